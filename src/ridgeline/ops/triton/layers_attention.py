"""Attention of one token in the kernel of all layers.

Keys and values are read as they lie, into registers. A warp takes whole keys, so that sums over a head's numbers end within it
and different keys meet only at the end (flash decoding, Dao et al. 2023).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

from ridgeline.ops.triton.layers_table import COS_SIN, HEAD_NORM, KV, PAGES, SLOT, WINDOW, pointer

TURNS = gl.constexpr(4)
"""Keys that a thread sees at a time."""
FEW_KEYS = gl.constexpr(512)
"""Up to which a program takes one query head and all of its keys: what it multiplies takes longer than what it reads, and nothing
must be put together."""
LEAST_KEYS = gl.constexpr(128)
"""Of a program that shares a head's keys with others."""
BROUGHT = gl.constexpr(512)
"""Keys that a program asks for ahead of attention."""
BRING = gl.constexpr("prefetch.global.L2 [$1]; mov.u32 $0, 0;")


@triton.constexpr_function
def _tile(GROUP: gl.constexpr, TURNS: gl.constexpr, DIM: gl.constexpr):
    """Layout of [GROUP, TURNS, keys, DIM]: DIM / 8 threads hold a key, so that sums over DIM end within a warp, and keys of
    different threads meet only at the end."""
    LANES: gl.constexpr = DIM // 8
    return gl.BlockedLayout([GROUP, TURNS, 1, 8], [1, 1, 32 // LANES, LANES], [1, 1, 8, 1], [3, 2, 1, 0])


@jit
def _along(axis: gl.constexpr, size: gl.constexpr, layout: gl.constexpr):
    """0 .. size - 1 along one of four axes."""
    if axis == 0:
        return gl.arange(0, size, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[:, None, None, None]
    elif axis == 1:
        return gl.arange(0, size, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))[None, :, None, None]
    elif axis == 2:
        return gl.arange(0, size, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))[None, None, :, None]
    else:
        return gl.arange(0, size, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))[None, None, None, :]


@jit
def _angles(angle_ptr, DIM: gl.constexpr, HALF: gl.constexpr):
    """Cosine and sine of each element, [1, 1, 1, DIM]; 1 and 0 where nothing turns."""
    at = _along(3, DIM, _tile(1, 1, DIM))
    angle = angle_ptr + gl.where(at < HALF, at, at - HALF)
    cos = gl.load(angle, mask=at < 2 * HALF, other=1.0)
    return cos, gl.load(angle + HALF, mask=at < 2 * HALF, other=0.0)


@jit
def _turned(
    heads_ptr,
    norm_ptr,
    angles,
    eps,
    HEADS: gl.constexpr,
    PADDED: gl.constexpr,
    DIM: gl.constexpr,
    HALF: gl.constexpr,
    NORMED: gl.constexpr,
    OFFSET: gl.constexpr,
):
    """HEADS heads as attention takes them, see qkv_write, [PADDED, 1, 1, DIM]: each element with the one it turns with."""
    LAYOUT: gl.constexpr = _tile(PADDED, 1, DIM)
    dtype: gl.constexpr = heads_ptr.dtype.element_ty
    at = _along(3, DIM, LAYOUT)
    partner = gl.where(at < HALF, at + HALF, gl.where(at < 2 * HALF, at - HALF, at))
    head = _along(0, PADDED, LAYOUT)
    real = (head < HEADS) & (at < DIM)
    x = gl.load(heads_ptr + head * DIM + at, mask=real, other=0.0, cache_modifier=".cg").to(gl.float32)
    other = gl.load(heads_ptr + head * DIM + partner, mask=real, other=0.0, cache_modifier=".cg").to(gl.float32)
    if NORMED:
        SHIFT: gl.constexpr = 1.0 if OFFSET else 0.0
        gain, other_gain = gl.load(norm_ptr + at).to(gl.float32), gl.load(norm_ptr + partner).to(gl.float32)
        norm = gl.rsqrt(gl.sum(x * x, 3) / DIM + eps)[:, :, :, None]
        x = (x * norm * (gain + SHIFT)).to(dtype).to(gl.float32)
        other = (other * norm * (other_gain + SHIFT)).to(dtype).to(gl.float32)
    cos, sin = gl.convert_layout(angles[0], LAYOUT), gl.convert_layout(angles[1], LAYOUT)
    return (x * cos + gl.where(at < HALF, -other, other) * sin).to(dtype)


@jit
def _pages(pages_ptr, first, last, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr):
    """Pages [1, TURNS, keys, 1] of a tile of slots, from the one from `first` on; int32."""
    LAYOUT: gl.constexpr = _tile(1, TURNS, DIM)
    slot = first + _along(1, TURNS, LAYOUT) * (2048 // DIM) + _along(2, 2048 // DIM, LAYOUT)
    return gl.load(pages_ptr + slot // PAGE_TOKENS, mask=slot < last, other=0)


@jit
def _keys(cache, pages, first, last, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr):
    """Keys and values [1, TURNS, keys, DIM] of the slots from `first` on, zeros from `last` on. cache: (keys of one head, page
    table of the row, elements from one page to the next, elements from keys to values)."""
    kv_ptr, _pages_ptr, page_stride, kind_stride = cache
    LAYOUT: gl.constexpr = _tile(1, TURNS, DIM)
    slot = first + _along(1, TURNS, LAYOUT) * (2048 // DIM) + _along(2, 2048 // DIM, LAYOUT)
    at = pages.to(gl.int64) * page_stride + slot % PAGE_TOKENS * DIM + _along(3, DIM, LAYOUT)
    real = (slot < last) & (_along(3, DIM, LAYOUT) < DIM)
    return gl.load(kv_ptr + at, mask=real, other=0.0), gl.load(kv_ptr + kind_stride + at, mask=real, other=0.0)


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
def _joined(seen, top, total, out):
    """Softmax over two sets of keys from what is known of each (Milakov and Gimelshein 2018): largest score, as a power of 2, sum
    of exponentials, and the values weighted by them; [GROUP, keys], the same, and [GROUP, keys, DIM]."""
    before, sums, values = seen
    most = gl.maximum(before, top)
    # Without a key yet there is nothing to scale, and no infinity may meet another.
    base = gl.where(most == -float("inf"), 0.0, most)
    old, new = gl.exp2(before - base), gl.exp2(top - base)
    EACH: gl.constexpr = gl.SliceLayout(2, values.type.layout)
    values = values * gl.convert_layout(old, EACH)[:, :, None] + out * gl.convert_layout(new, EACH)[:, :, None]
    return most, sums * old + total * new, values


@jit
def _with_keys(seen, q, keys, values, first, last, scale):
    """`seen` and the slots from `first` to `last` of a tile of keys. q: [GROUP, 1, 1, DIM]; scale: of scores in powers of 2."""
    GROUP: gl.constexpr = q.shape[0]
    DIM: gl.constexpr = q.shape[3]
    LAYOUT: gl.constexpr = _tile(GROUP, TURNS, DIM)
    SCORES: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    q = gl.convert_layout(q, LAYOUT).to(gl.float32)
    scores = gl.sum(q * gl.convert_layout(keys, LAYOUT).to(gl.float32), 3) * scale
    turn = gl.arange(0, TURNS, gl.SliceLayout(0, gl.SliceLayout(2, SCORES)))[None, :, None]
    slot = (
        first
        + turn * (2048 // DIM)
        + gl.arange(0, 2048 // DIM, gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))[None, None, :]
    )
    scores = gl.where(slot < last, scores, -float("inf"))
    top = gl.max(scores, 1)
    base = gl.where(top == -float("inf"), 0.0, top)
    weight = gl.exp2(scores - base[:, None, :])
    out = gl.sum(weight[:, :, :, None] * gl.convert_layout(values, LAYOUT).to(gl.float32), 1)
    return _joined(seen, top, gl.sum(weight, 1), out)


@jit
def _no_keys(GROUP: gl.constexpr, DIM: gl.constexpr):
    LAYOUT: gl.constexpr = _tile(GROUP, TURNS, DIM)
    EACH: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))
    none = gl.full([GROUP, 2048 // DIM], -float("inf"), gl.float32, EACH)
    out = gl.zeros([GROUP, 2048 // DIM, DIM], gl.float32, gl.SliceLayout(1, LAYOUT))
    return none, gl.zeros([GROUP, 2048 // DIM], gl.float32, EACH), out


@jit
def _one_key(q, key, value, taken, scale):
    """What is known of one key, if it is `taken`. q: [GROUP, 1, 1, DIM]; key, value: [1, 1, 1, DIM]."""
    GROUP: gl.constexpr = q.shape[0]
    DIM: gl.constexpr = q.shape[3]
    none, zeros, out = _no_keys(GROUP, DIM)
    score = gl.sum(gl.sum(q.to(gl.float32) * gl.convert_layout(key, q.type.layout).to(gl.float32), 3), 1) * scale
    EACH: gl.constexpr = none.type.layout
    VALUES: gl.constexpr = out.type.layout
    mine = taken & (gl.arange(0, 2048 // DIM, gl.SliceLayout(0, EACH)) == 0)[None, :]
    first = taken & (gl.arange(0, 2048 // DIM, gl.SliceLayout(0, gl.SliceLayout(2, VALUES))) == 0)[None, :, None]
    value = gl.convert_layout(gl.sum(value.to(gl.float32), 1), VALUES)
    return gl.where(mine, gl.convert_layout(score, EACH), none), gl.where(mine, 1.0, zeros), gl.where(first, value, out)


@jit
def _over_keys(seen, held):
    """What is known of all keys of a tile: [GROUP], [GROUP], [GROUP, DIM]. held: memory to exchange values in."""
    top, sums, values = seen
    GROUP: gl.constexpr = values.shape[0]
    DIM: gl.constexpr = values.shape[2]
    EACH: gl.constexpr = gl.SliceLayout(2, values.type.layout)
    most = gl.max(top, 1)
    base = gl.where(most == -float("inf"), 0.0, most)
    weight = gl.exp2(top - base[:, None])
    values = values * gl.convert_layout(weight, EACH)[:, :, None]
    # Within each of the 8 warps first.
    values = gl.sum(gl.reshape(values, (GROUP, 8, 256 // DIM, DIM)), 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    ACROSS: gl.constexpr = gl.BlockedLayout([1, 8, 2], [1, 1, 32], [GROUP, 1, 8 // GROUP], [2, 1, 0])
    room = held._reinterpret(gl.float32, [GROUP, 8, DIM], FLAT)
    gl.thread_barrier()
    room.store(values)
    gl.thread_barrier()
    return most, gl.sum(sums * weight, 1), gl.sum(room.load(ACROSS), 1)


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
    GROUP: gl.constexpr = HEADS // KV_HEADS
    TILE: gl.constexpr = TURNS * (2048 // DIM)
    window, slot = gl.load(layer_ptr + WINDOW).to(gl.int32), gl.load(layer_ptr + SLOT)
    # Of the slots the newest is this token's own, which no cache holds yet.
    start = gl.where(window > 0, gl.maximum(length - window, 0), 0)
    slots = length - 1 - start
    alone = slots <= FEW_KEYS
    units = gl.where(alone, HEADS, KV_HEADS)
    unit, part = gl.program_id(0) % units, gl.program_id(0) // units
    head = gl.where(alone, unit // GROUP, unit)
    parts = gl.where(alone, 1, gl.minimum(gl.num_programs(0) // KV_HEADS, slots // LEAST_KEYS))
    each = gl.maximum(gl.cdiv(gl.cdiv(slots, parts), TILE), 1) * TILE
    parts = gl.maximum(gl.cdiv(slots, each), 1)
    first = start + part * each
    last = gl.where(part < parts, gl.minimum(first + each, length - 1), 0)
    kv_ptr = pointer(layer_ptr + KV, dtype) + head.to(gl.int64) * head_stride
    pages_ptr = gl.load(layer_ptr + PAGES).to(gl.pointer_type(gl.int32)) + row.to(gl.int64) * table_stride
    angle_ptr = pointer(layer_ptr + COS_SIN, gl.float32) + position.to(gl.int64) * (2 * HALF)
    norm_ptrs = (pointer(layer_ptr + HEAD_NORM, dtype), pointer(layer_ptr + HEAD_NORM + 1, dtype))
    cache = (kv_ptr, pages_ptr, page_stride, kind_stride)
    pages = _pages(pages_ptr, first, last, DIM, PAGE_TOKENS)
    next_pages = _pages(pages_ptr, first + TILE, last, DIM, PAGE_TOKENS)
    slot, angles = gl.load(slot_ptr + slot), _angles(angle_ptr, DIM, HALF)
    keys, values = _keys(cache, pages, first, last, DIM, PAGE_TOKENS)
    next_keys, next_values = _keys(cache, next_pages, first + TILE, last, DIM, PAGE_TOKENS)
    pages = _pages(pages_ptr, first + 2 * TILE, last, DIM, PAGE_TOKENS)
    tiles = (keys, values, next_keys, next_values, pages)
    _bring(cache, first + 2 * TILE, gl.minimum(last, first + 2 * TILE + BROUGHT), DIM, PAGE_TOKENS)
    return cache, (alone, unit, head, part, parts, first, last), slot, norm_ptrs, angles, tiles


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
    """attended [HEADS, DIM] of a layer, and the newest key and value into the cache. A program has one query head, or some keys of
    one KV head; the last of a KV head to end puts the parts together. ahead: see asked_ahead; buffers: see layers_kernel."""
    cache, share, slot, norm_ptrs, angles, _tiles = ahead
    kv_ptr, _pages_ptr, page_stride, kind_stride = cache
    alone, unit, head, part, parts, _first, _last = share
    GROUP: gl.constexpr = HEADS // KV_HEADS
    PADDED: gl.constexpr = triton.next_power_of_2(GROUP)
    if part < parts:
        own_ptr = qkv_ptr + (HEADS + head) * DIM
        along = _along(3, DIM, _tile(1, 1, DIM))
        value = gl.load(own_ptr + KV_HEADS * DIM + along, cache_modifier=".cg")
        key = _turned(own_ptr, norm_ptrs[1], angles, eps, 1, 1, DIM, HALF, NORMS & 2, OFFSET)
        newest = (key, value)
        if alone:
            one = _turned(qkv_ptr + unit * DIM, norm_ptrs[0], angles, eps, 1, 1, DIM, HALF, NORMS & 1, OFFSET)
            _whole(one, newest, ahead, attended_ptr + unit * DIM, held, scale, PAGE_TOKENS)
        else:
            q_ptr = qkv_ptr + head * GROUP * DIM
            q = _turned(q_ptr, norm_ptrs[0], angles, eps, GROUP, PADDED, DIM, HALF, NORMS & 1, OFFSET)
            _part(
                q, newest, ahead, attended_ptr + head * GROUP * DIM, buffers, held, scale, KV_HEADS, GROUP, PAGE_TOKENS
            )
        if (part == 0) & (unit % gl.where(alone, GROUP, 1) == 0):
            target = kv_ptr + slot // PAGE_TOKENS * page_stride + slot % PAGE_TOKENS * DIM + along
            gl.store(target, key)
            gl.store(target + kind_stride, value)


@jit
def _seen(q, newest, ahead, held, scale, PAGE_TOKENS: gl.constexpr):
    """What is known of this program's keys, see _over_keys; the first of those who share them has the newest."""
    cache, share, _slot, _norm_ptrs, _angles, tiles = ahead
    keys, values, next_keys, next_values, pages = tiles
    _alone, _unit, _head, part, _parts, first, last = share
    DIM: gl.constexpr = q.shape[3]
    TILE: gl.constexpr = TURNS * (2048 // DIM)
    seen = _one_key(q, newest[0], newest[1], part == 0, scale)
    for begin in range(first, last, TILE):
        seen = _with_keys(seen, q, keys, values, begin, last, scale)
        keys, values = next_keys, next_values
        next_keys, next_values = _keys(cache, pages, begin + 2 * TILE, last, DIM, PAGE_TOKENS)
        pages = _pages(cache[1], begin + 3 * TILE, last, DIM, PAGE_TOKENS)
    return _over_keys(seen, held)


@jit
def _whole(q, newest, ahead, attended_ptr, held, scale, PAGE_TOKENS: gl.constexpr):
    """Attention of one head."""
    _top, total, out = _seen(q, newest, ahead, held, scale, PAGE_TOKENS)
    _write(attended_ptr, total, out, 1)


@jit
def _part(
    q,
    newest,
    ahead,
    attended_ptr,
    buffers,
    held,
    scale,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
):
    """A part of attention of the heads of a group, and all of it if this is the last part to end."""
    _alone, _unit, head, part, parts, _first, _last = ahead[1]
    part_ptr, part_sums_ptr, arrivals_ptr, _counter_ptr = buffers
    PADDED: gl.constexpr = q.shape[0]
    DIM: gl.constexpr = q.shape[3]
    top, total, out = _seen(q, newest, ahead, held, scale, PAGE_TOKENS)
    line = head * (gl.num_programs(0) // KV_HEADS)
    OUT: gl.constexpr = out.type.layout
    member = gl.arange(0, PADDED, gl.SliceLayout(1, OUT))[:, None]
    at = gl.arange(0, DIM, gl.SliceLayout(0, OUT))[None, :]
    gl.store(part_ptr + ((line + part) * PADDED + member) * DIM + at, out)
    sums = part_sums_ptr + 2 * ((line + part) * PADDED + gl.arange(0, PADDED, top.type.layout))
    gl.store(sums, top)
    gl.store(sums + 1, total)
    gl.thread_barrier()
    if gl.atomic_add(arrivals_ptr + head, 1, sem="acq_rel") == parts - 1:
        gl.store(arrivals_ptr + head, 0)
        total, out = _together(part_ptr, part_sums_ptr, line, parts, held, PADDED, DIM)
        _write(attended_ptr, total, out, GROUP)


@jit
def _write(attended_ptr, total, out, HEADS: gl.constexpr):
    OUT: gl.constexpr = out.type.layout
    member = gl.arange(0, out.shape[0], gl.SliceLayout(1, OUT))[:, None]
    at = gl.arange(0, out.shape[1], gl.SliceLayout(0, OUT))[None, :]
    out = out / gl.convert_layout(total, gl.SliceLayout(1, OUT))[:, None]
    gl.store(attended_ptr + member * out.shape[1] + at, out.to(attended_ptr.dtype.element_ty), mask=member < HEADS)


@jit
def _together(part_ptr, part_sums_ptr, first, parts, held, PADDED: gl.constexpr, DIM: gl.constexpr):
    """Sums of exponentials [PADDED] and weighted values [PADDED, DIM] from what programs know of their keys, from line `first`
    of parts on."""
    seen = _no_keys(PADDED, DIM)
    KEYS: gl.constexpr = 2048 // DIM
    SUMS: gl.constexpr = seen[0].type.layout
    VALUES: gl.constexpr = seen[2].type.layout
    member = gl.arange(0, PADDED, gl.SliceLayout(1, SUMS))[:, None]
    key = gl.arange(0, KEYS, gl.SliceLayout(0, SUMS))[None, :]
    wide_member = gl.arange(0, PADDED, gl.SliceLayout(1, gl.SliceLayout(2, VALUES)))[:, None, None]
    wide_key = gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, VALUES)))[None, :, None]
    at = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, VALUES)))[None, None, :]
    for begin in range(0, parts, KEYS):
        sums = part_sums_ptr + 2 * ((first + begin + key) * PADDED + member)
        top = gl.load(sums, mask=begin + key < parts, other=-float("inf"), cache_modifier=".cg")
        total = gl.load(sums + 1, mask=begin + key < parts, other=0.0, cache_modifier=".cg")
        line = (first + begin + wide_key) * PADDED + wide_member
        real = (begin + wide_key < parts) & (wide_member + at < PADDED + DIM)
        out = gl.load(part_ptr + line * DIM + at, mask=real, other=0.0, cache_modifier=".cg")
        seen = _joined(seen, top, total, out)
    _top, total, out = _over_keys(seen, held)
    return total, out
