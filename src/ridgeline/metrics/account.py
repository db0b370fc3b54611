"""FLOPs, bytes, predicted time and energy of each step: the input of MFU, MBU, prediction and energy metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ridgeline.core.cost import CostModel, WorkMeter
from ridgeline.core.drafting import NO_DRAFT_WORK, DraftWork
from ridgeline.core.plan import StepPlan


class Waste(NamedTuple):
    """A row of a step with query tokens that gained nothing: rejected drafts, tokens of a request that has ended, and tokens
    computed again after a preemption.

    place: of the row. start: its computed tokens before the step. useful: its query tokens that count. again: the others come
    first, because they are computed again; otherwise they come last.
    """

    place: int
    start: int
    useful: int
    again: bool


def waste_of(place: int, n_query: int, start: int, end: int, reached: int) -> tuple[Waste, ...]:
    """The waste of a row with `n_query` query tokens, if any. start, end: its computed tokens before and after the step. reached:
    tokens that it had computed before its last preemption."""
    useful = max(0, end - max(start, reached))
    return () if useful >= n_query else (Waste(place, start, useful, start < reached),)


class Committed(NamedTuple):
    """A step after its commit. ends: tokens of each row of the plan whose keys are in the cache."""

    ends: Sequence[int]
    plan: StepPlan
    waste: Sequence[Waste] = ()


class EnergyMeter(Protocol):
    """The energy counter of a device (hardware.power.Meter)."""

    def take(self, prompt_s: float, output_s: float) -> tuple[float, float, float, float]:
        """hardware.power.Energy since the last reading. Arguments: device seconds of a step, of prompt and other query tokens."""


class Accounted(NamedTuple):
    """Account of one step. A tuple, because every step makes one.

    flops, bytes: of the served model, by the formulas of its spec, for all query tokens. predicted_s: predicted device seconds.
    joules: energy since the last step that reported energy. useful_flops: the part of `flops` for tokens that were committed and
    had not been computed before. draft_flops, draft_bytes: of the drafter on the device. prompt_joules, output_joules, metered_s:
    see hardware.power.Energy.
    """

    flops: float = 0.0
    bytes: float = 0.0
    predicted_s: float = 0.0
    joules: float = 0.0
    useful_flops: float = 0.0
    draft_flops: float = 0.0
    draft_bytes: float = 0.0
    prompt_joules: float = 0.0
    output_joules: float = 0.0
    metered_s: float = 0.0


class Account:
    """The interface, with a default that counts nothing."""

    def step(self, committed: Committed, prompt_tokens: int, device_s: float) -> Accounted:
        """Account for a step. prompt_tokens: how many of its query tokens belong to prompts."""
        return Accounted()


class DeviceAccount(Account):
    """Counts by the formulas of the spec and the energy counter of the device.

    cost: the cost model that predicts times. drafts: the drafter's work on the device.
    """

    def __init__(self, cost: CostModel, power: EnergyMeter, drafts: DraftWork = NO_DRAFT_WORK) -> None:
        self.cost = cost
        self._meter, self._power, self._drafts = WorkMeter(cost.spec), power, drafts

    def step(self, committed: Committed, prompt_tokens: int, device_s: float) -> Accounted:
        ends, plan, waste = committed
        draws = sum(plan.samples) + len(plan.drafts)
        if waste:
            ends = list(ends)
            for row in waste:
                ends[row.place] = row.start + plan.n_query[row.place]
        work = self._meter.work(ends, plan.n_query, draws)
        useful = self._useful_flops(committed, ends, draws) if waste else work.flops
        drafting = self._drafts.of(plan, committed.ends)
        prompt_s = device_s * min(1.0, prompt_tokens / max(1, work.tokens))
        joules, *of_steps = self._power.take(prompt_s, device_s - prompt_s)
        return Accounted(work.flops, work.bytes, self.cost.step_s(work), joules, useful, *drafting, *of_steps)

    def _useful_flops(self, committed: Committed, ends: Sequence[int], draws: int) -> int:
        """FLOPs of the step without the query tokens that gained nothing. ends: tokens of each row with them."""
        plan = committed.plan
        useful_ends, counts = list(ends), list(plan.n_query)
        for place, start, useful, again in committed.waste:
            if not again:
                wasted = counts[place] - useful
                draws -= min(wasted, plan.samples[place] + plan.n_draft[place])
                useful_ends[place] = start + useful
            counts[place] = useful
        return self._meter.work(useful_ends, counts, draws).flops
