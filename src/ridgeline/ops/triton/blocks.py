"""Products with weights in blocks (ops.blocks), which are dequantized in registers.

Layout: inputs are padded to units of 64. Byte j of the 32 bytes of a unit holds the lower four bits of the codes of its inputs j
and 32 + j, so that a tile of bytes becomes two tiles of weights by a mask and a shift, and each is multiplied by the inputs of its
half. Fifth and sixth bits follow the units of a row: a byte has those of 4 (2 for two bits) neighbours of the first half, then of
the second. Scales stay as they are stored. Weights are rounded to x's dtype once, after scaling, as in the other integer kernels.

Up to MOST_TOKENS tokens one kernel reads the blocks. Larger products are bound by arithmetic: the matrix is dequantized and cuBLAS
multiplies.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from ridgeline.ops.blocks import SCALINGS, Blocks, joined_products, parts_of, pieces_of
from ridgeline.ops.table import FloatInput, IntMatrix, IntOps, apply_norm
from ridgeline.ops.triton import block_tiles, integer, linears
from ridgeline.ops.triton.activation import activate
from ridgeline.ops.triton.integer_matrix import dequantize as dequantize_plain
from ridgeline.ops.triton.norm import rms_norm

MOST_TOKENS = 64
UNIT = 64
HALF = tl.constexpr(32)
PLAIN, MINIMUM, SUPER_6BIT, SUPER_8BIT, E8M0 = (tl.constexpr(number) for number in range(len(SCALINGS)))
"""Numbers of SCALINGS."""


class Tile(NamedTuple):
    """rows: tokens. outputs: of a program. units: read at a time, for kinds with super-blocks a multiple of 4."""

    rows: int
    outputs: int
    units: int = 4
    warps: int = 4
    stages: int = 4


def tile_for(tokens: int, outputs: int) -> Tile:
    """By arithmetic, not measured: enough programs for a GPU of 132 processors, and a tile that stays in registers."""
    return Tile(max(16, triton.next_power_of_2(tokens)), 16 if outputs <= 8192 else 32)


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """codes uint8 [out, in] of 4, 5 or 6 bits -> uint8 [out, bits / 8 of the padded inputs]."""
    units = F.pad(codes, (0, -codes.shape[1] % UNIT)).unflatten(1, (-1, 2, UNIT // 2))
    low = units & 15
    planes = [(low[:, :, 0] | low[:, :, 1] << 4).flatten(1)]
    if bits > 4:
        extra = bits - 4
        each = (units >> 4).unflatten(-1, (-1, 4 // extra))
        shifts = torch.arange(0, 4, extra, dtype=torch.uint8, device=codes.device)
        nibbles = (each << shifts).sum(-1, dtype=torch.uint8)
        planes.append((nibbles[:, :, 0] | nibbles[:, :, 1] << 4).flatten(1))
    return torch.cat(planes, 1)


def is_plain(form: Blocks | IntMatrix) -> bool:
    """Whether the kernels of other integers have this form."""
    return not form.scaling and form.bits in (4, 8)


def pack(blocks: Blocks) -> IntMatrix:
    """See MatmulOps.blocks."""
    if block_tiles.takes(blocks):
        return block_tiles.pack(blocks)
    if is_plain(blocks):
        return integer.pack(blocks.codes, blocks.scales.float(), None, blocks.bits, blocks.group)
    (outputs, inputs), codes = blocks.codes.shape, pack_codes(blocks.codes, blocks.bits)
    form = (blocks.bits, blocks.group, outputs, inputs)
    scales, extra = blocks.scales.contiguous(), None if blocks.extra is None else blocks.extra.contiguous()
    return IntMatrix(codes, scales, None, *form, scaling=blocks.scaling, extra=extra)


@triton.jit
def _factors(scale_ptr, extra_ptr, row, unit, half: tl.constexpr, groups, SCALING: tl.constexpr):
    """(scale, minimum) float32 [rows, units, 32 or 1] of one half of each unit. row: [rows, 1, 1], of type int64. unit: [1, units,
    1]. groups: of a row; the last unit may have one that does not exist."""
    group = 2 * unit + half
    if SCALING == SUPER_6BIT:
        line = (row * (groups // 8) + unit // 4) * 12
        low = tl.load(scale_ptr + line + group % 8).to(tl.int32)
        high = tl.load(scale_ptr + line + 8 + unit % 4).to(tl.int32) >> (4 * half)
        pair = extra_ptr + (row * (groups // 8) + unit // 4) * 2
        scale = ((low & 15) | (high & 3) << 4).to(tl.float32) * tl.load(pair).to(tl.float32)
        minimum = (low >> 4 | (high & 12) << 2).to(tl.float32) * tl.load(pair + 1).to(tl.float32)
        return scale, minimum
    elif SCALING == SUPER_8BIT:
        sixteen = 2 * group + (tl.arange(0, HALF) // 16)[None, None, :]
        super_scale = tl.load(extra_ptr + row * (groups // 8) + unit // 4).to(tl.float32)
        scale = tl.load(scale_ptr + row * groups * 2 + sixteen).to(tl.float32) * super_scale
        return scale, scale * 32.0
    else:
        at = row * groups + tl.minimum(group, groups - 1)
        if SCALING == E8M0:
            scale = (tl.load(scale_ptr + at).to(tl.int32) << 23).to(tl.float32, bitcast=True)
            return scale, scale
        else:
            scale = tl.load(scale_ptr + at).to(tl.float32)
            if SCALING == MINIMUM:
                return scale, tl.load(extra_ptr + at).to(tl.float32)
            else:
                return scale, scale * 16.0


@triton.jit
def _scaled(codes, scale, minimum, SCALING: tl.constexpr, TYPE: tl.constexpr):
    """Weights of codes int32 [rows, units, 32]."""
    if SCALING == E8M0:
        # The bits of a code are those of a float32 that is 2^-126 of it; small codes are subnormal there too.
        bits = (codes & 8) << 28 | (codes & 7) << 22
        return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37 * scale).to(TYPE)
    else:
        return (codes.to(tl.float32) * scale - minimum).to(TYPE)


@triton.jit
def unit_weights(
    codes_ptr, scale_ptr, extra_ptr, row, first_unit, units, groups,
    SCALING: tl.constexpr, BITS: tl.constexpr, UNITS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """The weights [rows, UNITS * 32] of both halves of the units from `first_unit` on. row: existing rows [rows]. units: of a row;
    units after them have weights that nothing is multiplied by."""
    unit = first_unit + tl.arange(0, UNITS)[None, :, None]
    unit = tl.minimum(unit, units - 1)
    place = tl.arange(0, HALF)[None, None, :]
    row = row.to(tl.int64)[:, None, None]
    line = codes_ptr + row * (units * 8 * BITS)
    packed = tl.load(line + unit * HALF + place).to(tl.int32)
    low = packed & 15
    high = packed >> 4
    if BITS == 5:
        fifth = tl.load(line + units * HALF + unit * 8 + place // 4).to(tl.int32) >> (place % 4)
        low |= (fifth & 1) << 4
        high |= (fifth >> 4 & 1) << 4
    if BITS == 6:
        upper = tl.load(line + units * HALF + unit * 16 + place // 2).to(tl.int32) >> (2 * (place % 2))
        low |= (upper & 3) << 4
        high |= (upper >> 4 & 3) << 4
    scale, minimum = _factors(scale_ptr, extra_ptr, row, unit, 0, groups, SCALING)
    first = _scaled(low, scale, minimum, SCALING, TYPE)
    scale, minimum = _factors(scale_ptr, extra_ptr, row, unit, 1, groups, SCALING)
    second = _scaled(high, scale, minimum, SCALING, TYPE)
    wide: tl.constexpr = UNITS * HALF
    return tl.reshape(first, (first.shape[0], wide)), tl.reshape(second, (second.shape[0], wide))


@triton.jit
def block_product(
    x_ptr, token, inside, codes_ptr, scale_ptr, extra_ptr, row, inputs,
    SCALING: tl.constexpr, BITS: tl.constexpr, UNITS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows `token` of x [tokens, inputs] times rows `row` [WIDE] of a matrix, float32. inside: tokens that exist."""
    TYPE: tl.constexpr = x_ptr.dtype.element_ty
    units = (inputs + 63) // 64
    at = tl.arange(0, UNITS * HALF)
    total = tl.zeros((token.shape[0], WIDE), dtype=tl.float32)
    for first_unit in range(0, units, UNITS):
        first, second = unit_weights(
            codes_ptr, scale_ptr, extra_ptr, row, first_unit, units, inputs // HALF, SCALING, BITS, UNITS, TYPE
        )
        here = first_unit * 64 + at // HALF * 64 + at % HALF
        line = x_ptr + token[:, None] * inputs + here[None, :]
        x = tl.load(line, mask=inside[:, None] & (here < inputs)[None, :], other=0.0)
        total = tl.dot(x, tl.trans(first), total, input_precision="ieee")
        x = tl.load(line + HALF, mask=inside[:, None] & (here + HALF < inputs)[None, :], other=0.0)
        total = tl.dot(x, tl.trans(second), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["tokens"])
def product_kernel(
    x_ptr, codes_ptr, scale_ptr, extra_ptr, bias_ptr, out_ptr, tokens, outputs, inputs, out_stride,
    SCALING: tl.constexpr, BITS: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """out [tokens, outputs of out_stride] = x W^T + bias, or this plus what out holds."""
    output = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = token < tokens
    row = tl.minimum(output, outputs - 1)
    token = token.to(tl.int64)
    total = block_product(
        x_ptr, token, inside, codes_ptr, scale_ptr, extra_ptr, row, inputs, SCALING, BITS, UNITS, WIDE
    )
    if BIAS:
        total += tl.load(bias_ptr + row).to(tl.float32)[None, :]
    here = out_ptr + token[:, None] * out_stride + output[None, :]
    mask = inside[:, None] & (output < outputs)[None, :]
    if ADD:
        total += tl.load(here, mask=mask, other=0.0).to(tl.float32)
    tl.store(here, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def dequantize_kernel(
    codes_ptr, scale_ptr, extra_ptr, out_ptr, outputs, inputs,
    SCALING: tl.constexpr, BITS: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """out [outputs, inputs]: the weights of ROWS outputs and UNITS units for each program."""
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first_unit = tl.program_id(1) * UNITS
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    units = (inputs + 63) // 64
    first, second = unit_weights(
        codes_ptr, scale_ptr, extra_ptr, tl.minimum(output, outputs - 1), first_unit, units, inputs // HALF,
        SCALING, BITS, UNITS, TYPE,
    )  # fmt: skip
    at = tl.arange(0, UNITS * HALF)
    here = first_unit * 64 + at // HALF * 64 + at % HALF
    line = out_ptr + output.to(tl.int64)[:, None] * inputs + here[None, :]
    exists = (output < outputs)[:, None]
    tl.store(line, first, mask=exists & (here < inputs)[None, :])
    tl.store(line + HALF, second, mask=exists & (here + HALF < inputs)[None, :])


def pieces(matrix: IntMatrix) -> list[IntMatrix]:
    """The matrices of a chain, in pieces of at most MOST_WEIGHTS weights."""
    made = []
    for part in parts_of(matrix):
        made += block_tiles.pieces_of(part) if block_tiles.is_tiled(part) else pieces_of(part)
    return made


def dequantize(matrix: IntMatrix, dtype: torch.dtype) -> torch.Tensor:
    """One matrix of a chain [out, d_in] in `dtype`."""
    if block_tiles.is_tiled(matrix):
        return block_tiles.dequantize(matrix, dtype)
    if is_plain(matrix):
        return dequantize_plain(matrix, dtype)
    out = torch.empty((matrix.out, matrix.d_in), dtype=dtype, device=matrix.codes.device)
    rows, units = 32, 4
    grid = triton.cdiv(matrix.out, rows), triton.cdiv(matrix.d_in, units * UNIT)
    dequantize_kernel[grid](
        matrix.codes, *_scales(matrix), out, matrix.out, matrix.d_in,
        SCALING=SCALINGS.index(matrix.scaling), BITS=matrix.bits, ROWS=rows, UNITS=units, num_warps=4,
    )  # fmt: skip
    return out


def _scales(matrix: IntMatrix) -> tuple[torch.Tensor, torch.Tensor]:
    return matrix.scales, matrix.scales if matrix.extra is None else matrix.extra


def _part(x: torch.Tensor, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor | None) -> torch.Tensor:
    """x [T, in] times one matrix of a chain -> [T, out]. stream: [T, out], added in place."""
    if is_plain(matrix):
        return (
            linears.int_linear(x, matrix, bias) if stream is None else linears.int_linear_add(x, matrix, bias, stream)
        )
    tokens, is_tiled = len(x), block_tiles.is_tiled(matrix)
    if is_tiled and (tiled := block_tiles.product(x, matrix, bias, stream)) is not None:
        return tiled
    if is_tiled or not 0 < tokens <= MOST_TOKENS:
        product = joined_products(
            lambda piece, part: F.linear(x, dequantize(piece, x.dtype), part), pieces(matrix), bias
        )
        return product if stream is None else stream.add_(product)
    out = stream if stream is not None else torch.empty((tokens, matrix.out), dtype=x.dtype, device=x.device)
    tile = tile_for(tokens, matrix.out)
    grid = triton.cdiv(matrix.out, tile.outputs), triton.cdiv(tokens, tile.rows)
    product_kernel[grid](
        x.contiguous(), matrix.codes, *_scales(matrix), matrix.scales if bias is None else bias, out,
        tokens, matrix.out, matrix.d_in, out.stride(0),
        SCALING=SCALINGS.index(matrix.scaling), BITS=matrix.bits, BIAS=bias is not None, ADD=stream is not None,
        ROWS=tile.rows, WIDE=tile.outputs, UNITS=tile.units, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out


def _chained(x: torch.Tensor, parts: list[IntMatrix], bias: torch.Tensor | None) -> torch.Tensor | None:
    """The products of few tokens with matrices in tiles, each written to its columns. None: not supported."""
    if not all(block_tiles.takes_tokens(x, part) for part in parts):
        return None
    out = torch.empty((len(x), sum(part.out for part in parts)), dtype=x.dtype, device=x.device)
    first = 0
    for part in parts:
        columns = slice(first, first := first + part.out)
        here = None if bias is None else bias[columns]
        if not block_tiles.product_into(x, part, here, out[:, columns]):
            return None
    return out


def linear(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """See MatmulOps.blocks. The matrices of a chain are multiplied one by one."""
    source = apply_norm(x, rms_norm)
    if matrix.more is not None and (product := _chained(source, parts_of(matrix), bias)) is not None:
        return product
    return joined_products(lambda part, part_bias: _part(source, part, part_bias, None), parts_of(matrix), bias)


def linear_add(x: torch.Tensor, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """See IntOps; the result takes the stream's memory."""
    if matrix.more is None and stream.is_contiguous() and stream.dtype is x.dtype:
        return _part(x, matrix, bias, stream)
    return stream.add_(linear(x, matrix, bias))


def linear_activate(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """See IntOps."""
    if matrix.more is None and is_plain(matrix):
        return linears.int_linear_activate(x, matrix, bias, kind)
    x = apply_norm(x, rms_norm)
    if matrix.more is None and block_tiles.is_tiled(matrix):
        product = block_tiles.product(x, matrix, bias, None, kind)
        if product is not None:
            return product
    return activate(linear(x, matrix, bias), kind)


def weights(matrix: IntMatrix) -> Iterator[torch.Tensor]:
    """See IntOps.weights. Products in tiles round scales to x's dtype first; these weights are those of llama.cpp."""
    for piece in pieces(matrix):
        tiled = block_tiles.is_tiled(piece)
        yield block_tiles.unpack(piece).dequantized() if tiled else dequantize(piece, torch.float32)


BLOCK_TRITON = IntOps(pack, linear, linear_add, linear_activate, weights)
