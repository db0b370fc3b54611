"""CUDA graphs of steps, keyed by how many query tokens they hold and nothing else.

A step in which each row has one query token and draws plainly is one graph, by its rows; one that verifies drafts is, by
rows and nodes. There are forward graphs of the same steps where a row asks for more than a plain draw, which finish eagerly,
and of mixed steps that the device computes faster than Python launches them, whose rows, query lengths and places are device
data. Mixed steps, also those that ran eagerly, have finish graphs, by how many rows draw; drafting ahead is another. A graph
reads its step from a static buffer; positions, lengths and page tables are device data already. All are captures of
DeviceStep, the same code that runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import Any, Protocol

import torch

from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.engine.batch import Batch, Room, Shape, mixed_step, packed_size, unpack, verify_step
from ridgeline.engine.device import DeviceStep
from ridgeline.engine.drafting import LOGIT_ROWS
from ridgeline.models.weights import Progress
from ridgeline.ops.step import SHORT

MIXED_ROWS = 32
"""Rows that graphs of small mixed steps hold: every row costs their attention an idle program per layer and head."""
MIXED_TOKENS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Query tokens of those that have a graph."""
CROWDED_TOKENS = (256, 384, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048, 3072, 4096, 6144)
"""Query tokens of mixed steps of any number of rows that have one, beside the most that a step takes."""
CROWDED_WORK = 1 << 36
"""Query tokens times numbers of a feed-forward matrix above which they have none, in 16 bits: the device takes longer than Python
needs to launch such a step, which is 20 ms for 32 layers and at times 40. An 8B gets there with 1,170 tokens, in fp8 with 2,340."""
UNREAD_TOKENS = 128
"""Query tokens of the graph that reads what up to MIXED_ROWS rows said while nothing was drafted."""
LONE_ROWS = 2
"""Steps that decode up to so many rows have a graph for contexts of up to SHORT slots, and one for others."""
DRAFT_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256)
"""Rows of steps with drafts that have a graph."""
HOST_ROWS, HOST_NODES, HOST_TOKENS = (1, 2, 4, 8, 16, 32), (1, 3, 8), 256
"""Rows, nodes and query tokens of those whose drafts the host makes, beside its largest: chains and trees, so fewer of each."""


def buckets(rows: int) -> list[int]:
    """Sizes of graphs for up to `rows` rows: fine where a token more costs most, relative to the step."""
    sizes = chain((1, 2, 4), range(8, 64, 8), range(64, 256, 16), range(256, rows + 32, 32))
    fitting = [size for size in sizes if size < rows]
    return [*fitting, rows]


def mixed_rooms(rows: int, tokens: int, spec: ModelSpec) -> list[Room]:
    """Mixed steps that have a graph, of up to `rows` rows and `tokens` query tokens, in the order in which they are looked at.
    Each has one row more than a step may bring, so that its padding tokens have a row of their own."""
    form = NUMBER_FORMATS.get(spec.quantization)
    work = CROWDED_WORK * (2 if form is not None and form.inputs_8bit else 1)
    few, most = min(rows, MIXED_ROWS) + 1, work // (spec.d_model * max(layer.d_ff for layer in spec.layers))
    rooms = {Room(few, few, span) for span in MIXED_TOKENS if span <= tokens}
    for span in (*CROWDED_TOKENS, tokens):
        if CROWDED_TOKENS[0] <= span <= min(tokens, most):
            many = min(rows, span) + 1
            rooms.add(Room(many, many, span))
    return sorted(rooms, key=lambda room: (room.tokens, room.rows))


def decode_step(rows: int) -> Shape:
    """A step of `rows` rows with one query token each, whose draws are plain."""
    return Shape(rows, rows, rows, 1, 1, True, False, True, None)


def _decoding(rows: torch.Tensor) -> Batch:
    return Batch(decode_step(len(rows)), rows, rows, packed=rows)


def draft_rooms(rows: int, nodes: Sequence[int], trees: bool, host_nodes: int) -> dict[bool, list[Room]]:
    """Steps with drafts that have a graph, of up to `rows` rows; those with the fewest query tokens first. True: of trees. nodes:
    per row, of what the device drafts, trees or chains; host_nodes: most of what the host drafts, 0 if it does not. The largest
    has more rows than ever run, for padding."""
    most = next((row for row in DRAFT_ROWS if row > rows), rows)

    def fitting(heights: Sequence[int], drafts: Sequence[int], tokens: int) -> set[Room]:
        every = {
            Room(row, row, row * (1 + one), 1 + one, row * one) for row in heights for one in drafts if row <= most
        }
        return {room for room in every if room.tokens <= tokens}

    few = [*(one for one in HOST_NODES if one < host_nodes), host_nodes] if host_nodes else []
    device, host = fitting(DRAFT_ROWS, nodes, LOGIT_ROWS), fitting(HOST_ROWS, few, HOST_TOKENS)
    forms = {tree: host | device if tree is trees else host for tree in (False, True)}
    return {tree: sorted(own, key=lambda room: (room.tokens, room.rows)) for tree, own in forms.items()}


class Replay(Protocol):
    def replay(self) -> None: ...


class CudaRecorder:
    """Captures work as a CUDA graph. All graphs share one memory pool: they run one after the other on one stream."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], object]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            work()
        return graph


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A step to its draws. told: what its last run tells the host, held so that no other graph is given this memory."""

    graph: Replay
    told: list[torch.Tensor]

    def replay(self) -> torch.Tensor:
        """Outcome.packed, until the next time."""
        self.graph.replay()
        return self.told[0]


class Graphs:
    """Graphs for up to `rows` rows and mixed steps of up to `tokens` query tokens, recorded by `capture` or when needed.

    `record` turns work into something that repeats it. What comes out lies in static buffers: it must be copied, on the
    same stream, before the next replay.
    """

    def __init__(
        self,
        step: DeviceStep,
        rows: int,
        tokens: int,
        record: Callable[[Callable[[], object]], Replay],
        drafts: tuple[int, ...] = (),
        host_drafts: int = 0,
    ) -> None:
        self._step, self._first, self._record = step, step.of_each_kind(), record
        self._sizes = buckets(rows)
        self._mixes = mixed_rooms(rows, tokens, step.spec)
        device, embedding = step.rows.ints.device, step.decoder.embedding
        self._ahead = [nodes for nodes in drafts if nodes]
        self._draft_rooms = draft_rooms(rows, self._ahead, bool(step.drafter.parents), host_drafts)
        every = list(chain.from_iterable(self._draft_rooms.values()))
        rooms = self._mixes + every
        longest = max((packed_size(room, tree=True) for room in rooms), default=0)
        self._input = torch.zeros(longest, dtype=torch.int32, device=device)
        most = max([rows, *(room.rows for room in rooms)])
        self._drawing = torch.zeros(most, dtype=torch.int32, device=device)
        self._picked = embedding.new_zeros(len(self._drawing), step.spec.d_model)
        self._decode, self._forward = cache(self._decode_graph), cache(self._forward_graph)
        self._mix, self._finish = cache(self._mixed_graph), cache(self._finish_graph)
        self._verify, self._draft = cache(self._verify_graph), cache(self._draft_graph)
        self._read = cache(self._read_graph)
        widest = max((room.wide for room in every), default=0)
        self._verified = torch.zeros(most, 2 + 3 * widest, dtype=torch.int32, device=device)
        self.unread_room = Room(min(rows, MIXED_ROWS) + 1, 0, UNREAD_TOKENS) if step.drafter.layers else None
        """Of steps that only the drafter reads, None if it reads nothing."""
        self._unread = self._input.new_zeros(packed_size(self.unread_room) if self.unread_room else 0)

    # --- which graph --------------------------------------------------------------------------------------------------

    def room(self, shape: Shape) -> Room | None:
        """The padding of the smallest graph that holds such a step; None if none does."""
        if shape.decode:
            size = self.bucket(shape.n_rows)
            return Room(size, size, size) if size else None
        if shape.wide > 1:
            return self._draft_room(shape)
        fitting = (room for room in self._mixes if room.tokens >= shape.n_tokens and room.rows > shape.n_rows)
        return next(fitting, None)

    def bucket(self, rows: int) -> int:
        """The smallest finish graph that holds `rows` rows; 0 if none does."""
        return next((size for size in self._sizes if size >= rows), 0)

    def _draft_room(self, shape: Shape) -> Room | None:
        """For a step with drafts in which every row draws. Rows may have fewer nodes if a padding row takes the rest."""
        if shape.chunked or not shape.plain or shape.n_draws != shape.n_rows:
            return None
        for room in self._draft_rooms[shape.deep > 0]:
            full = room.rows == shape.n_rows and room.tokens == shape.n_tokens
            if room.wide >= shape.wide and room.tokens >= shape.n_tokens and (room.rows > shape.n_rows or full):
                return room
        return None

    # --- use ----------------------------------------------------------------------------------------------------------

    def capture(self, progress: Progress) -> None:
        """Record every graph, the largest first so that the others fit into its memory."""
        work: list[tuple[Callable[[Any], object], Any]] = [(self._mix, room) for room in reversed(self._mixes)]
        for size in reversed(self._sizes):
            work += [(partial(self._decode, None), size), (self._forward, size), (self._finish, size)]
            if size <= LONE_ROWS and self._step.longest > SHORT:
                work.append((partial(self._decode, SHORT), size))
        for tree, rooms in self._draft_rooms.items():
            work += [(partial(self._verify, tree), room) for room in reversed(rooms)]
        for size in reversed(self._sizes):
            work += [(partial(self._draft, nodes), size) for nodes in self._ahead if size <= DRAFT_ROWS[-1]]
        work += [(self._read, self.unread_room)] * (self.unread_room is not None)
        for number, (make, size) in enumerate(work, 1):
            make(size)
            progress("graphs", number, len(work))

    def load(self, batch: Batch, room: Room) -> None:
        """Set the step that `forward` will run. batch: as packed for `room`."""
        assert batch.packed is not None
        if batch.shape.decode:
            self._drawing[: room.rows].copy_(batch.packed)
        else:
            if room.wide > 1:
                self._verify(batch.shape.deep > 0, room)
                self._drawing[: room.rows].copy_(batch.sampled)
            else:
                self._mix(room)
            self._input[: len(batch.packed)].copy_(batch.packed)

    def verify(self, room: Room, shape: Shape) -> torch.Tensor:
        """Replay the loaded step with drafts to its end; Outcome.packed."""
        self._verify(shape.deep > 0, room).replay()
        return self._verified[: room.rows, : 2 + (3 if shape.deep else 1) * room.wide]

    def read(self, batch: Batch, room: Room) -> None:
        """Have the drafter read a step packed for `unread_room`."""
        assert batch.packed is not None
        self._unread.copy_(batch.packed)
        self._read(room).replay()

    def draft(self, rows: int, ahead: int) -> None:
        """Draft for the first `rows` rows of the step that was finished last."""
        size = self.bucket(rows)
        if ahead not in self._ahead or size > DRAFT_ROWS[-1]:
            self._step.draft(self._drawing[:rows], self._picked[:rows], ahead, False)
        else:
            self._draft(ahead, size).replay()

    def decode(self, room: Room, bound: int) -> torch.Tensor:
        """Replay the loaded step of rows with one query token and a plain draw to its end; Outcome.packed. bound: of slots any
        row holds."""
        short = room.rows <= LONE_ROWS and bound <= SHORT < self._step.longest
        return self._decode(SHORT if short else None, room.rows).replay()

    def forward(self, batch: Batch, room: Room) -> torch.Tensor:
        """Replay the forward pass of the loaded step; hidden [room.draws, d_model]."""
        if batch.shape.decode:
            self._forward(room.rows).replay()
            return self._picked[: room.rows]
        if batch.scores is not None:  # a graph knows nothing of what is scored
            mixed = unpack(self._input[: packed_size(room)], mixed_step(room), room)
            return self._step.forward(replace(mixed, scores=batch.scores), self._step.longest)
        self._mix(room).replay()
        return self._picked[: room.draws]

    def pick(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Bring a step that ran eagerly to where finish graphs look. batch.sampled: padded to a bucket."""
        self._drawing[: len(batch.sampled)].copy_(batch.sampled)
        self._picked[: len(hidden)].copy_(hidden)

    def finish(self, rows: int) -> torch.Tensor:
        """Replay draw and advance of the first `rows` rows that draw; Outcome.packed."""
        return self._finish(self.bucket(rows)).replay()

    # --- recording ----------------------------------------------------------------------------------------------------
    # The first run of each loads kernels and makes workspaces; neither may happen inside a capture. It runs on row 0, and
    # through one layer of each kind where layers run one by one.

    def _decode_graph(self, longest: int | None, size: int) -> _Drawn:
        rows = self._drawing[:size]

        def work(step: DeviceStep, rows: torch.Tensor) -> torch.Tensor:
            hidden = step.forward(_decoding(rows), longest or step.longest)
            if self._ahead:  # which is where drafting goes on from
                self._picked[:size].copy_(hidden)
            return self._draw(rows, hidden)

        told = [work(self._step if size <= LONE_ROWS else self._first, torch.zeros_like(rows))]

        def drawn() -> None:
            told[0] = work(self._step, rows)

        return _Drawn(self._record(drawn), told)

    def _forward_graph(self, size: int) -> Replay:
        step, hidden, batch = self._step, self._picked[:size], _decoding(self._drawing[:size])
        self._decode(None, size)
        return self._record(lambda: hidden.copy_(step.forward(batch, step.longest)))

    def _mixed_graph(self, room: Room) -> Replay:
        batch = unpack(self._input[: packed_size(room)], mixed_step(room), room)

        def work(step: DeviceStep) -> None:
            self.pick(batch, step.forward(batch, step.longest))

        self._input.zero_()
        work(self._first)
        return self._record(lambda: work(self._step))

    def _finish_graph(self, size: int) -> _Drawn:
        hidden, rows = self._picked[:size], self._drawing[:size]
        told = [self._draw(torch.zeros_like(rows), hidden)]

        def drawn() -> None:
            told[0] = self._draw(rows, hidden)

        return _Drawn(self._record(drawn), told)

    def _draw(self, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Plain draws of `rows`; what the host is told of them."""
        found = self._step.finish(_decoding(rows), hidden, 0)[0].packed
        assert found is not None
        return found

    def _verify_graph(self, tree: bool, room: Room) -> Replay:
        shape, rows = verify_step(room, tree), room.rows
        # ahead: the hidden states that drew last are wanted.
        batch = replace(unpack(self._input[: packed_size(room, tree)], shape, room), ahead=1)

        def work(step: DeviceStep) -> None:
            outcome, last = step.finish(batch, step.forward(batch, step.longest), 0)
            assert outcome.packed is not None
            self._verified[:rows, : outcome.packed.shape[1]].copy_(outcome.packed)
            self._picked[:rows].copy_(last)

        self._input.zero_()
        work(self._first)
        return self._record(lambda: work(self._step))

    def _draft_graph(self, ahead: int, size: int) -> Replay:
        step, hidden, rows = self._step, self._picked[:size], self._drawing[:size]
        step.draft(torch.zeros_like(rows), hidden, ahead, False)
        return self._record(lambda: step.draft(rows, hidden, ahead, False))

    def _read_graph(self, room: Room) -> Replay:
        batch = unpack(self._unread, mixed_step(room), room)
        self._unread.zero_()
        self._step.read(batch)
        return self._record(lambda: self._step.read(batch))
