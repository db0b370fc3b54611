"""The row operations (ops.rows, ops.verify) as one foreign call each; see native/rows.cpp.

The arguments of a call are packed into the struct that it reads, which is the cheapest way to pass so many from Python.
"""

from __future__ import annotations

from struct import Struct

import torch

from ridgeline.ops.native.binding import Library
from ridgeline.ops.rows import Drafted, Gathered, RowState, Runs, Spread

STATE = 9
"""Length of state_of's result."""
_DRAW = Struct(f"{STATE + 8}q")
_GATHER, _ADVANCE, _VERIFY = Struct(f"{STATE + 11}q"), Struct(f"{STATE + 4}q"), Struct(f"{STATE + 9}q")
_KEEP, _LAST = Struct(f"{STATE + 12}q"), Struct("9q")


class NativeRows:
    """Row operations of one opened library. Rows, tables and a step's tensors are contiguous CPU tensors."""

    __slots__ = ("_advance", "_gather", "_keep", "_kernels", "_last", "_verify")

    def __init__(self, library: Library) -> None:
        self._kernels = library.kernels
        self._gather, self._advance, self._verify = library.rows_gather, library.rows_advance, library.rows_verify
        self._keep, self._last = library.rows_keep, library.rows_last

    def gather(self, state: RowState, device_rows: torch.Tensor, spread: Spread | None) -> Gathered:
        """See ops.rows.gather."""
        rows, groups = device_rows.shape[0], state.tables.shape[0]
        if spread is None:
            count, spread_pointers = rows, (0, 0, 0, 0)
        else:
            count = spread.row_of.shape[0]
            spread_pointers = (
                at(spread.n_query),
                at(spread.row_of),
                at(spread.place),
                0 if spread.shift is None else at(spread.shift),
            )
        position, tokens = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.int32)
        length, slots = torch.empty(rows, dtype=torch.int32), torch.empty((groups, count), dtype=torch.int64)
        out = (position.data_ptr(), tokens.data_ptr(), length.data_ptr(), slots.data_ptr())
        self._gather(_GATHER.pack(*state_of(state), at(device_rows), *spread_pointers, rows, count, *out))
        return Gathered(tokens, position, slots, length)

    def draw(
        self,
        state: RowState,
        knobs: torch.Tensor,
        rows: torch.Tensor,
        logits: torch.Tensor,
        depth: torch.Tensor | None,
    ) -> torch.Tensor:
        """See ops.sample.draw_with."""
        kernels = self._kernels.get(logits.dtype)
        logits = logits.contiguous() if kernels is not None else logits.float().contiguous()
        drawn = torch.empty(logits.shape[0], dtype=torch.int32)
        arguments = (at(knobs), knobs.stride(0), at(rows), 0 if depth is None else at(depth), at(logits), *logits.shape)
        (kernels or self._kernels[torch.float32]).draw(_DRAW.pack(*state_of(state), *arguments, at(drawn)))
        return drawn

    def advance(self, state: RowState, rows: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
        """See ops.rows.advance."""
        count = rows.shape[0]
        packed = torch.empty((count, 3), dtype=torch.int32)
        self._advance(_ADVANCE.pack(*state_of(state), at(rows), at(drawn), count, packed.data_ptr()))
        return packed

    def verify(
        self, state: RowState, rows: torch.Tensor, drawn: torch.Tensor, drafted: Drafted
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ops.verify.verify."""
        count, columns, parent = rows.shape[0], drafted.columns, drafted.parent
        path = None if parent is None else torch.empty((count, columns), dtype=torch.int64)
        packed = torch.empty((count, 2 + columns if parent is None else 2 + 3 * columns), dtype=torch.int32)
        each = (at(rows), at(drawn), at(drafted.first), at(drafted.count))
        arguments = (*each, 0 if parent is None else at(parent), count, columns)
        out = (packed.data_ptr(), 0 if path is None else path.data_ptr())
        self._verify(_VERIFY.pack(*state_of(state), *arguments, *out))
        return packed, path

    def keep(
        self,
        state: RowState,
        rows: torch.Tensor,
        packed: torch.Tensor,
        path: torch.Tensor,
        runs: Runs,
        depth: int,
    ) -> None:
        """See ops.rows.keep."""
        arguments = (*state_of(state), at(rows), at(packed), packed.stride(0), at(path), *path.shape)
        for number, group in enumerate(runs):
            for run in group:
                size = run.element_size()
                sizes = (run.shape[1], run.stride(0) * size, run.stride(1) * size, run.stride(2) * size)
                self._keep(_KEEP.pack(*arguments, number, run.data_ptr(), *sizes))

    def last(
        self, packed: torch.Tensor, path: torch.Tensor | None, hidden: torch.Tensor, first: torch.Tensor
    ) -> torch.Tensor:
        """See ops.rows.last."""
        count, size = len(packed), hidden.shape[1] * hidden.element_size()
        out = hidden.new_empty((count, hidden.shape[1]))
        along, columns = (0, 0) if path is None else (at(path), path.shape[1])
        self._last(
            _LAST.pack(at(packed), along, at(first), at(hidden), at(out), count, columns, packed.stride(0), size)
        )
        return out


def state_of(state: RowState) -> tuple[int, ...]:
    """State in rows.h."""
    tokens, tables = state.tokens, state.tables
    rows, width = tokens.shape
    groups, _, pages = tables.shape
    columns = state.ints.shape[1]
    return at(tokens), at(state.ints), at(tables), rows, width, columns, groups, pages, state.page_tokens


def at(tensor: torch.Tensor) -> int:
    """Address of a contiguous tensor."""
    assert tensor.is_contiguous()
    return tensor.data_ptr()
