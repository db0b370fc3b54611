"""Runners of a pipeline's stages. The last stage draws; the others learn what it drew, and advance their rows alike.

A stage before the last runs its layers when a step is launched, and learns the tokens when the step is collected. Until then it can
launch the next steps, whose rows are others: so all stages compute at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.decoding.logprobs import Ranked
from ridgeline.engine.batch import Batch
from ridgeline.engine.device import DeviceStep
from ridgeline.engine.executor import Executor
from ridgeline.engine.logits_inputs import Scores
from ridgeline.engine.result import Clock, Pending, without
from ridgeline.engine.runner import Runner
from ridgeline.parallel.pipeline import Stage


class LastStep(DeviceStep):
    """A step of the last stage: it announces what it draws."""

    def _drawn(self, batch: Batch, hidden: Tensor, bound: int, learn: bool) -> tuple[Tensor, Ranked | None]:
        drawn, logprobs = super()._drawn(batch, hidden, bound, learn)
        self.decoder.stage.announce(drawn)
        return drawn, logprobs


class EarlierStep(DeviceStep):
    """A step of a stage before the last: what it draws was drawn by the last stage."""

    def _drawn(self, batch: Batch, hidden: Tensor, bound: int, learn: bool) -> tuple[Tensor, Ranked | None]:
        return self.decoder.stage.learn(torch.empty(len(batch.owners), dtype=torch.int32, device=hidden.device)), None

    def _score(self, scores: Scores, hidden: Tensor) -> None:
        """The last stage has the head, and scores."""


@dataclass(slots=True)
class Begun:
    """A launched step of a stage before the last: its layers have run, its tokens are not known."""

    plan: StepPlan
    batch: Batch
    hidden: Tensor
    clock: Clock
    lost: list[int]
    transfers: dict[int, bool] = field(default_factory=dict)


class LastRunner(Runner):
    """The runner of the last stage."""

    step_kind = LastStep


class EarlierRunner(Runner):
    """The runner of a stage before the last. Its results have the tokens of all rows, and neither log-probabilities nor scores."""

    step_kind = EarlierStep

    def _make_executor(self) -> Executor:
        return Executor(self._step)  # each step has memory of its own

    def _launch(self, plan: StepPlan) -> Any:
        clock = Clock(self._cuda)
        self.rows.assign(plan)
        plan, lost = self.rows.drop_lost(plan)
        with self._inference:
            loaded = self._apply(plan, None)
            if loaded is None:
                return without(plan, None)
            hidden = self._step.forward(loaded.batch, plan.bound)
        return Begun(plan, loaded.batch, hidden, clock, lost)

    def collect(self) -> StepResult:
        oldest = self._pending[0]
        if isinstance(oldest, Begun):
            with self._inference:
                outcome, _ = self._step.finish(oldest.batch, oldest.hidden, oldest.plan.bound)
            pending = Pending.of(
                oldest.plan, oldest.batch, outcome, oldest.clock, self._step.ops.sampler.to_host, oldest.lost
            )
            pending.transfers = oldest.transfers
            self._pending[0] = pending
        return super().collect()


def runner_kind(stage: Stage) -> type[Runner]:
    """The class of the runner of a stage."""
    return Runner if stage.count == 1 else LastRunner if stage.last else EarlierRunner
