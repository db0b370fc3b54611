"""Attention of long chunks on Hopper: one warp fetches keys and values by TMA, two warp groups compute in turns.

A program takes tiles of 128 packed queries (see walk), 64 to each warp group. While one group's products run, the other
computes its softmax; within a group, the product with the values of one tile runs beside the softmax of the next
(FlashAttention-3, Shah et al. 2024). Plain causal attention of 16-bit floats alone; everything else is chunk's.

Programs stay for the whole launch and take one unit of work after the other without a stop: a unit's keys, queries and
first product come before the last one's result is written. Written in Gluon, which names layouts, barriers and copies
that Triton would choose by itself.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LANES = gl.constexpr(6)
"""Bits of a score's column that say which thread of four has it."""
HALF = gl.constexpr(64)
"""Queries of a warp group; also elements of a head in one copy, as wide as shared memory is swizzled."""


@jit
def _unit(turn, step, kv_heads: gl.constexpr):
    """The program's piece of work number `turn`: (KV head, device row, first packed query, first query token, query tokens,
    slots before them); no query tokens where there is nothing to do, as in all turns after it.

    Rounds go to and fro: what comes first in each has the most to do.
    """
    units_ptr, units = step
    programs = gl.num_programs(0)
    place = gl.where(turn % 2 == 0, gl.program_id(0), programs - 1 - gl.program_id(0))
    work = turn * programs + place
    real = work < units * kv_heads
    unit_ptr = units_ptr + (units - 1 - work // kv_heads)
    row = gl.load(unit_ptr, mask=real, other=0)
    first_packed = gl.load(unit_ptr + units, mask=real, other=0)
    first_query = gl.load(unit_ptr + 2 * units, mask=real, other=0)
    n = gl.load(unit_ptr + 3 * units, mask=real, other=0)
    start = gl.load(unit_ptr + 4 * units, mask=real, other=0)
    return work % kv_heads, row, first_packed, first_query, n, start


@jit
def _tiles(unit, group: gl.constexpr, KEYS: gl.constexpr):
    """Tiles of keys that a unit's queries see."""
    last = gl.minimum((unit[2] + 2 * HALF - 1) // group, unit[4] - 1)
    return gl.where(unit[4] > 0, (unit[5] + last + KEYS) // KEYS, 0)


@jit
def _plain(unit, group: gl.constexpr, KEYS: gl.constexpr):
    """Tiles of keys that all of them see whole."""
    return (unit[5] + unit[2] // group + 1) // KEYS


@jit
def _held(unit):
    """Slots of its row."""
    return unit[5] + unit[4]


@jit
def _slots(unit, OWN: gl.constexpr, group: gl.constexpr, LAYOUT: gl.constexpr):
    """Each query's own slot, the last one that it sees."""
    return unit[5] + (unit[2] + OWN + gl.arange(0, HALF, LAYOUT)) // group


@jit
def _queries(unit, OWN: gl.constexpr, group: gl.constexpr, LAYOUT: gl.constexpr):
    """(query token of the step, query head, whether there is one) of each of a warp group's packed queries."""
    head, _row, first_packed, first_query, n, _start = unit
    packed = first_packed + OWN + gl.arange(0, HALF, LAYOUT)
    place = packed // group
    return (first_query + place).to(gl.int64), head * group + packed % group, place < n


@jit
def _fetch(
    cache,
    table_ptr,
    strides,
    step,
    ring,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    page_tokens: gl.constexpr,
    BOX: gl.constexpr,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Fill the ring with the keys and the values of tile after tile, BOX slots of one page at a time."""
    table_stride, page_rows, kind_rows, head_rows = strides
    keys, values, keys_full, keys_free, values_full, values_free = ring
    PARTS: gl.constexpr = DIM // HALF
    BOXES: gl.constexpr = KEYS // BOX
    at = 0
    turn = 0
    unit = _unit(0, step, kv_heads)
    tiles = _tiles(unit, group, KEYS)
    while tiles > 0:
        turn += 1
        following = _unit(turn, step, kv_heads)
        pages_ptr = table_ptr + unit[1].to(gl.int64) * table_stride
        for tile in range(tiles):
            # The pages' numbers first: they are here by the time there is room.
            places = ()
            for box in gl.static_range(BOXES):
                slot = tile * KEYS + box * BOX
                page = gl.load(pages_ptr + slot // page_tokens, mask=slot < _held(unit), other=0)
                places = places + (page * page_rows + unit[0] * head_rows + slot % page_tokens,)  # type: ignore[assignment]
            stage = at % STAGES
            phase = (at // STAGES & 1) ^ 1
            mbarrier.wait(keys_free.index(stage), phase)
            mbarrier.expect(keys_full.index(stage), KEYS * DIM * 2)
            for box in gl.static_range(BOXES):
                for part in gl.static_range(PARTS):
                    target = keys.index((stage * PARTS + part) * BOXES + box)
                    tma.async_copy_global_to_shared(cache, [places[box], part * HALF], keys_full.index(stage), target)
            mbarrier.wait(values_free.index(stage), phase)
            mbarrier.expect(values_full.index(stage), KEYS * DIM * 2)
            for box in gl.static_range(BOXES):
                for part in gl.static_range(PARTS):
                    target = values.index((stage * PARTS + part) * BOXES + box)
                    tma.async_copy_global_to_shared(
                        cache, [places[box] + kind_rows, part * HALF], values_full.index(stage), target
                    )
            at += 1
        unit = following
        tiles = _tiles(unit, group, KEYS)


@jit
def _ask(q_ptr, strides, target, unit, OWN: gl.constexpr, group: gl.constexpr, DIM: gl.constexpr, WIDE: gl.constexpr):
    """Begin to copy a warp group's queries to `target`."""
    token, head, real = _queries(unit, OWN, group, gl.SliceLayout(1, WIDE))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    place = token * strides[0] + head * strides[1]
    async_copy.async_copy_global_to_shared(target, q_ptr + place[:, None] + dim[None, :], mask=real[:, None])
    async_copy.commit_group()


@jit
def _write(
    out_ptr,
    lse_ptr,
    unit,
    out,
    best,
    weight,
    scale,
    OWN: gl.constexpr,
    heads: gl.constexpr,
    group: gl.constexpr,
    DIM: gl.constexpr,
    WIDE: gl.constexpr,
):
    """Store the outputs of a warp group's queries and their log-sum-exp."""
    ROWS: gl.constexpr = best.type.layout
    token, head, real = _queries(unit, OWN, group, ROWS)
    gl.store(lse_ptr + token * heads + head, (best * scale + gl.log2(weight)) * LN2, mask=real)
    out = out * gl.convert_layout(1.0 / weight, gl.SliceLayout(1, out.type.layout))[:, None]
    token, head, real = _queries(unit, OWN, group, gl.SliceLayout(1, WIDE))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
    place = (token * heads + head) * DIM
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), WIDE)
    gl.store(out_ptr + place[:, None] + dim[None, :], out, mask=real[:, None])


@jit
def _weigh(scores, best, weight, scale):
    """One turn of the running softmax (Milakov and Gimelshein 2018): (weights, new maximum, new sum, what scales sums of
    before). scores: before `scale`, which includes log2(e)."""
    top = gl.maximum(best, gl.max(scores, 1))
    p = gl.exp2(scores * scale - (top * scale)[:, None])
    shrink = gl.exp2((best - top) * scale)
    return p, top, weight * shrink + gl.sum(p, 1), shrink


@jit
def _hide(scores, first, place):
    """Scores of slots first, first + 1, ... without those behind each query's own slot `place`."""
    column = gl.arange(0, scores.shape[1], gl.SliceLayout(0, scores.type.layout))
    # What a thread's columns have in common moves to the other side: against constants, one instruction a score less.
    last = (place - first)[:, None] - (column & LANES)[None, :]
    return gl.where((column & ~LANES)[None, :] <= last, scores, float("-inf"))


@jit
def _attend(
    tensors,
    strides,
    scale,
    step,
    ring,
    queries,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    PART: gl.constexpr,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp group: the first (PART 0) or the second half of each unit's queries.

    Every query sees slot 0, so that the first tile gives each a finite maximum. A unit's first product begins beside the
    last one of the unit before, its queries have been asked for a unit ahead, and what says where they lie two units ahead.
    """
    keys, values, keys_full, keys_free, values_full, values_free = ring
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    q_ptr, out_ptr, lse_ptr = tensors
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    heads: gl.constexpr = kv_heads * group
    OWN: gl.constexpr = PART * HALF
    scale = scale * LOG2E
    zeros = gl.zeros([HALF, KEYS], gl.float32, SCORES)
    lowest = gl.full([HALF], float("-inf"), gl.float32, ROWS)
    nothing = gl.zeros([HALF], gl.float32, ROWS)
    unit = _unit(0, step, kv_heads)
    following = _unit(1, step, kv_heads)
    tiles = _tiles(unit, group, KEYS)
    p = gl.zeros([HALF, KEYS], dtype, WEIGHTS)
    best = lowest
    weight = nothing
    if tiles > 0:
        _ask(q_ptr, strides, queries.index(PART), unit, OWN, group, DIM, WIDE)
        async_copy.wait_group(0)
        fence_async_shared()
        mbarrier.wait(keys_full.index(0), 0)
        scores = warpgroup_mma(queries.index(PART), keys.index(0).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(keys_free.index(0), count=1)
        if _plain(unit, group, KEYS) == 0:
            scores = _hide(scores, 0, _slots(unit, OWN, group, ROWS))
        weights, best, weight, _shrink = _weigh(scores, best, weight, scale)
        p = gl.convert_layout(weights.to(dtype), WEIGHTS)
    at = 0
    turn = 0
    while tiles > 0:
        q_tile = queries.index(turn % 2 * 2 + PART)
        turn += 1
        q_following = queries.index(turn % 2 * 2 + PART)
        _ask(q_ptr, strides, q_following, following, OWN, group, DIM, WIDE)
        plain = _plain(unit, group, KEYS)
        own = _slots(unit, OWN, group, ROWS)
        out = gl.zeros([HALF, DIM], gl.float32, OUT)
        for tile in range(1, tiles):
            last = at % STAGES
            last_phase = at // STAGES & 1
            at += 1
            stage = at % STAGES
            mbarrier.wait(keys_full.index(stage), at // STAGES & 1)
            scores = warpgroup_mma(q_tile, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            mbarrier.wait(values_full.index(last), last_phase)
            out = warpgroup_mma(p, values.index(last), out, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(keys_free.index(stage), count=1)
            # The product with the last tile's values is still running: hence a softmax in each branch, since ptxas waits for
            # it at the start of the block that has the wait.
            if tile >= plain:
                scores = _hide(scores, tile * KEYS, own)
                weights, best, weight, shrink = _weigh(scores, best, weight, scale)
            else:
                weights, best, weight, shrink = _weigh(scores, best, weight, scale)
            out = warpgroup_mma_wait(0, deps=[out])
            mbarrier.arrive(values_free.index(last), count=1)
            out = out * gl.convert_layout(shrink, gl.SliceLayout(1, OUT))[:, None]
            p = gl.convert_layout(weights.to(dtype), WEIGHTS)
        later = _unit(turn + 1, step, kv_heads)
        last = at % STAGES
        mbarrier.wait(values_full.index(last), at // STAGES & 1)
        if tiles * KEYS > _held(unit):
            # Slots that the row does not hold may hold anything, and zero times NaN is NaN. Both groups write the
            # same, each before its own product.
            slot = (tiles - 1) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, WIDE))
            held = values.index(last).load(WIDE)
            values.index(last).store(gl.where((slot < _held(unit))[:, None], held, 0.0))
            fence_async_shared()
        at += 1
        best_before = best
        weight_before = weight
        tiles = _tiles(following, group, KEYS)
        if tiles > 0:
            async_copy.wait_group(0)
            fence_async_shared()
            stage = at % STAGES
            mbarrier.wait(keys_full.index(stage), at // STAGES & 1)
            scores = warpgroup_mma(q_following, keys.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            out = warpgroup_mma(p, values.index(last), out, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[scores])
            mbarrier.arrive(keys_free.index(stage), count=1)
            if _plain(following, group, KEYS) == 0:
                scores = _hide(scores, 0, _slots(following, OWN, group, ROWS))
                weights, best, weight, _shrink = _weigh(scores, lowest, nothing, scale)
            else:
                weights, best, weight, _shrink = _weigh(scores, lowest, nothing, scale)
            out = warpgroup_mma_wait(0, deps=[out])
            p = gl.convert_layout(weights.to(dtype), WEIGHTS)
        else:
            out = warpgroup_mma(p, values.index(last), out, is_async=True)
            out = warpgroup_mma_wait(0, deps=[out])
        mbarrier.arrive(values_free.index(last), count=1)
        _write(out_ptr, lse_ptr, unit, out, best_before, weight_before, scale, OWN, heads, group, DIM, WIDE)
        unit = following
        following = later


@jit(do_not_specialize=["units"])
def hopper_kernel(
    q_ptr,
    cache,
    table_ptr,
    units_ptr,
    out_ptr,
    lse_ptr,
    q_token_stride,
    q_head_stride,
    page_rows,
    kind_rows,
    head_rows,
    table_stride,
    scale,
    units,
    kv_heads: gl.constexpr,
    group: gl.constexpr,
    page_tokens: gl.constexpr,
    BOX: gl.constexpr,
    KEYS: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Units of 128 packed queries of a row and one KV head, as chunk_plan_kernel cut them, from the last to the first. scale > 0.

    cache: descriptor of the layer's memory as rows [rows, DIM], read in boxes of BOX slots (which divides the page) and 64
    elements. A slot's keys are in row page * page_rows + head * head_rows + place in the page, its values kind_rows on.
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    SWIZZLED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(dtype, [4, HALF, DIM], SWIZZLED)
    keys = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], SWIZZLED)
    values = gl.allocate_shared_memory(dtype, [STAGES, KEYS, DIM], SWIZZLED)
    # The same memory as the copies fill it: the halves of a head behind each other, each in runs of slots.
    BOXES: gl.constexpr = STAGES * (DIM // HALF) * (KEYS // BOX)
    key_boxes = keys._reinterpret(dtype, [BOXES, BOX, HALF], SWIZZLED)
    value_boxes = values._reinterpret(dtype, [BOXES, BOX, HALF], SWIZZLED)
    keys_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    keys_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    values_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    values_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(keys_full.index(stage), count=1)
        mbarrier.init(values_full.index(stage), count=1)
        mbarrier.init(keys_free.index(stage), count=2)
        mbarrier.init(values_free.index(stage), count=2)
    fence_async_shared()
    step = (units_ptr, units)
    tensors = (q_ptr, out_ptr, lse_ptr)
    q_strides = (q_token_stride, q_head_stride)
    ring = (keys, values, keys_full, keys_free, values_full, values_free)
    boxes = (key_boxes, value_boxes, keys_full, keys_free, values_full, values_free)
    cache_strides = (table_stride, page_rows, kind_rows, head_rows)
    FIRST: gl.constexpr = 0
    SECOND: gl.constexpr = 1
    gl.warp_specialize(
        [
            (
                _attend,
                (tensors, q_strides, scale, step, ring, queries, kv_heads, group, FIRST, KEYS, DIM, STAGES),
            ),
            (
                _attend,
                (tensors, q_strides, scale, step, ring, queries, kv_heads, group, SECOND, KEYS, DIM, STAGES),
            ),
            (
                _fetch,
                (
                    cache,
                    table_ptr,
                    cache_strides,
                    step,
                    boxes,
                    kv_heads,
                    group,
                    page_tokens,
                    BOX,
                    KEYS,
                    DIM,
                    STAGES,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


def cache_rows(kv: torch.Tensor, box: int) -> TensorDescriptor:
    """`cache` for hopper_kernel: all memory from the first element of kv [pages, 2, kv_heads, page_tokens, DIM] on."""
    dim = kv.shape[4]
    rows = (kv.untyped_storage().nbytes() // kv.itemsize - kv.storage_offset()) // dim
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor(kv, [rows, dim], [dim, 1], [box, HALF.value], layout)
