"""Plan of decode attention: a device kernel that divides rows of different lengths into work units of equal size (split-KV)."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.triton.launch import await_inputs

UNIT_FIELDS = 9
"""Fields of a work unit: device row (-1: no work), first slot and end of its part; first query token of its row, query tokens,
slots held, first unit of the row, number of its units, and its index in the step."""
FINER_RUNS = tl.constexpr(8)
"""Number of shorter part lengths that are tried."""
IDLE = tl.constexpr(128)
"""Empty units that a program marks per iteration."""


@triton.jit
def load_unit(units_ptr, units, unit):
    """Load the UNIT_FIELDS of a unit from L2 (.cg); see walk._await_unit."""
    at = units_ptr + unit
    row = tl.load(at, cache_modifier=".cg")
    begin = tl.load(at + units, cache_modifier=".cg")
    end = tl.load(at + 2 * units, cache_modifier=".cg")
    first_query = tl.load(at + 3 * units, cache_modifier=".cg")
    n = tl.load(at + 4 * units, cache_modifier=".cg")
    length = tl.load(at + 5 * units, cache_modifier=".cg")
    first_unit = tl.load(at + 6 * units, cache_modifier=".cg")
    count = tl.load(at + 7 * units, cache_modifier=".cg")
    index = tl.load(at + 8 * units, cache_modifier=".cg")
    return row, begin, end, first_query, n, length, first_unit, count, index


@triton.jit
def _run(span, units, spare, smallest, tile: tl.constexpr, FINER: tl.constexpr):
    """Slots of a part, a multiple of `tile`, such that rows of `span` slots [ROWS] make at most `units` parts."""
    total = tl.sum(span.to(tl.int64), 0)
    run = tl.maximum((total + spare - 1) // spare, smallest).to(tl.int32)
    run = (run + tile - 1) // tile * tile
    if FINER:
        # `run` fits even if the last part of every row holds a single slot. Most hold more, so shorter parts may fit too.
        for step in tl.static_range(1, FINER_RUNS + 1):
            available = spare + (units - spare) * step // FINER_RUNS
            shorter = tl.maximum((total + available - 1) // available, smallest).to(tl.int32)
            shorter = (shorter + tile - 1) // tile * tile
            fits = tl.sum((span + shorter - 1) // shorter, 0) <= units
            run = tl.where(fits, tl.minimum(run, shorter), run)
    return run


@triton.jit
def _spans(q_start_ptr, length_ptr, row, rows, group, small, window: tl.constexpr, tile: tl.constexpr):
    """Per row: first query token, query tokens, slots held, first slot read, slots that the split kernel reads."""
    real = row < rows
    first_query = tl.load(q_start_ptr + row, mask=real, other=0)
    n = tl.load(q_start_ptr + row + 1, mask=real, other=0) - first_query
    length = tl.load(length_ptr + row, mask=real, other=0)
    low = tl.zeros_like(length)
    if window > 0:
        low = tl.maximum(length - n - window + 1, 0) // tile * tile
    split = (n > 0) & (length >= n) & (n * group <= small)
    return first_query, n, length, low, tl.where(split, length - low, 0)


@triton.jit
def _parts(span, run, tile: tl.constexpr, FINER: tl.constexpr):
    """Per row of `span` slots: number of parts, and slots of each part but the last, about `run`."""
    count = tl.maximum((span + (run - 1 if FINER else run // 2)) // run, 1)
    row_run = ((span + count - 1) // count + tile - 1) // tile * tile
    return tl.where(span > 0, (span + row_run - 1) // tl.maximum(row_run, 1), 0), row_run


@triton.jit(do_not_specialize=["rows", "units", "spare", "group", "small", "smallest"])
def plan_kernel(
    rows_ptr,
    q_start_ptr,
    length_ptr,
    units_ptr,
    per_row_ptr,
    arrivals_ptr,
    rows,
    units,
    spare,
    group,
    small,
    smallest,
    kv_heads: tl.constexpr,
    window: tl.constexpr,
    tile: tl.constexpr,
    FINER: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Divide rows of at most `small` packed queries along their slots into parts of about equal length.

    Part lengths are multiples of `tile` and about `smallest` or more. All parts fit into rows + spare units. FINER: use as many
    units as that allows. The parts of a row have equal length except the last. Without FINER a row is divided from 1.5 part lengths
    on: a few more slots do not delay the step, whereas each part costs a program and a share of the combination.

    Rows with the longest parts come first, because programs start in unit order and the last to start should be short (longest
    processing time first, Graham 1969). Each program plans BLOCK rows.

    units: int32 [UNIT_FIELDS, units]. per_row: int32 [2, rows], first unit and number of units. arrivals: int32 [rows, kv_heads],
    set to zero.
    """
    await_inputs(PDL)
    row = tl.arange(0, ROWS)
    _, _, _, _, span = _spans(q_start_ptr, length_ptr, row, rows, group, small, window, tile)
    run = _run(span, units, spare, smallest, tile, FINER)
    counts, runs = _parts(span, run, tile, FINER)
    total = tl.sum(counts, 0)
    block_row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = block_row < rows
    first_query, n, length, low, block_span = _spans(
        q_start_ptr, length_ptr, block_row, rows, group, small, window, tile
    )
    count, block_run = _parts(block_span, run, tile, FINER)
    longer = runs[None, :] > block_run[:, None]
    before = longer | ((runs[None, :] == block_run[:, None]) & (row[None, :] < block_row[:, None]))
    first = tl.sum(tl.where(before, counts[None, :], 0), 1)
    tl.store(per_row_ptr + block_row, first, mask=inside)
    tl.store(per_row_ptr + rows + block_row, count, mask=inside)
    for head in tl.static_range(kv_heads):
        tl.store(arrivals_ptr + block_row * kv_heads + head, tl.zeros((BLOCK,), tl.int32), mask=inside)
    device_row = tl.load(rows_ptr + block_row, mask=inside, other=0)
    max_parts, part = tl.max(count, 0), 0
    while part < max_parts:
        here = part < count
        at = units_ptr + first + part
        slot = low + part * block_run
        tl.store(at, device_row, mask=here)
        tl.store(at + units, slot, mask=here)
        tl.store(at + 2 * units, tl.minimum(slot + block_run, length), mask=here)
        tl.store(at + 3 * units, first_query, mask=here)
        tl.store(at + 4 * units, n, mask=here)
        tl.store(at + 5 * units, length, mask=here)
        tl.store(at + 6 * units, first, mask=here)
        tl.store(at + 7 * units, count, mask=here)
        tl.store(at + 8 * units, block_row, mask=here)
        part += 1
    begin = tl.program_id(0) * IDLE
    while begin < units:
        unit = begin + tl.arange(0, IDLE)
        tl.store(units_ptr + unit, tl.full((IDLE,), -1, tl.int32), mask=(unit >= total) & (unit < units))
        begin += tl.num_programs(0) * IDLE
