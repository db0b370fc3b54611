"""Runners of a pipeline's stages. The last stage draws; the others learn what it drew, and advance their rows alike.

A stage before the last runs its layers when a step is launched, and learns the tokens when the last stage has collected the step.
Until then it can launch the next steps, whose rows are others: so all stages compute at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.decoding.logprobs import Ranked
from ridgeline.engine.batch import Batch
from ridgeline.engine.device import DeviceStep, Outcome
from ridgeline.engine.divided_runner import DividedRunner
from ridgeline.engine.executor import Executor, LoadedStep
from ridgeline.engine.graphs import LONE_ROWS, GraphExecutor, GraphKey
from ridgeline.engine.logits_inputs import Scores
from ridgeline.engine.result import Clock, Pending, without
from ridgeline.engine.runner import Runner
from ridgeline.engine.shape import Sizes, StepShape
from ridgeline.ops.capture import CudaCapture
from ridgeline.parallel.mesh import Mesh


class LastStep(DeviceStep):
    """A step of the last stage. drawn: on the host, what the step drew last, once its work has ended; None: nothing."""

    drawn: Tensor | None = None

    def _drawn(self, batch: Batch, hidden: Tensor, bound: int, learn: bool) -> tuple[Tensor, Ranked | None]:
        drawn, logprobs = super()._drawn(batch, hidden, bound, learn)
        self.drawn = self.ops.sampler.to_host(drawn)
        return drawn, logprobs


class EarlierStep(DeviceStep):
    """A step of a stage before the last: what it draws was drawn by the last stage."""

    def _drawn(self, batch: Batch, hidden: Tensor, bound: int, learn: bool) -> tuple[Tensor, Ranked | None]:
        return self.decoder.stage.learn(torch.empty(len(batch.owners), dtype=torch.int32, device=hidden.device)), None

    def _score(self, scores: Scores, hidden: Tensor) -> tuple[None, None]:
        """The last stage has the final hidden states and the head: it scores and pools."""
        return None, None


class StageExecutor(Executor):
    """Runs the layers of a stage eagerly. Each step has memory of its own."""

    def forward(self, loaded: LoadedStep, plan: StepPlan) -> Tensor:
        """The hidden states of DeviceStep.forward."""
        return self._step.forward(loaded.batch, plan.bound)


class StageGraphs(GraphExecutor):
    """Runs the layers of a stage as a CUDA graph, messages between stages included. Draws are not captured, because drawn tokens go
    from host to host. Steps with drafts run eagerly."""

    captures_draws = False

    def forward(self, loaded: LoadedStep, plan: StepPlan) -> Tensor:
        """As StageExecutor.forward. The result is in static memory; before the last stage it has no meaning."""
        shape = loaded.batch.shape
        if not loaded.padded or loaded.batch.scores is not None:
            return self._step.forward(loaded.batch, plan.bound)
        self._replay("forward", shape)
        return self._hidden[: shape.draws]

    def _run(self, loaded: LoadedStep, plan: StepPlan) -> Outcome:
        hidden = self.forward(loaded, plan)
        if not draws_or_scores(loaded):
            return Outcome(None)
        return self._finish(loaded, plan, hidden, self._step.drafter.learns())

    def _draft_shape(self, shape: StepShape, fused_sampling: bool) -> StepShape | None:
        return None

    def all_keys(self) -> Iterator[GraphKey]:
        yield from (GraphKey("forward", shape) for shape in reversed([*self._buckets, *self._mixed]))

    def launch(self, key: GraphKey) -> None:
        """As GraphExecutor.launch, whose lone decode steps are graphs of another kind."""
        all_layers = key.shape.decode and key.shape.rows <= LONE_ROWS
        self.work(key)(self._step if all_layers else self._reduced_step)

    def work(self, key: GraphKey) -> Callable[[DeviceStep], None]:
        batch, hidden = self._batches[key.shape], self._hidden[: key.shape.draws]

        def forward(device: DeviceStep) -> None:
            out = device.forward(batch, device.longest)
            if device.decoder.stage.last:
                hidden.copy_(out)

        return forward


def draws_or_scores(loaded: LoadedStep) -> bool:
    """Whether a step draws or scores tokens, so that the last stage announces tokens. A padded step would draw for the scratch
    row."""
    return bool(loaded.draws) or loaded.batch.scores is not None


@dataclass(slots=True)
class Begun:
    """A launched step of a stage before the last: its layers have run, its tokens are not known."""

    plan: StepPlan
    loaded: LoadedStep
    hidden: Tensor
    clock: Clock
    lost: list[int]
    transfers: dict[int, bool] = field(default_factory=dict)


class LastRunner(Runner):
    """The runner of the last stage. It announces what a step drew when it collects the step, so that a GPU goes on with the next
    step, which has other rows, while the host commits this one and plans."""

    step_kind = LastStep

    def _launch(self, plan: StepPlan) -> Pending | StepResult:
        assert isinstance(self._step, LastStep)
        self._step.drawn = None
        launched = super()._launch(plan)
        if isinstance(launched, Pending):
            launched.drawn = self._step.drawn
        return launched

    def collect(self) -> StepResult:
        oldest, result = self._pending[0], super().collect()
        if isinstance(oldest, Pending) and oldest.drawn is not None and result.error is None:
            self._step.decoder.stage.announce(oldest.drawn)
        return result

    def _make_executor(self) -> Executor:
        return _graphs(self._step, self._sizes) if self._cuda and self._sizes.graphs else super()._make_executor()


class EarlierRunner(Runner):
    """The runner of a stage before the last. Its results have the tokens of all rows, and neither log-probabilities nor scores."""

    step_kind = EarlierStep

    def _make_executor(self) -> Executor:
        return _graphs(self._step, self._sizes) if self._cuda and self._sizes.graphs else StageExecutor(self._step)

    def _launch(self, plan: StepPlan) -> Any:
        clock = Clock(self._cuda)
        self.rows.assign(plan)
        plan, lost = self.rows.drop_lost(plan)
        with self._inference:
            loaded = self._apply(plan, None)
            if loaded is None:
                return without(plan, None)
            assert isinstance(self.executor, StageExecutor | StageGraphs)
            hidden = self.executor.forward(loaded, plan)
        return Begun(plan, loaded, hidden, clock, lost)

    def learn(self, steps: int) -> None:
        """Enqueue the end of the oldest `steps` steps, which the last stage has collected. Waits for their tokens, but not for
        the device, which may be busy with a later step."""
        for at in range(steps):
            begun = self._pending[at]
            if isinstance(begun, Begun):
                self._pending[at] = self._ended(begun)

    def _ended(self, begun: Begun) -> Pending:
        batch, outcome = begun.loaded.batch, Outcome(None)
        if draws_or_scores(begun.loaded):
            with self._inference:
                outcome, _ = self._step.finish(batch, begun.hidden, begun.plan.bound)
        pending = Pending.of(begun.plan, batch, outcome, begun.clock, self._step.ops.sampler.to_host, begun.lost)
        pending.transfers = begun.transfers
        return pending

    def collect(self) -> StepResult:
        self.learn(1)
        return super().collect()


def _graphs(step: DeviceStep, sizes: Sizes) -> StageGraphs:
    return StageGraphs(step, sizes, CudaCapture())


def runner_kind(mesh: Mesh) -> type[Runner]:
    """The class of the runner of a rank."""
    stage = mesh.stage
    if mesh.divides_requests:
        return DividedRunner
    return Runner if stage.count == 1 else LastRunner if stage.last else EarlierRunner
