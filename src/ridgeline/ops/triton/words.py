"""Decode attention over keys and values in 8 or 4 bits, read as words of 16 bits.

A word holds 2 or 4 neighbouring elements of one key or value. The matrix load that transposes works on 16 bits, so words are
transposed, and each place of a word is converted in registers and multiplied by the queries' elements of this place: one product
for each place. Scales multiply scores and weights instead of elements. Slots or words are the rows of a product and queries its
columns, because the matrix unit takes 16 rows but 8 columns, and decoding has few queries. Where a vector has several scales, each
packed query has a column for each of them: the column of group g has the query's elements of this group and zeros, its scores are
multiplied by the group's scales, and the sum over the groups is the score.

A program of one warp has all sums of a slot in its registers and needs no barrier; so that 16 columns fit, see tuning.WORD_TILES.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.ops.step import KvView
from ridgeline.ops.triton.launch import gdc_wait
from ridgeline.ops.triton.walk import LN2, LOG2E, STEP_SIZES, _await_unit, _combine, _pages, _seen

SMALLEST = tl.constexpr(6.103515625e-05)
HEADROOM = tl.constexpr(8.0)
"""Binary digits by which a weight may exceed 1 before sums are rescaled."""


@triton.jit
def _pair(words, code: tl.constexpr):
    """The elements at two places of the words by instructions on registers of 32 bits, which hold two words or two float16."""
    return tl.inline_asm_elementwise(code, "=r,=r,r", [words], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)


@triton.jit
def _places(
    words, number: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr, element: tl.constexpr, FAST: tl.constexpr
):
    """The elements at the places `number` and `number` + 1 of words, without scales, in the type `element`: stored values of e4m3,
    else (code + 128) or (code + 8) times the factors 2^-24 and, at odd places of 4 bits, 2^-20 (see _factor). These are the last
    bits of a float16 below the normal numbers, so that a mask converts them."""
    if FAST and element == tl.float16:
        if FLOAT:
            return _pair(
                words,
                "{.reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t; cvt.rn.f16x2.e4m3x2 $0, a; "
                "cvt.rn.f16x2.e4m3x2 $1, b;}",
            )
        elif BITS == 8:
            return _pair(
                words, "{.reg .b32 t; xor.b32 t, $2, 0x80808080; prmt.b32 $0, t, 0, 0x4240; prmt.b32 $1, t, 0, 0x4341;}"
            )
        elif number == 0:
            return _pair(words, "and.b32 $0, $2, 0x000f000f; and.b32 $1, $2, 0x00f000f0;")
        else:
            return _pair(
                words, "{.reg .b32 t; shr.u32 t, $2, 8; and.b32 $0, t, 0x000f000f; and.b32 $1, t, 0x00f000f0;}"
            )
    else:
        return _place(words, number, BITS, FLOAT, element), _place(words, number + 1, BITS, FLOAT, element)


@triton.jit
def _place(words, number: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr, element: tl.constexpr):
    codes = (words.to(tl.int32) >> (number * BITS)) & ((1 << BITS) - 1)
    if FLOAT:
        return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(element)
    else:
        if BITS == 8:
            codes = codes ^ 128
        return (codes.to(tl.float32) / _factor(number, BITS, FLOAT)).to(element)


@triton.jit
def _factor(number: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr):
    """A code, plus its zero, over what _places returns."""
    factor: tl.constexpr = 1.0 if FLOAT else (1048576.0 if BITS == 4 and number % 2 == 1 else 16777216.0)
    return factor


@triton.jit
def _zero(BITS: tl.constexpr, FLOAT: tl.constexpr):
    """What is subtracted from a code."""
    zero: tl.constexpr = 0.0 if FLOAT else (8.0 if BITS == 4 else 128.0)
    return zero


@triton.jit
def _over_groups(partial, GROUPS: tl.constexpr):
    """Sum [KEYS, GROUPS * queries] over the groups; each group's columns get the sum."""
    if GROUPS == 1:
        return partial
    else:
        keys: tl.constexpr = partial.shape[0]
        queries: tl.constexpr = partial.shape[1] // GROUPS
        total = tl.sum(tl.reshape(partial, (keys, GROUPS, queries)), 1)
        return tl.reshape(tl.broadcast_to(total[:, None, :], (keys, GROUPS, queries)), partial.shape)


@triton.jit
def _load_scales(line, inside, GROUPS: tl.constexpr, SCALES: tl.constexpr):
    """Scales of the slots: [KEYS] with one group, else [KEYS, GROUPS]."""
    if GROUPS == 1:
        return tl.load(line, mask=inside, other=1.0)
    else:
        number = tl.arange(0, GROUPS)
        real = inside[:, None] & (number < SCALES)[None, :]
        return tl.load(line[:, None] + number[None, :], mask=real, other=1.0)


@triton.jit
def _in_columns(scales, COLUMNS: tl.constexpr, GROUPS: tl.constexpr):
    """float32 that scores [KEYS, COLUMNS] are multiplied by: [KEYS, 1] or [KEYS, COLUMNS]."""
    if GROUPS == 1:
        return scales[:, None]
    else:
        keys: tl.constexpr = scales.shape[0]
        return tl.reshape(tl.broadcast_to(scales[:, :, None], (keys, GROUPS, COLUMNS // GROUPS)), (keys, COLUMNS))


@triton.jit
def _words_step(
    q0, q1, q2, q3, keys, values, key_scales, value_scales, seen, best, weight, zeros, out0, out1, out2, out3, q_zero, scale, cap,
    BITS: tl.constexpr, FLOAT: tl.constexpr, GROUPS: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """One iteration of online softmax over words of keys [KEYS, WORDS] and of values [WORDS, KEYS]. The exponents' maximum is that
    of score + log2(scale of the value). It follows the true one only where that is more than 2^HEADROOM larger, so that weights of
    codes are at most 2^HEADROOM and sums are seldom rescaled. weight [KEYS, COLUMNS]: weights of the softmax, summed over
    iterations only. zeros [16, COLUMNS]: sums of the weights of codes, in each row. q_zero [COLUMNS]: what the zero of the codes
    adds to the scores."""
    COLUMNS: tl.constexpr = q0.shape[1]
    element: tl.constexpr = q0.dtype
    k0, k1 = _places(keys, 0, BITS, FLOAT, element, FAST)
    scores = tl.dot(k0, q0, input_precision=PRECISION)
    if BITS == 4:
        k2, k3 = _places(keys, 2, BITS, FLOAT, element, FAST)
        scores = tl.dot(k2, q2, scores, input_precision=PRECISION)
        odd = tl.dot(k1, q1, input_precision=PRECISION)
        odd = tl.dot(k3, q3, odd, input_precision=PRECISION)
        scores += odd * 0.0625
    else:
        scores = tl.dot(k1, q1, scores, input_precision=PRECISION)
    if FLOAT == 0:
        scores = scores - q_zero[None, :]
    key_scales = key_scales.to(tl.float32)
    if CAPPED == 0:
        key_scales *= scale * LOG2E * _factor(0, BITS, FLOAT)
    scores = _over_groups(scores * _in_columns(key_scales, COLUMNS, GROUPS), GROUPS)
    if CAPPED:
        # tanh(x) = 2 sigmoid(2 x) - 1
        scores = cap * (2.0 * tl.sigmoid(2.0 * scores * (scale * _factor(0, BITS, FLOAT) / cap)) - 1.0) * LOG2E
    # Scales of slots that no query sees may be anything.
    log2, inverse = _log2_and_inverse(tl.maximum(value_scales.to(tl.float32), SMALLEST), FAST)
    scores = tl.where(seen, scores + _in_columns(log2, COLUMNS, GROUPS), float("-inf"))
    top = tl.max(scores, 0)
    if tl.max((top > best + HEADROOM).to(tl.int32), 0) > 0:
        top = tl.maximum(best, top)
        shrink = _exp2(best - tl.where(top == float("-inf"), 0.0, top), FAST)[None, :]
        best = top
        weight, zeros, out0, out1 = weight * shrink, zeros * shrink, out0 * shrink, out1 * shrink
        if BITS == 4:
            out2, out3 = out2 * shrink, out3 * shrink
    p = _exp2(scores - tl.where(best == float("-inf"), 0.0, best)[None, :], FAST)
    weight += p * _in_columns(inverse, COLUMNS, GROUPS)
    p = p.to(element)
    if FLOAT == 0:
        ones = tl.full((zeros.shape[0], p.shape[0]), 1.0, element)
        zeros = tl.dot(ones, p, zeros, input_precision=PRECISION)
    v0, v1 = _places(values, 0, BITS, FLOAT, element, FAST)
    out0 = tl.dot(v0, p, out0, input_precision=PRECISION)
    out1 = tl.dot(v1, p, out1, input_precision=PRECISION)
    if BITS == 4:
        v2, v3 = _places(values, 2, BITS, FLOAT, element, FAST)
        out2 = tl.dot(v2, p, out2, input_precision=PRECISION)
        out3 = tl.dot(v3, p, out3, input_precision=PRECISION)
    return best, weight, zeros, out0, out1, out2, out3


@triton.jit
def _log2_and_inverse(x, FAST: tl.constexpr):
    """(log2(x), 1 / x) of normal numbers, approximate to 2^-22 if FAST."""
    if FAST:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        inverse = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2, inverse
    else:
        return tl.log2(x), 1.0 / x


@triton.jit
def _exp2(x, FAST: tl.constexpr):
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.exp2(x)


@triton.jit
def _moved(x, FAST: tl.constexpr):
    """x. Triton does not pipeline a loop that carries a value over two iterations, but does not look through assembly."""
    if FAST:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        return x


@triton.jit
def _queries(q_ptr, tile, BITS: tl.constexpr, FLOAT: tl.constexpr, element: tl.constexpr):
    """The queries' elements at each place of the words [WORDS, COLUMNS], where in 8 bits the last two are unused, and what the zero
    of the codes adds to scores [COLUMNS]."""
    q0 = tl.load(q_ptr, mask=tile, other=0.0).to(element)
    q1 = tl.load(q_ptr + 1, mask=tile, other=0.0).to(element)
    q2, q3 = q1, q1
    if BITS == 4:
        q2 = tl.load(q_ptr + 2, mask=tile, other=0.0).to(element)
        q3 = tl.load(q_ptr + 3, mask=tile, other=0.0).to(element)
    total = tl.sum(q0.to(tl.float32), 0) + tl.sum(q1.to(tl.float32), 0)
    if BITS == 4:
        total += tl.sum(q2.to(tl.float32), 0) + tl.sum(q3.to(tl.float32), 0)
    return q0, q1, q2, q3, total * (_zero(BITS, FLOAT) / _factor(0, BITS, FLOAT))


@triton.jit
def _store(target, out0, out1, out2, out3, factor, tile, BITS: tl.constexpr):
    """Store results times `factor`: those of each place lie beside those of the next."""
    kind: tl.constexpr = target.dtype.element_ty
    tl.store(target, (out0 * factor).to(kind), mask=tile)
    tl.store(target + 1, (out1 * factor).to(kind), mask=tile)
    if BITS == 4:
        tl.store(target + 2, (out2 * factor).to(kind), mask=tile)
        tl.store(target + 3, (out3 * factor).to(kind), mask=tile)


@triton.jit(do_not_specialize=[*STEP_SIZES, "planned"])
def words_kernel(
    q_ptr, kv_ptr, scales_ptr, table_ptr, position_ptr, ancestors_ptr, key_positions_ptr, units_ptr, arrivals_ptr,
    out_ptr, lse_ptr, part_ptr, part_lse_ptr, q_token_stride, q_head_stride, page_stride, kind_stride, head_stride,
    scale_page_stride, table_stride, key_positions_stride, scale, cap, units, planned, part_queries: tl.constexpr,
    kv_heads: tl.constexpr, group: tl.constexpr, head_dim: tl.constexpr, page_tokens: tl.constexpr,
    window: tl.constexpr, BITS: tl.constexpr, FLOAT: tl.constexpr, SCALES: tl.constexpr, TREE: tl.constexpr,
    COMPACTED: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr, QUERIES: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr, AHEAD: tl.constexpr, FUSED: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr, WORDS: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """As walk.split_kernel, for a cache in 8 or 4 bits. kv_ptr, page_stride, kind_stride, head_stride: in words of 16 bits.
    QUERIES: packed queries, each in GROUPS columns. WORDS: words of a vector, padded. FLOAT: codes are e4m3. AHEAD: as in
    walk.split_kernel."""
    head = tl.program_id(0) % kv_heads
    unit = _await_unit(units_ptr, units, tl.program_id(0) // kv_heads, planned, AHEAD, PDL)
    row, begin, end, first_query, n, length, first_unit, count, index = unit
    start = length - n
    if row < 0:
        if PDL and AHEAD == 0:
            gdc_wait()
        return
    places: tl.constexpr = 16 // BITS
    words: tl.constexpr = head_dim // places
    column = tl.arange(0, GROUPS * QUERIES)
    packed = column % QUERIES
    place = packed // group
    real = place < n
    at = tl.arange(0, WORDS)
    # A column has the elements of its group.
    tile = real[None, :] & (at < words)[:, None] & ((at * SCALES // words)[:, None] == (column // QUERIES)[None, :])
    token = (first_query + place).to(tl.int64)
    query_head = head * group + packed % group
    pages_ptr = table_ptr + row.to(tl.int64) * table_stride
    head_ptr = kv_ptr + head.to(tl.int64) * head_stride
    scale_head_stride: tl.constexpr = page_tokens * SCALES
    scale_kind_stride: tl.constexpr = kv_heads * scale_head_stride
    head_scales_ptr = scales_ptr + head.to(tl.int64) * scale_head_stride
    page = _pages(pages_ptr, begin, end, page_tokens, KEYS)
    page_after = _pages(pages_ptr, begin + KEYS, end, page_tokens, KEYS)
    query_position = tl.load(position_ptr + token, mask=real, other=0, cache_modifier=".cg")
    if PDL and AHEAD == 0:
        gdc_wait()
    query_ancestors = token
    if TREE:
        query_ancestors = tl.load(ancestors_ptr + token, mask=real, other=0)
    element: tl.constexpr = tl.float16 if q_ptr.dtype.element_ty == tl.bfloat16 else q_ptr.dtype.element_ty
    q_tile = q_ptr + token[None, :] * q_token_stride + query_head[None, :] * q_head_stride + places * at[:, None]
    q0, q1, q2, q3, q_zero = _queries(q_tile, tile & (AHEAD == 0), BITS, FLOAT, element)
    best = tl.full((GROUPS * QUERIES,), float("-inf"), tl.float32)
    weight = tl.zeros((KEYS, GROUPS * QUERIES), tl.float32)
    zeros = tl.zeros((16, GROUPS * QUERIES), tl.float32)
    out0 = tl.zeros((WORDS, GROUPS * QUERIES), tl.float32)
    out1, out2, out3 = out0, out0, out0
    slot = begin + tl.arange(0, KEYS)
    scale_line = head_scales_ptr + page.to(tl.int64) * scale_page_stride + slot % page_tokens * SCALES
    key_scales = _load_scales(scale_line, slot < end, GROUPS, SCALES)
    value_scales = _load_scales(scale_line + scale_kind_stride, slot < end, GROUPS, SCALES)
    for first in range(begin, end, KEYS):
        slot = first + tl.arange(0, KEYS)
        vector = head_ptr + page.to(tl.int64) * page_stride + (slot % page_tokens).to(tl.int64) * words
        # Loaded one iteration ahead, as in walk.split_kernel; scales too, which are too narrow for asynchronous copies.
        page = _moved(page_after, PDL)
        page_after = _pages(pages_ptr, first + 2 * KEYS, end, page_tokens, KEYS)
        later = slot + KEYS
        scale_line = head_scales_ptr + page.to(tl.int64) * scale_page_stride + later % page_tokens * SCALES
        next_key_scales = _load_scales(scale_line, later < end, GROUPS, SCALES)
        scale_line += scale_kind_stride
        next_value_scales = _load_scales(scale_line, later < end, GROUPS, SCALES)
        inside = slot < end
        if words != WORDS:
            keys_mask = inside[:, None] & (at < words)[None, :]
            values_mask = inside[None, :] & (at < words)[:, None]
            keys = tl.load(vector[:, None] + at[None, :], mask=keys_mask, other=0)
            values = tl.load(vector[None, :] + kind_stride + at[:, None], mask=values_mask, other=0)
        else:
            keys = tl.load(vector[:, None] + at[None, :], mask=inside[:, None], other=0)
            values = tl.load(vector[None, :] + kind_stride + at[:, None], mask=inside[None, :], other=0)
        if AHEAD > 0:
            # The loop's first loads are in flight. Only the code below depends on the previous kernel.
            waiting = first == begin
            if waiting:
                if PDL:
                    gdc_wait()
                q0, q1, q2, q3, q_zero = _queries(q_tile, tile, BITS, FLOAT, element)
        seen = _seen(
            slot, place, start, end, query_position, query_ancestors, key_positions_ptr + row.to(tl.int64) * key_positions_stride,
            position_ptr + first_query, n, window, TREE, COMPACTED,
        )  # fmt: skip
        best, weight, zeros, out0, out1, out2, out3 = _words_step(
            q0, q1, q2, q3, keys, values, key_scales, value_scales, tl.trans(seen), best, weight, zeros, out0, out1, out2,
            out3, q_zero, scale, cap, BITS, FLOAT, GROUPS, CAPPED, PRECISION, PDL,
        )  # fmt: skip
        key_scales, value_scales = next_key_scales, next_value_scales
    weight = tl.sum(weight, 0)
    zeros = tl.max(zeros, 0)[None, :] * _zero(BITS, FLOAT)
    out0 = out0 * _factor(0, BITS, FLOAT) - zeros
    out1 = out1 * _factor(1, BITS, FLOAT) - zeros
    out2 = out2 * _factor(2, BITS, FLOAT) - zeros
    out3 = out3 * _factor(3, BITS, FLOAT) - zeros
    some = weight > 0.0
    lse = tl.where(some, (best + tl.log2(tl.where(some, weight, 1.0))) * LN2, float("-inf"))
    factor = (1.0 / tl.where(some, weight, 1.0))[None, :]
    heads: tl.constexpr = kv_heads * group
    first_group = real & (column < QUERIES)
    if count == 1:
        target = out_ptr + (token[None, :] * heads + query_head[None, :]) * head_dim + places * at[:, None]
        _store(target, out0, out1, out2, out3, factor, tile, BITS)
        tl.store(lse_ptr + token * heads + query_head, lse, mask=first_group)
    else:
        part_line = tl.program_id(0).to(tl.int64) * part_queries + packed
        part = part_ptr + part_line[None, :] * head_dim + places * at[:, None]
        _store(part, out0, out1, out2, out3, factor, tile, BITS)
        tl.store(part_lse_ptr + part_line, lse, mask=first_group)
        if FUSED:
            # All threads must have stored their parts before one thread increments the counter.
            tl.debug_barrier()
            counter = arrivals_ptr + index * kv_heads + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == count - 1:
                _combine(
                    part_ptr, part_lse_ptr, out_ptr, lse_ptr, first_unit, count, first_query, n, head, tl.arange(0, PACKED),
                    part_queries, kv_heads, group, head_dim, PARTS, WIDTH,
                )  # fmt: skip
                tl.store(counter, 0)


def word_arguments(view: KvView, packed: int) -> dict[str, object]:
    """What words_kernel takes otherwise than split_kernel. packed: queries of a row, padded to a power of 2."""
    words = view.kv.view(torch.int16)
    scales = 1 if view.scales is None else view.scales.shape[4]
    groups = triton.next_power_of_2(scales)
    return {
        "kv_ptr": words,
        "page_stride": words.stride(0),
        "kind_stride": words.stride(1),
        "head_stride": words.stride(2),
        "FLOAT": view.kv.dtype.is_floating_point,
        "QUERIES": max(packed, 8 // groups),
        "WORDS": max(16, triton.next_power_of_2(words.shape[4])),
        "GROUPS": groups,
    }
