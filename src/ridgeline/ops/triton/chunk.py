"""Chunked-prefill attention on any GPU, tiled over the packed queries of a row, and the kernel that plans its work units.

Source: FlashAttention-2 (Dao 2023, arXiv:2307.08691). See walk for the inner loop.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.triton.launch import await_inputs
from ridgeline.ops.triton.vectors import as_computed, load_keys_values, pages_of_tile
from ridgeline.ops.triton.walk import _finish, _seen, _step

UNIT_FIELDS = 5
"""Fields of a work unit: device row (-1: no work), first packed query, first query token of its row, number of query tokens
(0: no work), number of slots before them."""


@triton.jit
def _units_beyond(tiles, count, n, start, group, tile: tl.constexpr, keys: tl.constexpr):
    """Count a row's units (of `count`) whose last query sees more than `tiles` key tiles."""
    slot = tiles * keys - start
    return tl.where(count == 0, 0, tl.where(slot <= 0, count, tl.where(slot >= n, 0, count - slot * group // tile)))


@triton.jit(do_not_specialize=["rows", "units", "group", "small"])
def chunk_plan_kernel(
    rows_ptr,
    q_start_ptr,
    length_ptr,
    units_ptr,
    rows,
    units,
    group,
    small,
    tile: tl.constexpr,
    keys: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write units [UNIT_FIELDS, units] int32: one unit for each `tile` packed queries of rows with more than `small` of them.

    Units are sorted by the number of key tiles (`keys` slots each) that they see, in ascending order. Empty units come first.
    `units` must be large enough for all. Each program computes the rank of BLOCK units by counting, without a sort.
    """
    await_inputs(PDL)
    row = tl.arange(0, ROWS)
    real = row < rows
    first_query = tl.load(q_start_ptr + row, mask=real, other=0)
    n = tl.load(q_start_ptr + row + 1, mask=real, other=0) - first_query
    length = tl.load(length_ptr + row, mask=real, other=0)
    start = length - n
    count = tl.where((n * group > small) & (start >= 0), (n * group + tile - 1) // tile, 0)
    stop = tl.cumsum(count, 0)
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = stop[None, :] <= unit[:, None]
    owner = tl.sum(before.to(tl.int32), 1)
    number = unit - tl.sum(tl.where(before, count[None, :], 0), 1)
    owned = owner < rows
    unit_query = tl.load(q_start_ptr + owner, mask=owned, other=0)
    unit_n = tl.load(q_start_ptr + owner + 1, mask=owned, other=0) - unit_query
    unit_start = tl.load(length_ptr + owner, mask=owned, other=0) - unit_n
    begin = number * tile
    last = (tl.minimum(begin + tile, unit_n * group) - 1) // group
    tiles = (unit_start + last + keys) // keys
    # Rank by key tiles, then by row, then by place in the row. The rank is the sum over all rows of units that come later.
    longer = _units_beyond(tiles[:, None], count[None, :], n[None, :], start[None, :], group, tile, keys)
    at_least = _units_beyond(tiles[:, None] - 1, count[None, :], n[None, :], start[None, :], group, tile, keys)
    ahead = longer + tl.where(row[None, :] < owner[:, None], at_least - longer, 0)
    shorter = tl.where(row[None, :] == owner[:, None], count[None, :] - at_least, 0)
    rank = tl.where(owned, tl.sum(ahead, 1) + number - tl.sum(shorter, 1), unit)
    inside = unit < units
    target = units_ptr + units - 1 - rank
    tl.store(target, tl.load(rows_ptr + owner, mask=owned, other=-1), mask=inside)
    tl.store(target + units, begin, mask=inside)
    tl.store(target + 2 * units, unit_query, mask=inside)
    tl.store(target + 3 * units, unit_n, mask=inside)
    tl.store(target + 4 * units, unit_start, mask=inside)


@triton.jit(do_not_specialize=["units"])
def chunk_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    table_ptr,
    position_ptr,
    ancestors_ptr,
    key_positions_ptr,
    units_ptr,
    out_ptr,
    lse_ptr,
    q_token_stride,
    q_head_stride,
    page_stride,
    kind_stride,
    head_stride,
    scale_page_stride,
    table_stride,
    key_positions_stride,
    scale,
    cap,
    units,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    window: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    TREE: tl.constexpr,
    COMPACTED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Attention for one tile of QUERIES packed queries and one KV head per program; the grid is units * kv_heads.

    The first loop covers slots that all queries of the tile see and applies no mask. The second loop masks the remainder.
    q [tokens, heads, head_dim]; out [tokens, heads, head_dim] and lse [tokens, heads] float32.
    """
    await_inputs(PDL)
    # Units with the most slots start first, so that short units fill the tail.
    unit_ptr = units_ptr + (units - 1 - tl.program_id(0) // kv_heads)
    head = tl.program_id(0) % kv_heads
    row = tl.load(unit_ptr).to(tl.int64)
    if row < 0:
        return
    first_packed = tl.load(unit_ptr + units)
    first_query = tl.load(unit_ptr + 2 * units)
    n = tl.load(unit_ptr + 3 * units)
    start = tl.load(unit_ptr + 4 * units)
    packed = first_packed + tl.arange(0, QUERIES)
    place = packed // group
    real = place < n
    at = tl.arange(0, WIDTH)
    tile = real[:, None] & (at < head_dim)[None, :]
    token = (first_query + place).to(tl.int64)
    query_head = head * group + packed % group
    q = tl.load(
        q_ptr + token[:, None] * q_token_stride + query_head[:, None] * q_head_stride + at[None, :],
        mask=tile,
        other=0.0,
    )
    q = as_computed(q, BITS)
    query_position = tl.load(position_ptr + token, mask=real, other=0)
    query_ancestors = token
    if TREE:
        query_ancestors = tl.load(ancestors_ptr + token, mask=real, other=0)
    pages_ptr = table_ptr + row * table_stride
    head_ptr = kv_ptr + head.to(tl.int64) * head_stride
    scale_head_stride: tl.constexpr = page_tokens * SCALES
    scale_kind_stride: tl.constexpr = kv_heads * scale_head_stride
    head_scales_ptr = scales_ptr + head.to(tl.int64) * scale_head_stride
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, WIDTH), tl.float32)
    # Slots in [low, common) are visible to the whole tile. Slots from `end` on are visible to none of it.
    end = start + tl.minimum((first_packed + QUERIES - 1) // group, n - 1) + 1
    low = 0
    if TREE:
        common = start // KEYS * KEYS
    else:
        common = (start + first_packed // group + 1) // KEYS * KEYS
    if window > 0:
        if COMPACTED == 0:
            # A draft tree's tokens may have positions right after the root's, whatever their slots.
            reach = start if TREE else start + first_packed // group
            low = tl.maximum(reach - window + 1, 0) // KEYS * KEYS
        common = low
    for first in range(low, common, KEYS):
        slot = first + tl.arange(0, KEYS)
        page = pages_of_tile(pages_ptr, slot, first, end, page_tokens, KEYS)
        keys, values = load_keys_values(
            head_ptr, head_scales_ptr, page, slot % page_tokens, slot < end, page_stride, kind_stride, scale_page_stride,
            scale_kind_stride, head_dim, BITS, SCALES, KEYS, WIDTH, q.dtype, False,
        )  # fmt: skip
        best, weight, out = _step(q, keys, values, None, best, weight, out, scale, cap, False, CAPPED, PRECISION)
    for first in range(common, end, KEYS):
        slot = first + tl.arange(0, KEYS)
        page = pages_of_tile(pages_ptr, slot, first, end, page_tokens, KEYS)
        keys, values = load_keys_values(
            head_ptr, head_scales_ptr, page, slot % page_tokens, slot < end, page_stride, kind_stride, scale_page_stride,
            scale_kind_stride, head_dim, BITS, SCALES, KEYS, WIDTH, q.dtype, True,
        )  # fmt: skip
        seen = _seen(
            slot, place, start, end, query_position, query_ancestors, key_positions_ptr + row * key_positions_stride,
            position_ptr + first_query, n, window, TREE, COMPACTED,
        )  # fmt: skip
        best, weight, out = _step(q, keys, values, seen, best, weight, out, scale, cap, True, CAPPED, PRECISION)
    out, lse = _finish(best, weight, out)
    target = (token[:, None] * (kv_heads * group) + query_head[:, None]) * head_dim + at[None, :]
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=tile)
    tl.store(lse_ptr + token * (kv_heads * group) + query_head, lse, mask=real)
