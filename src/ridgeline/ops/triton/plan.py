"""Who computes what: a device kernel that turns lengths into equal units of work."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.triton.launch import await_inputs


@triton.jit(do_not_specialize=["rows", "units", "spare", "group", "small"])
def plan_kernel(
    q_start_ptr,
    length_ptr,
    units_ptr,
    per_row_ptr,
    rows,
    units,
    spare,
    group,
    small,
    window: tl.constexpr,
    tile: tl.constexpr,
    smallest: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """units [3, units]: row (rows or more: nothing to do), begin, end. per_row [2, rows]: first unit, number of units.

    SPLIT: rows with at most `small` packed queries, cut along their slots into runs of a common length, a multiple of
    `tile`, chosen such that all runs fit into rows + spare units. Else: the other rows, cut into `tile` packed queries;
    `units` must be enough for them.
    """
    await_inputs(PDL)
    row = tl.arange(0, ROWS)
    real = row < rows
    first_query = tl.load(q_start_ptr + row, mask=real, other=0)
    n = tl.load(q_start_ptr + row + 1, mask=real, other=0) - first_query
    length = tl.load(length_ptr + row, mask=real, other=0)
    held = (n > 0) & (length >= n)
    few = n * group <= small
    if SPLIT:
        low = tl.zeros((ROWS,), tl.int32)
        if window > 0:
            low = tl.maximum(length - n - window + 1, 0) // tile * tile
        span = tl.where(held & few, length - low, 0)
        total = tl.sum(span.to(tl.int64), 0)
        run = tl.maximum((total + spare - 1) // spare, smallest).to(tl.int32)
        run = (run + tile - 1) // tile * tile
    else:
        span = tl.where(held & (few == 0), n * group, 0)
        run = tile
    count = (span + run - 1) // run
    stop = tl.cumsum(count, 0)
    if tl.program_id(0) == 0:
        tl.store(per_row_ptr + row, stop - count, mask=real)
        tl.store(per_row_ptr + rows + row, count, mask=real)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = stop[None, :] <= unit[:, None]
    owner = tl.sum(before.to(tl.int32), 1)
    first_unit = tl.sum(tl.where(before, count[None, :], 0), 1)
    owned = owner < rows
    begin = (unit - first_unit) * run
    own = tl.load(q_start_ptr + owner + 1, mask=owned, other=0) - tl.load(q_start_ptr + owner, mask=owned, other=0)
    if SPLIT:
        end = tl.load(length_ptr + owner, mask=owned, other=0)
        if window > 0:
            begin += tl.maximum(end - own - window + 1, 0) // tile * tile
        end = tl.minimum(begin + run, end)
    else:
        end = tl.minimum(begin + run, own * group)
    inside = unit < units
    tl.store(units_ptr + unit, owner, mask=inside)
    tl.store(units_ptr + units + unit, begin, mask=inside)
    tl.store(units_ptr + 2 * units + unit, end, mask=inside)
