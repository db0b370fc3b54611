"""Kernels of experts for long prompts on Hopper (ops.triton.experts): weights come by TMA, in 16 bits or as e4m3 codes.

With many pairs of each expert the matrix unit bounds the products, and the instructions that load through pointers take time from
it. TMA copies a block of weights with one instruction. Gate and up have a sum each.

Formats that quantize the inputs of linears to e4m3 do so here, too: the matrix unit multiplies e4m3 at twice the rate, and no
weight is converted. A row of x and a row of weights have a scale each, which multiply the sum. The codes of a row of weights lie in
the order of ops.triton.integer.pack, so `round_kernel` stores the row of x in that order: the terms of a sum can come in any.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.triton.activation import gated
from ridgeline.ops.triton.expert_kernels import pairs_of
from ridgeline.ops.triton.launch import await_inputs
from ridgeline.ops.triton.quantize import scale_of


@triton.jit
def round_kernel(x_ptr, out_ptr, scale_ptr, size, padded, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out e4m3 [rows, padded], scales float32 [rows]: one row of x [rows, size] per program as ops.triton.quantize rounds it, in
    the order of integer.pack, then zeros. padded: a multiple of 64, at most BLOCK."""
    await_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * size + at, mask=at < size, other=0.0).to(tl.float32)
    factor, scale = scale_of(tl.max(tl.abs(x), 0))
    # From [chunk, piece, code, thread, parity] to [chunk, thread, piece, parity, code].
    ordered = tl.permute(tl.reshape((x * factor).to(tl.float8e4nv), (BLOCK // 64, 4, 2, 4, 2)), (0, 3, 1, 4, 2))
    tl.store(out_ptr + row * padded + at, tl.reshape(ordered, (BLOCK,)), mask=at < padded)
    tl.store(scale_ptr + row, scale)


@triton.jit
def _rows(x_ptr, row, start, inputs, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """x [rows, BLOCK] from input `start` on. EVEN: blocks end where rows end."""
    here = start + tl.arange(0, BLOCK)
    at = x_ptr + row[:, None] * inputs + here[None, :]
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=(here < inputs)[None, :], other=0.0)


@triton.jit
def inner_prompt_kernel(
    x_ptr, x_scale_ptr, w, w_scale_ptr, bias_ptr,
    out_ptr, chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, width, inputs, per_token, held,
    KIND: tl.constexpr, BIASED: tl.constexpr, ROUNDED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As expert_kernels.inner_kernel. w: descriptor of [experts * 2 width, inputs] with boxes of WIDE x BLOCK. ROUNDED: x and w are
    e4m3 with a scale for each row."""
    await_inputs(PDL)
    expert, pair, inside = pairs_of(
        tl.program_id(1), chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, held, ROWS, True
    )
    if expert >= 0:
        column = tl.program_id(0) * WIDE
        first = expert * 2 * width + column
        token = pair // per_token
        gate = tl.zeros((ROWS, WIDE), dtype=tl.float32)
        up = tl.zeros((ROWS, WIDE), dtype=tl.float32)
        for start in range(0, inputs, BLOCK):
            x = _rows(x_ptr, token, start, inputs, EVEN, BLOCK)
            gate = tl.dot(x, w.load([first, start]).T, gate, input_precision="ieee")
            up = tl.dot(x, w.load([first + width, start]).T, up, input_precision="ieee")
        at = column + tl.arange(0, WIDE)
        within = at < width
        row = expert.to(tl.int64) * 2 * width + at
        if ROUNDED:
            x_scale = tl.load(x_scale_ptr + token)[:, None]
            gate *= x_scale * tl.load(w_scale_ptr + row, mask=within, other=0.0)[None, :]
            up *= x_scale * tl.load(w_scale_ptr + row + width, mask=within, other=0.0)[None, :]
        if BIASED:
            gate += tl.load(bias_ptr + row, mask=within, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias_ptr + row + width, mask=within, other=0.0).to(tl.float32)[None, :]
        value = gated(gate, up, KIND).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + pair[:, None] * width + at[None, :], value, mask=inside[:, None] & within[None, :])


@triton.jit
def outer_prompt_kernel(
    x_ptr, x_scale_ptr, w, w_scale_ptr, bias_ptr, shares_ptr,
    out_ptr, chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, outputs, width, held,
    BIASED: tl.constexpr, ROUNDED: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As expert_kernels.outer_kernel. w: descriptor of [experts * outputs, width]. See `inner_prompt_kernel`."""
    await_inputs(PDL)
    expert, pair, inside = pairs_of(
        tl.program_id(1), chosen_ptr, order_ptr, tile_expert_ptr, tile_first_ptr, tile_end_ptr, held, ROWS, True
    )
    if expert >= 0:
        column = tl.program_id(0) * WIDE
        first = expert * outputs + column
        total = tl.zeros((ROWS, WIDE), dtype=tl.float32)
        for start in range(0, width, BLOCK):
            x = _rows(x_ptr, pair, start, width, EVEN, BLOCK)
            total = tl.dot(x, w.load([first, start]).T, total, input_precision="ieee")
        at = column + tl.arange(0, WIDE)
        within = at < outputs
        row = expert.to(tl.int64) * outputs + at
        share = tl.load(shares_ptr + pair, mask=inside, other=0.0)[:, None]
        if ROUNDED:
            total *= tl.load(x_scale_ptr + pair)[:, None] * tl.load(w_scale_ptr + row, mask=within, other=0.0)[None, :]
        if BIASED:
            total += tl.load(bias_ptr + row, mask=within, other=0.0).to(tl.float32)[None, :]
        here = out_ptr + pair[:, None] * outputs + at[None, :]
        tl.store(here, (total * share).to(out_ptr.dtype.element_ty), mask=inside[:, None] & within[None, :])
