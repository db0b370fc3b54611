"""CUDA graphs: one launch runs all kernels of a step, for steps whose launch time in Python matters.

A step is padded to the next shape that has a graph and copied to the static memory of that graph. Rows, lengths and positions are
device data, so one graph serves every step of its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from ridgeline.core.plan import StepPlan
from ridgeline.engine.batch import Batch, packed_size, unpack
from ridgeline.engine.catch_up import reading, unread_steps
from ridgeline.engine.device import DeviceStep, Outcome
from ridgeline.engine.executor import Executor, LoadedStep
from ridgeline.engine.graph_shapes import DRAFT_ROWS, MIXED_ROWS, buckets, draft_shapes, mixed_shapes
from ridgeline.engine.shape import Sizes, StepShape
from ridgeline.models.weights import Progress
from ridgeline.ops.capture import Capture, Captured, CudaCapture
from ridgeline.ops.step import SHORT

UNREAD_TOKENS = 128
"""Query tokens of the graph in which a draft model catches up on up to MIXED_ROWS rows."""
LONE_ROWS = 2
"""Decode steps of up to LONE_ROWS rows have one graph for contexts of up to SHORT slots and one for longer contexts."""


class GraphKey(NamedTuple):
    """Key of a captured graph.

    kind: see GraphExecutor. shape: of the step; for "draw" and "draft" StepShape.decoding of the rows. variant: for "step" the most
    slots of a row, for "draft" the nodes per row. adapted: the graph has the kernels of adapters ("step" and "forward" only).
    """

    kind: str
    shape: StepShape
    variant: int = 0
    adapted: bool = False


class GraphExecutor(Executor):
    """Runs steps by replay of graphs that are captured at start-up, and eagerly where no graph fits.

    Kinds of graphs: "step", a whole step that decodes or verifies drafts, without logits processors; "forward", the forward pass
    of a decode or mixed step; "draw", sampling and advance; "draft", drafting ahead; "read", catch-up of a draft model.
    Results are in static memory: copy them, on the same stream, before the next replay.
    """

    def __init__(self, step: DeviceStep, sizes: Sizes, capture: Capture) -> None:
        super().__init__(step)
        self._reduced_step, self._capture = step.one_layer_of_each_kind(), capture
        self._captured: dict[GraphKey, Captured] = {}
        self._buckets = [StepShape.decoding(rows, step.mesh.share(rows)) for rows in buckets(sizes.rows)]
        self._mixed = mixed_shapes(sizes, step.spec)
        self._nodes = [nodes for nodes in sizes.drafts if nodes]
        self._drafts = draft_shapes(sizes, bool(step.drafter.parents))
        self._unread = reading(min(sizes.rows, MIXED_ROWS) + 1, UNREAD_TOKENS) if step.drafter.catches_up else None
        several = [*self._mixed, *chain.from_iterable(self._drafts.values())]
        # Zeros point to row 0, the scratch row, so that runs before the first load change no request.
        zeros = partial(torch.zeros, dtype=torch.int32, device=step.rows.ints.device)
        self._drawing = zeros(max([sizes.rows, *(shape.rows for shape in several)]))
        """Device rows that draw in the loaded step, padded with zeros."""
        self._hidden = step.decoder.embedding.new_zeros(len(self._drawing), step.state_width)
        """Hidden states that they sample from; after sampling, the states that drafts start from."""
        self._batches = {shape: unpack(self._drawing[: shape.rows], shape) for shape in self._buckets}
        for shape in [*several, *([self._unread] if self._unread else [])]:
            self._batches[shape] = unpack(zeros(packed_size(shape)), shape)

    # --- which graph --------------------------------------------------------------------------------------------------

    def padded(self, shape: StepShape, fused_sampling: bool) -> StepShape | None:
        """The smallest shape with a graph that fits the step."""
        if shape.decode:
            return self._bucket(shape.rows, shape.share)
        if shape.width > 1:
            return self._draft_shape(shape, fused_sampling)
        fitting = (mixed for mixed in self._mixed if mixed.tokens >= shape.tokens and mixed.rows > shape.rows)
        return next(fitting, None)

    def _bucket(self, rows: int, share: int = 0) -> StepShape | None:
        fitting = (shape for shape in self._buckets if shape.rows >= rows and (shape.share or shape.rows) >= share)
        return next(fitting, None)

    def _draft_shape(self, shape: StepShape, fused_sampling: bool) -> StepShape | None:
        """The shape for a step with drafts in which every row draws. Rows may have fewer nodes if a padding row takes the
        remainder."""
        if shape.chunked or not fused_sampling:
            return None
        fitting = (
            padded
            for padded in self._drafts[shape.tree]
            if padded.width >= shape.width and padded.tokens >= shape.tokens
            if padded.rows > shape.rows or (padded.rows, padded.tokens) == (shape.rows, shape.tokens)
        )
        return next(fitting, None)

    # --- a step -------------------------------------------------------------------------------------------------------

    def load(self, plan: StepPlan, batch: Batch, padded: bool) -> LoadedStep:
        draws = len(batch.sampled)
        self._drawing[:draws].copy_(batch.sampled)
        self._drawing[draws:].zero_()
        if padded and not batch.shape.decode:  # a decode batch consists of the drawing rows alone
            self._batches[batch.shape].packed.copy_(batch.packed)
        return super().load(plan, batch, padded)

    def run(self, loaded: LoadedStep, plan: StepPlan) -> Outcome:
        with self._inference:
            return self._run(loaded, plan)

    def _run(self, loaded: LoadedStep, plan: StepPlan) -> Outcome:
        batch, draws, shape = loaded.batch, loaded.draws, loaded.batch.shape
        if loaded.padded and batch.fused_sampling and not shape.chunked:
            packed = self._replay("step", shape, self._slots(shape, plan.bound), batch.adapted)
        else:
            if loaded.padded and batch.scores is None:
                self._replay("forward", shape, adapted=batch.adapted)
                hidden = self._hidden[: shape.draws]
            else:
                hidden = self._step.forward(batch, plan.bound)
            if not draws and batch.scores is None:
                return Outcome(None)  # a padded step would draw for the scratch row
            rows = self._bucket(draws)
            if not batch.fused_sampling or shape.width > 1 or not draws or rows is None:
                return self._finish(loaded, plan, hidden, self._step.drafter.learns())
            if not loaded.padded:
                self._hidden[: len(hidden)].copy_(hidden)
            packed = self._replay("draw", rows)
        if batch.ahead:
            self._catch_up(plan)
            self._draft(draws, batch.ahead)
        return Outcome(packed)

    def _slots(self, shape: StepShape, bound: int) -> int:
        """Variant of the "step" graph for rows with at most `bound` slots."""
        short = shape.decode and shape.rows <= LONE_ROWS and bound <= SHORT < self._step.longest
        return SHORT if short else self._step.longest

    def _catch_up(self, plan: StepPlan) -> None:
        for packed, shape in unread_steps(plan, self._unread):
            batch = self._sent(packed, shape)
            if shape == self._unread:
                self._batches[shape].packed.copy_(batch.packed)
                self._replay("read", shape)
            else:
                self._step.read(batch)

    def _draft(self, draws: int, nodes: int) -> None:
        """Draft ahead for the rows that drew."""
        rows = self._bucket(draws)
        if rows is None or nodes not in self._nodes or rows.rows > DRAFT_ROWS[-1]:
            self._step.draft(self._drawing[:draws], self._hidden[:draws], nodes, False)
        else:
            self._replay("draft", rows, nodes)

    def _replay(self, kind: str, shape: StepShape, variant: int = 0, adapted: bool = False) -> Any:
        return self._captured[GraphKey(kind, shape, variant, adapted)].replay()

    # --- capture ------------------------------------------------------------------------------------------------------

    def capture(self, progress: Progress) -> None:
        """Capture every graph, the largest first, so that the others fit into its memory pool."""
        keys = list(self.all_keys())
        for number, key in enumerate(keys, 1):
            self.launch(key)
            self._captured[key] = self._capture(partial(self.work(key), self._step))
            progress("graphs", number, len(keys))

    def launch_graphs(self) -> None:
        for key in reversed(list(self.all_keys())):
            self.launch(key)

    def all_keys(self) -> Iterator[GraphKey]:
        """Keys of all graphs, in the order of `capture`."""
        for key in self._keys():
            if self._step.has_adapters and key.kind in ("step", "forward"):
                yield key._replace(adapted=True)
            yield key

    def _keys(self) -> Iterator[GraphKey]:
        """Keys of the graphs without adapters."""
        longest = self._step.longest
        yield from (GraphKey("forward", shape) for shape in reversed(self._mixed))
        for shape in reversed(self._buckets):
            yield from (GraphKey("step", shape, longest), GraphKey("forward", shape), GraphKey("draw", shape))
            if shape.rows <= LONE_ROWS and longest > SHORT:
                yield GraphKey("step", shape, SHORT)
        for shapes in self._drafts.values():
            yield from (GraphKey("step", shape, longest) for shape in reversed(shapes))
        for shape in reversed(self._buckets):
            yield from (GraphKey("draft", shape, nodes) for nodes in self._nodes if shape.rows <= DRAFT_ROWS[-1])
        if self._unread is not None:
            yield GraphKey("read", self._unread)

    def launch(self, key: GraphKey) -> None:
        """Run the work of a graph once, to load kernels and allocate workspaces, which a capture does not allow.

        One layer of each kind is enough, except for lone decode steps, where one kernel may run all layers.
        """
        all_layers = key.kind == "step" and key.shape.decode and key.shape.rows <= LONE_ROWS
        self.work(key)(self._step if all_layers else self._reduced_step)

    def work(self, key: GraphKey) -> Callable[[DeviceStep], torch.Tensor | None]:
        """The function that the graph captures, over static memory. It returns Outcome.packed or None."""
        kind, shape, variant, adapted = key
        batch = replace(self._batches[shape], adapted=adapted)
        hidden, drawing = self._hidden[: shape.draws], self._drawing[: shape.draws]

        def step(device: DeviceStep) -> torch.Tensor | None:
            # ahead is a flag here: any value above 0 makes finish return the last hidden states.
            graph_batch = replace(batch, ahead=bool(self._nodes))
            outcome, last = device.finish(graph_batch, device.forward(batch, variant), 0, device.drafter.learns())
            if graph_batch.ahead:
                hidden.copy_(last)
            return outcome.packed

        def forward(device: DeviceStep) -> None:
            if not shape.decode:  # steps that decode are launched while the device runs the step before
                CudaCapture.in_parts()
            hidden.copy_(device.forward(batch, device.longest))

        def draw(device: DeviceStep) -> torch.Tensor | None:
            return device.finish(batch, hidden, 0, device.drafter.learns())[0].packed

        def draft(device: DeviceStep) -> None:
            device.draft(drawing, hidden, variant, False)

        def read(device: DeviceStep) -> None:
            device.read(batch)

        works: dict[str, Callable[[DeviceStep], torch.Tensor | None]]
        works = {"step": step, "forward": forward, "draw": draw, "draft": draft, "read": read}
        return works[kind]
