"""The input tensors of a step: its rows, their query tokens, and the tokens whose logits are needed.

They are computed from the plan and the row table on the host, without reading from the device. The arrays of a step are packed
into one array, so that one copy uploads a step and one copy moves it to the static memory of captured work.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch

from ridgeline.core.draft import MAX_DRAFT
from ridgeline.core.errors import EngineFailed
from ridgeline.core.plan import Logits, StepPlan
from ridgeline.decoding.masks import mask_words
from ridgeline.engine.logits_inputs import NO_INPUTS, LogitsInputs, LogitsInputsBuilder, ScoreBuilder, Scores
from ridgeline.engine.packet import Packet
from ridgeline.engine.row_table import RowTable
from ridgeline.engine.shape import StepShape
from ridgeline.engine.trees import Branches, branches
from ridgeline.ops.rows import Drafted

_ALIGN = 16
"""Items to which the parts of a packed step are aligned, as in Packet."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Draft trees of a step. shift int32 [T]: position minus slot of each query token. ancestors int64 [T]: as in StepInputs."""

    shift: torch.Tensor
    ancestors: torch.Tensor


@dataclass(frozen=True, slots=True)
class Nodes:
    """The query tokens whose logits are needed in a step with drafts.

    Each row that draws has its last known token (node 0) and its draft nodes. All int32 [N]: rows, the device row; number, the
    index among the nodes of the row; depth, the level in the tree, which equals number for a chain.
    """

    rows: torch.Tensor
    number: torch.Tensor
    depth: torch.Tensor
    drafted: Drafted


@dataclass(frozen=True, slots=True)
class Ragged:
    """Layout of the query tokens of a step in which a row has several query tokens or does not draw. All int32.

    q_start [B + 1]: index of each row's first query token. n_query [B]: query tokens per row. advance [B]: how far the position
    moves, drawn tokens excluded. row_of, place [T]: row in the step and index in that row of each query token. at [N]: query
    tokens whose logits are needed. nodes: None without drafts. tree: None for chains.
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
    """A step's tensors.

    packed: int32, all of them in one array (see `unpack`). rows int32 [B]: device rows. sampled int32 [S]: device rows that draw.
    ragged: None if every row has one query token and draws. inputs: of logits processors. scores: query tokens to score. greedy:
    every row takes its most probable token. ahead: as in StepPlan. adapted: a row has an adapter.
    """

    shape: StepShape
    packed: torch.Tensor
    rows: torch.Tensor
    sampled: torch.Tensor
    ragged: Ragged | None = None
    inputs: LogitsInputs = NO_INPUTS
    scores: Scores | None = None
    greedy: bool = False
    ahead: int = 0
    adapted: bool = False

    @property
    def nodes(self) -> Nodes | None:
        """None without drafts."""
        return None if self.ragged is None else self.ragged.nodes

    @property
    def owners(self) -> torch.Tensor:
        """Device row of each logits row, int32 [N]."""
        return self.sampled if self.nodes is None else self.nodes.rows

    @property
    def fused_sampling(self) -> bool:
        """Rows need only temperature, top_k, top_p and min_p: no logits processor, no log-probabilities, no prompt scores."""
        return self.inputs is NO_INPUTS and self.scores is None


@lru_cache(maxsize=256)
def _layout(shape: StepShape) -> tuple[dict[str, slice], list[int]]:
    """Slice of each part of a packed step, and the sizes of all parts, each followed by its padding. An int64 takes two items."""
    if shape.decode:
        return {"rows": slice(0, shape.rows)}, [shape.rows, 0]
    rows, draws, tokens, logits = shape.rows, shape.draws, shape.tokens, shape.logits
    sizes = {"rows": rows, "sampled": draws, "q_start": rows + 1, "n_query": rows, "advance": rows}
    sizes |= {"at": logits, "row_of": tokens, "place": tokens}
    if shape.width > 1:
        sizes |= {"owner": logits, "number": logits, "first": draws, "n_draft": draws}
    if shape.width > 1 and shape.tree:
        sizes |= {"depth": logits, "parent": 2 * draws * shape.width}
    if shape.tree:
        sizes |= {"shift": tokens, "ancestors": 2 * tokens}
    cuts = [item_count for size in sizes.values() for item_count in (size, -size % _ALIGN)]
    begins = [0, *accumulate(cuts)][:-1:2]
    return {name: slice(at, at + sizes[name]) for name, at in zip(sizes, begins, strict=True)}, cuts


def packed_size(shape: StepShape) -> int:
    """Items of a packed step."""
    return sum(_layout(shape)[1])


def blank(shape: StepShape) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A packed step of zeros, int32, and its parts by name."""
    packed = np.zeros(packed_size(shape), dtype=np.int32)
    return packed, {name: packed[place] for name, place in _layout(shape)[0].items()}


def unpack(packed: torch.Tensor, shape: StepShape) -> Batch:
    """The batch over a packed step, int32 [packed_size(shape)]."""
    if shape.decode:
        return Batch(shape, packed, packed, packed)
    places, cuts = _layout(shape)
    part = dict(zip(places, packed.split(cuts)[::2], strict=True))
    rows, sampled = part.pop("rows"), part.pop("sampled")
    tree = Tree(part.pop("shift"), part.pop("ancestors").view(torch.int64)) if shape.tree else None
    nodes = None
    if shape.width > 1:
        parent = part.pop("parent").view(torch.int64).view(-1, shape.width) if shape.tree else None
        drafted, number = Drafted(part.pop("first"), part.pop("n_draft"), shape.width, parent), part.pop("number")
        nodes = Nodes(part.pop("owner"), number, part.pop("depth", number), drafted)
    return Batch(shape, packed, rows, sampled, Ragged(**part, nodes=nodes, tree=tree))


def pack_rows(part: Mapping[str, np.ndarray], rows: np.ndarray, n_query: np.ndarray) -> np.ndarray:
    """Fill the parts that depend only on the device rows int32 [B] and their query token counts int32 [B]; pad the remainder.
    Returns the end of each row's query tokens, int32 [B]."""
    count, tokens = len(rows), int(n_query.sum())
    ends = np.cumsum(n_query, dtype=np.int32)
    row_of = np.repeat(np.arange(count, dtype=np.int32), n_query)
    part["rows"][:count], part["n_query"][:count] = rows, n_query
    part["q_start"][1 : count + 1], part["q_start"][count + 1 :] = ends, tokens
    part["row_of"][:tokens], part["row_of"][tokens:] = row_of, len(part["rows"]) - 1
    part["place"][:tokens] = np.arange(tokens, dtype=np.int32) - part["q_start"][row_of]
    return ends


class BatchBuilder:
    """Reads a plan, adds its step to a packet, and builds the Batch when the packet is sent.

    table: with the plan's rows assigned. Raises EngineFailed for a plan that this runner cannot run.
    """

    def __init__(self, plan: StepPlan, table: RowTable) -> None:
        self._plan = plan
        self._rows = np.frombuffer(plan.rows, dtype=np.int32)
        self._n_query = np.frombuffer(plan.n_query, dtype=np.int32)
        self._n_draft = np.frombuffer(plan.n_draft, dtype=np.int32)
        self._check(table.vocab)
        self.shape = self._padded = StepShape.of(plan)
        self._where = np.flatnonzero(np.frombuffer(plan.samples, dtype=np.int8))
        drawing = self._rows[self._where]
        self._nodes = 1 + self._n_draft[self._where]
        self._greedy, self._adapted = bool(table.greedy[drawing].all()), bool(table.adapted[self._rows].any())
        self._inputs = self._scores = None
        if plan.masks or plan.biases or not table.fused_sampling[drawing].all():
            self._inputs = LogitsInputsBuilder(plan, table, drawing, self._nodes)
        if plan.score_ids and Logits.ALL in plan.logits:
            self._scores = ScoreBuilder(plan, table)

    @property
    def fused_sampling(self) -> bool:
        """See Batch.fused_sampling."""
        return self._inputs is None and self._scores is None

    def _check(self, vocab: int) -> None:
        plan, n_draft = self._plan, self._n_draft
        if (most := int(n_draft.max())) > MAX_DRAFT:
            raise EngineFailed(f"A row has {most} draft tokens, but at most {MAX_DRAFT} can be verified in a step.")
        if (drafted := int(n_draft.sum())) != len(plan.drafts):
            raise EngineFailed(f"The plan has {len(plan.drafts)} draft tokens, but its rows have {drafted}.")
        if len(plan.tree) not in (0, len(plan.drafts)):
            raise EngineFailed(f"The plan has {len(plan.tree)} parents for {len(plan.drafts)} draft tokens.")
        if plan.tree and bool(((n_draft > 0) & (self._n_query != n_draft + 1)).any()):
            raise EngineFailed("A draft tree must follow exactly one query token, but its row has several.")
        size = 4 * mask_words(vocab)
        for row, nodes in zip(plan.rows, plan.n_draft, strict=True) if plan.masks and drafted else ():
            if row in plan.masks and nodes and len(plan.masks[row]) != (1 + nodes) * size:
                raise EngineFailed(f"Row {row} has {len(plan.masks[row])} bytes of masks for {nodes} drafts.")

    def pack(self, packet: Packet, shape: StepShape) -> None:
        """Add the step to the packet, padded to `shape`."""
        self._padded = shape
        packed, part = blank(shape)
        if shape.decode:
            part["rows"][: len(self._rows)] = self._rows
        else:
            self._pack_ragged(part)
        packet.add("step", packed)
        if self._inputs is not None:
            self._inputs.pack(packet)
        if self._scores is not None:
            self._scores.pack(packet)

    def _pack_ragged(self, part: Mapping[str, np.ndarray]) -> None:
        n_query, n_draft, where, nodes = self._n_query, self._n_draft, self._where, self._nodes
        ends = pack_rows(part, self._rows, n_query)
        advance = n_query - n_draft
        advance[where] -= 1
        advance[self._rows == 0] = 0  # the scratch row replaces a lost row and never advances
        part["advance"][: len(advance)] = advance
        part["sampled"][: len(where)] = self._rows[where]
        first = np.cumsum(nodes, dtype=np.int32) - nodes
        number = np.arange(nodes.sum(), dtype=np.int32) - np.repeat(first, nodes)
        # Logits of a row start at its last known token.
        part["at"][: len(number)] = np.repeat(ends[where] - nodes, nodes) + number
        if self._padded.width > 1:
            part["owner"][: len(number)] = np.repeat(self._rows[where], nodes)
            part["number"][: len(number)] = number
            part["first"][: len(where)], part["n_draft"][: len(where)] = first, n_draft[where]
        if self._padded.tree:
            self._pack_tree(part, ends)

    def _pack_tree(self, part: Mapping[str, np.ndarray], ends: np.ndarray) -> None:
        """Pack ancestors, shifts and depths of draft trees. Rows without drafts stay causal."""
        ancestors, parent = (
            part["ancestors"].view(np.int64),
            part["parent"].view(np.int64).reshape(-1, self._padded.width),
        )
        ancestors[:] = -1
        for index, (place, tree) in enumerate(zip(self._where, self._branches(), strict=True)):
            nodes, first = len(tree.depth), part["first"][index]
            tokens = slice(ends[place] - nodes, ends[place])
            if nodes > 1:
                part["shift"][tokens] = tree.depth - np.arange(nodes)
                ancestors[tokens] = tree.ancestors
            parent[index, :nodes] = tree.parent
            part["depth"][first : first + nodes] = tree.depth

    def _branches(self) -> list[Branches]:
        """The draft tree of each row that draws."""
        parents, ends = self._plan.tree, np.cumsum(self._n_draft)
        return [branches(tuple(parents[ends[place] - self._n_draft[place] : ends[place]])) for place in self._where]

    def build(self, tensors: Mapping[str, torch.Tensor]) -> Batch:
        """The Batch over the uploaded `tensors`."""
        return replace(
            unpack(tensors["step"], self._padded),
            inputs=NO_INPUTS if self._inputs is None else self._inputs.build(tensors),
            scores=None if self._scores is None else self._scores.build(tensors),
            greedy=self._greedy,
            ahead=self._plan.ahead,
            adapted=self._adapted,
        )
