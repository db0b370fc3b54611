"""Attention of one token in the kernel of all layers: who does which part of it, and what is asked for before it begins.

A processor takes about 32 KB in a microsecond beside its weights. With few keys putting parts together costs more than that.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from ridgeline.ops.triton.layers_few_keys import few_asked, few_attended
from ridgeline.ops.triton.layers_many_keys import MOST_PARTS, TILE, many_attended
from ridgeline.ops.triton.layers_table import COS_SIN, HEAD_NORM, KV, PAGES, SLOT, WINDOW, pointer

FEW_KEYS = gl.constexpr(512)
"""Up to which a program takes one query head and all of its keys, and nothing must be put together."""
BROUGHT = gl.constexpr(512)
"""Keys that a program asks for ahead of attention, beside those it loads."""
BRING = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@jit
def _bring(cache, first, last, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr):
    """Ask for the keys and values of slots from `first` to `last` to be brought nearer, which takes microseconds while weights
    stream; nobody waits."""
    kv_ptr, pages_ptr, page_stride, kind_stride = cache
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    for begin in range(first, last, 256):
        slot = begin + gl.arange(0, 256, LAYOUT)
        page = gl.load(pages_ptr + slot // PAGE_TOKENS, mask=slot < last, other=0).to(gl.int64)
        at = kv_ptr + page * page_stride + slot % PAGE_TOKENS * DIM
        for line in gl.static_range(DIM // 64):
            gl.inline_asm_elementwise(BRING, "=r,l", [at + line * 64], gl.int32, False, 1)
            gl.inline_asm_elementwise(BRING, "=r,l", [at + kind_stride + line * 64], gl.int32, False, 1)


@jit
def _share(length, window, HEADS: gl.constexpr, KV_HEADS: gl.constexpr):
    """Of this program: whether it has a query head alone, that head or the KV head; the KV head; which part of how many; slots from
    and to."""
    # Of the slots the newest is this token's own, which no cache holds yet.
    start = gl.where(window > 0, gl.maximum(length - window, 0), 0)
    slots = length - 1 - start
    alone = slots <= FEW_KEYS
    units = gl.where(alone, HEADS, KV_HEADS)
    unit, part = gl.program_id(0) % units, gl.program_id(0) // units
    head = gl.where(alone, unit // (HEADS // KV_HEADS), unit)
    most = gl.where(alone, 1, gl.minimum(gl.num_programs(0) // KV_HEADS, MOST_PARTS))
    each = gl.maximum(gl.cdiv(gl.cdiv(slots, most), TILE), 1) * TILE
    each = gl.where(alone, FEW_KEYS, each)
    parts = gl.maximum(gl.cdiv(slots, each), 1)
    first = start + part * each
    last = gl.where(part < parts, gl.minimum(first + each, length - 1), 0)
    return alone, unit, head, part, parts, first, last


@jit
def asked_ahead(
    layer_ptr,
    token,
    strides,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    HALF: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    dtype: gl.constexpr,
):
    """This program's share of attention in a layer, and what it needs of it that no program computes now: see attention."""
    row, length, position, slot_ptr, table_stride = token
    page_stride, kind_stride, head_stride = strides
    window, slot = gl.load(layer_ptr + WINDOW).to(gl.int32), gl.load(layer_ptr + SLOT)
    share = _share(length, window, HEADS, KV_HEADS)
    alone, _unit, head, _part, _parts, first, last = share
    kv_ptr = pointer(layer_ptr + KV, dtype) + head.to(gl.int64) * head_stride
    pages_ptr = gl.load(layer_ptr + PAGES).to(gl.pointer_type(gl.int32)) + row.to(gl.int64) * table_stride
    angle_ptr = pointer(layer_ptr + COS_SIN, gl.float32) + position.to(gl.int64) * (2 * HALF)
    norm_ptrs = (pointer(layer_ptr + HEAD_NORM, dtype), pointer(layer_ptr + HEAD_NORM + 1, dtype))
    # Keys of a head; the row's page table; elements from one page to the next, and from keys to values.
    cache = (kv_ptr, pages_ptr, page_stride, kind_stride)
    slot = gl.load(slot_ptr + slot)
    few = few_asked(cache, first, gl.where(alone, last, 0), angle_ptr, DIM, HALF, PAGE_TOKENS)
    # A tile of many keys is not loaded yet: beside those of few keys it would not fit into registers.
    begin = first + gl.where(alone, TILE, 0)
    _bring(cache, begin, gl.minimum(last, begin + BROUGHT), DIM, PAGE_TOKENS)
    return cache, share, slot, norm_ptrs, angle_ptr, few


@jit
def attention(
    ahead,
    qkv_ptr,
    attended_ptr,
    buffers,
    held,
    eps,
    scale,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    HALF: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    NORMS: gl.constexpr,
    OFFSET: gl.constexpr,
):
    """attended [HEADS, DIM] of a layer, and the newest key and value into the cache. ahead: see asked_ahead; buffers: see
    layers_kernel."""
    cache, share, slot, norm_ptrs, angle_ptr, few = ahead
    alone, unit, head, part, parts, first, last = share
    place_ptr = cache[0] + slot // PAGE_TOKENS * cache[2] + slot % PAGE_TOKENS * DIM
    if part < parts:
        if alone:
            key_ptr = qkv_ptr + (HEADS + head) * DIM
            head_ptrs = (qkv_ptr + unit * DIM, key_ptr, key_ptr + KV_HEADS * DIM)
            out, key, value = few_attended(
                few, cache, head_ptrs, norm_ptrs, first, last, held, eps, scale, DIM, HALF, PAGE_TOKENS, NORMS, OFFSET
            )
            at = gl.arange(0, DIM, out.type.layout)
            gl.store(attended_ptr + unit * DIM + at, out.to(qkv_ptr.dtype.element_ty))
            if unit % (HEADS // KV_HEADS) == 0:
                along = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, key.type.layout)))[None, None, :]
                gl.store(place_ptr + along, key)
                gl.store(place_ptr + cache[3] + along, value)
        else:
            many_attended(
                cache,
                qkv_ptr,
                attended_ptr,
                place_ptr,
                buffers,
                (head, part, parts, first, last),
                norm_ptrs,
                angle_ptr,
                held,
                eps,
                scale,
                HEADS,
                KV_HEADS,
                DIM,
                HALF,
                PAGE_TOKENS,
                NORMS,
                OFFSET,
            )
