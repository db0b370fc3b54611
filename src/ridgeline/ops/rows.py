"""State of the device's rows: gathers a step's query tokens from it and writes sampled tokens back.

This module is the PyTorch version. A GPU has one kernel for each function (ops.triton.rows).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch


class Int(IntEnum):
    """Columns of `ints`. The first four move with every step.

    POSITION: tokens whose keys are written, so the position of the next query. LENGTH: slots in use; equal to POSITION
    until a retention policy drops slots. KNOWN: tokens in the row. DONE: 1 once a stop or the limit was seen.
    """

    POSITION = 0
    LENGTH = 1
    KNOWN = 2
    DONE = 3
    LIMIT = 4
    PROMPT = 5
    MIN_TOKENS = 6
    TOP_K = 7
    KEY = 8
    STOP = 10


class Knob(IntEnum):
    """Columns of `knobs`, float32: sampling parameters of a row. top_k is a column of `ints`."""

    TEMPERATURE = 0
    TOP_P = 1
    MIN_P = 2
    PRESENCE = 3
    FREQUENCY = 4
    REPETITION = 5


MOVING = 4


@dataclass(frozen=True, slots=True)
class RowState:
    """tokens int32 [R, width]: all known tokens of each row. ints int32 [R, INTS]: columns as in Int. tables int32
    [groups, R, P]: each row's pages of page_tokens slots, in slot order."""

    tokens: torch.Tensor
    ints: torch.Tensor
    tables: torch.Tensor
    page_tokens: int


@dataclass(frozen=True, slots=True)
class Spread:
    """How query tokens are spread over rows: n_query int32 [B]; row_of, place int32 [T], each token's row in the step and
    number in that row. Tokens that are read again come before the row's next one: their places are below 0, and n_query
    counts the others. shift int32 [T]: what a position is beyond its slot's, None for nothing."""

    n_query: torch.Tensor
    row_of: torch.Tensor
    place: torch.Tensor
    shift: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """The drafts that device rows [S] verify. Of each row logits are wanted behind its last known token, node 0, and behind every
    node of its draft: rows of logits that follow each other, the first of them at `first` int32 [S]. count int32 [S]: nodes but
    for the root; wide: 1 + the most that a row may have; parent int64 [S, wide]: the node that each hangs on, which comes before
    it, 0 for the root; None: chains."""

    first: torch.Tensor
    count: torch.Tensor
    wide: int
    parent: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Gathered:
    """A step's query tokens: tokens, position int32 [T]; slots int64 [groups, T], where their keys go; length int32 [B],
    slots each row holds with them."""

    tokens: torch.Tensor
    position: torch.Tensor
    slots: torch.Tensor
    length: torch.Tensor


def gather(state: RowState, device_rows: torch.Tensor, spread: Spread | None) -> Gathered:
    """Read the next query tokens of `device_rows` int32 [B]. Without `spread` each row has one query token."""
    ints = state.ints.index_select(0, device_rows)
    if spread is None:
        row, position, slot = device_rows, ints[:, Int.POSITION].contiguous(), ints[:, Int.LENGTH]
        length = slot + 1
    else:
        row = device_rows.index_select(0, spread.row_of)
        length = ints[:, Int.LENGTH] + spread.n_query
        ints = ints[:, :MOVING].index_select(0, spread.row_of)
        position, slot = ints[:, Int.POSITION] + spread.place, ints[:, Int.LENGTH] + spread.place
    tables, size = state.tables, state.page_tokens
    tokens = state.tokens.view(-1).index_select(0, row * state.tokens.shape[1] + position)
    pages = tables.view(len(tables), -1).index_select(1, row * tables.shape[2] + slot // size)
    if spread is not None and spread.shift is not None:
        position = position + spread.shift
    return Gathered(tokens, position, (pages.long() * size).add_(slot % size), length)


def ends(state: RowState, rows: torch.Tensor, place: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """What a token drawn for `place` of device rows [N] ends: int32 [N], 1 for a stop id, 2 for the limit, 3 for both, as
    in core.plan.Flag."""
    ints = state.ints.index_select(0, rows)
    known = place + 1
    stop = (drawn.unsqueeze(1) == ints[:, Int.STOP :]).any(dim=1)
    stop &= known - ints[:, Int.PROMPT] > ints[:, Int.MIN_TOKENS]
    return (known >= ints[:, Int.LIMIT]).int().mul_(2).add_(stop)


def move(state: RowState, rows: torch.Tensor, count: torch.Tensor, flag: torch.Tensor) -> None:
    """Add `count` tokens to rows, and mark rows as done where `flag` is set."""
    moved = torch.stack((count, count, count, flag.clamp(max=1)), dim=1)
    state.ints[:, :MOVING].index_add_(0, rows, moved)


def advance(state: RowState, rows: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Append one drawn token int32 [S] to each of the device rows int32 [S]. Rows that are done do not change. Only row 0 may
    occur more than once. -> int32 [S, 3]: tokens gained, flag, token."""
    place = state.ints.index_select(0, rows)[:, Int.KNOWN]
    live = 1 - state.ints.index_select(0, rows)[:, Int.DONE]
    flag = ends(state, rows, place, drawn) * live
    at = (rows * state.tokens.shape[1] + place).long()
    state.tokens.view(-1).index_copy_(0, at, drawn)
    move(state, rows, live, flag)
    return torch.stack((live, flag, drawn), dim=1)


def last(packed: torch.Tensor, path: torch.Tensor | None, hidden: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Select the hidden states [S, D] from which each row's last token was drawn. hidden [N, D]: of last known tokens and drafts.
    packed int32 [S, 2 + ..], path int64 [S, wide]: of ops.verify; path None for chains. first: as in Drafted."""
    node = (packed[:, 0] - 1).clamp(min=0).long()
    if path is not None:
        node = path.gather(1, node.unsqueeze(1)).squeeze(1)
    return hidden.index_select(0, node + first)


Runs = Sequence[Sequence[torch.Tensor]]
"""For each group of layers, views [pages, heads of keys and values, page_tokens, dim] of its cache."""


def keep(state: RowState, rows: torch.Tensor, packed: torch.Tensor, path: torch.Tensor, runs: Runs, depth: int) -> None:
    """Move keys and values of kept draft nodes to the slots that those of a chain would have.

    Args:
        state: of device rows int32 [S], which `verify` has moved on already.
        packed, path: of ops.verify; packed[:, 0] is the tokens gained, the nodes kept and one more.
        runs: the whole cache.
        depth: of the deepest node that any of these drafts may have.
    """
    count = packed[:, 0]
    root = state.ints[:, Int.LENGTH].index_select(0, rows) - count
    place = torch.arange(1, depth + 1, device=path.device)
    source = path[:, 1 : depth + 1]
    goes = (place < count.unsqueeze(1)) & (source != place)
    slots = root.long().unsqueeze(1) + torch.stack((source, place.expand_as(source)))
    size, row_index = state.page_tokens, rows.long().unsqueeze(1)
    for table, group in zip(state.tables.unbind(0), runs, strict=True):
        # Nodes that need no move copy a slot of the scratch page onto itself.
        moved = goes * (table.long()[row_index, slots // size] * size + slots % size)
        (from_page, to_page), (from_place, to_place) = (moved // size).flatten(1), (moved % size).flatten(1)
        for run in group:
            run[to_page, :, to_place] = run[from_page, :, from_place]


ToHost = Callable[[torch.Tensor], torch.Tensor]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy to pinned host memory. The caller keeps the result alive until the device has written it, because torch does
    not track that write. A CPU tensor is returned unchanged."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
