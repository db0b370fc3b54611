"""The runner owns the device memory. It executes each StepPlan and returns a StepResult; it has no scheduling policy.

launch enqueues a step without waiting for the device; collect waits for the oldest step. A failed step returns a StepResult with
`error`. A bad plan never ends the process; only the loss of the device does.
"""

from __future__ import annotations

import logging
from collections import deque

import torch

from ridgeline.core.errors import EngineFailed, RidgelineError
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.core.sharing import joined
from ridgeline.core.spec import KvLayout
from ridgeline.engine.batch import BatchBuilder
from ridgeline.engine.device import DeviceStep
from ridgeline.engine.executor import CapturedExecutor, Executor, LoadedStep
from ridgeline.engine.graphs import GraphExecutor
from ridgeline.engine.late_compiles import LateCompiles
from ridgeline.engine.packet import Packet
from ridgeline.engine.result import Clock, Pending, without
from ridgeline.engine.row_table import RowTable
from ridgeline.engine.shape import Sizes
from ridgeline.engine.warm_up import warm_up
from ridgeline.kv.store import KvStore, Transfers
from ridgeline.models.build import LoadedModel
from ridgeline.models.weights import Progress
from ridgeline.ops.capture import CudaCapture
from ridgeline.speculation.device import DeviceDrafter, NoDrafter

log = logging.getLogger(__name__)


def build_runner(
    model: LoadedModel,
    layout: KvLayout,
    sizes: Sizes,
    progress: Progress | None = None,
    drafter: DeviceDrafter = NoDrafter(),
    kind: type[Runner] | None = None,
) -> Runner:
    """A runner on the device of the model's weights. Allocates the KV cache and, on a GPU, compiles kernels and captures graphs.

    Args:
        layout: includes the layers of the drafter.
        progress: called with (stage, done, total).
        kind: class of the runner (engine.stage); None: Runner.
    Raises:
        ConfigError: if the row table is too large.
    """
    with torch.inference_mode():
        runner = (kind or Runner)(model, layout, sizes, drafter)
        runner.prepare(progress or (lambda stage, done, total: None))
    return runner


class Runner:
    """Runs steps of a model over its KV cache and its row table. Results are in the order of launches."""

    step_kind: type[DeviceStep] = DeviceStep

    def __init__(self, model: LoadedModel, layout: KvLayout, sizes: Sizes, drafter: DeviceDrafter) -> None:
        self.device = model.decoder.embedding.device
        self._cuda, self._inference = self.device.type == "cuda", torch.inference_mode()
        self.rows = RowTable(layout, sizes.rows, sizes.max_len, model.spec.vocab_size, self.device)
        layers = joined(model.rank_spec.layers, drafter.layers)
        self.store = KvStore(layout, layers, sizes.blocks, self.device, sizes.pool, sizes.releasable)
        self.transfers = Transfers(self.store)
        self._step = self.step_kind(model, self.rows, self.store, sizes.step_tokens, drafter)
        self.late = LateCompiles()
        """Kernels compiled after `prepare`."""
        self._sizes = sizes
        self.executor = self._make_executor()
        self._before: Clock | None = None
        """Clock of the step collected last."""
        self._pending: deque[Pending | StepResult] = deque()

    def _make_executor(self) -> Executor:
        if not self._cuda:
            return CapturedExecutor(self._step)
        return GraphExecutor(self._step, self._sizes, CudaCapture()) if self._sizes.graphs else Executor(self._step)

    def prepare(self, progress: Progress) -> None:
        """On a GPU, warm up: compile kernels, allocate buffers and capture graphs before requests arrive."""
        if not self._cuda:
            return
        self.late.pause()
        with torch.inference_mode():
            warm_up(self._step, self.executor, self._sizes, progress)
        torch.cuda.synchronize(self.device)
        self.late.watch()

    def launch(self, plan: StepPlan) -> None:
        """Enqueue one step; on a CPU it runs at once. Raises EngineFailed if the device is lost."""
        reason, arrived, transfers = "", dict[int, bool](), self.transfers
        try:
            if self._pending and isinstance(last := self._pending[-1], Pending):
                last.keep()
            if plan.transfers or plan.stores or transfers.busy:
                arrived = transfers.step(plan)
            self._pending.append(self._launch(plan))
            self._pending[-1].transfers = arrived
        except Exception as error:
            reason = error.message if isinstance(error, RidgelineError) else f"{type(error).__name__}: {error}"
            log.exception("step %d failed", plan.step)
        if reason:
            # Outside of the handler, so that the tensors of the failed step are already released.
            self.executor.forget()
            self._pending.append(self._failed(plan, reason, arrived))
            self._recover(reason)

    def _failed(self, plan: StepPlan, reason: str, arrived: dict[int, bool]) -> StepResult:
        """The result of a failed step. arrived: what ended with it, of which only tickets of earlier plans count."""
        self.transfers.forget(plan)
        result = without(plan, reason)
        result.transfers = arrived
        return result

    def _recover(self, reason: str) -> None:
        """Release the memory of a failed step. Raises EngineFailed if the device is lost: a CUDA fault is permanent, so every later
        step would fail too."""
        if not self._cuda:
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        except Exception as error:
            raise EngineFailed(f"The device is lost ({reason}): restart the engine.") from error

    def collect(self) -> StepResult:
        """Wait for the oldest launched step and return its result. Raises IndexError if there is none."""
        oldest = self._pending.popleft()
        if isinstance(oldest, StepResult):
            return oldest
        before, self._before = self._before, oldest.clock
        try:
            result = oldest.result()
            result.gap_s = 0.0 if before is None else oldest.clock.since(before)
            return result
        except Exception as error:
            log.exception("step %d failed on the device", oldest.plan.step)
            reason = f"{type(error).__name__}: {error}"
        self._recover(reason)
        return self._failed(oldest.plan, reason, oldest.transfers)

    def close(self) -> None:
        """Wait for the device, and drop the steps in flight and the graphs."""
        if self._cuda:
            torch.cuda.synchronize(self.device)
        self.transfers.close()
        self._pending.clear()
        self.executor.close()

    # --- one step ---------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> Pending | StepResult:
        clock, executor = Clock(self._cuda), self.executor
        self.rows.assign(plan)
        blocks = self._measured(plan) if plan.measures else None
        lost: list[int] = []
        if (loaded := executor.repeated(plan)) is None:
            plan, lost = self.rows.drop_lost(plan)
        if loaded is None or plan.changes_device_state:
            with self._inference:
                loaded = self._apply(plan, loaded)
        if loaded is None:
            result = without(plan, None)
            result.blocks = () if blocks is None else blocks.tolist()
            return result
        outcome = executor.run(loaded, plan)
        to_host = self._step.ops.sampler.to_host
        blocks = None if blocks is None else to_host(blocks)  # before the event that ends the step
        pending = Pending.of(plan, loaded.batch, outcome, clock, to_host, lost)
        pending.fresh, pending.blocks = loaded.fresh, blocks
        return pending

    def _measured(self, plan: StepPlan) -> torch.Tensor:
        """StepResult.blocks, on the device."""
        try:
            with self._inference:
                return torch.stack([self._step.measure(each) for each in plan.measures])
        except Exception:
            self.rows.forget(plan)
            raise

    def _apply(self, plan: StepPlan, loaded: LoadedStep | None) -> LoadedStep | None:
        """Upload the changes and the step of a plan in one copy. Rows and pages change even if the step is refused.

        Args:
            loaded: the step, if its inputs need no upload.
        Returns:
            The step to run; None for a plan without rows.
        """
        packet = Packet()
        builder, refusal, padded = None, None, None
        try:
            for compaction in plan.compactions:
                self._step.compact(compaction)
            self.rows.pack_changes(plan, packet)
            if loaded is None and plan.rows:
                try:
                    builder = BatchBuilder(plan, self.rows)
                    padded = self.executor.padded(builder.shape, builder.fused_sampling)
                    builder.pack(packet, padded or builder.shape)
                except RidgelineError as error:
                    refusal = error
            if plan.drafts and refusal is None:
                self.rows.pack_drafts(plan, packet)
            tensors = packet.send(self.device)
            self.rows.write_changes(tensors)
            self.store.copy_pages(plan.copies)
            if plan.drafts and refusal is None:
                self.rows.write_drafts(plan, tensors)
        except Exception:
            # The changed rows are in an unknown state now. A later step that plans one of them runs without it.
            self.rows.forget(plan)
            raise
        if refusal is not None:
            raise refusal
        return loaded if builder is None else self.executor.load(plan, builder.build(tensors), padded is not None)
