"""CUDA graphs of steps, keyed by what they run and what their steps are padded to.

A step in which each row has one query token and draws plainly is one graph, by its rows; one that verifies drafts is, by
rows and nodes. There are forward graphs of the same steps where a row asks for more than a plain draw, which finish eagerly,
and of mixed steps that the device computes faster than Python launches them, whose rows, query lengths and places are device
data. Mixed steps, also those that ran eagerly, have finish graphs, by how many rows draw; drafting ahead is another. A graph
reads its step from a static buffer; positions, lengths and page tables are device data already. All are captures of
DeviceStep, the same code that runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from ridgeline.core.spec import NUMBER_FORMATS, ModelSpec
from ridgeline.engine.batch import Batch, Room, Shape, mixed_step, packed_size, unpack, verify_step
from ridgeline.engine.device import DeviceStep
from ridgeline.models.weights import Progress
from ridgeline.ops.capture import Capture, Captured
from ridgeline.ops.step import SHORT
from ridgeline.speculation.build import LOGIT_ROWS

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


class GraphKey(NamedTuple):
    """kind: what the graph runs, see Graphs. padded: its step, or as many rows. variant: of "decode" the slots that any row holds
    at most; of "verify" whether drafts are trees; of "draft" how many nodes per row."""

    kind: str
    padded: Room
    variant: int = 0


class Graphs:
    """Graphs for up to `rows` rows and mixed steps of up to `tokens` query tokens, all captured by `capture`.

    decode: a step whose rows have one query token each and draw plainly. forward: its forward pass alone. mixed: the forward pass
    of a mixed step. verify: a step that verifies drafts. finish: draw and advance of rows. draft: drafting ahead for rows. read:
    what only the drafter reads. What comes out lies in static buffers: it must be copied, on the same stream, before the next
    replay.
    """

    def __init__(
        self,
        step: DeviceStep,
        rows: int,
        tokens: int,
        capture: Capture,
        drafts: tuple[int, ...] = (),
        host_drafts: int = 0,
    ) -> None:
        """drafts: numbers of nodes per row that the device drafts; host_drafts: most nodes that the host does, 0 if it does not."""
        self._step, self._one_of_each, self._capture = step, step.of_each_kind(), capture
        self._captured: dict[GraphKey, Captured] = {}
        self._sizes = buckets(rows)
        self._mixes = mixed_rooms(rows, tokens, step.spec)
        self._ahead = [nodes for nodes in drafts if nodes]
        self._draft_rooms = draft_rooms(rows, self._ahead, bool(step.drafter.parents), host_drafts)
        self.unread_room = Room(min(rows, MIXED_ROWS) + 1, 0, UNREAD_TOKENS) if step.drafter.layers else None
        """Of steps that only the drafter reads, None if it reads nothing."""
        rooms = [*self._mixes, *chain.from_iterable(self._draft_rooms.values())]
        longest = max((packed_size(room, tree=True) for room in rooms), default=0)
        # Zeros are row 0, the scratch row: what captures run before anything is loaded moves nothing.
        self._input = torch.zeros(longest, dtype=torch.int32, device=step.rows.ints.device)
        self._unread = self._input.new_zeros(packed_size(self.unread_room) if self.unread_room else 0)
        self._drawing = self._input.new_zeros(max([rows, *(room.rows for room in rooms)]))
        self._picked = step.decoder.embedding.new_zeros(len(self._drawing), step.spec.d_model)

    # --- which graph --------------------------------------------------------------------------------------------------

    def room(self, shape: Shape) -> Room | None:
        """The padding of the smallest graph that holds such a step; None if none does."""
        if shape.decode:
            size = self.bucket(shape.n_rows)
            return _rows(size) if size else None
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
        """Capture every graph, the largest first so that the others fit into its memory."""
        keys = list(self.all_keys())
        for number, key in enumerate(keys, 1):
            self.launch(key)
            self._captured[key] = self._capture(partial(self._work(key), self._step))
            progress("graphs", number, len(keys))

    def launch(self, key: GraphKey) -> None:
        """Run once what a graph runs, to load kernels and make workspaces; neither may happen inside a capture. It goes through
        one layer of each kind, but where all layers are one kernel."""
        whole = key.kind == "decode" and key.padded.rows <= LONE_ROWS
        self._work(key)(self._step if whole else self._one_of_each)

    def all_keys(self) -> Iterator[GraphKey]:
        """Of every graph, in the order of `capture`."""
        longest, sizes = self._step.longest, [_rows(size) for size in reversed(self._sizes)]
        yield from (GraphKey("mixed", room) for room in reversed(self._mixes))
        for size in sizes:
            yield from (GraphKey("decode", size, longest), GraphKey("forward", size), GraphKey("finish", size))
            if size.rows <= LONE_ROWS and longest > SHORT:
                yield GraphKey("decode", size, SHORT)
        for tree, rooms in self._draft_rooms.items():
            yield from (GraphKey("verify", room, tree) for room in reversed(rooms))
        for size in sizes:
            yield from (GraphKey("draft", size, nodes) for nodes in self._ahead if size.rows <= DRAFT_ROWS[-1])
        if self.unread_room is not None:
            yield GraphKey("read", self.unread_room)

    def load(self, batch: Batch, room: Room) -> None:
        """Set the step that the next replay will run. batch: as packed for `room`."""
        assert batch.packed is not None
        if batch.shape.decode:
            self._drawing[: room.rows].copy_(batch.packed)
            return
        if room.wide > 1:
            self._drawing[: room.rows].copy_(batch.sampled)
        self._input[: len(batch.packed)].copy_(batch.packed)

    def verify(self, room: Room, shape: Shape) -> torch.Tensor:
        """Replay the loaded step with drafts to its end; Outcome.packed."""
        return self._replay("verify", room, shape.deep > 0)

    def read(self, batch: Batch, room: Room) -> None:
        """Have the drafter read a step packed for `unread_room`."""
        assert batch.packed is not None
        self._unread.copy_(batch.packed)
        self._replay("read", room)

    def draft(self, rows: int, ahead: int) -> None:
        """Draft for the first `rows` rows of the step that was finished last."""
        size = self.bucket(rows)
        if ahead not in self._ahead or size > DRAFT_ROWS[-1]:
            self._step.draft(self._drawing[:rows], self._picked[:rows], ahead, False)
        else:
            self._replay("draft", _rows(size), ahead)

    def decode(self, room: Room, bound: int) -> torch.Tensor:
        """Replay the loaded step of rows with one query token and a plain draw to its end; Outcome.packed. bound: of slots any
        row holds."""
        short = room.rows <= LONE_ROWS and bound <= SHORT < self._step.longest
        return self._replay("decode", room, SHORT if short else self._step.longest)

    def forward(self, batch: Batch, room: Room) -> torch.Tensor:
        """Replay the forward pass of the loaded step; hidden [room.draws, d_model]."""
        if batch.scores is not None and not batch.shape.decode:  # a graph knows nothing of what is scored
            mixed = replace(self._mixed(room), scores=batch.scores)
            return self._step.forward(mixed, self._step.longest)
        self._replay("forward" if batch.shape.decode else "mixed", room)
        return self._picked[: room.draws]

    def pick(self, batch: Batch, hidden: torch.Tensor) -> None:
        """Bring a step that ran eagerly to where finish graphs look. batch.sampled: padded to a bucket."""
        self._drawing[: len(batch.sampled)].copy_(batch.sampled)
        self._picked[: len(hidden)].copy_(hidden)

    def finish(self, rows: int) -> torch.Tensor:
        """Replay draw and advance of the first `rows` rows that draw; Outcome.packed."""
        return self._replay("finish", _rows(self.bucket(rows)))

    def _replay(self, kind: str, padded: Room, variant: int = 0) -> Any:
        return self._captured[GraphKey(kind, padded, variant)].replay()

    # --- what graphs run ----------------------------------------------------------------------------------------------

    def _work(self, key: GraphKey) -> Callable[[DeviceStep], torch.Tensor | None]:
        """What the graph runs over static buffers; what it returns is Outcome.packed."""
        kind, room, variant = key
        rows, hidden = self._drawing[: room.rows], self._picked[: room.rows]

        def decode(step: DeviceStep) -> torch.Tensor:
            state = step.forward(_decoding(rows), variant)
            if self._ahead:  # which is where drafting goes on from
                hidden.copy_(state)
            return _draw(step, rows, state)

        def forward(step: DeviceStep) -> None:
            hidden.copy_(step.forward(_decoding(rows), step.longest))

        def mixed(step: DeviceStep) -> None:
            batch = self._mixed(room)
            self.pick(batch, step.forward(batch, step.longest))

        def verify(step: DeviceStep) -> torch.Tensor | None:
            batch = unpack(self._input[: packed_size(room, bool(variant))], verify_step(room, bool(variant)), room)
            # ahead: the hidden states that drew last are wanted.
            outcome, last = step.finish(replace(batch, ahead=1), step.forward(batch, step.longest), 0)
            hidden.copy_(last)
            return outcome.packed

        def finish(step: DeviceStep) -> torch.Tensor:
            return _draw(step, rows, hidden)

        def draft(step: DeviceStep) -> None:
            step.draft(rows, hidden, variant, False)

        def read(step: DeviceStep) -> None:
            step.read(unpack(self._unread, mixed_step(room), room))

        works: dict[str, Callable[[DeviceStep], torch.Tensor | None]] = {
            "decode": decode,
            "forward": forward,
            "mixed": mixed,
            "verify": verify,
            "finish": finish,
            "draft": draft,
            "read": read,
        }
        return works[kind]

    def _mixed(self, room: Room) -> Batch:
        return unpack(self._input[: packed_size(room)], mixed_step(room), room)


def _rows(size: int) -> Room:
    """So many rows with one query token each."""
    return Room(size, size, size)


def _draw(step: DeviceStep, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Plain draws of `rows`; what the host is told of them."""
    packed = step.finish(_decoding(rows), hidden, 0)[0].packed
    assert packed is not None
    return packed
