"""Per-row state on the device: gather a step's query tokens from it, and write sampled tokens back.

This module is the PyTorch version. ops.triton.rows has one kernel for each function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch


class Int(IntEnum):
    """Columns of `ints`. Every step changes the first four.

    POSITION: tokens whose keys are written, which is also the position of the next query. LENGTH: slots in use; equal to POSITION
    until a retention policy drops slots. KNOWN: tokens in the row. DONE: 1 once a stop token or the limit was reached. ADAPTER:
    slot of the row's adapter, 0 for none. RANK: that attends for the row, where ranks divide requests; -1 for the scratch row.
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
    ADAPTER = 10
    RANK = 11
    STOP = 12


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
    """tokens int32 [R, width]: all known tokens of each row. ints int32 [R, INTS]: see Int. tables int32 [groups, R, P]: page
    numbers of each row in slot order; a page has page_tokens slots."""

    tokens: torch.Tensor
    ints: torch.Tensor
    tables: torch.Tensor
    page_tokens: int


@dataclass(frozen=True, slots=True)
class Spread:
    """Assignment of query tokens to rows. n_query int32 [B]: new query tokens per row. row_of, place int32 [T]: row index in the
    step and number within the row of each token. Tokens that are recomputed precede the row's next token and have negative places;
    n_query does not count them. shift int32 [T]: position minus the slot's position; None: zero."""

    n_query: torch.Tensor
    row_of: torch.Tensor
    place: torch.Tensor
    shift: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """Drafts that device rows [S] verify. The logits of a row belong to its last known token (node 0, the root) and to every node
    of its draft. They are consecutive rows of logits, from index `first` int32 [S] on. count int32 [S]: nodes without the root.
    columns: maximum nodes of a row, with the root. parent int64 [S, columns]: parent of each node, which precedes it; 0 for the
    root; None: chains."""

    first: torch.Tensor
    count: torch.Tensor
    columns: int
    parent: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Gathered:
    """Query tokens of a step. tokens, position: int32 [T]. slots int64 [groups, T]: slots of their keys. length int32 [B]: slots
    that each row holds, including them."""

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
    """Why tokens drawn for `place` of device rows [N] end a request: int32 [N], 1 stop token, 2 limit, 3 both; see
    core.plan.Flag."""
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
    """Append one drawn token int32 [S] to each of the device rows int32 [S]. Rows that are done do not change. Only row 0 may occur
    more than once.

    Returns: int32 [S, 3]: tokens gained, flag, token.
    """
    place = state.ints.index_select(0, rows)[:, Int.KNOWN]
    live = 1 - state.ints.index_select(0, rows)[:, Int.DONE]
    flag = ends(state, rows, place, drawn) * live
    at = (rows * state.tokens.shape[1] + place).long()
    state.tokens.view(-1).index_copy_(0, at, drawn)
    move(state, rows, live, flag)
    return torch.stack((live, flag, drawn), dim=1)


def last(packed: torch.Tensor, path: torch.Tensor | None, hidden: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
    """Select the hidden state [S, D] from which each row's last token was drawn. hidden [N, D]: of last known tokens and draft
    nodes. packed int32 [S, 2 + ..], path int64 [S, columns]: results of ops.verify; path is None for chains. first: see Drafted."""
    node = (packed[:, 0] - 1).clamp(min=0).long()
    if path is not None:
        node = path.gather(1, node.unsqueeze(1)).squeeze(1)
    return hidden.index_select(0, node + first)


Runs = Sequence[Sequence[torch.Tensor]]
"""For each group of layers, views [pages, heads of keys and values, page_tokens, dim] of its cache."""


def keep(state: RowState, rows: torch.Tensor, packed: torch.Tensor, path: torch.Tensor, runs: Runs, depth: int) -> None:
    """Move keys and values of accepted draft nodes to the slots that they would have in a chain.

    Args:
        state: state of device rows int32 [S], after `verify` has updated it.
        packed, path: results of ops.verify. packed[:, 0]: tokens gained, one more than the accepted nodes.
        runs: the complete cache.
        depth: depth of the deepest node in these drafts.
    """
    size = state.page_tokens
    for moved, group in zip(moved_slots(state, rows, packed, path, depth), runs, strict=True):
        (from_page, to_page), (from_place, to_place) = moved // size, moved % size
        for run in group:
            run[to_page, :, to_place] = run[from_page, :, from_place]


def moved_slots(
    state: RowState, rows: torch.Tensor, packed: torch.Tensor, path: torch.Tensor, depth: int
) -> Iterator[torch.Tensor]:
    """For each group of layers the slots in the cache that `keep` moves from and to, int64 [2, S * depth]. Nodes that need no
    move copy a slot of the scratch page onto itself."""
    count = packed[:, 0]
    root = state.ints[:, Int.LENGTH].index_select(0, rows) - count
    place = torch.arange(1, depth + 1, device=path.device)
    source = path[:, 1 : depth + 1]
    goes = (place < count.unsqueeze(1)) & (source != place)
    slots = root.long().unsqueeze(1) + torch.stack((source, place.expand_as(source)))
    size, row_index = state.page_tokens, rows.long().unsqueeze(1)
    for table in state.tables.unbind(0):
        yield (goes * (table.long()[row_index, slots // size] * size + slots % size)).flatten(1)


ToHost = Callable[[torch.Tensor], torch.Tensor]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Start a copy to pinned host memory. The caller keeps the result alive until the device has written it, because torch does
    not track that write. A CPU tensor is returned unchanged."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Last tokens of rows that are run together, all int32: q_start [S + 1], row_of [T], place [T]: 0 for a row's last token and
    negative before it. n_query [S]: ones, since they end at the next query token. max_tokens: maximum tokens of a row."""

    n_query: torch.Tensor
    q_start: torch.Tensor
    row_of: torch.Tensor
    place: torch.Tensor
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ChainStart:
    """Start of a chain. state: its ints advance with the draft; drafted tokens are written after the rows' known tokens. rows int32
    [S]; temperature float32 [S]. last: tokens that are run before the first one is drafted. count: tokens to draft. longest:
    maximum slots of any row. greedy: no row samples."""

    state: RowState
    rows: torch.Tensor
    temperature: torch.Tensor
    last: LastTokens
    count: int
    longest: int
    greedy: bool
