"""One step as the device needs it: which rows, which of their tokens, which logits, and who asks for more than a draw.

Everything here follows from the plan and the joins; nothing is read back from the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch

from ridgeline.core.draft import MAX_DRAFT
from ridgeline.core.errors import EngineFailed
from ridgeline.core.plan import Logits, StepPlan
from ridgeline.decoding.masks import mask_words, read_mask
from ridgeline.engine.packet import Packet
from ridgeline.engine.row_table import RowTable
from ridgeline.engine.trees import Branches, branches
from ridgeline.ops.rows import Drafted


@dataclass(frozen=True, slots=True)
class Shape:
    """What the host knows of a step. n_tokens: T; n_rows: B; n_draws: rows that draw; max_query, wide: most query tokens,
    1 + most drafts of a row.

    decode: each row has one query token and draws one. sampling: places in the step of the rows that draw, or None for
    all. plain: no row asks for more than a draw by temperature, top_k, top_p and min_p. greedy: all draw the most probable
    token. deep: levels of the deepest draft tree, 0 for chains. chunked: a row has more query tokens than its last known one
    and its drafts.
    """

    n_tokens: int
    n_rows: int
    n_draws: int
    max_query: int
    wide: int
    decode: bool
    greedy: bool
    plain: bool
    sampling: np.ndarray | None
    deep: int = 0
    chunked: bool = False

    @property
    def even(self) -> bool:
        """The logits of every query token are wanted, as each is a row's last known one or its draft."""
        return self.wide > 1 and not self.chunked and self.sampling is None


@dataclass(frozen=True, slots=True)
class Room:
    """What a step's arrays are padded to: rows B, rows that draw S, query tokens T, of a row that draws itself and its drafts at
    the most, drafts of all rows. A padding row is row 0 and has no query tokens; a padding token belongs to the last row, which
    must then be padding."""

    rows: int
    draws: int
    tokens: int
    wide: int = 1
    drafts: int = 0

    @property
    def logits(self) -> int:
        """N, query tokens whose logits are wanted: each row's that draws, and its drafts."""
        return self.draws + self.drafts


@dataclass(frozen=True, slots=True)
class Wishes:
    """Which logit rows want what, as int32 indices into the step's N logit rows (None: nobody).

    bias: (logit row, token, bias) triples as three tensors. words: masks of the masked rows. tops: for the rows with
    log-probabilities, how many alternatives each wants; places: those rows' places among the rows that draw; nodes: their
    numbers of logit rows.
    """

    penalized: torch.Tensor | None = None
    early: torch.Tensor | None = None
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    masked: torch.Tensor | None = None
    words: torch.Tensor | None = None
    logprobs: torch.Tensor | None = None
    tops: tuple[int, ...] = ()
    places: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Scores:
    """Query tokens to score: at int32 [M] of the step's T, ids int32 [M]; counts, tops: per scored row (place -> n)."""

    at: torch.Tensor
    ids: torch.Tensor
    counts: Mapping[int, int]
    tops: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Tree:
    """How the query tokens of drafts hang together. shift int32 [T]: what a position is beyond its slot's. ancestors int64 [T],
    as in StepInputs."""

    shift: torch.Tensor
    ancestors: torch.Tensor


@dataclass(frozen=True, slots=True)
class Nodes:
    """The query tokens whose logits are wanted in a step with drafts: of each row that draws its last known token, node 0, and
    its drafts. rows, number, depth int32 [N]: the device row of each, its number among that row's, and its level in the tree (of
    a chain, its number)."""

    rows: torch.Tensor
    number: torch.Tensor
    depth: torch.Tensor
    drafted: Drafted


@dataclass(frozen=True, slots=True)
class Ragged:
    """Where the query tokens of a step lie that is not pure decode; all int32.

    q_start [B + 1]; n_query [B]; advance [B], how far the position moves before drawn tokens count; row_of, place [T],
    each query token's row in the step and number in that row; at [N], the query tokens whose logits are wanted; nodes: None
    without drafts; tree: None for chains.
    """

    q_start: torch.Tensor
    n_query: torch.Tensor
    advance: torch.Tensor
    row_of: torch.Tensor
    place: torch.Tensor
    at: torch.Tensor
    nodes: Nodes | None = None
    tree: Tree | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's tensors. rows int32 [B]; sampled int32 [S], device rows that draw; ragged: None for pure decode. packed:
    all of these as they were uploaded, one int32 array (see `unpack`), None where nothing was. ahead: as in StepPlan."""

    shape: Shape
    rows: torch.Tensor
    sampled: torch.Tensor
    ragged: Ragged | None = None
    wishes: Wishes = Wishes()
    scores: Scores | None = None
    packed: torch.Tensor | None = None
    ahead: int = 0

    @property
    def nodes(self) -> Nodes | None:
        """None without drafts."""
        return None if self.ragged is None else self.ragged.nodes

    @property
    def owners(self) -> torch.Tensor:
        """The device row of each row of logits, int32 [N]."""
        return self.sampled if self.nodes is None else self.nodes.rows


_ALIGN = 16
"""Items to which the parts of a packed step are aligned, as in Packet."""


@lru_cache(maxsize=256)
def _places(room: Room, tree: bool) -> tuple[dict[str, slice], list[int]]:
    """Where each part of a packed step lies, and the sizes of all parts, each with the gap behind it. int64 takes two items."""
    rows, draws, tokens, logits = room.rows, room.draws, room.tokens, room.logits
    sizes = {"rows": rows, "sampled": draws, "q_start": rows + 1, "n_query": rows, "advance": rows}
    sizes |= {"at": logits, "row_of": tokens, "place": tokens}
    if room.wide > 1:
        sizes |= {"owner": logits, "number": logits, "first": draws, "n_draft": draws}
    if room.wide > 1 and tree:
        sizes |= {"depth": logits, "parent": 2 * draws * room.wide}
    if tree:
        sizes |= {"shift": tokens, "ancestors": 2 * tokens}
    cuts = [size for one in sizes.values() for size in (one, -one % _ALIGN)]
    begins = [0, *accumulate(cuts)][:-1:2]
    return {name: slice(at, at + sizes[name]) for name, at in zip(sizes, begins, strict=True)}, cuts


def _blank(room: Room, tree: bool) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A packed step of zeros, and its parts."""
    packed = np.zeros(packed_size(room, tree), dtype=np.int32)
    return packed, {name: packed[place] for name, place in _places(room, tree)[0].items()}


def packed_size(room: Room, tree: bool = False) -> int:
    """Items of a packed step that is not pure decode."""
    return sum(_places(room, tree)[1])


def unpack(packed: torch.Tensor, shape: Shape, room: Room) -> Batch:
    """The batch over a packed step, without drafts and wishes. For pure decode that is its rows."""
    if shape.decode:
        return Batch(shape, packed, packed, packed=packed)
    places, cuts = _places(room, shape.deep > 0)
    part = dict(zip(places, packed.split(cuts)[::2], strict=True))
    rows, sampled = part.pop("rows"), part.pop("sampled")
    tree = Tree(part.pop("shift"), part.pop("ancestors").view(torch.int64)) if shape.deep else None
    nodes = None
    if shape.wide > 1:
        parent = part.pop("parent").view(torch.int64).view(-1, shape.wide) if shape.deep else None
        drafted, number = Drafted(part.pop("first"), part.pop("n_draft"), shape.wide, parent), part.pop("number")
        nodes = Nodes(part.pop("owner"), number, part.pop("depth", number), drafted)
    return Batch(shape, rows, sampled, Ragged(**part, nodes=nodes, tree=tree), packed=packed)


def mixed_step(room: Room) -> Shape:
    """A step of up to so many query tokens, however they are spread over its rows; all draws are plain."""
    return Shape(room.tokens, room.rows, room.draws, room.tokens, 1, False, False, True, None, chunked=True)


def verify_step(room: Room, tree: bool) -> Shape:
    """A step in which each row verifies as many drafts as there is room for; all draws are plain."""
    wide = room.wide
    return Shape(room.tokens, room.rows, room.draws, wide, wide, False, False, True, None, deep=wide - 1 if tree else 0)


def unread(plan: StepPlan, room: Room | None) -> Iterator[tuple[np.ndarray, Room]]:
    """Packed steps of what the plan's rows have not read but for the last two tokens, each row's in order, with their room: `room`,
    of as many rows at a time as it holds; None: of all at once, without padding."""
    if max(plan.unread, default=0) <= 2:
        return
    own = np.frombuffer(plan.rows, dtype=np.int32)[np.frombuffer(plan.samples, dtype=np.int8) > 0]
    # The scratch row stands in for one that was lost: it has nothing to read.
    each = np.maximum(np.frombuffer(plan.unread, dtype=np.int32) - 2, 0) * (own > 0)
    own, each = own[each > 0], each[each > 0]
    most = len(own) if room is None else room.rows - 1
    for begin in range(0, len(own), max(1, most)):
        some = slice(begin, begin + most)
        yield from _reading(own[some], each[some], room or Room(len(own), 0, int(each.sum())))


def _reading(own: np.ndarray, each: np.ndarray, room: Room) -> Iterator[tuple[np.ndarray, Room]]:
    """Steps that read the last `each` tokens of device rows but for two, both [n]; see `unread`."""
    row_of = np.repeat(np.arange(len(own), dtype=np.int32), each)
    place = np.arange(len(row_of)) - np.cumsum(each)[row_of] - 1
    for first in range(0, len(row_of), room.tokens):
        part = slice(first, first + room.tokens)
        packed, into = _blank(room, False)
        count = len(row_of[part])
        into["rows"][: len(own)] = own
        into["q_start"][1:] = count
        into["q_start"][1 : len(own) + 1] = np.cumsum(np.bincount(row_of[part], minlength=len(own)))
        into["n_query"][row_of[part]] = place[part] + 1
        into["row_of"][:] = room.rows - 1
        into["row_of"][:count], into["place"][:count] = row_of[part], place[part]
        yield packed, room


class BatchBuilder:
    """Reads a plan, fills a packet, and makes the Batch once the packet was sent.

    table: with the plan's rows assigned. Raises EngineFailed for a plan that this runner cannot run.
    """

    def __init__(self, plan: StepPlan, table: RowTable, packet: Packet) -> None:
        self._plan, self._vocab, self._packet = plan, table.vocab, packet
        self._rows = np.frombuffer(plan.rows, dtype=np.int32)
        self._n_query = np.frombuffer(plan.n_query, dtype=np.int32)
        self._n_draft = np.frombuffer(plan.n_draft, dtype=np.int32)
        most = self._check()
        self._branches: list[Branches] = []
        self._where = np.flatnonzero(np.frombuffer(plan.samples, dtype=np.int8))
        self._nodes = 1 + self._n_draft[self._where]
        self.shape = self._shape(table, most)
        self._drawing = [] if self.shape.plain else [table[row] for row in self._rows[self._where].tolist()]
        scored = (place for place, wanted in enumerate(plan.logits) if wanted == Logits.ALL) if plan.score_ids else ()
        self._scored = {place: table[plan.rows[place]] for place in scored}
        self._tops: tuple[int, ...] = ()
        self._places: tuple[int, ...] = ()
        self._score_counts: dict[int, int] = {}
        self._room = self.room()

    def _check(self) -> int:
        """The most drafts of a row."""
        plan, drafted = self._plan, sum(self._plan.n_draft)
        most = max(plan.n_draft) if drafted else 0
        if most > MAX_DRAFT:
            raise EngineFailed(f"A row has {most} draft tokens, but at most {MAX_DRAFT} can be verified in a step.")
        if drafted != len(plan.drafts):
            raise EngineFailed(f"The plan has {len(plan.drafts)} draft tokens, but its rows have {drafted}.")
        if len(plan.tree) not in (0, len(plan.drafts)):
            raise EngineFailed(f"The plan has {len(plan.tree)} parents for {len(plan.drafts)} draft tokens.")
        if plan.tree and bool(((self._n_draft > 0) & (self._n_query != self._n_draft + 1)).any()):
            raise EngineFailed("A draft tree must follow exactly one query token, but its row has several.")
        if plan.masks and drafted:
            size = 4 * mask_words(self._vocab)
            for row, n_draft in zip(plan.rows, plan.n_draft, strict=True):
                if row in plan.masks and n_draft and len(plan.masks[row]) != (1 + n_draft) * size:
                    raise EngineFailed(f"Row {row} has {len(plan.masks[row])} bytes of masks for {n_draft} drafts.")
        return most

    def _shape(self, table: RowTable, most: int) -> Shape:
        everyone = len(self._where) == len(self._rows)
        max_query = int(self._n_query.max())
        drawing = self._rows if everyone else self._rows[self._where]
        return Shape(
            n_tokens=int(self._n_query.sum()),
            n_rows=len(self._rows),
            n_draws=len(self._where),
            max_query=max_query,
            wide=1 + most,
            decode=everyone and max_query == 1,
            greedy=bool(table.greedy[drawing].all()),
            plain=not self._plan.masks and bool(table.plain[drawing].all()),
            sampling=None if everyone else self._where,
            deep=self._read_tree(),
            chunked=bool((self._n_query > self._n_draft + 1).any()) if most else max_query > 1,
        )

    def _read_tree(self) -> int:
        """How the drafts of each row that draws hang together; returns the levels of the deepest tree, 0 for chains."""
        if not self._plan.tree:
            return 0
        ends = np.cumsum(self._n_draft)
        parents = self._plan.tree
        self._branches = [
            branches(tuple(parents[ends[place] - self._n_draft[place] : ends[place]])) for place in self._where
        ]
        return max((one.levels for one in self._branches), default=0)

    # --- what goes up -----------------------------------------------------------------------------------------------

    def room(self) -> Room:
        """Without padding."""
        drafts = int(self._nodes.sum()) - self.shape.n_draws
        return Room(self.shape.n_rows, self.shape.n_draws, self.shape.n_tokens, self.shape.wide, drafts)

    def pack(self, room: Room) -> None:
        """Add the step to the packet, padded to `room`."""
        self._room, more = room, room.rows - len(self._rows)
        self.shape = self.shape if room.wide == self.shape.wide else replace(self.shape, wide=room.wide)
        if self.shape.decode:
            self._packet.add("step", np.pad(self._rows, (0, more)) if more else self._rows)
        else:
            self._packet.add("step", self._packed(room))
        if not self.shape.plain:
            self._pack_wishes()
        if self._scored:
            self._pack_scores()

    def _packed(self, room: Room) -> np.ndarray:
        n_query, n_draft, where = self._n_query, self._n_draft, self._where
        packed, part = _blank(room, self.shape.deep > 0)
        n_rows, n_draws, n_tokens = self.shape.n_rows, self.shape.n_draws, self.shape.n_tokens
        part["rows"][:n_rows] = self._rows
        part["sampled"][:n_draws] = self._rows[where]
        ends = np.cumsum(n_query, dtype=np.int32)
        part["q_start"][1 : n_rows + 1] = ends
        part["q_start"][n_rows + 1 :] = n_tokens
        part["n_query"][:n_rows] = n_query
        advance = n_query - n_draft
        advance[where] -= 1
        advance[self._rows == 0] = 0  # the scratch row stands in for one that was lost, and never moves
        part["advance"][:n_rows] = advance
        first = np.cumsum(self._nodes, dtype=np.int32) - self._nodes
        number = np.arange(self._nodes.sum(), dtype=np.int32) - np.repeat(first, self._nodes)
        # Logits of a row start at its last known token.
        part["at"][: len(number)] = np.repeat(ends[where] - self._nodes, self._nodes) + number
        if room.wide > 1:
            part["owner"][: len(number)] = np.repeat(self._rows[where], self._nodes)
            part["number"][: len(number)] = number
            part["first"][:n_draws], part["n_draft"][:n_draws] = first, n_draft[where]
        row_of = np.repeat(np.arange(n_rows, dtype=np.int32), n_query)
        part["row_of"][:n_tokens] = row_of
        part["row_of"][n_tokens:] = room.rows - 1
        part["place"][:n_tokens] = np.arange(n_tokens, dtype=np.int32) - part["q_start"][row_of]
        if self.shape.deep:
            self._pack_tree(part, ends)
        return packed

    def _pack_tree(self, part: Mapping[str, np.ndarray], ends: np.ndarray) -> None:
        """Rows without drafts keep the causal order."""
        ancestors, parent = part["ancestors"].view(np.int64), part["parent"].view(np.int64).reshape(-1, self.shape.wide)
        ancestors[:] = -1
        for index, (place, one) in enumerate(zip(self._where, self._branches, strict=True)):
            nodes, first = len(one.depth), part["first"][index]
            own = slice(ends[place] - nodes, ends[place])
            if nodes > 1:
                part["shift"][own] = one.depth - np.arange(nodes)
                ancestors[own] = one.ancestors
            parent[index, :nodes] = one.parent
            part["depth"][first : first + nodes] = one.depth

    def _pack_wishes(self) -> None:
        draws = [one.join.sampling for one in self._drawing]
        self._pack_index("penalized", [one.penalized for one in draws])
        self._pack_index("early", [one.min_tokens > 0 for one in draws])
        self._pack_bias()
        self._pack_masks()
        wanted = [one.logprobs is not None for one in draws]
        self._pack_index("logprobs", wanted)
        self._places = tuple(np.flatnonzero(wanted).tolist())
        self._tops = tuple(draws[place].logprobs or 0 for place in self._places)

    def _pack_index(self, name: str, wanted: Sequence[bool]) -> None:
        """The logit rows of the drawing rows that want something."""
        if any(wanted):
            self._packet.add(name, np.flatnonzero(np.repeat(wanted, self._nodes)))

    def _pack_bias(self) -> None:
        rows: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for end, nodes, one in zip(accumulate(self._nodes.tolist()), self._nodes.tolist(), self._drawing, strict=True):
            for token, bias in one.join.sampling.logit_bias:
                if token < self._vocab:
                    rows += range(end - nodes, end)
                    tokens += [token] * nodes
                    values += [bias] * nodes
        if rows:
            self._packet.add("bias_rows", rows)
            self._packet.add("bias_tokens", tokens)
            self._packet.add("bias", values, np.float32)

    def _pack_masks(self) -> None:
        masks, size = self._plan.masks, 4 * mask_words(self._vocab)
        wanted, words = [], []
        for nodes, one in zip(self._nodes.tolist(), self._drawing, strict=True):
            given = masks.get(one.join.row)
            own = [] if given is None else [given[at * size :][:size] for at in range(max(1, len(given) // size))]
            word = [read_mask(mask, self._vocab) for mask in own]
            if one.allowed is not None:
                word = [one.allowed] if given is None else [mask & one.allowed for mask in word]
            wanted.append(bool(word))
            words += word * (nodes // max(1, len(word)))
        self._pack_index("masked", wanted)
        if words:
            self._packet.add("words", np.stack(words))

    def _pack_scores(self) -> None:
        at: list[int] = []
        ids: list[int] = []
        starts = np.cumsum(self._n_query) - self._n_query
        for place, one in self._scored.items():
            wanted = np.array(self._plan.score_ids[one.join.row], dtype=np.int32)
            asked = np.flatnonzero(wanted >= 0)
            at += (starts[place] + asked).tolist()
            ids += wanted[asked].tolist()
            self._score_counts[place] = len(asked)
        self._packet.add("score_at", at)
        self._packet.add("score_ids", ids)

    # --- what came of it --------------------------------------------------------------------------------------------

    def build(self, got: Mapping[str, torch.Tensor]) -> Batch:
        """The Batch over the tensors that the packet became."""
        batch = unpack(got["step"], self.shape, self._room)
        wishes = Wishes() if self.shape.plain else self._wishes(got)
        scores = self._scores(got) if self._scored else None
        return replace(batch, wishes=wishes, scores=scores, ahead=self._plan.ahead)

    def _wishes(self, got: Mapping[str, torch.Tensor]) -> Wishes:
        return Wishes(
            penalized=got.get("penalized"),
            early=got.get("early"),
            bias=(got["bias_rows"], got["bias_tokens"], got["bias"]) if "bias" in got else None,
            masked=got.get("masked"),
            words=got.get("words"),
            logprobs=got.get("logprobs"),
            tops=self._tops,
            places=self._places,
            nodes=tuple(self._nodes[list(self._places)].tolist()),
        )

    def _scores(self, got: Mapping[str, torch.Tensor]) -> Scores:
        tops = {place: one.join.sampling.prompt_logprobs or 0 for place, one in self._scored.items()}
        return Scores(got["score_at"], got["score_ids"], self._score_counts, tops)
