"""Attention of one query head and all of its keys, few, by one program of the kernel of all layers.

Keys and values are read as they lie, into registers. A warp takes whole keys, so that sums over a head's numbers end within it
and different keys meet only at the end.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl

TURNS = gl.constexpr(4)
"""Keys that a thread sees at a time."""


@triton.constexpr_function
def _tile(TURNS: gl.constexpr, DIM: gl.constexpr):
    """Layout of [TURNS, keys, DIM]: DIM / 8 threads hold a key, so that sums over DIM end within a warp, and keys of different
    threads meet only at the end."""
    LANES: gl.constexpr = DIM // 8
    return gl.BlockedLayout([TURNS, 1, 8], [1, 32 // LANES, LANES], [1, 8, 1], [2, 1, 0])


@jit
def _numbers(TURNS: gl.constexpr, DIM: gl.constexpr):
    """Of a head, [1, 1, DIM]."""
    LAYOUT: gl.constexpr = _tile(TURNS, DIM)
    return gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]


@jit
def _slots(first, layout: gl.constexpr, DIM: gl.constexpr):
    """Of a tile from slot `first` on, [TURNS, keys]."""
    turn = gl.arange(0, TURNS, gl.SliceLayout(1, layout))[:, None]
    return first + turn * (2048 // DIM) + gl.arange(0, 2048 // DIM, gl.SliceLayout(0, layout))[None, :]


@jit
def _pages(cache, first, last, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr):
    """Pages [TURNS, keys] of the tile of slots from `first` on; int32."""
    SLOTS: gl.constexpr = gl.SliceLayout(2, _tile(TURNS, DIM))
    slot = _slots(first, SLOTS, DIM)
    return gl.load(cache[1] + slot // PAGE_TOKENS, mask=slot < last, other=0)


@jit
def _keys(cache, pages, first, last, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr):
    """Keys and values [TURNS, keys, DIM] of the slots from `first` on, zeros from `last` on."""
    kv_ptr, _pages_ptr, page_stride, kind_stride = cache
    SLOTS: gl.constexpr = pages.type.layout
    slot = _slots(first, SLOTS, DIM)
    at = (pages.to(gl.int64) * page_stride + slot % PAGE_TOKENS * DIM)[:, :, None] + _numbers(TURNS, DIM)
    real = (slot < last)[:, :, None]
    return gl.load(kv_ptr + at, mask=real, other=0.0), gl.load(kv_ptr + kind_stride + at, mask=real, other=0.0)


@jit
def few_asked(cache, first, last, angle_ptr, DIM: gl.constexpr, HALF: gl.constexpr, PAGE_TOKENS: gl.constexpr):
    """What attention to the slots from `first` to `last` needs first, see few_attended: two tiles, pages of a third, and cosine and
    sine of each number of a head, 1 and 0 where nothing turns."""
    TILE: gl.constexpr = TURNS * (2048 // DIM)
    pages = _pages(cache, first, last, DIM, PAGE_TOKENS)
    next_pages = _pages(cache, first + TILE, last, DIM, PAGE_TOKENS)
    at = _numbers(1, DIM)
    angle = angle_ptr + gl.where(at < HALF, at, at - HALF)
    cos = gl.load(angle, mask=at < 2 * HALF, other=1.0)
    angles = (cos, gl.load(angle + HALF, mask=at < 2 * HALF, other=0.0))
    tile = _keys(cache, pages, first, last, DIM, PAGE_TOKENS)
    next_tile = _keys(cache, next_pages, first + TILE, last, DIM, PAGE_TOKENS)
    return tile, next_tile, _pages(cache, first + 2 * TILE, last, DIM, PAGE_TOKENS), angles


@jit
def _turned(
    head_ptr, norm_ptr, angles, eps, DIM: gl.constexpr, HALF: gl.constexpr, NORMED: gl.constexpr, OFFSET: gl.constexpr
):
    """A head as attention takes it, see qkv_write, [1, 1, DIM]: each number with the one it turns with."""
    dtype: gl.constexpr = head_ptr.dtype.element_ty
    at = _numbers(1, DIM)
    partner = gl.where(at < HALF, at + HALF, gl.where(at < 2 * HALF, at - HALF, at))
    x = gl.load(head_ptr + at, cache_modifier=".cg").to(gl.float32)
    other = gl.load(head_ptr + partner, cache_modifier=".cg").to(gl.float32)
    if NORMED:
        SHIFT: gl.constexpr = 1.0 if OFFSET else 0.0
        gain, other_gain = gl.load(norm_ptr + at).to(gl.float32), gl.load(norm_ptr + partner).to(gl.float32)
        norm = gl.rsqrt(gl.sum(x * x, 2) / DIM + eps)[:, :, None]
        x = (x * norm * (gain + SHIFT)).to(dtype).to(gl.float32)
        other = (other * norm * (other_gain + SHIFT)).to(dtype).to(gl.float32)
    return (x * angles[0] + gl.where(at < HALF, -other, other) * angles[1]).to(dtype)


@jit
def _no_keys(DIM: gl.constexpr):
    LAYOUT: gl.constexpr = _tile(TURNS, DIM)
    EACH: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    none = gl.full([2048 // DIM], -float("inf"), gl.float32, EACH)
    return none, gl.zeros_like(none), gl.zeros([2048 // DIM, DIM], gl.float32, gl.SliceLayout(0, LAYOUT))


@jit
def _one_key(q, key, value, scale):
    """What is known of one key. q, key, value: [1, 1, DIM]."""
    DIM: gl.constexpr = q.shape[2]
    none, zeros, out = _no_keys(DIM)
    score = gl.sum(gl.sum(q.to(gl.float32) * key.to(gl.float32), 2), 0) * scale
    EACH: gl.constexpr = none.type.layout
    VALUES: gl.constexpr = out.type.layout
    mine = gl.arange(0, 2048 // DIM, EACH) == 0
    first = (gl.arange(0, 2048 // DIM, gl.SliceLayout(1, VALUES)) == 0)[:, None]
    value = gl.convert_layout(gl.sum(value.to(gl.float32), 0), VALUES)
    return gl.where(mine, gl.convert_layout(score, EACH), none), gl.where(mine, 1.0, zeros), gl.where(first, value, out)


@jit
def _with_keys(seen, q, keys, values, first, last, scale):
    """`seen` and the slots from `first` to `last` of a tile (Milakov and Gimelshein 2018): of each thread's keys the largest score,
    as a power of 2, the sum of exponentials, and the values weighted by them; [keys], [keys] and [keys, DIM]."""
    before, sums, out = seen
    DIM: gl.constexpr = q.shape[2]
    LAYOUT: gl.constexpr = _tile(TURNS, DIM)
    scores = gl.sum(gl.convert_layout(q, LAYOUT).to(gl.float32) * keys.to(gl.float32), 2) * scale
    SLOTS: gl.constexpr = scores.type.layout
    scores = gl.where(_slots(first, SLOTS, DIM) < last, scores, -float("inf"))
    top = gl.maximum(before, gl.max(scores, 0))
    # Without a key yet there is nothing to scale, and no infinity may meet another.
    base = gl.where(top == -float("inf"), 0.0, top)
    old, weight = gl.exp2(before - base), gl.exp2(scores - base[None, :])
    out = out * gl.convert_layout(old, gl.SliceLayout(1, out.type.layout))[:, None]
    out += gl.sum(weight[:, :, None] * values.to(gl.float32), 0)
    return top, sums * old + gl.sum(weight, 0), out


@jit
def _over_keys(seen, held):
    """The values [DIM] weighted over all keys. held: memory to exchange them in."""
    top, sums, out = seen
    DIM: gl.constexpr = out.shape[1]
    # One thread has the newest key, so there is a largest score.
    weight = gl.exp2(top - gl.max(top, 0))
    out = out * gl.convert_layout(weight, gl.SliceLayout(1, out.type.layout))[:, None]
    # Within each of the 8 warps first.
    out = gl.sum(gl.reshape(out, (8, 256 // DIM, DIM)), 1)
    ACROSS: gl.constexpr = gl.BlockedLayout([8, 2], [1, 32], [1, 8], [1, 0])
    room = held._reinterpret(gl.float32, [8, DIM], gl.SwizzledSharedLayout(4, 1, 8, [1, 0]))
    gl.thread_barrier()
    room.store(out)
    gl.thread_barrier()
    return gl.sum(room.load(ACROSS), 0) / gl.sum(sums * weight, 0)


@jit
def few_attended(
    asked,
    cache,
    head_ptrs,
    norm_ptrs,
    first,
    last,
    held,
    eps,
    scale,
    DIM: gl.constexpr,
    HALF: gl.constexpr,
    PAGE_TOKENS: gl.constexpr,
    NORMS: gl.constexpr,
    OFFSET: gl.constexpr,
):
    """Attention of a query head [DIM] to the slots from `first` to `last` and to the newest key; that key, its value [1, 1, DIM].
    asked: see few_asked; head_ptrs: of the head, its key and its value."""
    TILE: gl.constexpr = TURNS * (2048 // DIM)
    tile, next_tile, pages, angles = asked
    value = gl.load(head_ptrs[2] + _numbers(1, DIM), cache_modifier=".cg")
    key = _turned(head_ptrs[1], norm_ptrs[1], angles, eps, DIM, HALF, NORMS & 2, OFFSET)
    q = _turned(head_ptrs[0], norm_ptrs[0], angles, eps, DIM, HALF, NORMS & 1, OFFSET)
    seen = _one_key(q, key, value, scale)
    for begin in range(first, last, TILE):
        seen = _with_keys(seen, q, tile[0], tile[1], begin, last, scale)
        tile = next_tile
        next_tile = _keys(cache, pages, begin + 2 * TILE, last, DIM, PAGE_TOKENS)
        pages = _pages(cache, begin + 3 * TILE, last, DIM, PAGE_TOKENS)
    return _over_keys(seen, held), key, value
