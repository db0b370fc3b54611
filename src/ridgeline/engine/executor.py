"""Executors run steps on the device: eagerly, or on a CPU by replay of a captured step of the same shape. `graphs` holds the
executor with CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import product

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
"""Captured steps that a CPU keeps: a single request has one for each number of draft nodes, and returns to each of them."""
RECORDED = 2
"""Runs of a step on a CPU that take longer than later ones: the first run builds it, the second run is captured."""


@dataclass(slots=True)
class LoadedStep:
    """A step whose inputs are in the memory that it runs from.

    plan: the plan that loaded it. padded: it is padded to the shape of a graph. draws: rows that draw. captured:
    captured.replay(plan) runs the whole step and returns an Outcome; None: the step runs eagerly. runs: number of runs so far.
    """

    plan: StepPlan
    batch: Batch
    padded: bool
    draws: int
    captured: Captured | None = None
    runs: int = 0

    @property
    def fresh(self) -> bool:
        """The last run took longer than later runs will."""
        return self.captured is not None and self.runs <= RECORDED


class Executor:
    """Runs every step eagerly, without padding. Subclasses override what differs.

    captures_draws: draws without logits processors run as graphs.
    """

    captures_draws = False

    def __init__(self, step: DeviceStep) -> None:
        self._step, self._inference = step, torch.inference_mode()
        self._last: LoadedStep | None = None

    def padded(self, shape: StepShape, fused_sampling: bool) -> StepShape | None:
        """The shape to which a step must be padded for a graph; None: no padding. fused_sampling: see Batch.fused_sampling."""
        return None

    def capture(self, progress: Progress) -> None:
        """Capture graphs at start-up, before any step runs."""

    def launch_graphs(self) -> None:
        """Run the work of each graph once, to load its kernels."""

    def repeated(self, plan: StepPlan) -> LoadedStep | None:
        """The step that an earlier plan loaded, if this plan differs from that one only in pages and draft tokens; else None."""
        return self._last if self._last is not None and plan.repeats(self._last.plan) else None

    def load(self, plan: StepPlan, batch: Batch, padded: bool) -> LoadedStep:
        """Copy an uploaded step to the memory that it runs from. padded: `padded` returned its shape."""
        self._last = LoadedStep(plan, batch, padded, sum(plan.samples))
        return self._last

    def forget(self) -> None:
        """Drop the loaded step."""
        self._last = None

    def close(self) -> None:
        """Drop the loaded step, and all that was captured: no step runs any more."""
        self.forget()

    def run(self, loaded: LoadedStep, plan: StepPlan) -> Outcome:
        """Run the step. plan: the plan that loaded it, or one that repeats that plan."""
        return self._whole(loaded, plan, self._step.drafter.learns())

    def _whole(self, loaded: LoadedStep, plan: StepPlan, learn: bool) -> Outcome:
        """Run the whole step eagerly. learn: the drafter sees the logits."""
        with self._inference:
            return self._finish(loaded, plan, self._step.forward(loaded.batch, plan.bound), learn)

    def _finish(self, loaded: LoadedStep, plan: StepPlan, hidden: torch.Tensor, learn: bool) -> Outcome:
        """Sample and draft ahead. hidden: from DeviceStep.forward."""
        batch = loaded.batch
        outcome, last = self._step.finish(batch, hidden, plan.bound, learn)
        if not batch.ahead or not len(last):
            return outcome
        self._catch_up(plan)
        return replace(outcome, worth=self._step.draft(batch.sampled, last, batch.ahead, batch.greedy))

    def _catch_up(self, plan: StepPlan) -> None:
        """Run the draft model over the tokens that rows gained while drafting was off."""
        for packed, shape in unread_steps(plan, None):
            self._step.read(self._sent(packed, shape))

    def _sent(self, packed: object, shape: StepShape) -> Batch:
        packet = Packet()
        packet.add("step", packed)
        return unpack(packet.send(self._step.rows.ints.device)["step"], shape)


class CapturedExecutor(Executor):
    """Captures steps on a CPU, one for each shape. Later steps of the shape are copied to its memory and replay it. A step with a
    prompt chunk, logits processors or prompt scores runs eagerly."""

    def __init__(self, step: DeviceStep) -> None:
        super().__init__(step)
        self._kept: dict[tuple[StepShape, int, bool, bool], LoadedStep] = {}
        """Key: shape, nodes drafted ahead, all rows greedy, a row has an adapter. In LRU order, the least recently used first."""

    def repeated(self, plan: StepPlan) -> LoadedStep | None:
        loaded = super().repeated(plan)
        if loaded is None and plan.rows and not (plan.masks or plan.biases or plan.score_ids):
            for key in product((StepShape.of(plan),), (plan.ahead,), (False, True), (False, True)):
                if key in self._kept and plan.repeats(self._kept[key].plan):
                    loaded = self._last = self._kept[key] = self._kept.pop(key)
        return loaded

    def load(self, plan: StepPlan, batch: Batch, padded: bool) -> LoadedStep:
        loaded = super().load(plan, batch, padded)
        if batch.shape.chunked or not batch.fused_sampling or is_behind(plan):
            return loaded
        key = batch.shape, batch.ahead, batch.greedy, batch.adapted
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
        if loaded.captured is None or learn:  # a captured step does not show its logits to the drafter
            return self._whole(loaded, plan, learn)
        outcome: Outcome = loaded.captured.replay(plan)
        return outcome
