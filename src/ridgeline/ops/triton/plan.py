"""Who computes what in decoding: a device kernel that turns lengths into equal units of work."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.triton.launch import await_inputs

UNIT_FIELDS = 9
"""All that a program of the split kernel asks before it reads keys, in one look-up: device row (-1: nothing to do), first
slot and end of its run; its row's first query token, query tokens, slots held, first unit, units, and index in the step."""
FINER_RUNS = tl.constexpr(8)
"""Shorter runs tried where they might fit too."""
IDLE = tl.constexpr(128)
"""Units without work that a program of the plan marks at a time."""


@triton.jit
def load_unit(units_ptr, units, unit):
    """The UNIT_FIELDS of a unit, from L2: see walk."""
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
    """Slots of a run, a multiple of `tile`, so that rows of `span` slots [ROWS] make at most `units` runs."""
    total = tl.sum(span.to(tl.int64), 0)
    run = tl.maximum((total + spare - 1) // spare, smallest).to(tl.int32)
    run = (run + tile - 1) // tile * tile
    if FINER:
        # That is short enough even if every row ends with a run of one slot; most end with more.
        for step in tl.static_range(1, FINER_RUNS + 1):
            available = spare + (units - spare) * step // FINER_RUNS
            shorter = tl.maximum((total + available - 1) // available, smallest).to(tl.int32)
            shorter = (shorter + tile - 1) // tile * tile
            fits = tl.sum((span + shorter - 1) // shorter, 0) <= units
            run = tl.where(fits, tl.minimum(run, shorter), run)
    return run


@triton.jit
def _spans(q_start_ptr, length_ptr, row, rows, group, small, window: tl.constexpr, tile: tl.constexpr):
    """Of rows: first query token, query tokens, slots held, first slot that is read, slots of the split kernel's to read."""
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
    """Runs of rows of `span` slots, and slots of each but the last, about `run` of them."""
    count = tl.maximum((span + (run - 1 if FINER else run // 2)) // run, 1)
    own_run = ((span + count - 1) // count + tile - 1) // tile * tile
    return tl.where(span > 0, (span + own_run - 1) // tl.maximum(own_run, 1), 0), own_run


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
    """Cut rows with at most `small` packed queries along their slots into runs of about a common length, multiples of `tile`
    and about `smallest` at least, such that all runs fit into rows + spare units; FINER: into as many of them as that allows.
    The runs of a row are alike but for its last. Unless FINER, a row is cut from one and a half runs on: a few slots more make
    no program late, and each part costs a program and its share in putting them together.

    Rows of the longest runs come first (Graham 1969): programs start in the order of their units, and what starts last
    should end soon. Each program of the plan hands out BLOCK rows.

    units: int32 [UNIT_FIELDS, units]. per_row: int32 [2, rows], first unit and number of units. arrivals: int32 [rows,
    kv_heads], set to zero.
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
    most, part = tl.max(count, 0), 0
    while part < most:
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
