"""Kernels of experts (ops.triton.experts).

`route_kernel` chooses the experts of each token. `sort_kernel` orders the (token, choice) pairs by expert and lists the tiles of at
most ROWS pairs of one expert that the products work on. Its list has a fixed length, pairs // ROWS + groups: expert e's tiles start
at pairs_before(e) // ROWS + e, which leaves room for each expert's last, partly filled tile; unused entries hold -1. `inner_kernel`
multiplies by gate and up and applies the activation, `outer_kernel` multiplies by down and by the pair's share. `sum_kernel` adds a
token's terms in float32 in the order of its choices, so its sum does not depend on the other tokens. Terms are stored in x's dtype:
in 16 bits that adds one rounding of the result to the two that it has (of what down multiplies, and of the sum), and saves half of
what prompts move for them.

Weights are floats, codes in the layout of ops.triton.integer, or MXFP4. Codes are dequantized in registers, as the left operand of
the product, so that they go to the matrix unit without a way through shared memory; groups have their scales there, and one scale
per output multiplies the sum.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.triton.activation import gated
from ridgeline.ops.triton.blocks import E8M0, block_product
from ridgeline.ops.triton.integer_matrix import dequantized, of_groups, read_scales
from ridgeline.ops.triton.launch import await_inputs

FLOATS, CODES, MXFP4 = (tl.constexpr(number) for number in range(3))
"""Forms of weights."""


@triton.jit
def route_kernel(
    logits_ptr, chosen_ptr, shares_ptr, load_ptr, count, per_token, first, held,
    NORMALIZED: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The `per_token` likeliest experts of one token, likeliest first; of equal ones the first. See ops.experts.route. Experts are
    numbered from `first`, and the `held` others of this rank; all others get the number `held`. CHOICES: at least `per_token`.

    Probabilities that are not numbers are 0: one request's overflow must not read beyond the weights of all.
    """
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + token * count + at, mask=at < count, other=-float("inf")).to(tl.float32)
    exps = tl.exp(logits - tl.max(logits, 0))
    probabilities = exps / tl.sum(exps, 0)
    probabilities = tl.where(probabilities >= 0, probabilities, 0.0)
    # Bits of positive floats ascend as the floats do. Below them the experts descend.
    keys = probabilities.to(tl.int32, bitcast=True).to(tl.int64) << 32 | BLOCK - 1 - at
    keys = tl.where(at < count, keys, -1)
    choice = tl.arange(0, CHOICES)
    best = tl.zeros((CHOICES,), dtype=tl.int64)
    for number in range(per_token):
        largest = tl.max(keys, 0)
        best = tl.where(choice == number, largest, best)
        keys = tl.where(keys == largest, -1, keys)
    exists = choice < per_token
    expert = BLOCK - 1 - (best & 0x7FFFFFFF).to(tl.int32)
    share = (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    if NORMALIZED:
        share = share / tl.sum(tl.where(exists, share, 0.0), 0)
    here = (expert >= first) & (expert < first + held)
    place = token * per_token + choice
    tl.store(chosen_ptr + place, tl.where(here, expert - first, held), mask=exists)
    tl.store(shares_ptr + place, share, mask=exists)
    tl.atomic_add(load_ptr + expert, 1, mask=exists)


@triton.jit(do_not_specialize=["pairs"])  # start-up compiles one form for all numbers of pairs
def sort_kernel(
    chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, pairs, held,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Order the pairs of one expert behind those of all earlier experts, and list its tiles. Those of number `held`, which are
    other ranks', are unused."""
    await_inputs(PDL)
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    before = 0
    count = 0
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + at, mask=start + at < pairs, other=2147483647)
        before += tl.sum((chosen < expert).to(tl.int32), 0)
        count += tl.sum((chosen == expert).to(tl.int32), 0)
    placed = before
    for start in range(0, pairs, BLOCK):
        chosen = tl.load(chosen_ptr + start + at, mask=start + at < pairs, other=2147483647)
        mine = (chosen == expert).to(tl.int32)
        tl.store(order_ptr + placed + tl.cumsum(mine, 0) - 1, start + at, mask=mine > 0)
        placed += tl.sum(mine, 0)
    first_tile = before // ROWS + expert
    tiles = (count + ROWS - 1) // ROWS
    next_first = (before + count) // ROWS + expert + 1
    for tile in range(first_tile, next_first):
        used = (tile < first_tile + tiles) & (expert < held)
        tl.store(tile_expert_ptr + tile, tl.where(used, expert, -1))
        tl.store(tile_first_ptr + tile, before + (tile - first_tile) * ROWS)
        tl.store(tile_end_ptr + tile, before + count)


@triton.jit
def _product(x_ptr, row, inside, w_ptr, out_at, outputs, inputs, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Rows of x times rows `out_at` of a matrix [outputs, inputs], float32. WIDE: number of columns of out_at."""
    at = tl.arange(0, BLOCK)
    total = tl.zeros((row.shape[0], WIDE), dtype=tl.float32)
    for start in range(0, inputs, BLOCK):
        here = start + at
        x = tl.load(
            x_ptr + row[:, None] * inputs + here[None, :], mask=inside[:, None] & (here < inputs)[None, :], other=0.0
        )
        w = tl.load(
            w_ptr + out_at[None, :].to(tl.int64) * inputs + here[:, None],
            mask=(out_at < outputs)[None, :] & (here < inputs)[:, None],
            other=0.0,
        )
        total = tl.dot(x, w.to(x.dtype), total, input_precision="ieee")
    return total


@triton.jit
def _code_product(
    x_ptr, row, inside, w_ptr, scale_ptr, zero_ptr, out_at, outputs, inputs, units, groups,
    SHIFT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr,
    POWER: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """As _product, of codes: see integer_matrix. Groups have their scale and zero point in one int32 (`Stacked`), or float32
    scales: the compiler reads no operand ahead that has less than 4 bytes."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    at = tl.arange(0, BLOCK)
    total = tl.zeros((WIDE, row.shape[0]), dtype=tl.float32)
    for start in range(0, inputs, BLOCK):
        here = start + at
        x = tl.load(
            x_ptr + row[None, :] * inputs + here[:, None], mask=inside[None, :] & (here < inputs)[:, None], other=0.0
        )
        if scale_ptr.dtype.element_ty == tl.int32:
            both = tl.load(scale_ptr + of_groups(out_at, outputs, start, groups, GROUP, BITS, BLOCK))
            scale, zero = (both & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True), both >> 16
        else:
            scale, zero = read_scales(scale_ptr, zero_ptr, out_at, outputs, start, groups, GROUP, ZEROS, BITS, BLOCK)
        w = dequantized(
            w_ptr, scale, zero, out_at, start, outputs, units, SHIFT, GROUP, ZEROS, BITS, PTX, POWER, TYPE, WIDE, BLOCK
        )
        total = tl.dot(w, x, total, input_precision="ieee")
    if GROUP == 0:
        total *= tl.load(scale_ptr + out_at, mask=out_at < outputs, other=0.0).to(tl.float32)[:, None]
    return tl.trans(total)


@triton.jit
def pairs_of(
    tile, chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, held,
    ROWS: tl.constexpr, SORTED: tl.constexpr,
):  # fmt: skip
    """(expert, numbers of the pairs [ROWS], which of them exist). expert -1: the tile is unused."""
    at = tl.arange(0, ROWS)
    if SORTED:
        expert = tl.load(tile_expert_ptr + tile)
        place = tl.load(tile_first_ptr + tile) + at
        inside = (place < tl.load(tile_end_ptr + tile)) & (expert >= 0)
        pair = tl.load(order_ptr + place, mask=inside, other=0)
    else:
        expert = tl.load(chosen_ptr + tile)
        expert = tl.where(expert < held, expert, -1)
        pair, inside = tile + at * 0, at == 0
    return expert, pair.to(tl.int64), inside


@triton.jit
def _matrix_product(
    x_ptr, row, inside, w_ptr, scale_ptr, zero_ptr, first, out_at, outputs, inputs, units, groups,
    FORM: tl.constexpr, SHIFT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr,
    PTX: tl.constexpr, POWER: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of x times rows `first` + `out_at` of all experts' rows, of which `outputs` after `first` exist. A row of codes has
    `units` int16 and `groups` scales and zero points."""
    if FORM == MXFP4:
        last = first + tl.minimum(out_at, outputs - 1)
        return block_product(x_ptr, row, inside, w_ptr, scale_ptr, scale_ptr, last, inputs, E8M0, 4, BLOCK // 64, WIDE)
    elif FORM == CODES:
        return _code_product(
            x_ptr, row, inside, w_ptr + first * units, scale_ptr + first * groups, zero_ptr + first * groups,
            out_at, outputs, inputs, units, groups, SHIFT, GROUP, ZEROS, BITS, PTX, POWER, BLOCK, WIDE,
        )  # fmt: skip
    else:
        return _product(x_ptr, row, inside, w_ptr + first * inputs, out_at, outputs, inputs, BLOCK, WIDE)


@triton.jit
def inner_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, units, groups,
    out_ptr, chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, width, inputs, per_token, held,
    KIND: tl.constexpr, BIASED: tl.constexpr, SORTED: tl.constexpr,
    FORM: tl.constexpr, SHIFT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr,
    PTX: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, width] = act(gate) * up of each pair's token; w [experts, 2 width, inputs], gate's rows first; bias: likewise."""
    await_inputs(PDL)
    expert, pair, inside = pairs_of(
        tl.program_id(0), chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, held, ROWS, SORTED
    )
    if expert >= 0:
        at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        both = tl.arange(0, 2 * WIDE)
        row = tl.program_id(1) * WIDE + both // 2 + both % 2 * width  # gate and up by turns: one product has both
        total = _matrix_product(
            x_ptr, pair // per_token, inside, w_ptr, scale_ptr, zero_ptr, expert.to(tl.int64) * 2 * width, row, 2 * width,
            inputs, units, groups, FORM, SHIFT, GROUP, ZEROS, BITS, PTX, POWER, BLOCK, 2 * WIDE,
        )  # fmt: skip
        if BIASED:
            bias = tl.load(bias_ptr + expert * 2 * width + row, mask=row < 2 * width, other=0.0)
            total += bias.to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(total, (ROWS, WIDE, 2)))
        here = pair[:, None] * width + at[None, :]
        value = gated(gate, up, KIND).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + here, value, mask=inside[:, None] & (at < width)[None, :])


@triton.jit
def outer_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, bias_ptr, units, groups,
    shares_ptr, out_ptr, chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, outputs, width, held,
    BIASED: tl.constexpr, SORTED: tl.constexpr,
    FORM: tl.constexpr, SHIFT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr,
    PTX: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, outputs] = share * down(x); w [experts, outputs, width]."""
    await_inputs(PDL)
    expert, pair, inside = pairs_of(
        tl.program_id(0), chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, held, ROWS, SORTED
    )
    if expert >= 0:
        at = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
        first = expert.to(tl.int64) * outputs
        total = _matrix_product(
            x_ptr, pair, inside, w_ptr, scale_ptr, zero_ptr, first, at, outputs, width, units, groups,
            FORM, SHIFT, GROUP, ZEROS, BITS, PTX, POWER, BLOCK, WIDE,
        )  # fmt: skip
        if BIASED:
            total += tl.load(bias_ptr + expert * outputs + at, mask=at < outputs, other=0.0).to(tl.float32)[None, :]
        total *= tl.load(shares_ptr + pair, mask=inside, other=0.0)[:, None]
        here = pair[:, None] * outputs + at[None, :]
        tl.store(out_ptr + here, total.to(out_ptr.dtype.element_ty), mask=inside[:, None] & (at < outputs)[None, :])


@triton.jit
def sum_kernel(x_ptr, out_ptr, width, per_token, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out float32 [tokens, width]: the sums of the terms of each token, x [tokens, per_token, width], in their order."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for term in range(per_token):
        total += tl.load(x_ptr + (token * per_token + term) * width + at, mask=at < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * width + at, total, mask=at < width)
