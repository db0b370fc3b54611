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
            room = spare + (units - spare) * step // FINER_RUNS
            shorter = tl.maximum((total + room - 1) // room, smallest).to(tl.int32)
            shorter = (shorter + tile - 1) // tile * tile
            fits = tl.sum((span + shorter - 1) // shorter, 0) <= units
            run = tl.where(fits, tl.minimum(run, shorter), run)
    return run


@triton.jit(do_not_specialize=["rows", "units", "spare", "group", "small"])
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
    kv_heads: tl.constexpr,
    window: tl.constexpr,
    tile: tl.constexpr,
    smallest: tl.constexpr,
    FINER: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Cut rows with at most `small` packed queries along their slots into runs of about a common length, multiples of `tile`,
    such that all runs fit into rows + spare units; FINER: into as many of them as that allows. The runs of a row are alike but
    for its last. Unless FINER, a row is cut from one and a half runs on: a few slots more make no program late, and each part
    costs a program and its share in putting them together.

    units: int32 [UNIT_FIELDS, units]. per_row: int32 [2, rows], first unit and number of units. arrivals: int32 [rows,
    kv_heads], set to zero.
    """
    await_inputs(PDL)
    row = tl.arange(0, ROWS)
    real = row < rows
    first_query = tl.load(q_start_ptr + row, mask=real, other=0)
    n = tl.load(q_start_ptr + row + 1, mask=real, other=0) - first_query
    length = tl.load(length_ptr + row, mask=real, other=0)
    low = tl.zeros((ROWS,), tl.int32)
    if window > 0:
        low = tl.maximum(length - n - window + 1, 0) // tile * tile
    own = (n > 0) & (length >= n) & (n * group <= small)
    span = tl.where(own, length - low, 0)
    run = _run(span, units, spare, smallest, tile, FINER)
    count = tl.maximum((span + (run - 1 if FINER else run // 2)) // run, 1)
    run = ((span + count - 1) // count + tile - 1) // tile * tile
    count = tl.where(own, (span + run - 1) // tl.maximum(run, 1), 0)
    stop = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(per_row_ptr + row, stop - count, mask=real)
        tl.store(per_row_ptr + rows + row, count, mask=real)
        for head in tl.static_range(kv_heads):
            tl.store(arrivals_ptr + row * kv_heads + head, tl.zeros((ROWS,), tl.int32), mask=real)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = stop[None, :] <= unit[:, None]
    owner = tl.sum(before.to(tl.int32), 1)
    first_unit = tl.sum(tl.where(before, count[None, :], 0), 1)
    mine = row[None, :] == owner[:, None]
    parts = tl.sum(tl.where(mine, count[None, :], 0), 1)
    run = tl.sum(tl.where(mine, run[None, :], 0), 1)
    owned = owner < rows
    at = tl.load(q_start_ptr + owner, mask=owned, other=0)
    n = tl.load(q_start_ptr + owner + 1, mask=owned, other=0) - at
    length = tl.load(length_ptr + owner, mask=owned, other=0)
    begin = (unit - first_unit) * run
    if window > 0:
        begin += tl.maximum(length - n - window + 1, 0) // tile * tile
    device_row = tl.load(rows_ptr + owner, mask=owned, other=0)
    inside = unit < units
    units_ptr += unit
    tl.store(units_ptr, tl.where(owned, device_row, -1), mask=inside)
    tl.store(units_ptr + units, begin, mask=inside)
    tl.store(units_ptr + 2 * units, tl.minimum(begin + run, length), mask=inside)
    tl.store(units_ptr + 3 * units, at, mask=inside)
    tl.store(units_ptr + 4 * units, n, mask=inside)
    tl.store(units_ptr + 5 * units, length, mask=inside)
    tl.store(units_ptr + 6 * units, first_unit, mask=inside)
    tl.store(units_ptr + 7 * units, parts, mask=inside)
    tl.store(units_ptr + 8 * units, owner, mask=inside)
