"""Attention kernels for rows of few query tokens: a tile of packed queries loops over slots of the row with online softmax.

Packed query m of a row is query token m // group, head m % group of its KV head's group. Scores are scaled by log2(e). Offsets into
the cache are int64. Masked slots past a tile's end are not loaded.
Source: FlashDecoding for the split of a row's keys; online softmax of Milakov and Gimelshein 2018.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ridgeline.ops.triton.launch import gdc_wait
from ridgeline.ops.triton.plan import load_unit
from ridgeline.ops.triton.vectors import as_computed, load_keys_values

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
STEP_SIZES = ["batch", "units"]
"""Arguments that change from step to step. Specialization on 1 or on multiples of 16 would compile a kernel while requests wait."""


@triton.jit
def _seen(
    slot,
    place,
    start,
    end,
    query_position,
    query_ancestors,
    key_positions_ptr,
    query_position_ptr,
    n,
    window: tl.constexpr,
    TREE: tl.constexpr,
    COMPACTED: tl.constexpr,
):
    """Visibility mask [QUERIES, KEYS] of the slots for the row's queries at `place`. reference.row_mask defines it."""
    among = slot - start
    seen = (among[None, :] <= place[:, None]) & (slot < end)[None, :]
    if TREE:
        inside = (among >= 0) & (among < 64)
        bit = (query_ancestors[:, None] >> tl.where(inside, among, 0)[None, :].to(tl.int64)) & 1
        seen = seen & ((inside == 0)[None, :] | (bit != 0) | (among[None, :] == place[:, None]))
    if window > 0:
        key_position = slot
        if COMPACTED:
            key_position = tl.load(key_positions_ptr + slot, mask=slot < end, other=0)
        in_step = (among >= 0) & (among < n)
        if TREE or COMPACTED:
            key_position = tl.where(in_step, tl.load(query_position_ptr + among, mask=in_step, other=0), key_position)
        seen = seen & (query_position[:, None] - key_position[None, :] < window)
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
    """One iteration of online softmax over a tile of keys. best, weight: [QUERIES]; out: [QUERIES, WIDTH]."""
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
    """(out / weight, log-sum-exp). Queries without visible keys return 0 and minus infinity."""
    some = weight > 0.0
    lse = tl.where(some, (best + tl.log2(tl.where(some, weight, 1.0))) * LN2, float("-inf"))
    return out / tl.where(some, weight, 1.0)[:, None], lse


@triton.jit
def _combine(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    first_unit,
    count,
    first_query,
    n,
    kv_head,
    packed,
    part_queries: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Combine the parts of packed queries [PACKED], weighted by exp(log-sum-exp), PARTS at a time in a fixed order."""
    real = packed < n * group
    at = tl.arange(0, WIDTH)
    best = tl.full(packed.shape, float("-inf"), tl.float32)
    weight = tl.zeros_like(best)
    out = tl.zeros((packed.shape[0], WIDTH), tl.float32)
    for done in range(0, count, PARTS):
        part = done + tl.arange(0, PARTS)
        line = ((first_unit + part).to(tl.int64) * kv_heads + kv_head)[:, None] * part_queries + packed[None, :]
        inside = (part < count)[:, None] & real[None, :]
        # Other programs wrote the parts while this one was running, so the loads bypass L1 (.cg).
        lse = tl.load(part_lse_ptr + line, mask=inside, other=float("-inf"), cache_modifier=".cg")
        tile = inside[:, :, None] & (at < head_dim)[None, None, :]
        values = tl.load(part_ptr + line[:, :, None] * head_dim + at, mask=tile, other=0.0, cache_modifier=".cg")
        top = tl.maximum(best, tl.max(lse, 0))
        safe = tl.where(top == float("-inf"), 0.0, top)
        shrink = tl.exp(best - safe)
        p = tl.exp(lse - safe[None, :])
        weight = weight * shrink + tl.sum(p, 0)
        out = out * shrink[:, None] + tl.sum(values * p[:, :, None], 0)
        best = top
    out, lse = _finish(best * LOG2E, weight, out)
    line = (first_query + packed // group).to(tl.int64) * (kv_heads * group) + kv_head * group + packed % group
    tile = real[:, None] & (at < head_dim)[None, :]
    tl.store(out_ptr + line[:, None] * head_dim + at[None, :], out.to(out_ptr.dtype.element_ty), mask=tile)
    tl.store(lse_ptr + line, lse, mask=real)


@triton.jit
def _pages(pages_ptr, first, end, page_tokens: tl.constexpr, KEYS: tl.constexpr):
    """Page numbers of the slots first .. first + KEYS - 1: a scalar if they lie in one page, otherwise [KEYS]."""
    if page_tokens % KEYS == 0:
        return tl.load(pages_ptr + first // page_tokens, mask=first < end, other=0, cache_modifier=".cg")
    else:
        slot = first + tl.arange(0, KEYS)
        return tl.load(pages_ptr + slot // page_tokens, mask=slot < end, other=0, cache_modifier=".cg")


@triton.jit
def _await_unit(units_ptr, units, unit, planned, AHEAD: tl.constexpr, PDL: tl.constexpr):
    """Load a program's work unit. Wait for earlier kernels here, unless earlier steps wrote the unit's first AHEAD slots; then the
    caller waits. With AHEAD 0 the caller always waits.

    planned: an earlier kernel of this step waited for the plan before it allowed dependents to launch. The first kernel that uses a
    plan does so, and all later kernels may read the plan and everything written before it without a wait. They read it from L2
    (.cg), because only the wait guarantees that L1 holds no stale lines.
    """
    if PDL:
        if planned == 0:
            gdc_wait()
        gdc_launch_dependents()
    work = load_unit(units_ptr, units, unit)
    row, begin, end, _, n, length, _, _, _ = work
    if PDL and AHEAD > 0:
        must_wait = (row < 0) | (tl.minimum(begin + AHEAD, end) > length - n)
        if must_wait:
            gdc_wait()
    return work


@triton.jit(do_not_specialize=[*STEP_SIZES, "planned"])
def split_kernel(
    q_ptr,
    kv_ptr,
    scales_ptr,
    table_ptr,
    position_ptr,
    ancestors_ptr,
    key_positions_ptr,
    units_ptr,
    arrivals_ptr,
    out_ptr,
    lse_ptr,
    part_ptr,
    part_lse_ptr,
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
    planned,
    part_queries: tl.constexpr,
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
    AHEAD: tl.constexpr,
    FUSED: tl.constexpr,
    PACKED: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Attention of one work unit and one KV head per program: all query tokens of a row over one part of its slots (split-KV).

    The grid is units * kv_heads. q [tokens, heads, head_dim]; kv: paged cache, with scales if BITS > 0; table int32 [device rows,
    pages]; units: see plan. out like q, lse float32 [tokens, heads]. A row with several parts stores them to part [units *
    kv_heads, part_queries, head_dim] and part_lse, float32. With AHEAD > 0 the loop's first loads precede the PDL wait; see
    _await_unit. FUSED: the last program of a row and head to arrive combines the parts; otherwise combine_kernel does.
    """
    head = tl.program_id(0) % kv_heads
    unit = _await_unit(units_ptr, units, tl.program_id(0) // kv_heads, planned, AHEAD, PDL)
    row, begin, end, first_query, n, length, first_unit, count, index = unit
    start = length - n
    if row < 0:
        if PDL and AHEAD == 0:
            gdc_wait()
        return
    packed = tl.arange(0, QUERIES)
    place = packed // group
    real = place < n
    at = tl.arange(0, WIDTH)
    tile = real[:, None] & (at < head_dim)[None, :]
    token = (first_query + place).to(tl.int64)
    query_head = head * group + packed % group
    q_tile = q_ptr + token[:, None] * q_token_stride + query_head[:, None] * q_head_stride + at[None, :]
    pages_ptr = table_ptr + row.to(tl.int64) * table_stride
    head_ptr = kv_ptr + head.to(tl.int64) * head_stride
    scale_head_stride: tl.constexpr = page_tokens * SCALES
    scale_kind_stride: tl.constexpr = kv_heads * scale_head_stride
    head_scales_ptr = scales_ptr + head.to(tl.int64) * scale_head_stride
    page = _pages(pages_ptr, begin, end, page_tokens, KEYS)
    query_position = tl.load(position_ptr + token, mask=real, other=0, cache_modifier=".cg")
    if PDL and AHEAD == 0:
        # Earlier steps wrote page numbers and positions. The loads below depend on kernels of this layer.
        gdc_wait()
    query_ancestors = token
    if TREE:
        query_ancestors = tl.load(ancestors_ptr + token, mask=real, other=0)
    if AHEAD > 0:
        q = as_computed(tl.zeros((QUERIES, WIDTH), q_ptr.dtype.element_ty), BITS)
    else:
        q = as_computed(tl.load(q_tile, mask=tile, other=0.0), BITS)
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, WIDTH), tl.float32)
    for first in range(begin, end, KEYS):
        slot = first + tl.arange(0, KEYS)
        here = page.to(tl.int64)
        # Loaded one iteration ahead. A load whose address depends on another load would halve the pipeline's depth.
        page = _pages(pages_ptr, first + KEYS, end, page_tokens, KEYS)
        keys, values = load_keys_values(
            head_ptr, head_scales_ptr, here, slot % page_tokens, slot < end, page_stride, kind_stride, scale_page_stride,
            scale_kind_stride, head_dim, BITS, SCALES, KEYS, WIDTH, q.dtype, True,
        )  # fmt: skip
        if AHEAD > 0:
            # The loop's first loads are in flight. Only the code below depends on the previous kernel.
            waiting = first == begin
            if waiting:
                if PDL:
                    gdc_wait()
                q = as_computed(tl.load(q_tile, mask=tile, other=0.0), BITS)
        seen = _seen(
            slot, place, start, end, query_position, query_ancestors, key_positions_ptr + row.to(tl.int64) * key_positions_stride,
            position_ptr + first_query, n, window, TREE, COMPACTED,
        )  # fmt: skip
        best, weight, out = _step(q, keys, values, seen, best, weight, out, scale, cap, True, CAPPED, PRECISION)
    out, lse = _finish(best, weight, out)
    heads: tl.constexpr = kv_heads * group
    if count == 1:
        target = (token[:, None] * heads + query_head[:, None]) * head_dim + at[None, :]
        tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=tile)
        tl.store(lse_ptr + token * heads + query_head, lse, mask=real)
    else:
        line = tl.program_id(0).to(tl.int64) * part_queries + packed
        tl.store(part_ptr + line[:, None] * head_dim + at[None, :], out, mask=tile)
        tl.store(part_lse_ptr + line, lse, mask=real)
        if FUSED:
            # All threads must have stored their parts before one thread increments the counter.
            tl.debug_barrier()
            counter = arrivals_ptr + index * kv_heads + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                _combine(
                    part_ptr,
                    part_lse_ptr,
                    out_ptr,
                    lse_ptr,
                    first_unit,
                    count,
                    first_query,
                    n,
                    head,
                    tl.arange(0, PACKED),
                    part_queries,
                    kv_heads,
                    group,
                    head_dim,
                    PARTS,
                    WIDTH,
                )
                tl.store(counter, 0)


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
    """Combine the parts of one query token and head per program, for rows that were split; the grid is [rows, heads, tokens]."""
    if PDL:
        gdc_launch_dependents()
    # The plan was written before split_kernel allowed this kernel to launch. See _await_unit for .cg.
    index = tl.program_id(0)
    head = tl.program_id(1)
    place = tl.program_id(2)
    count = tl.load(per_row_ptr + batch + index, cache_modifier=".cg")
    first_unit = tl.load(per_row_ptr + index, cache_modifier=".cg")
    first_query = tl.load(q_start_ptr + index, cache_modifier=".cg")
    n = tl.load(q_start_ptr + index + 1, cache_modifier=".cg") - first_query
    if PDL:
        gdc_wait()
    if (count <= 1) | (place >= n):
        return
    _combine(
        part_ptr,
        part_lse_ptr,
        out_ptr,
        lse_ptr,
        first_unit,
        count,
        first_query,
        n,
        head // group,
        place * group + head % group + tl.arange(0, 1),
        part_queries,
        kv_heads,
        group,
        head_dim,
        PARTS,
        WIDTH,
    )
