"""Attention of one token in the kernel of all layers, on tensor cores.

A program processes all query heads of a KV head and a part of its keys. Keys and values arrive in alternating stages of the ring. A
warp loads 16 of a stage's keys, and PIECE elements of their values, from shared memory to registers. The matrix unit sees the
elements of a head in an order in which a thread holds 16 contiguous bytes of both. Warps, and then programs, combine their partial
results. Source: Flash-Decoding (Dao et al. 2023).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from ridgeline.ops.triton.gluon_names import barrier, reinterpret
from ridgeline.ops.triton.layers_keys import PIECE, share_of, slots_of_stage, stage_taken, stages_ended
from ridgeline.ops.triton.layers_table import COS_SIN, HEAD_NORM, KV, SLOT, WINDOW, pointer

WARPS = gl.constexpr(8)
KEYS = gl.constexpr(16)
"""Keys per warp and iteration."""
MMA_ROWS = gl.constexpr(16)
"""Rows of the matrix unit: query heads, then the new key and the new value."""
MEMBERS = gl.constexpr(8)
"""Maximum query heads per KV head: columns of the matrix unit's other operand."""
AT_A_TIME = gl.constexpr(16)
"""Parts that are combined per iteration."""
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA, 2))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA, 2))


@triton.constexpr_function
def _bits(size, step, dim, rank=2):
    """Basis vectors of a linear layout that enumerate `size` indices of a dimension, `step` apart."""
    return [[step << bit if axis == dim else 0 for axis in range(rank)] for bit in range(size.bit_length() - 1)]


@triton.constexpr_function
def _turning(DIM):
    """(low, high, other): the order of 8, 16 and 32 as head offsets of neighbouring threads. Eight threads read lines of two keys
    without bank conflicts."""
    return {64: (16, 32, 8), 128: (8, 32, 16), 256: (8, 16, 32)}[DIM]


@triton.constexpr_function
def _keys_layout(DIM):
    """Layout of queries [WARPS, 16, DIM], the same for each warp."""
    low, high, other = _turning(DIM)
    registers = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0], [0, 0, other], *_bits(DIM // 64, 64, 2, 3)]
    return gl.DistributedLinearLayout(
        registers, [[0, 0, low], [0, 0, high], *_bits(8, 1, 1, 3)], _bits(8, 1, 0, 3), [], [8, 16, DIM]
    )


@triton.constexpr_function
def _key_lines(DIM):
    """Layout of a stage of keys. Warps that share keys (but hold different values) hold all elements of them."""
    low, high, other = _turning(DIM)
    pieces = DIM // 64
    registers = [[0, 1], [0, 2], [0, 4], [8 * pieces, 0], [0, other], *_bits(pieces, 1, 0)]
    lanes = [[0, low], [0, high], *_bits(8, pieces, 0)]
    warps = [[0, 0]] * (pieces.bit_length() - 1) + _bits(8 // pieces, 16 * pieces, 0)
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [128, 64])


@triton.constexpr_function
def _shared_keys(DIM):
    """Layout of keys [8 / pieces, pieces, 16, DIM], the same for all pieces."""
    low, high, other = _turning(DIM)
    pieces = DIM // 64
    registers = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 8, 0], [0, 0, 0, other], *_bits(pieces, 64, 3, 4)]
    lanes = [[0, 0, 0, low], [0, 0, 0, high], *_bits(8, 1, 2, 4)]
    warps = [*_bits(pieces, 1, 1, 4), *_bits(8 // pieces, 1, 0, 4)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [8 // pieces, pieces, 16, DIM])


@triton.constexpr_function
def _value_lines(DIM):
    """Layout of a stage of values: a warp holds PIECE elements of 16 slots."""
    pieces = DIM // 64
    registers = [[0, 1], [0, 2], [0, 4], [pieces, 0], [8 * pieces, 0]]
    lanes = [[2 * pieces, 0], [4 * pieces, 0], [0, 8], [0, 16], [0, 32]]
    return gl.DistributedLinearLayout(
        registers, lanes, _bits(pieces, 1, 0) + _bits(8 // pieces, 16 * pieces, 0), [], [128, 64]
    )


@triton.constexpr_function
def _flat(DIM):
    """Layout of [heads, DIM]: a warp holds complete heads."""
    return gl.SliceLayout(0, _across(DIM))


@triton.constexpr_function
def _across(DIM):
    """Layout of [WARPS, heads, DIM]: a thread holds the same element of all warps."""
    lanes = min(32, DIM // 4)
    return gl.BlockedLayout([8, 1, 4], [1, 32 // lanes, lanes], [1, 8, 1], [2, 1, 0])


@triton.constexpr_function
def _pairs_across(DIM):
    """Layout of [WARPS, heads, 2], with the threads of _across."""
    lanes = min(32, DIM // 4)
    return gl.BlockedLayout([8, 1, 2], [1, 32 // lanes, lanes], [1, 8, 1], [2, 1, 0])


@jit
def _row(layout: gl.constexpr):
    return gl.arange(0, MMA_ROWS, gl.SliceLayout(1, layout))[:, None]


@jit
def _at(DIM: gl.constexpr, layout: gl.constexpr):
    return gl.arange(0, DIM, gl.SliceLayout(0, layout))[None, :]


@jit
def _angles(angle_ptr, DIM: gl.constexpr, HALF: gl.constexpr):
    """Cosine and sine of each element, [1, DIM]; 1 and 0 for unrotated dimensions."""
    at = _at(DIM, _flat(DIM))
    angle = angle_ptr + gl.where(at < HALF, at, at - HALF)
    cos = gl.load(angle, mask=at < 2 * HALF, other=1.0)
    return cos, gl.load(angle + HALF, mask=at < 2 * HALF, other=0.0)


@jit
def attention_inputs(layer_ptr, token, strides, SHAPE: gl.constexpr, dtype: gl.constexpr):
    """Issue the loads of a layer's attention that do not depend on this layer's products; the result is `ahead` of `attention`."""
    _row, length, position, slot_ptr, _table_stride = token
    page_stride, kind_stride, head_stride = strides
    DIM: gl.constexpr = SHAPE[2]
    HALF: gl.constexpr = SHAPE[3]
    PAGE_TOKENS: gl.constexpr = SHAPE[4]
    window = gl.load(layer_ptr + WINDOW).to(gl.int32)
    slot = gl.load(slot_ptr + gl.load(layer_ptr + SLOT))
    share = share_of(length, window, SHAPE)
    place_ptr = pointer(layer_ptr + KV, dtype) + share[0].to(gl.int64) * head_stride
    place_ptr += slot // PAGE_TOKENS * page_stride + slot % PAGE_TOKENS * DIM
    angle_ptr = pointer(layer_ptr + COS_SIN, gl.float32) + position.to(gl.int64) * (2 * HALF)
    norm_ptrs = (pointer(layer_ptr + HEAD_NORM, dtype), pointer(layer_ptr + HEAD_NORM + 1, dtype))
    return share, (place_ptr, kind_stride), _angles(angle_ptr, DIM, HALF), norm_ptrs


@jit
def _partner(at, HALF: gl.constexpr):
    """Index of the element that rotary embedding combines with `at`."""
    return gl.where(at < HALF, at + HALF, gl.where(at < 2 * HALF, at - HALF, at))


@jit
def _heads(
    qkv_ptr,
    head,
    norm_ptrs,
    angles,
    eps,
    SHAPE: gl.constexpr,
    NORMS: gl.constexpr,
    OFFSET: gl.constexpr,
):
    """Query heads of a KV head, its key and its value, normalised and rotated as in qkv_write: [MMA_ROWS, DIM]."""
    HEADS: gl.constexpr = SHAPE[0]
    KV_HEADS: gl.constexpr = SHAPE[1]
    DIM: gl.constexpr = SHAPE[2]
    HALF: gl.constexpr = SHAPE[3]
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
def _keys(ring, at, real, dtype: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr):
    """Load the keys of a stage, [WARPS, KEYS, DIM]. Undefined if the stage is not `real`."""
    PIECES: gl.constexpr = DIM // PIECE
    keys = stage_taken(ring, at, real, _key_lines(DIM), dtype, STAGES)
    keys = gl.convert_layout(gl.reshape(keys, (WARPS // PIECES, 1, KEYS, DIM)), _shared_keys(DIM))
    target = gl.zeros([WARPS // PIECES, PIECES, KEYS, DIM], dtype, _shared_keys(DIM))
    return gl.reshape(gl.broadcast(keys, target)[0], (WARPS, KEYS, DIM))


@jit
def _values(ring, at, dtype: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr):
    """Load the values of a stage, [WARPS, KEYS, PIECE]."""
    PIECES: gl.constexpr = DIM // PIECE
    values = stage_taken(ring, at, True, _value_lines(DIM), dtype, STAGES)
    values = gl.permute(gl.reshape(values, (WARPS // PIECES, KEYS, PIECES, PIECE)), (0, 2, 1, 3))
    return gl.reshape(values, (WARPS, KEYS, PIECE))


@jit
def _zeroed(values, begin, start, last, DIM: gl.constexpr):
    """Zero the values of masked slots. They are undefined memory and may be NaN, which a zero weight would not remove."""
    slot = _slots(begin, gl.SliceLayout(2, values.type.layout), DIM)[:, :, None]
    return gl.where((slot >= start) & (slot < last), values, 0.0)


@jit
def _slots(first, layout: gl.constexpr, DIM: gl.constexpr):
    """Slot numbers of a stage, [WARPS, KEYS]."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, layout))[:, None]
    return first + warp // (DIM // PIECE) * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, layout))[None, :]


@jit
def _for_scores(x, DIM: gl.constexpr):
    """Reorder keys or queries [WARPS, 16, DIM] to the element order of the matrix unit, in two halves [.., DIM / 2] whose products
    are independent."""
    x = gl.reshape(x, (WARPS, 16, DIM // 64, 2, 2, 2, 2, 2, 2))
    if DIM == 64:
        x = gl.permute(x, (0, 1, 2, 6, 7, 3, 4, 8, 5))
    elif DIM == 128:
        x = gl.permute(x, (0, 1, 2, 6, 7, 3, 5, 8, 4))
    else:
        x = gl.permute(x, (0, 1, 2, 6, 7, 4, 5, 8, 3))
    return gl.split(gl.reshape(x, (WARPS, 16, DIM // 2, 2)))


@jit
def _queries(rows, DIM: gl.constexpr):
    """Rows [1, MMA_ROWS, DIM] in shared memory as the left operand of the scores, the same for each warp."""
    LAYOUT: gl.constexpr = _keys_layout(DIM)
    q = gl.broadcast(rows.load(LAYOUT), gl.zeros([WARPS, MMA_ROWS, DIM], rows.dtype, LAYOUT))[0]
    first, second = _for_scores(q, DIM)
    return gl.convert_layout(first, LEFT), gl.convert_layout(second, LEFT)


@jit
def _scores(q, keys):
    """Scores [WARPS, MEMBERS, KEYS]."""
    DIM: gl.constexpr = keys.shape[2]
    none = gl.zeros([WARPS, MMA_ROWS, KEYS], gl.float32, MMA)
    first, second = _for_scores(keys, DIM)
    first = mma_v2(q[0], gl.convert_layout(gl.permute(first, (0, 2, 1)), RIGHT), none)
    second = mma_v2(q[1], gl.convert_layout(gl.permute(second, (0, 2, 1)), RIGHT), none)
    return _of_queries(first) + _of_queries(second)


@jit
def _of_queries(scores):
    scores = gl.permute(gl.reshape(scores, (WARPS, 2, MEMBERS, KEYS)), (0, 2, 3, 1))
    return gl.split(scores)[0]


@jit
def _weighed(out, weights, values):
    """out [WARPS, DIM, MEMBERS] plus the weighted values, in an order that `_in_order` undoes."""
    DIM: gl.constexpr = values.shape[2]
    values = gl.permute(gl.reshape(values, (WARPS, KEYS, DIM // 64, 8, 4, 2)), (0, 2, 4, 5, 3, 1))
    values = gl.convert_layout(gl.reshape(values, (WARPS, DIM, KEYS)), LEFT)
    return mma_v2(values, gl.convert_layout(gl.permute(weights, (0, 2, 1)), RIGHT), out)


@jit
def _in_order(out):
    """Undo the element order of `_weighed`: [WARPS, members, DIM]."""
    DIM: gl.constexpr = out.shape[1]
    out = gl.permute(gl.reshape(out, (WARPS, DIM // 64, 4, 2, 8, out.shape[2])), (0, 5, 1, 4, 2, 3))
    return gl.reshape(out, (WARPS, out.shape[1], DIM))


@jit
def _finite(top):
    """`top`, or 0 where no key was seen, so that no infinity is subtracted from another."""
    return gl.where(top == -float("inf"), 0.0, top)


@jit
def _seen(q, ring, at, share, scale, dtype: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr):
    """Online softmax of each warp over its keys (Milakov and Gimelshein 2018): largest score (base 2) and sum of exponentials
    [WARPS, MEMBERS], and the weighted values [WARPS, PIECE, MEMBERS]. Members past the group size are masked."""
    _head, _part, _parts, first, last, start = share
    TILE: gl.constexpr = slots_of_stage(DIM)
    out = gl.zeros([WARPS, PIECE, MEMBERS], gl.float32, MMA)
    total = gl.sum(_of_queries(gl.zeros([WARPS, MMA_ROWS, KEYS], gl.float32, MMA)), 2)
    top = total - float("inf")
    keys = _keys(ring, at, first < last, dtype, DIM, STAGES)
    for begin in range(first, last, TILE):
        scores = _scores(q, keys) * scale
        # Operands of the next products are loaded while the softmax weights are computed.
        values = _values(ring, at + 1, dtype, DIM, STAGES)
        keys = _keys(ring, at + 2, begin + TILE < last, dtype, DIM, STAGES)
        stages_ended(ring, at, STAGES)
        SLOTS: gl.constexpr = gl.SliceLayout(1, scores.type.layout)
        member = gl.arange(0, MEMBERS, gl.SliceLayout(0, gl.SliceLayout(2, scores.type.layout)))[None, :, None]
        slot = _slots(begin, SLOTS, DIM)[:, None, :]
        scores = gl.where((slot >= start) & (slot < last) & (member < GROUP), scores, -float("inf"))
        new_top = gl.maximum(top, gl.max(scores, 2))
        old, weights = gl.exp2(top - _finite(new_top)), gl.exp2(scores - _finite(new_top)[:, :, None])
        top, total = new_top, total * old + gl.sum(weights, 2)
        out = out * gl.convert_layout(old, gl.SliceLayout(1, MMA))[:, None, :]
        if (begin < start) | (begin + TILE > last):
            values = _zeroed(values, begin, start, last, DIM)
        out = _weighed(out, weights.to(dtype), values)
        at += 2
    return top, total, out


@jit
def _over_warps(top, total, out, scratch, PADDED: gl.constexpr, DIM: gl.constexpr):
    """Combine the warps of a program: [PADDED], [PADDED], [PADDED, DIM]. scratch: shared memory for the exchange. PADDED: group
    size, rounded up to a power of two."""
    PIECES: gl.constexpr = DIM // PIECE
    top = gl.max(gl.reshape(top, (WARPS, MEMBERS // PADDED, PADDED)), 1)
    total = gl.sum(gl.reshape(total, (WARPS, MEMBERS // PADDED, PADDED)), 1)
    out = _in_order(gl.sum(gl.reshape(out, (WARPS, PIECE, MEMBERS // PADDED, PADDED)), 2))
    out = gl.permute(gl.reshape(out, (WARPS // PIECES, PIECES, PADDED, PIECE)), (0, 2, 1, 3))
    both = gl.convert_layout(gl.join(top, total), _pairs_across(DIM))
    exchange = reinterpret(
        scratch, gl.float32, [WARPS // PIECES, PADDED, DIM], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0])
    )
    barrier()
    exchange.store(gl.reshape(out, (WARPS // PIECES, PADDED, DIM)))
    barrier()
    # Warps that share keys have the same maxima and sums.
    top, total = gl.split(gl.max(gl.reshape(both, (WARPS // PIECES, PIECES, PADDED, 2)), 1))
    SUMS: gl.constexpr = gl.SliceLayout(2, _across(DIM))
    return _joined(gl.convert_layout(top, SUMS), gl.convert_layout(total, SUMS), exchange.load(_across(DIM)))


@jit
def _joined(top, total, out):
    """Combine softmax results over several sets of keys: [members], [members], [members, DIM]."""
    new_top = gl.max(top, 0)
    weight = gl.exp2(top - _finite(new_top)[None, :])
    EACH: gl.constexpr = gl.SliceLayout(1, _flat(out.shape[2]))
    total = gl.convert_layout(gl.sum(total * weight, 0), EACH)
    return gl.convert_layout(new_top, EACH), total, gl.sum(out * weight[:, :, None], 0)


@jit
def _of_both(some, others):
    """Combine softmax results over two sets of keys."""
    new_top = gl.maximum(some[0], others[0])
    old, new = gl.exp2(some[0] - _finite(new_top)), gl.exp2(others[0] - _finite(new_top))
    return new_top, some[1] * old + others[1] * new, some[2] * old[:, None] + others[2] * new[:, None]


@jit
def attention(
    ahead,
    qkv_ptr,
    attended_ptr,
    buffers,
    ring,
    at,
    eps,
    scale,
    STAGES: gl.constexpr,
    SHAPE: gl.constexpr,
    NORMS: gl.constexpr,
    OFFSET: gl.constexpr,
):
    """Compute attended [query heads, size] of a layer, or this program's part of it, and write the new key and value to the cache.

    at: ring stages since the kernel began; returns it after this attention. ahead: see attention_inputs; buffers: see
    layers_kernel.
    """
    share = ahead[0]
    if share[1] < share[2]:
        _attended(ahead, qkv_ptr, attended_ptr, buffers, ring, at, eps, scale, STAGES, SHAPE, NORMS, OFFSET)
    return at + 2 * gl.cdiv(gl.maximum(share[4] - share[3], 0), slots_of_stage(SHAPE[2]))


@jit
def _attended(
    ahead,
    qkv_ptr,
    attended_ptr,
    buffers,
    ring,
    at,
    eps,
    scale,
    STAGES: gl.constexpr,
    SHAPE: gl.constexpr,
    NORMS: gl.constexpr,
    OFFSET: gl.constexpr,
):
    """Attention of a KV head's query heads over one part of the keys. Part 0 includes the new key and writes it to the cache."""
    share, newest, angles, norm_ptrs = ahead
    head, part, parts = share[0], share[1], share[2]
    scratch = ring[3]
    dtype: gl.constexpr = qkv_ptr.dtype.element_ty
    HEADS: gl.constexpr = SHAPE[0]
    DIM: gl.constexpr = SHAPE[2]
    GROUP: gl.constexpr = HEADS // SHAPE[1]
    PADDED: gl.constexpr = triton.next_power_of_2(GROUP)
    heads = _heads(qkv_ptr, head, norm_ptrs, angles, eps, SHAPE, NORMS, OFFSET)
    # Two copies: `mixed` for the matrix unit without bank conflicts, `rows` for access by row.
    mixed = reinterpret(scratch, dtype, [1, MMA_ROWS, DIM], gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
    rows = reinterpret(scratch, dtype, [2, MMA_ROWS, DIM], gl.SwizzledSharedLayout(8, 1, 1, [1, 0])).index(1)
    barrier()
    mixed.store(gl.expand_dims(heads, 0))
    rows.store(heads)
    barrier()
    if part == 0:
        row = _row(_flat(DIM))
        along = gl.where(row == GROUP, 0, newest[1]) + _at(DIM, _flat(DIM))
        gl.store(newest[0] + along, heads, mask=(row == GROUP) | (row == GROUP + 1))
    q = _queries(mixed, DIM)
    queries = rows.slice(0, PADDED, 0).load(_flat(DIM)).to(gl.float32)
    score = gl.sum(queries * rows.slice(GROUP, 1, 0).load(_flat(DIM)).to(gl.float32), 1) * scale
    score = gl.where(part == 0, score, -float("inf"))
    value = rows.slice(GROUP + 1, 1, 0).load(_flat(DIM)).to(gl.float32)
    top, total, out = _seen(q, ring, at, share, scale, dtype, GROUP, DIM, STAGES)
    top, total, out = _over_warps(top, total, out, scratch, PADDED, DIM)
    top, total, out = _of_both((top, total, out), (score, 1.0, value))
    attended_ptr += head * GROUP * DIM
    if parts == 1:
        _write(attended_ptr, out, total, GROUP)
    else:
        _part(attended_ptr, out, top, total, buffers, share, HEADS, GROUP)


@jit
def _write(attended_ptr, out, total, GROUP: gl.constexpr):
    DIM: gl.constexpr = out.shape[1]
    member = gl.arange(0, out.shape[0], gl.SliceLayout(1, _flat(DIM)))[:, None]
    out = (out / total[:, None]).to(attended_ptr.dtype.element_ty)
    gl.store(attended_ptr + member * DIM + _at(DIM, _flat(DIM)), out, mask=member < GROUP)


@jit
def _part(attended_ptr, out, top, total, buffers, share, HEADS: gl.constexpr, GROUP: gl.constexpr):
    """Store a program's partial result. The last program of a KV head to arrive combines all parts."""
    DIM: gl.constexpr = out.shape[1]
    part_ptr, sums_ptr, arrivals_ptr, _counter_ptr = buffers
    head, part, parts = share[0], share[1], share[2]
    member = gl.arange(0, out.shape[0], gl.SliceLayout(1, _flat(DIM)))
    line = part * HEADS + head * GROUP + member
    gl.store(
        part_ptr + line[:, None] * DIM + _at(DIM, _flat(DIM)), out / total[:, None], mask=(member < GROUP)[:, None]
    )
    gl.store(sums_ptr + line, top + gl.log2(total), mask=member < GROUP)
    barrier()
    if gl.atomic_add(arrivals_ptr + head, 1, sem="acq_rel") == parts - 1:
        gl.store(arrivals_ptr + head, 0)
        _together(attended_ptr, part_ptr, sums_ptr, head, parts, HEADS, GROUP, out.shape[0], DIM)


@jit
def _together(
    attended_ptr,
    part_ptr,
    sums_ptr,
    head,
    parts,
    HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    PADDED: gl.constexpr,
    DIM: gl.constexpr,
):
    """Combine the parts of a KV head's query heads and store. A thread holds the same elements of all parts."""
    LAYOUT: gl.constexpr = _across(DIM)
    SUMS: gl.constexpr = gl.SliceLayout(2, LAYOUT)
    member = gl.arange(0, PADDED, gl.SliceLayout(0, SUMS))[None, :]
    at = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    none = gl.zeros([PADDED, DIM], gl.float32, _flat(DIM))
    seen = (gl.sum(none, 1) - float("inf"), gl.sum(none, 1), none)
    for begin in range(0, parts, AT_A_TIME):
        other = begin + gl.arange(0, AT_A_TIME, gl.SliceLayout(1, SUMS))[:, None]
        line, real = other * HEADS + head * GROUP + member, (other < parts) & (member < GROUP)
        top = gl.load(sums_ptr + line, mask=real, other=-float("inf"), cache_modifier=".cg")
        out = gl.load(part_ptr + line[:, :, None] * DIM + at, mask=real[:, :, None], other=0.0, cache_modifier=".cg")
        seen = _of_both(seen, _joined(top, gl.full(top.shape, 1.0, gl.float32, SUMS), out))
    _write(attended_ptr, seen[2], seen[1], GROUP)
