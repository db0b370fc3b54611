"""The runner owns device memory and holds no policy: it does what a StepPlan says and tells what came of it.

launch enqueues a step and never waits for the device; collect waits for the oldest one. A step that fails comes back as
a StepResult with `error`; nothing a plan contains ends the process, only the loss of the device does.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch

from ridgeline.core.errors import EngineFailed, RidgelineError
from ridgeline.core.plan import Form, StepPlan, StepResult
from ridgeline.core.spec import KvLayout
from ridgeline.engine.batch import Batch, BatchBuilder, Room, mixed_step, unpack, unread
from ridgeline.engine.device import DeviceStep, Outcome
from ridgeline.engine.graphs import Graphs
from ridgeline.engine.late import Late
from ridgeline.engine.packet import Packet
from ridgeline.engine.rehearsal import Extent, chunked, rehearse, rehearse_all, rehearse_pinned
from ridgeline.engine.result import Clock, Pending, without
from ridgeline.engine.row_table import RowTable
from ridgeline.kv.store import KvStore
from ridgeline.models.build import LoadedModel
from ridgeline.models.weights import Progress
from ridgeline.ops.capture import Capture, Captured, CudaCapture, Uncaptured
from ridgeline.speculation.device import DeviceDrafter, NoDrafter

log = logging.getLogger(__name__)

BATCHES = 64
"""Batches kept without graphs: a request alone has one for each number of its drafts, and comes back to each, as whoever sits in
its row after it does."""

RECORDED = 2
"""Steps of a batch without graphs that take longer than those to come: one builds it, one is recorded (ops.capture). Steps with
masks or scores are built each time."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the runner makes room for. rows: requests at once; step_tokens: query tokens of a step; max_len: tokens of a
    request; blocks: pages of KV cache; graphs: CUDA graphs for decode (on a GPU). drafts:
    numbers of nodes per row that the device drafts; host_drafts: most nodes of what the host drafts, 0 if it does not."""

    rows: int
    step_tokens: int
    max_len: int
    blocks: int
    graphs: bool = True
    drafts: tuple[int, ...] = ()
    host_drafts: int = 0


def build_runner(
    model: LoadedModel,
    layout: KvLayout,
    sizes: Sizes,
    progress: Progress | None = None,
    drafter: DeviceDrafter = NoDrafter(),
) -> Runner:
    """A runner on the device that holds the model's weights; `layout` has room for the drafter's layers. Allocates the cache
    and, on a GPU, compiles kernels and captures graphs (`progress`: stage, done, total). Raises ConfigError if rows could
    not be addressed."""
    with torch.inference_mode():
        runner = Runner(model, layout, sizes, drafter)
        runner.prepare(progress or _silent)
    return runner


def _silent(stage: str, done: int, total: int) -> None:
    """Progress that nobody is told."""


@dataclass(slots=True)
class _Built:
    """A batch, to be used again while nothing but lengths changes. plan: the first one it served. graph: its forward graph's
    padding, None if it runs without; step: its replay(bound) is the step without graphs, an Outcome; served: how often."""

    plan: StepPlan
    batch: Batch
    graph: Room | None
    step: Captured
    served: int = 0


class Runner:
    """launch / collect / close over a model, its cache and its rows. Results come in the order of launches."""

    def __init__(self, model: LoadedModel, layout: KvLayout, sizes: Sizes, drafter: DeviceDrafter) -> None:
        self.device = model.decoder.embedding.device
        self._cuda, self._inference = self.device.type == "cuda", torch.inference_mode()
        self.rows = RowTable(layout, sizes.rows, sizes.max_len, model.spec.vocab_size, self.device)
        self.store = KvStore(layout, (*model.spec.layers, *drafter.layers), sizes.blocks, self.device)
        self._step = DeviceStep(model, self.rows, self.store, sizes.step_tokens, drafter)
        self.late = Late()
        """What is compiled from now on, once prepared."""
        self._sizes = sizes
        self._graphs: Graphs | None = None
        if sizes.graphs and self._cuda:
            self._graphs = self._new_graphs(self._step, CudaCapture())
        self._built: tuple[StepPlan, _Built] | None = None
        """The last step's, and its plan: another request may have come to sit in the same row."""
        self._known: dict[Form | None, _Built] = {}
        """By form, those of late; none with graphs, in whose buffers only the last one lies."""
        self._before: Clock | None = None
        """Of the step collected last."""
        self._pending: deque[Pending | StepResult] = deque()

    def prepare(self, progress: Progress) -> None:
        """On a GPU, run and capture now what would otherwise compile and allocate while requests wait. The largest step
        comes first: the memory that it leaves behind serves all others."""
        if not self._cuda:
            return
        self.late.rest()
        with torch.inference_mode():
            if find_spec("triton") is None:
                self._rehearse(progress)
            else:
                # Only here: Triton is an extra that a machine without a GPU need not have.
                from ridgeline.ops.triton.ahead import with_kernels

                with_kernels(lambda: self._rehearse(progress), self._rehearse_dry, progress)
            if self._graphs is not None:
                self._graphs.capture(progress)
            rehearse_pinned()
        torch.cuda.synchronize(self.device)
        self.late.watch()

    def _rehearse(self, progress: Progress) -> None:
        """Run steps of all kinds that no graph will serve, those with the most tokens first; only the largest through all
        layers, as the others need neither more memory nor other kernels."""
        extent = self._extent()
        rehearse(self._step, chunked(extent.tokens, extent.longest))
        rehearse_all(self._step.of_each_kind(), extent, self._graphs, progress)

    def _rehearse_dry(self) -> None:
        """Launch the kernels of `prepare`, and capture nothing."""
        step = self._step
        rehearse_all(step.of_each_kind(), self._extent(), self._graphs, _silent)
        if self._graphs is not None:
            self._new_graphs(step, Uncaptured).capture(_silent)

    def _new_graphs(self, step: DeviceStep, capture: Capture) -> Graphs:
        sizes = self._sizes
        return Graphs(step, sizes.rows, sizes.step_tokens, capture, sizes.drafts, sizes.host_drafts)

    def _extent(self) -> Extent:
        """What steps may hold."""
        sizes, trees = self._sizes, bool(self._step.drafter.parents)
        forms = {
            tree
            for tree, brought in ((trees, any(sizes.drafts)), (False, sizes.host_drafts), (True, sizes.host_drafts))
            if brought
        }
        longest = min(sizes.max_len, sizes.step_tokens)
        most = max((*sizes.drafts, sizes.host_drafts), default=0)
        return Extent(sizes.rows, sizes.step_tokens, longest, most, tuple(sorted(forms)))

    def launch(self, plan: StepPlan) -> None:
        """Enqueue one step; on a CPU it runs at once. Raises EngineFailed if the device is lost."""
        reason = ""
        try:
            if self._pending and isinstance(last := self._pending[-1], Pending):
                last.keep()
            arrived = self.store.transfer(plan.transfers) if plan.transfers else {}
            self._pending.append(self._launch(plan))
            self._pending[-1].transfers = arrived
        except Exception as error:
            reason = error.message if isinstance(error, RidgelineError) else f"{type(error).__name__}: {error}"
            log.exception("step %d failed", plan.step)
        if reason:
            # Outside of the handler, so that the failed step's tensors are free already.
            self._forget()
            self._pending.append(without(plan, reason))
            self._recover(reason)

    def _recover(self, reason: str) -> None:
        """A step has failed: give its memory back. Raises EngineFailed if the device itself is lost, because then every
        later step would fail too (a CUDA fault stays until the process ends)."""
        if not self._cuda:
            return
        try:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        except Exception as error:
            raise EngineFailed(f"The device is lost ({reason}): restart the engine.") from error

    def collect(self) -> StepResult:
        """The result of the oldest launched step; waits for it. IndexError if there is none."""
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
        return without(oldest.plan, reason)

    def close(self) -> None:
        """Wait for the device and forget what is in flight."""
        if self._cuda:
            torch.cuda.synchronize(self.device)
        self._pending.clear()
        self._forget()

    # --- one step ---------------------------------------------------------------------------------------------------

    def _launch(self, plan: StepPlan) -> Pending | StepResult:
        clock = Clock(self._cuda)
        self.rows.assign(plan)
        reused = self._repeated(plan)
        plan, lost = (plan, []) if reused is not None else self.rows.drop_lost(plan)
        built = reused
        if reused is None or plan.brings:
            with self._inference:
                built = self._apply(plan, reused)
        if built is None:
            return without(plan, None)
        if built.plan is plan:
            self._remember(built)
        self._built = plan, built
        built.served += 1
        pending = Pending.of(plan, built.batch, self._run(built, plan.bound), clock, self._step.ops.to_host, lost)
        pending.fresh = built.graph is None and built.served <= RECORDED and not (plan.masks or plan.score_ids)
        return pending

    def _repeated(self, plan: StepPlan) -> _Built | None:
        """The batch of an earlier step that serves this one."""
        if self._built is not None and plan.repeats(self._built[0]):
            return self._built[1]
        form = plan.form(self.rows.kinds) if self._known else None
        if (found := self._known.pop(form, None)) is not None:
            self._known[form] = found  # the last one of those of late
        return found

    def _remember(self, built: _Built) -> None:
        form = None if self._graphs is not None or built.batch.shape.chunked else built.plan.form(self.rows.kinds)
        if form is not None:
            if len(self._known) == BATCHES:
                del self._known[next(iter(self._known))]
            self._known[form] = built

    def _forget(self) -> None:
        self._built = None
        self._known.clear()

    def _apply(self, plan: StepPlan, reused: _Built | None) -> _Built | None:
        """One upload for all that the plan changes and states; rows and pages change even if the step is refused. reused:
        the batch that serves it, if there is one already."""
        packet = Packet()
        builder, refusal, graph = None, None, None
        try:
            self.rows.pack_changes(plan, packet)
            if reused is None and plan.rows:
                try:
                    builder = BatchBuilder(plan, self.rows, packet)
                    graph = None if self._graphs is None else self._graphs.room(builder.shape)
                    builder.pack(graph or self._eager_room(builder))
                except RidgelineError as error:
                    refusal = error
            if plan.drafts and refusal is None:
                self.rows.pack_drafts(plan, packet)
            got = packet.send(self.device)
            self.rows.write_changes(got)
            self.store.copy_pages(plan.copies)
            if plan.drafts and refusal is None:
                self.rows.write_drafts(plan, got)
        except Exception:
            # The rows that the changes were for are unknown now; a step that plans one of them goes without it.
            self.rows.forget(plan)
            raise
        if refusal is not None:
            raise refusal
        if builder is None:
            return reused
        batch = builder.build(got)
        if graph is not None and self._graphs is not None:
            self._graphs.load(batch, graph)
        # Of batches of one shape, all that is not in `packed` is the same.
        alike = batch.shape.even and batch.shape.plain and batch.scores is None and not plan.unread
        form = (batch.shape, batch.ahead) if alike else None
        work = partial(self._eager, plan, batch, learn=False)
        return _Built(plan, batch, graph, self._step.ops.capture(work, batch.packed, form))

    def _eager_room(self, builder: BatchBuilder) -> Room:
        """No padding, but for rows that draw if a finish graph will take them."""
        room, shape = builder.room(), builder.shape
        if self._graphs is None or shape.decode or shape.wide > 1 or not shape.plain or not shape.n_draws:
            return room
        return replace(room, draws=self._graphs.bucket(shape.n_draws))

    def _run(self, built: _Built, bound: int) -> Outcome:
        batch, graphs, shape = built.batch, self._graphs, built.batch.shape
        if graphs is None or (built.graph is None and shape.decode):
            # What is recorded teaches nobody anything.
            return (
                self._eager(built.plan, batch, bound, True) if self._step.drafter.learns() else built.step.replay(bound)
            )
        with self._inference:
            return self._replay(built, graphs, bound)

    def _replay(self, built: _Built, graphs: Graphs, bound: int) -> Outcome:
        """A step with graphs."""
        batch, shape = built.batch, built.batch.shape
        if built.graph is not None and shape.wide > 1:
            outcome = Outcome(graphs.verify(built.graph, shape))
        elif built.graph is not None and shape.decode and shape.plain:
            outcome = Outcome(graphs.decode(built.graph, bound))
        else:
            hidden = self._step.forward(batch, bound) if built.graph is None else graphs.forward(batch, built.graph)
            if not shape.plain or shape.wide > 1 or not shape.n_draws or batch.scores is not None:
                return self._finish(built.plan, batch, hidden, bound)
            if built.graph is None:
                graphs.pick(batch, hidden)
            outcome = Outcome(graphs.finish(shape.n_draws))
        if batch.ahead:
            self._catch_up(built.plan)
            graphs.draft(shape.n_draws, batch.ahead)
        return outcome

    def _eager(self, plan: StepPlan, batch: Batch, bound: int, learn: bool) -> Outcome:
        with self._inference:
            return self._finish(plan, batch, self._step.forward(batch, bound), bound, learn)

    def _finish(
        self, plan: StepPlan, batch: Batch, hidden: torch.Tensor, bound: int, learn: bool | None = None
    ) -> Outcome:
        """The end of a step without graphs."""
        outcome, last = self._step.finish(batch, hidden, bound, learn)
        if batch.ahead and len(last):
            self._catch_up(plan)
            return replace(outcome, worth=self._step.draft(batch.sampled, last, batch.ahead, batch.shape.greedy))
        return outcome

    def _catch_up(self, plan: StepPlan) -> None:
        """A draft model reads what rows have said while nothing was drafted."""
        graphs, own = self._graphs, None if self._graphs is None else self._graphs.unread_room
        for packed, room in unread(plan, own):
            packet = Packet()
            packet.add("step", packed)
            batch = unpack(packet.send(self.device)["step"], mixed_step(room), room)
            if graphs is None or own is None:
                self._step.read(batch)
            else:
                graphs.read(batch, room)
