"""How steps run on the device: operation by operation, or on a CPU as what was captured of a step of the same shape. CUDA graphs
are in `graphs`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from ridgeline.core.plan import StepPlan
from ridgeline.engine.batch import Batch, unpack
from ridgeline.engine.catch_up import is_behind, unread_steps
from ridgeline.engine.device import DeviceStep, Outcome
from ridgeline.engine.packet import Packet
from ridgeline.engine.shape import StepShape
from ridgeline.models.weights import Progress
from ridgeline.ops.capture import Captured

MOST_SHAPES = 64
"""Steps that a CPU keeps in memory: a request alone has one for each number of its drafts, and comes back to each."""
RECORDED = 2
"""Runs of a step on a CPU that take longer than those to come: the first one builds it, the second one is captured."""


@dataclass(slots=True)
class LoadedStep:
    """A step in the memory that it runs from. plan: the one that loaded it. padded: to the shape of a graph. draws: rows that draw.
    captured: its replay(plan) is the whole step, an Outcome; None if it runs operation by operation. runs: how often it ran."""

    plan: StepPlan
    batch: Batch
    padded: bool
    draws: int
    captured: Captured | None = None
    runs: int = 0

    @property
    def fresh(self) -> bool:
        """The last run took longer than those to come."""
        return self.captured is not None and self.runs <= RECORDED


class Executor:
    """Runs every step operation by operation, without padding. Other ways to run steps override what differs."""

    def __init__(self, step: DeviceStep) -> None:
        self._step, self._inference = step, torch.inference_mode()
        self._last: LoadedStep | None = None

    def padded(self, shape: StepShape, plain: bool) -> StepShape | None:
        """The shape to which a step must be padded to be run by graphs; None: it is not padded. plain: see Batch.plain."""
        return None

    def capture(self, progress: Progress) -> None:
        """At start-up: capture what is captured before any step runs."""

    def launch_graphs(self) -> None:
        """Run once what `capture` captures, to load its kernels."""

    def repeated(self, plan: StepPlan) -> LoadedStep | None:
        """What an earlier plan has loaded, if this plan differs from it in nothing but pages and the tokens of its drafts."""
        return self._last if self._last is not None and plan.repeats(self._last.plan) else None

    def load(self, plan: StepPlan, batch: Batch, padded: bool) -> LoadedStep:
        """Bring a step that was uploaded to where it runs from. padded: to a shape that `padded` returned."""
        self._last = LoadedStep(plan, batch, padded, sum(plan.samples))
        return self._last

    def forget(self) -> None:
        """Drop what is loaded."""
        self._last = None

    def run(self, loaded: LoadedStep, plan: StepPlan) -> Outcome:
        """Run the step for a plan that has loaded it or repeats the one that has."""
        return self._whole(loaded, plan, self._step.drafter.learns())

    def _whole(self, loaded: LoadedStep, plan: StepPlan, learn: bool) -> Outcome:
        """Run it operation by operation. learn: the drafter sees the logits."""
        with self._inference:
            return self._finish(loaded, plan, self._step.forward(loaded.batch, plan.bound), learn)

    def _finish(self, loaded: LoadedStep, plan: StepPlan, hidden: torch.Tensor, learn: bool) -> Outcome:
        """Draw and draft ahead. hidden: from DeviceStep.forward."""
        batch = loaded.batch
        outcome, last = self._step.finish(batch, hidden, plan.bound, learn)
        if not batch.ahead or not len(last):
            return outcome
        self._catch_up(plan)
        return replace(outcome, worth=self._step.draft(batch.sampled, last, batch.ahead, batch.greedy))

    def _catch_up(self, plan: StepPlan) -> None:
        """A draft model reads what rows have gained while nothing was drafted."""
        for packed, shape in unread_steps(plan, None):
            self._step.read(self._sent(packed, shape))

    def _sent(self, packed: object, shape: StepShape) -> Batch:
        packet = Packet()
        packet.add("step", packed)
        return unpack(packet.send(self._step.rows.ints.device)["step"], shape)


class CapturedExecutor(Executor):
    """Captures steps that come again, for a CPU: one for each shape, in memory that later steps of that shape are copied to. A step
    that holds a part of a prompt, processes logits or scores tokens runs operation by operation."""

    def __init__(self, step: DeviceStep) -> None:
        super().__init__(step)
        self._kept: dict[tuple[StepShape, int, bool], LoadedStep] = {}
        """By shape, nodes drafted ahead and whether all draw greedily; the one used longest ago comes first."""

    def repeated(self, plan: StepPlan) -> LoadedStep | None:
        loaded = super().repeated(plan)
        if loaded is None and plan.rows and not (plan.masks or plan.score_ids):
            shape = StepShape.of(plan)
            for greedy in (False, True):
                key = shape, plan.ahead, greedy
                if key in self._kept and plan.repeats(self._kept[key].plan):
                    loaded = self._last = self._kept[key] = self._kept.pop(key)
        return loaded

    def load(self, plan: StepPlan, batch: Batch, padded: bool) -> LoadedStep:
        loaded = super().load(plan, batch, padded)
        if batch.shape.chunked or not batch.plain or is_behind(plan):
            return loaded
        key = batch.shape, batch.ahead, batch.greedy
        if (kept := self._kept.pop(key, None)) is None:
            if len(self._kept) == MOST_SHAPES:
                del self._kept[next(iter(self._kept))]
            kept = loaded
            loaded.captured = self._step.ops.capture(partial(self._whole, loaded, learn=False))
        else:
            kept.batch.packed.copy_(batch.packed)
        kept.plan = plan
        self._kept[key] = self._last = kept
        return kept

    def forget(self) -> None:
        super().forget()
        self._kept.clear()

    def run(self, loaded: LoadedStep, plan: StepPlan) -> Outcome:
        learn = self._step.drafter.learns()
        loaded.runs += 1
        if loaded.captured is None or learn:  # a captured step teaches a drafter nothing
            return self._whole(loaded, plan, learn)
        outcome: Outcome = loaded.captured.replay(plan)
        return outcome
