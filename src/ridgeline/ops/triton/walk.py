"""The attention kernels: a tile of packed queries walks over a row's slots with a running softmax.

Packed query m of a row is query token m // group, head m % group of its KV head's group. Scores are in units of log 2.
Offsets into the cache are int64; slots that are masked out are not loaded where a tile reaches behind its end.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.ops.triton.plan import load_unit

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
        key_position = slot
        if COMPACTED:
            key_position = tl.load(key_positions_ptr + slot, mask=slot < end, other=0)
        fresh = (among >= 0) & (among < n)
        if TREE or COMPACTED:
            key_position = tl.where(fresh, tl.load(fresh_position_ptr + among, mask=fresh, other=0), key_position)
        seen = seen & (own_position[:, None] - key_position[None, :] < window)
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
    """Put the parts of packed queries [PACKED] together, weighted by exp(their log-sum-exp), PARTS at a time in order."""
    real = packed < n * group
    at = tl.arange(0, WIDTH)
    best = tl.full(packed.shape, float("-inf"), tl.float32)
    weight = tl.zeros_like(best)
    out = tl.zeros((packed.shape[0], WIDTH), tl.float32)
    for done in range(0, count, PARTS):
        part = done + tl.arange(0, PARTS)
        line = ((first_unit + part).to(tl.int64) * kv_heads + kv_head)[:, None] * part_queries + packed[None, :]
        inside = (part < count)[:, None] & real[None, :]
        # Written while this program may have been running: not from its processor's own cache.
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
    """Page numbers of the slots first .. first + KEYS - 1: one, if they lie in one page, else [KEYS]."""
    if page_tokens % KEYS == 0:
        return tl.load(pages_ptr + first // page_tokens, mask=first < end, other=0, cache_modifier=".cg")
    else:
        slot = first + tl.arange(0, KEYS)
        return tl.load(pages_ptr + slot // page_tokens, mask=slot < end, other=0, cache_modifier=".cg")


@triton.jit
def _await_unit(units_ptr, units, unit, planned, AHEAD: tl.constexpr, PDL: tl.constexpr):
    """A program's unit, and the wait for earlier kernels: here, or left to the caller where the unit's first AHEAD slots
    were written by earlier steps. AHEAD 0: always left to the caller.

    planned: whether an earlier kernel of this step waited for the plan before it let others begin. The first one to use a
    plan does, so all after it may read it, and what was written before it, without waiting. They read it from L2 (.cg):
    only the wait is sure to empty a processor's own cache.
    """
    if PDL:
        if planned == 0:
            gdc_wait()
        gdc_launch_dependents()
    work = load_unit(units_ptr, units, unit)
    row, begin, end, _, n, length, _, _, _ = work
    if PDL and AHEAD > 0:
        fresh = (row < 0) | (tl.minimum(begin + AHEAD, end) > length - n)
        if fresh:
            gdc_wait()
    return work


@triton.jit(do_not_specialize=[*STEP_SIZES, "planned"])
def split_kernel(
    q_ptr,
    kv_ptr,
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
    """All query tokens of a row, one KV head, one run of its slots.

    planned, AHEAD: see _await_unit; with AHEAD, no wait comes before the loop's first loads. FUSED: the last program of a
    row and head puts its parts together; else combine_kernel does.
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
    page = _pages(pages_ptr, begin, end, page_tokens, KEYS)
    own_position = tl.load(position_ptr + token, mask=real, other=0, cache_modifier=".cg")
    if PDL and AHEAD == 0:
        # Pages and positions were there before the plan; what comes now was written for this layer.
        gdc_wait()
    own_ancestors = token
    if TREE:
        own_ancestors = tl.load(ancestors_ptr + token, mask=real, other=0)
    if AHEAD > 0:
        q = tl.zeros((QUERIES, WIDTH), q_ptr.dtype.element_ty)
    else:
        q = tl.load(q_tile, mask=tile, other=0.0)
    best = tl.full((QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((QUERIES,), tl.float32)
    out = tl.zeros((QUERIES, WIDTH), tl.float32)
    for first in range(begin, end, KEYS):
        slot = first + tl.arange(0, KEYS)
        offset = page.to(tl.int64) * page_stride + (slot % page_tokens).to(tl.int64) * head_dim
        # A turn ahead: loads whose address another load brings would leave half of the pipeline's depth.
        page = _pages(pages_ptr, first + KEYS, end, page_tokens, KEYS)
        inside = (slot < end)[:, None]
        if head_dim != WIDTH:
            inside = inside & (at < head_dim)[None, :]
        pointer = head_ptr + offset[:, None] + at[None, :]
        keys = tl.load(pointer, mask=inside, other=0.0)
        values = tl.load(pointer + kind_stride, mask=inside, other=0.0)
        if AHEAD > 0:
            # The loop's first loads are under way by now; what the kernel before writes is needed only here.
            waiting = first == begin
            if waiting:
                if PDL:
                    gdc_wait()
                q = tl.load(q_tile, mask=tile, other=0.0)
        seen = _seen(
            slot,
            place,
            start,
            end,
            own_position,
            own_ancestors,
            key_positions_ptr + row.to(tl.int64) * key_positions_stride,
            position_ptr + first_query,
            n,
            window,
            TREE,
            COMPACTED,
        )
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
            # Every thread's part must be out before the one thread that counts says so.
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
    """One query token and head of a row that was split: its parts weighted by exp(their log-sum-exp)."""
    if PDL:
        gdc_launch_dependents()
    # The plan was written before the split kernel let this one begin (.cg: see there).
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
