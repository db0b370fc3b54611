"""Attention to many keys by several programs of the kernel of all layers, on tensor cores.

A program has all query heads of a KV head and some of its keys; a warp has 16 keys at a time, as they lie, in registers. The
order in which the matrix unit sees a head's numbers is such that a thread has neighbours of 16 bytes of both keys and values.
Warps, and then programs, put together what each knows of its own keys (flash decoding, Dao et al. 2023).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

WARPS = gl.constexpr(8)
KEYS = gl.constexpr(16)
"""Of a warp at a time."""
TILE = gl.constexpr(128)
"""Keys of a program at a time."""
HELD = gl.constexpr(16)
"""Rows of the matrix unit: query heads, and behind them the key and the value."""
MEMBERS = gl.constexpr(8)
"""Query heads of a KV head, at most: columns of the matrix unit's other side."""
MOST_PARTS = gl.constexpr(16)
"""Programs that share the keys of a KV head, at most."""
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))


@triton.constexpr_function
def _above(DIM, low):
    """Registers' bits of a head's numbers from `low` on."""
    return [[0, 0, 1 << bit] for bit in range(low, DIM.bit_length() - 1)]


@triton.constexpr_function
def _keys_layout(DIM):
    """Of keys, or queries, [WARPS, 16, DIM]."""
    own, lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0]], [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(own + _above(DIM, 5), lanes, warps, [], [8, 16, DIM])


@triton.constexpr_function
def _values_layout(DIM):
    """Of values [WARPS, 16, DIM]."""
    own = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 8, 0]]
    lanes, warps = [[0, 2, 0], [0, 4, 0], [0, 0, 8], [0, 0, 16], [0, 0, 32]], [[1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(own + _above(DIM, 6), lanes, warps, [], [8, 16, DIM])


@triton.constexpr_function
def _flat(DIM):
    """Of [heads, DIM]: a warp has whole heads."""
    return gl.SliceLayout(0, _across(DIM))


@triton.constexpr_function
def _across(DIM):
    """Of [WARPS, heads, DIM]: a thread has the same of all warps."""
    lanes = min(32, DIM // 4)
    return gl.BlockedLayout([8, 1, 4], [1, 32 // lanes, lanes], [1, 8, 1], [2, 1, 0])


@triton.constexpr_function
def _pairs_across(DIM):
    """Of [WARPS, heads, 2], alike."""
    lanes = min(32, DIM // 4)
    return gl.BlockedLayout([8, 1, 2], [1, 32 // lanes, lanes], [1, 8, 1], [2, 1, 0])


@jit
def _row(layout: gl.constexpr):
    return gl.arange(0, HELD, gl.SliceLayout(1, layout))[:, None]


@jit
def _at(DIM: gl.constexpr, layout: gl.constexpr):
    return gl.arange(0, DIM, gl.SliceLayout(0, layout))[None, :]


@jit
def _angles(angle_ptr, DIM: gl.constexpr, HALF: gl.constexpr):
    """Cosine and sine of each element, [1, DIM]; 1 and 0 where nothing turns."""
    at = _at(DIM, _flat(DIM))
    angle = angle_ptr + gl.where(at < HALF, at, at - HALF)
    cos = gl.load(angle, mask=at < 2 * HALF, other=1.0)
    return cos, gl.load(angle + HALF, mask=at < 2 * HALF, other=0.0)


@jit
def _partner(at, HALF: gl.constexpr):
    """The element that one turns with."""
    return gl.where(at < HALF, at + HALF, gl.where(at < 2 * HALF, at - HALF, at))


@jit
def _heads(
    qkv_ptr,
    head,
    norm_ptrs,
    angles,
    eps,
    HEADS: gl.constexpr,
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    HALF: gl.constexpr,
    NORMS: gl.constexpr,
    OFFSET: gl.constexpr,
):
    """The query heads of a KV head, its key and its value as attention takes them, see qkv_write, [HELD, DIM]."""
    GROUP: gl.constexpr = HEADS // KV_HEADS
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    at, row = _at(DIM, _flat(DIM)), _row(_flat(DIM))
    line = gl.where(row < GROUP, head * GROUP + row, HEADS + head + (row - GROUP) * KV_HEADS) * DIM
    real = row < GROUP + 2
    x = gl.load(qkv_ptr + line + at, mask=real, other=0.0, cache_modifier=".cg").to(gl.float32)
    other = gl.load(qkv_ptr + line + _partner(at, HALF), mask=real, other=0.0, cache_modifier=".cg").to(gl.float32)
    if NORMS:
        SHIFT: gl.constexpr = 1.0 if OFFSET else 0.0
        norm = gl.rsqrt(gl.sum(x * x, 1) / DIM + eps)[:, None]
        for which in gl.static_range(2):
            if NORMS >> which & 1:
                normed = (row < GROUP) if which == 0 else (row == GROUP)
                gain, other_gain = gl.load(norm_ptrs[which] + at), gl.load(norm_ptrs[which] + _partner(at, HALF))
                x = gl.where(normed, (x * norm * (gain.to(gl.float32) + SHIFT)).to(dtype).to(gl.float32), x)
                turning = (other * norm * (other_gain.to(gl.float32) + SHIFT)).to(dtype).to(gl.float32)
                other = gl.where(normed, turning, other)
    turned = x * angles[0] + gl.where(at < HALF, -other, other) * angles[1]
    return gl.where(row <= GROUP, turned, x).to(dtype)


@jit
def _placed(cache, first, last, layout: gl.constexpr, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr):
    """Where the numbers of the slots of a tile are, [WARPS, KEYS, DIM], and which of the slots are before `last`."""
    SLOTS: gl.constexpr = gl.SliceLayout(2, layout)
    slot = _slots(first, SLOTS)
    page = gl.load(cache[1] + slot // PAGE_TOKENS, mask=slot < last, other=0).to(gl.int64)
    at = (page * cache[2] + slot % PAGE_TOKENS * DIM)[:, :, None]
    along = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    return cache[0] + at + along, (slot < last)[:, :, None]


@jit
def _slots(first, layout: gl.constexpr):
    """Of a tile, [WARPS, KEYS]."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    return first + warp * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, layout))[None, :]


@jit
def _keys(cache, first, last, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr):
    at, real = _placed(cache, first, last, _keys_layout(DIM), DIM, PAGE_TOKENS)
    return gl.load(at, mask=real, other=0.0)


@jit
def _values(cache, first, last, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr):
    at, real = _placed(cache, first, last, _values_layout(DIM), DIM, PAGE_TOKENS)
    return gl.load(at + cache[3], mask=real, other=0.0)


@jit
def _for_scores(x, DIM: gl.constexpr):
    """Keys or queries [WARPS, 16, DIM] in the order in which the matrix unit sees their numbers."""
    x = gl.reshape(x, (WARPS, 16, DIM // 32, 4, 2, 2, 2))
    return gl.reshape(gl.permute(x, (0, 1, 2, 4, 5, 3, 6)), (WARPS, 16, DIM))


@jit
def _queries(rows, DIM: gl.constexpr):
    """Rows [1, HELD, DIM] in shared memory as the left side of scores, the same for each warp."""
    LAYOUT: gl.constexpr = _keys_layout(DIM)
    q = gl.broadcast(rows.load(LAYOUT), gl.zeros([WARPS, HELD, DIM], rows.dtype, LAYOUT))[0]
    return gl.convert_layout(_for_scores(q, DIM), LEFT)


@jit
def _scores(q, keys):
    """[WARPS, MEMBERS, KEYS]."""
    DIM: gl.constexpr = keys.shape[2]
    keys = gl.convert_layout(gl.permute(_for_scores(keys, DIM), (0, 2, 1)), RIGHT)
    return _of_queries(mma_v2(q, keys, gl.zeros([WARPS, HELD, KEYS], gl.float32, MMA)))


@jit
def _of_queries(scores):
    scores = gl.permute(gl.reshape(scores, (WARPS, 2, MEMBERS, KEYS)), (0, 2, 3, 1))
    return gl.split(scores)[0]


@jit
def _weighed(out, weights, values):
    """out [WARPS, DIM, MEMBERS] and the values weighed, in an order that `_in_order` undoes."""
    DIM: gl.constexpr = values.shape[2]
    values = gl.permute(gl.reshape(values, (WARPS, KEYS, DIM // 64, 8, 4, 2)), (0, 2, 4, 5, 3, 1))
    values = gl.convert_layout(gl.reshape(values, (WARPS, DIM, KEYS)), LEFT)
    return mma_v2(values, gl.convert_layout(gl.permute(weights, (0, 2, 1)), RIGHT), out)


@jit
def _in_order(out):
    """[WARPS, members, DIM]."""
    DIM: gl.constexpr = out.shape[1]
    out = gl.permute(gl.reshape(out, (WARPS, DIM // 64, 4, 2, 8, out.shape[2])), (0, 5, 1, 4, 2, 3))
    return gl.reshape(out, (WARPS, out.shape[1], DIM))


@jit
def _finite(top):
    """What exponents are taken off: without a key yet there is nothing to scale, and no infinity may meet another."""
    return gl.where(top == -float("inf"), 0.0, top)


@jit
def _seen(q, tile, cache, first, last, scale, GROUP: gl.constexpr, PAGE_TOKENS: gl.constexpr):
    """What each warp knows of its keys (Milakov and Gimelshein 2018): largest score, as a power of 2, and sum of exponentials,
    [WARPS, MEMBERS], and the values weighted by them [WARPS, DIM, MEMBERS]; nothing for members that the group has not."""
    keys, values = tile
    DIM: gl.constexpr = keys.shape[2]
    out = gl.zeros([WARPS, DIM, MEMBERS], gl.float32, MMA)
    total = gl.sum(_of_queries(gl.zeros([WARPS, HELD, KEYS], gl.float32, MMA)), 2)
    top = total - float("inf")
    for begin in range(first, last, TILE):
        scores = _scores(q, keys) * scale
        keys = _keys(cache, begin + TILE, last, DIM, PAGE_TOKENS)
        SLOTS: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
        member = gl.arange(0, MEMBERS, gl.SliceLayout(0, gl.SliceLayout(2, scores.type.layout)))[None, :, None]
        real = (_slots(begin, SLOTS)[:, None, :] < last) & (member < GROUP)
        scores = gl.where(real, scores, -float("inf"))
        most = gl.maximum(top, gl.max(scores, 2))
        old, weights = gl.exp2(top - _finite(most)), gl.exp2(scores - _finite(most)[:, :, None])
        top, total = most, total * old + gl.sum(weights, 2)
        out = out * gl.convert_layout(old, gl.SliceLayout(1, MMA))[:, None, :]
        out = _weighed(out, weights.to(values.dtype), values)
        values = _values(cache, begin + TILE, last, DIM, PAGE_TOKENS)
    return top, total, out


@jit
def _over_warps(top, total, out, held, PADDED: gl.constexpr):
    """What is known of all keys of a program: [PADDED], [PADDED], [PADDED, DIM]. held: memory to exchange values in; PADDED:
    members that may have something."""
    DIM: gl.constexpr = out.shape[1]
    top = gl.max(gl.reshape(top, (WARPS, MEMBERS // PADDED, PADDED)), 1)
    total = gl.sum(gl.reshape(total, (WARPS, MEMBERS // PADDED, PADDED)), 1)
    out = gl.sum(gl.reshape(out, (WARPS, DIM, MEMBERS // PADDED, PADDED)), 2)
    both = gl.convert_layout(gl.join(top, total), _pairs_across(DIM))
    room = held._reinterpret(gl.float32, [WARPS, PADDED, DIM], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
    gl.thread_barrier()
    room.store(_in_order(out))
    gl.thread_barrier()
    top, total = gl.split(both)
    SUMS: gl.constexpr = gl.SliceLayout(2, _across(DIM))
    return _joined(gl.convert_layout(top, SUMS), gl.convert_layout(total, SUMS), room.load(_across(DIM)))


@jit
def _joined(top, total, out):
    """Softmax over several sets of keys from what is known of each: [members], [members], [members, DIM]."""
    most = gl.max(top, 0)
    weight = gl.exp2(top - _finite(most)[None, :])
    EACH: gl.constexpr = gl.SliceLayout(1, _flat(out.shape[2]))
    total = gl.convert_layout(gl.sum(total * weight, 0), EACH)
    return gl.convert_layout(most, EACH), total, gl.sum(out * weight[:, :, None], 0)


@jit
def many_attended(
    cache,
    qkv_ptr,
    attended_ptr,
    place_ptr,
    buffers,
    share,
    norm_ptrs,
    angle_ptr,
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
    """A part of attention of a KV head's query heads, and all of it if this is the last part to end; the first has the newest key,
    and writes it to place_ptr. share: (KV head, part, parts, slots from and to)."""
    head, part, parts, first, last = share
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    GROUP: gl.constexpr = HEADS // KV_HEADS
    PADDED: gl.constexpr = triton.next_power_of_2(GROUP)
    tile = _keys(cache, first, last, DIM, PAGE_TOKENS), _values(cache, first, last, DIM, PAGE_TOKENS)
    angles = _angles(angle_ptr, DIM, HALF)
    heads = _heads(qkv_ptr, head, norm_ptrs, angles, eps, HEADS, KV_HEADS, DIM, HALF, NORMS, OFFSET)
    # For the matrix unit without conflicts of banks, and row by row.
    mixed = held._reinterpret(dtype, [1, HELD, DIM], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    rows = held._reinterpret(dtype, [2, HELD, DIM], gl.SwizzledSharedLayout(8, 1, 1, [1, 0])).index(1)
    gl.thread_barrier()
    mixed.store(gl.expand_dims(heads, 0))
    rows.store(heads)
    gl.thread_barrier()
    if part == 0:
        row = _row(_flat(DIM))
        at = gl.where(row == GROUP, 0, cache[3]) + _at(DIM, _flat(DIM))
        gl.store(place_ptr + at, heads, mask=(row == GROUP) | (row == GROUP + 1))
    q = _queries(mixed, DIM)
    own = rows.slice(0, PADDED, 0).load(_flat(DIM)).to(gl.float32)
    newest = gl.sum(own * rows.slice(GROUP, 1, 0).load(_flat(DIM)).to(gl.float32), 1) * scale
    newest = gl.where(part == 0, newest, -float("inf"))
    value = rows.slice(GROUP + 1, 1, 0).load(_flat(DIM)).to(gl.float32)
    top, total, out = _seen(q, tile, cache, first, last, scale, GROUP, PAGE_TOKENS)
    top, total, out = _over_warps(top, total, out, held, PADDED)
    most = gl.maximum(top, newest)
    old, new = gl.exp2(top - most), gl.exp2(newest - most)
    total = total * old + new
    out = out * old[:, None] + value * new[:, None]
    attended_ptr += head * GROUP * DIM
    if parts == 1:
        _write(attended_ptr, out, total, GROUP)
    else:
        _part(attended_ptr, out, most, total, buffers, share, GROUP)


@jit
def _write(attended_ptr, out, total, GROUP: gl.constexpr):
    DIM: gl.constexpr = out.shape[1]
    member = gl.arange(0, out.shape[0], gl.SliceLayout(1, _flat(DIM)))[:, None]
    out = (out / total[:, None]).to(attended_ptr.dtype.element_ty)
    gl.store(attended_ptr + member * DIM + _at(DIM, _flat(DIM)), out, mask=member < GROUP)


@jit
def _part(attended_ptr, out, top, total, buffers, share, GROUP: gl.constexpr):
    """What a program knows of its keys for the others, and of all keys if it is the last to end."""
    DIM: gl.constexpr = out.shape[1]
    part_ptr, sums_ptr, arrivals_ptr, _counter_ptr = buffers
    head, part, parts, _first, _last = share
    part_ptr += head * (MOST_PARTS * GROUP * DIM)
    sums_ptr += head * (MOST_PARTS * GROUP * 2)
    line = part * GROUP + gl.arange(0, out.shape[0], gl.SliceLayout(1, _flat(DIM)))
    real = line < (part + 1) * GROUP
    gl.store(part_ptr + line[:, None] * DIM + _at(DIM, _flat(DIM)), out, mask=real[:, None])
    gl.store(sums_ptr + line * 2, top, mask=real)
    gl.store(sums_ptr + line * 2 + 1, total, mask=real)
    gl.thread_barrier()
    if gl.atomic_add(arrivals_ptr + head, 1, sem="acq_rel") == parts - 1:
        gl.store(arrivals_ptr + head, 0)
        _together(attended_ptr, part_ptr, sums_ptr, parts, GROUP, out.shape[0], DIM)


@jit
def _together(attended_ptr, part_ptr, sums_ptr, parts, GROUP: gl.constexpr, PADDED: gl.constexpr, DIM: gl.constexpr):
    """Attention of a KV head's query heads from what programs know; a thread has the same numbers of all parts."""
    LAYOUT: gl.constexpr = _across(DIM)
    SUMS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    other = gl.arange(0, MOST_PARTS, gl.SliceLayout(1, SUMS))[:, None]
    member = gl.arange(0, PADDED, gl.SliceLayout(0, SUMS))[None, :]
    line, real = other * GROUP + member, (other < parts) & (member < GROUP)
    top = gl.load(sums_ptr + line * 2, mask=real, other=-float("inf"), cache_modifier=".cg")
    total = gl.load(sums_ptr + line * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
    at = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    out = gl.load(part_ptr + line[:, :, None] * DIM + at, mask=real[:, :, None], other=0.0, cache_modifier=".cg")
    _top, total, out = _joined(top, total, out)
    _write(attended_ptr, out, total, GROUP)
