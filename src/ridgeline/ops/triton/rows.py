"""Kernels that gather a step's query tokens and write drawn tokens back to the rows. See ops.rows."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.ops import rows as torch_rows
from ridgeline.ops.rows import Gathered, Int, RowState, Spread
from ridgeline.ops.triton.launch import await_inputs, overlap

BLOCK = 64
COPIED, LARGEST_COPIED = 1024, 1 << 16
"""Elements that a program copies to the host, and the largest tensor that this kernel copies."""
POSITION, LENGTH, KNOWN, DONE = (
    tl.constexpr(int(column)) for column in (Int.POSITION, Int.LENGTH, Int.KNOWN, Int.DONE)
)
LIMIT, PROMPT, MIN_TOKENS = (tl.constexpr(int(column)) for column in (Int.LIMIT, Int.PROMPT, Int.MIN_TOKENS))
STOP = tl.constexpr(int(Int.STOP))


@triton.jit(do_not_specialize=["batch", "queries"])
def _gather_kernel(
    device_rows_ptr,
    n_query_ptr,
    row_of_ptr,
    place_ptr,
    tokens_ptr,
    ints_ptr,
    tables_ptr,
    token_ptr,
    position_ptr,
    slots_ptr,
    length_ptr,
    batch,
    queries,
    width,
    ints_stride,
    group_stride,
    row_stride,
    groups: tl.constexpr,
    page_tokens: tl.constexpr,
    SPREAD: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gather BLOCK query tokens, and the lengths of BLOCK rows, per program.

    Inputs: device_rows, n_query int32 [batch]; row_of, place int32 [queries]; the RowState's tokens, ints and tables. Outputs:
    token, position int32 [queries]; slots int64 [groups, queries]; length int32 [batch]. SPREAD: rows may have several query
    tokens.
    """
    await_inputs(PDL)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < batch
    row = tl.load(device_rows_ptr + at, mask=real, other=0)
    more = tl.load(n_query_ptr + at, mask=real, other=0) if SPREAD else 1
    length = tl.load(ints_ptr + row * ints_stride + LENGTH, mask=real, other=0)
    tl.store(length_ptr + at, length + more, mask=real)
    real = at < queries
    if SPREAD:
        place = tl.load(place_ptr + at, mask=real, other=0)
        row = tl.load(device_rows_ptr + tl.load(row_of_ptr + at, mask=real, other=0), mask=real, other=0)
        length = tl.load(ints_ptr + row * ints_stride + LENGTH, mask=real, other=0)
    else:
        place = tl.zeros((BLOCK,), tl.int32)
    position = tl.load(ints_ptr + row * ints_stride + POSITION, mask=real, other=0) + place
    tl.store(position_ptr + at, position, mask=real)
    tl.store(token_ptr + at, tl.load(tokens_ptr + row * width + position, mask=real, other=0), mask=real)
    slot = length + place
    for group in tl.static_range(groups):
        page = tl.load(tables_ptr + group * group_stride + row * row_stride + slot // page_tokens, mask=real, other=0)
        target = page.to(tl.int64) * page_tokens + slot % page_tokens
        tl.store(slots_ptr + group * queries + at, target, mask=real)


def gather(state: RowState, device_rows: torch.Tensor, spread: Spread | None) -> Gathered:
    """See ops.rows.gather."""
    rows, groups = len(device_rows), len(state.tables)
    queries = rows if spread is None else len(spread.row_of)
    device = device_rows.device
    token, position = (torch.empty(queries, dtype=torch.int32, device=device) for _ in range(2))
    slots = torch.empty((groups, queries), dtype=torch.int64, device=device)
    length = torch.empty(rows, dtype=torch.int32, device=device)
    _gather_kernel[(triton.cdiv(max(rows, queries), BLOCK),)](
        device_rows,
        device_rows if spread is None else spread.n_query,
        device_rows if spread is None else spread.row_of,
        device_rows if spread is None else spread.place,
        state.tokens,
        state.ints,
        state.tables,
        token,
        position,
        slots,
        length,
        rows,
        queries,
        state.tokens.stride(0),
        state.ints.stride(0),
        state.tables.stride(0),
        state.tables.stride(1),
        groups=groups,
        page_tokens=state.page_tokens,
        SPREAD=spread is not None,
        BLOCK=BLOCK,
        num_warps=2,
        **overlap(device),
    )
    if spread is not None and spread.shift is not None:
        position = position + spread.shift
    return Gathered(token, position, slots, length)


@triton.jit
def _advance_kernel(
    rows_ptr,
    drawn_ptr,
    tokens_ptr,
    ints_ptr,
    packed_ptr,
    width,
    ints_stride,
    stops: tl.constexpr,
    PDL: tl.constexpr,
    STOPS: tl.constexpr,
):
    """Append drawn int32 [rows] to one row per program; packed int32 [rows, 3]. Row 0 is done, so programs that share it write the
    values it already has."""
    await_inputs(PDL)
    index = tl.program_id(0)
    row = tl.load(rows_ptr + index)
    drawn = tl.load(drawn_ptr + index)
    row_ptr = ints_ptr + row * ints_stride
    known = tl.load(row_ptr + KNOWN)
    done = tl.load(row_ptr + DONE)
    live = 1 - done
    at = tl.arange(0, STOPS)
    stop = tl.sum((tl.load(row_ptr + STOP + at, mask=at < stops, other=-1) == drawn).to(tl.int32), 0) > 0
    generated = known + 1 - tl.load(row_ptr + PROMPT)
    stop = stop & (generated > tl.load(row_ptr + MIN_TOKENS))
    flag = (2 * (known + 1 >= tl.load(row_ptr + LIMIT)).to(tl.int32) + stop.to(tl.int32)) * live
    tl.store(tokens_ptr + row * width + known, drawn)
    tl.store(row_ptr + POSITION, tl.load(row_ptr + POSITION) + live)
    tl.store(row_ptr + LENGTH, tl.load(row_ptr + LENGTH) + live)
    tl.store(row_ptr + KNOWN, known + live)
    tl.store(row_ptr + DONE, done + (flag > 0).to(tl.int32))
    tl.store(packed_ptr + 3 * index, live)
    tl.store(packed_ptr + 3 * index + 1, flag)
    tl.store(packed_ptr + 3 * index + 2, drawn)


@triton.jit(do_not_specialize=["count", "columns", "stride", "step"])
def _copy_kernel(source_ptr, target_ptr, count, columns, stride, step, BLOCK: tl.constexpr):
    """Copy a matrix with strides (stride, step) to contiguous target [count], BLOCK elements per program."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = source_ptr + at // columns * stride + at % columns * step
    tl.store(target_ptr + at, tl.load(source, mask=at < count), mask=at < count)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """See ops.rows.to_host. A kernel writes to host memory, because the copy engine adds 13 us to a step."""
    count = tensor.numel()
    if not tensor.is_cuda or tensor.dtype != torch.int32 or tensor.ndim != 2 or not 0 < count <= LARGEST_COPIED:
        return torch_rows.to_host(tensor)
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    _copy_kernel[(triton.cdiv(count, COPIED),)](tensor, host, count, tensor.shape[1], *tensor.stride(), BLOCK=COPIED)
    return host


def from_host(matrix: torch.Tensor, device: torch.device) -> torch.Tensor:
    """See ops.table.FromHost. A kernel reads host memory, because the copy engine would first end the copies of weights."""
    result = torch.empty_like(matrix, device=device)
    count = matrix.numel()
    _copy_kernel[(triton.cdiv(count, COPIED),)](matrix, result, count, matrix.shape[1], *matrix.stride(), BLOCK=COPIED)
    return result


def advance(state: RowState, rows: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """See ops.rows.advance."""
    packed = torch.empty((len(rows), 3), dtype=torch.int32, device=rows.device)
    stops = state.ints.shape[1] - Int.STOP
    if len(rows):
        _advance_kernel[(len(rows),)](
            rows,
            drawn,
            state.tokens,
            state.ints,
            packed,
            state.tokens.stride(0),
            state.ints.stride(0),
            stops=stops,
            STOPS=triton.next_power_of_2(stops),
            num_warps=1,
            **overlap(rows.device),
        )
    return packed
