"""The attention kernels: a tile of packed queries walks over a row's slots with a running softmax.

Packed query m of a row is query token m // group, head m % group of its KV head's group. Scores are in units of log 2.
Offsets into the cache are int64; slots that are masked out are not loaded where a tile reaches behind its end.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.triton.launch import await_inputs

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
STEP_SIZES = ["batch", "units"]
"""Arguments that change from step to step: a kernel compiled apart for 1 or for multiples of 16 would compile while
requests wait."""


@triton.jit
def _tile_offsets(
    pages_ptr, slot, first, page_stride, end, page_tokens: tl.constexpr, head_dim: tl.constexpr, KEYS: tl.constexpr
):
    """Element offsets int64 [KEYS] of the keys at `slot` = first .. first + KEYS - 1, from (page 0, kind, head)."""
    if page_tokens % KEYS == 0:
        page = tl.load(pages_ptr + first // page_tokens).to(tl.int64)
        return page * page_stride + (slot % page_tokens).to(tl.int64) * head_dim
    else:
        page = tl.load(pages_ptr + slot // page_tokens, mask=slot < end, other=0).to(tl.int64)
        return page * page_stride + (slot % page_tokens).to(tl.int64) * head_dim


@triton.jit
def _seen(
    slot,
    place,
    start,
    end,
    own_position,
    own_ancestors,
    key_positions_ptr,
    fresh_position_ptr,
    n,
    window: tl.constexpr,
    TREE: tl.constexpr,
    COMPACTED: tl.constexpr,
):
    """Which of the slots [KEYS] each query [QUERIES] at `place` of its row sees; reference.row_mask says the rule."""
    among = slot - start
    seen = (among[None, :] <= place[:, None]) & (slot < end)[None, :]
    if TREE:
        inside = (among >= 0) & (among < 64)
        bit = (own_ancestors[:, None] >> tl.where(inside, among, 0)[None, :].to(tl.int64)) & 1
        seen = seen & ((inside == 0)[None, :] | (bit != 0) | (among[None, :] == place[:, None]))
    if window > 0:
        said = slot
        if COMPACTED:
            said = tl.load(key_positions_ptr + slot, mask=slot < end, other=0)
        fresh = (among >= 0) & (among < n)
        if TREE or COMPACTED:
            said = tl.where(fresh, tl.load(fresh_position_ptr + among, mask=fresh, other=0), said)
        seen = seen & (own_position[:, None] - said[None, :] < window)
    return seen


@triton.jit
def _step(
    q,
    keys,
    values,
    seen,
    best,
    weight,
    out,
    scale,
    cap,
    MASKED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One turn of the running softmax (Milakov and Gimelshein 2018): best, weight [QUERIES], out [QUERIES, WIDTH]."""
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION)
    if CAPPED:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores * (scale / cap)) - 1.0) * LOG2E
    else:
        scores = scores * (scale * LOG2E)
    if MASKED:
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(best, tl.max(scores, 1))
    safe = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
    p = tl.exp2(scores - safe[:, None])
    shrink = tl.exp2(best - safe)
    weight = weight * shrink + tl.sum(p, 1)
    out = out * shrink[:, None]
    out = tl.dot(p.to(values.dtype), values, out, input_precision=PRECISION)
    return top, weight, out


@triton.jit
def _finish(best, weight, out):
    """(out / weight, log-sum-exp); queries that saw nothing give 0 and minus infinity."""
    some = weight > 0.0
    lse = tl.where(some, (best + tl.log2(tl.where(some, weight, 1.0))) * LN2, float("-inf"))
    return out / tl.where(some, weight, 1.0)[:, None], lse


@triton.jit(do_not_specialize=STEP_SIZES)
def split_kernel(
    q_ptr,
    kv_ptr,
    table_ptr,
    rows_ptr,
    q_start_ptr,
    length_ptr,
    position_ptr,
    ancestors_ptr,
    key_positions_ptr,
    units_ptr,
    per_row_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
    q_token_stride,
    q_head_stride,
    page_stride,
    kind_stride,
    head_stride,
    table_stride,
    key_positions_stride,
    scale,
    cap,
    batch,
    units,
    part_queries: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    window: tl.constexpr,
    TREE: tl.constexpr,
    COMPACTED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """All query tokens of a row, one KV head, one run of its slots."""
    await_inputs(PDL)
    unit = tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    index = tl.load(units_ptr + unit)
    if index >= batch:
        return
    begin = tl.load(units_ptr + units + unit)
    end = tl.load(units_ptr + 2 * units + unit)
    row = tl.load(rows_ptr + index).to(tl.int64)
    first_query = tl.load(q_start_ptr + index)
    n = tl.load(q_start_ptr + index + 1) - first_query
    start = tl.load(length_ptr + index) - n
    packed = tl.arange(0, QUERIES)
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
    own_position = tl.load(position_ptr + token, mask=real, other=0)
    own_ancestors = token
    if TREE:
        own_ancestors = tl.load(ancestors_ptr + token, mask=real, other=0)
    pages_ptr = table_ptr + row * table_stride
    head_ptr = kv_ptr + head.to(tl.int64) * head_stride
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, WIDTH), tl.float32)
    for first in range(begin, end, KEYS):
        slot = first + tl.arange(0, KEYS)
        offset = _tile_offsets(pages_ptr, slot, first, page_stride, end, page_tokens, head_dim, KEYS)
        inside = (slot < end)[:, None]
        if head_dim != WIDTH:
            inside = inside & (at < head_dim)[None, :]
        pointer = head_ptr + offset[:, None] + at[None, :]
        keys = tl.load(pointer, mask=inside, other=0.0)
        values = tl.load(pointer + kind_stride, mask=inside, other=0.0)
        seen = _seen(
            slot,
            place,
            start,
            end,
            own_position,
            own_ancestors,
            key_positions_ptr + row * key_positions_stride,
            position_ptr + first_query,
            n,
            window,
            TREE,
            COMPACTED,
        )
        best, weight, out = _step(q, keys, values, seen, best, weight, out, scale, cap, True, CAPPED, PRECISION)
    out, lse = _finish(best, weight, out)
    if tl.load(per_row_ptr + batch + index) == 1:
        target = (token[:, None] * (kv_heads * group) + query_head[:, None]) * head_dim + at[None, :]
        tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=tile)
        tl.store(lse_ptr + token * (kv_heads * group) + query_head, lse, mask=real)
    else:
        line = tl.program_id(0).to(tl.int64) * part_queries + packed
        tl.store(part_ptr + line[:, None] * head_dim + at[None, :], out, mask=tile)
        tl.store(part_lse_ptr + line, lse, mask=real)


@triton.jit(do_not_specialize=STEP_SIZES)
def combine_kernel(
    per_row_ptr,
    q_start_ptr,
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    batch,
    part_queries: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    PDL: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One head of a row that was split: its parts weighted by exp(their log-sum-exp), one query token after the other."""
    await_inputs(PDL)
    index = tl.program_id(0)
    head = tl.program_id(1)
    count = tl.load(per_row_ptr + batch + index)
    if count <= 1:
        return
    first_query = tl.load(q_start_ptr + index)
    n = tl.load(q_start_ptr + index + 1) - first_query
    first = tl.load(per_row_ptr + index)
    at = tl.arange(0, WIDTH)
    for place in range(n):
        packed = place * group + head % group
        best = tl.full((1,), float("-inf"), tl.float32)
        weight = tl.zeros((1,), tl.float32)
        out = tl.zeros((WIDTH,), tl.float32)
        for done in range(0, count, PARTS):
            part = done + tl.arange(0, PARTS)
            inside = part < count
            line = ((first + part).to(tl.int64) * kv_heads + head // group) * part_queries + packed
            lse = tl.load(part_lse_ptr + line, mask=inside, other=float("-inf"))
            tile = inside[:, None] & (at < head_dim)[None, :]
            values = tl.load(part_ptr + line[:, None] * head_dim + at[None, :], mask=tile, other=0.0)
            top = tl.maximum(best, tl.max(lse, 0))
            safe = tl.where(top == float("-inf"), 0.0, top)
            shrink = tl.exp(best - safe)
            p = tl.exp(lse - safe)
            weight = weight * shrink + tl.sum(p, 0)
            out = out * shrink + tl.sum(values * p[:, None], 0)
            best = top
        some = weight > 0.0
        line = (first_query + place).to(tl.int64) * (kv_heads * group) + head
        out = out / tl.where(some, weight, 1.0)
        tl.store(out_ptr + line * head_dim + at, out.to(out_ptr.dtype.element_ty), mask=at < head_dim)
        lse = tl.where(some, best + tl.log(tl.where(some, weight, 1.0)), float("-inf"))
        tl.store(lse_ptr + line + tl.arange(0, 1), lse)


@triton.jit(do_not_specialize=STEP_SIZES)
def chunk_kernel(
    q_ptr,
    kv_ptr,
    table_ptr,
    rows_ptr,
    q_start_ptr,
    length_ptr,
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
    table_stride,
    key_positions_stride,
    scale,
    cap,
    batch,
    units,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    page_tokens: tl.constexpr,
    window: tl.constexpr,
    TREE: tl.constexpr,
    COMPACTED: tl.constexpr,
    CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One tile of a row's packed queries and one KV head; first the slots that all of them see, then the others."""
    await_inputs(PDL)
    # Later tiles see more slots: they start first, so that the short ones fill the end.
    unit = units - 1 - tl.program_id(0) // kv_heads
    head = tl.program_id(0) % kv_heads
    index = tl.load(units_ptr + unit)
    if index >= batch:
        return
    first_packed = tl.load(units_ptr + units + unit)
    row = tl.load(rows_ptr + index).to(tl.int64)
    first_query = tl.load(q_start_ptr + index)
    n = tl.load(q_start_ptr + index + 1) - first_query
    start = tl.load(length_ptr + index) - n
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
    own_position = tl.load(position_ptr + token, mask=real, other=0)
    own_ancestors = token
    if TREE:
        own_ancestors = tl.load(ancestors_ptr + token, mask=real, other=0)
    pages_ptr = table_ptr + row * table_stride
    head_ptr = kv_ptr + head.to(tl.int64) * head_stride
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, WIDTH), tl.float32)
    # Slots [low, common) are seen by the whole tile, none at or after end by any of it.
    end = start + tl.minimum((first_packed + QUERIES - 1) // group, n - 1) + 1
    low = 0
    if TREE:
        common = start // KEYS * KEYS
    else:
        common = (start + first_packed // group + 1) // KEYS * KEYS
    if window > 0:
        if COMPACTED == 0:
            # A draft tree's tokens may have been said right after the root, whatever their slot.
            reach = start if TREE else start + first_packed // group
            low = tl.maximum(reach - window + 1, 0) // KEYS * KEYS
        common = low
    for first in range(low, common, KEYS):
        slot = first + tl.arange(0, KEYS)
        offset = _tile_offsets(pages_ptr, slot, first, page_stride, end, page_tokens, head_dim, KEYS)
        pointer = head_ptr + offset[:, None] + at[None, :]
        if head_dim != WIDTH:
            keys = tl.load(pointer, mask=(at < head_dim)[None, :], other=0.0)
            values = tl.load(pointer + kind_stride, mask=(at < head_dim)[None, :], other=0.0)
        else:
            keys = tl.load(pointer)
            values = tl.load(pointer + kind_stride)
        best, weight, out = _step(q, keys, values, None, best, weight, out, scale, cap, False, CAPPED, PRECISION)
    for first in range(common, end, KEYS):
        slot = first + tl.arange(0, KEYS)
        offset = _tile_offsets(pages_ptr, slot, first, page_stride, end, page_tokens, head_dim, KEYS)
        inside = (slot < end)[:, None]
        if head_dim != WIDTH:
            inside = inside & (at < head_dim)[None, :]
        pointer = head_ptr + offset[:, None] + at[None, :]
        keys = tl.load(pointer, mask=inside, other=0.0)
        values = tl.load(pointer + kind_stride, mask=inside, other=0.0)
        seen = _seen(
            slot,
            place,
            start,
            end,
            own_position,
            own_ancestors,
            key_positions_ptr + row * key_positions_stride,
            position_ptr + first_query,
            n,
            window,
            TREE,
            COMPACTED,
        )
        best, weight, out = _step(q, keys, values, seen, best, weight, out, scale, cap, True, CAPPED, PRECISION)
    out, lse = _finish(best, weight, out)
    target = (token[:, None] * (kv_heads * group) + query_head[:, None]) * head_dim + at[None, :]
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=tile)
    tl.store(lse_ptr + token * (kv_heads * group) + query_head, lse, mask=real)
