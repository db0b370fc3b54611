"""Products of up to 64 tokens with weights in blocks (ops.blocks) on Hopper, in CUDA C++ (block_tiles.cu).

Layout: units of 16 outputs and 256 inputs, those of a tile of 16 outputs one after the other. The four threads of a warp that share
an output hold eight neighbours of each 32 inputs, a piece, so that their codes of all pieces are whole words, their inputs are 16
bytes of x, and a group's scales are unpacked once for eight weights. codes: int32 [tiles, units, bits, 32 threads, 4] words of the
threads. Bits of a word: the lower four bits of the codes of a piece, codes 2 j in the lower half of the word and 2 j + 1 in the
upper one. The upper bits of codes follow those of a unit, a word for the four (two of two bits) pieces that fill it. Scales lie by
unit and output. They are those of the checkpoint, as many bytes as there.

A matrix unit takes codes as bfloat16 below the smallest normal number, where an "and" makes a number of a code, and a fused
multiply-add scales it and subtracts the minimum: scales are rounded to x's dtype, then weights.
"""

from __future__ import annotations

from ctypes import Structure, c_uint32, c_void_p
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ridgeline.ops.blocks import MOST_WEIGHTS, SCALINGS, SUPER, Blocks
from ridgeline.ops.table import IntMatrix
from ridgeline.ops.triton import cuda, pairs
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.launch import is_hopper, processors
from ridgeline.ops.triton.shapes import MEMORY

ROWS, LANES = 16, 32
"""Outputs of a tile; threads of a warp."""
VECTOR, VECTOR_WORDS = 64, 128
"""Inputs of the lower bits that a warp loads at once, and their words. In four bits a row's last unit is as long as its inputs."""
MOST_TOKENS = 64
RESERVED = 1024
"""Bytes of shared memory that each program takes besides its own."""
LARGEST_EXPONENT = 156
"""Larger scales of MXFP4, 2^29 and more, are set to this one."""
TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}


class Tile(NamedTuple):
    """across, along: warps of a program with other outputs, and with other inputs. each: programs for a multiprocessor. depth:
    units that a warp has asked for."""

    across: int
    along: int
    each: int
    depth: int = 1


FEW, MANY, LONG = 4096, 16384, 8192
"""Most outputs of the first and of the second tile; most inputs of TILES."""
TILES = {
    1: (Tile(2, 8, 1), Tile(2, 4, 2, 2), Tile(1, 8, 2, 2)),
    2: (Tile(1, 8, 2), Tile(2, 4, 2), Tile(2, 8, 1)),
    4: (Tile(2, 8, 1), Tile(2, 4, 2, 0), Tile(2, 4, 2, 0)),
    8: (Tile(2, 4, 1), Tile(2, 4, 1), Tile(2, 4, 1)),
}
"""By eights of tokens: for few, many and most outputs. Measured on an H200 with the linears of an 8B
(docs/log/2026-11-28-blocks-in-tiles.md), for Q4_K, Q5_K and Q6_K together."""
LONG_TILES = {1: Tile(1, 8, 2), 2: Tile(1, 8, 2), 4: Tile(2, 8, 1, 0), 8: Tile(2, 4, 1)}
EXPERT_TILES = {
    1: (Tile(2, 4, 3), Tile(1, 4, 4)),
    2: (Tile(2, 4, 3), Tile(1, 4, 4)),
    8: (Tile(2, 4, 2), Tile(1, 4, 4)),
}
"""By eights of pairs: of gate and up, and of down. Measured with the experts of gpt-oss-20b."""


class _Pairs(Structure):
    """Pairs of block_tiles.cu."""

    _fields_ = tuple((name, c_void_p) for name in ("chosen", "order", "tile_expert", "tile_first", "tile_end"))


class _Arrays(Structure):
    """Arrays of block_tiles.cu."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("extra", c_void_p),
        ("units", c_uint32),
        ("vectors", c_uint32),
    )


# --- layout -----------------------------------------------------------------------------------------------------------


def takes(blocks: Blocks) -> bool:
    """Whether blocks have this layout. Other kernels have plain codes of 4 or 8 bits."""
    return (bool(blocks.scaling) or blocks.bits in (5, 6)) and is_hopper(blocks.codes.device) and cuda.available()


def is_tiled(matrix: IntMatrix) -> bool:
    return matrix.codes.dtype is torch.int32


def _tiles(tensor: torch.Tensor, per_unit: int) -> torch.Tensor:
    """[outputs, n] -> [tiles, units, 16, per_unit], filled with zeros. per_unit: elements of a row in 256 inputs."""
    padded = F.pad(tensor, (0, -tensor.shape[1] % per_unit, 0, -tensor.shape[0] % ROWS))
    return padded.view(-1, ROWS, padded.shape[1] // per_unit, per_unit).transpose(1, 2)


def _words(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """Fields of `bits` bits [..., n, 2] -> int32 words [...] with field i, 0 at i * bits, and i, 1 at 16 + i * bits."""
    words = torch.zeros(fields.shape[:-2], dtype=torch.int32, device=fields.device)
    for field in range(fields.shape[-2]):
        for half in range(2):
            words |= fields[..., field, half].int() << (16 * half + field * bits)
    return words


def _codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [outputs, inputs] -> int32 [tiles, words]."""
    tiled = _tiles(codes, SUPER)
    tiles, units = tiled.shape[:2]
    # [tiles, units, row half, row, piece, thread of four, pair, code of a pair] -> row and thread are the lane.
    at = tiled.reshape(tiles, units, 2, 8, 8, 4, 4, 2)
    words = _words(at & 15, 4)  # [tiles, units, half, row, piece, thread]
    lower = words.unflatten(4, (4, 2)).permute(0, 1, 4, 3, 6, 5, 2).reshape(tiles, units, -1)
    if bits == 4:
        return lower.flatten(1)[:, : VECTOR_WORDS * -(-codes.shape[1] // VECTOR)]
    together = 16 // (bits - 4) // 4  # pieces of a word
    upper = (at >> 4).permute(0, 1, 3, 5, 4, 2, 6, 7)  # [tiles, units, row, thread, piece, half, pair, code]
    upper = upper.unflatten(4, (-1, together)).transpose(5, 6).flatten(6, 7)  # [..., word, half, pairs, code]
    words = _words(upper, bits - 4).flatten(4, 5).unflatten(4, (-1, 4))  # [tiles, units, row, thread, vectors, 4]
    return torch.cat((lower, words.permute(0, 1, 4, 2, 3, 5).reshape(tiles, units, -1)), 2).flatten(1)


def _super_six(blocks: Blocks) -> torch.Tensor:
    """uint8 [tiles, units, 16, 16]: two float16; lower bits of scale and minimum of 8 groups; byte i of the last four: the upper
    bits of scale and minimum of group i, then of group i + 4."""
    assert blocks.extra is not None
    packed = _tiles(blocks.scales, 12)
    pairs_ = packed[..., 8:]
    groups = torch.stack((pairs_ & 15, pairs_ >> 4), -1).flatten(-2)  # upper bits of groups 0 to 7
    upper = groups[..., :4] | groups[..., 4:] << 4
    halves = _tiles(blocks.extra, 2).contiguous().view(torch.uint8)
    return torch.cat((halves, packed[..., :8], upper), -1)


def pack(blocks: Blocks) -> IntMatrix:
    """See MatmulOps.blocks."""
    (outputs, inputs), extra = blocks.codes.shape, None
    if blocks.scaling == "super_6bit":
        scales = _super_six(blocks)
    elif blocks.scaling == "super_8bit":
        assert blocks.extra is not None
        # A thread's inputs of a piece are in one of two groups.
        scales = _tiles(blocks.scales, 16).unflatten(-1, (8, 2)).transpose(-1, -2)
        extra = _tiles(blocks.extra, 1)
    else:
        scales = blocks.scales.clamp(max=LARGEST_EXPONENT) if blocks.scaling == "e8m0" else blocks.scales
        scales = _tiles(scales, SUPER // blocks.group)
        extra = None if blocks.extra is None else _tiles(blocks.extra, SUPER // blocks.group)
    rows = -(-outputs // ROWS)
    return IntMatrix(
        _codes(blocks.codes, blocks.bits).contiguous(), scales.reshape(rows, -1).contiguous(), None, blocks.bits, blocks.group,
        outputs, inputs, scaling=blocks.scaling, extra=None if extra is None else extra.reshape(rows, -1).contiguous(),
    )  # fmt: skip


def unpack(matrix: IntMatrix) -> Blocks:
    """Inverse of pack, but for padding and scales that do not exist in bfloat16."""
    tiles, units, bits = len(matrix.codes), units_of(matrix), matrix.bits
    whole = F.pad(matrix.codes, (0, units * bits * VECTOR_WORDS - matrix.codes.shape[1]))
    words = whole.view(tiles, units, bits, 8, 4, 4)
    codes = _fields(
        words[:, :, :4].unflatten(-1, (2, 2)), 4
    )  # [tiles, units, pieces / 2, row, thread, piece, half, pair, code]
    codes = codes.permute(0, 6, 3, 1, 2, 5, 4, 7, 8)
    if bits > 4:
        pieces = 16 // (bits - 4) // 4
        upper = _fields(words[:, :, 4:].unflatten(-1, (2, 2)), bits - 4).unflatten(7, (pieces, 4))
        # [tiles, units, vector, row, thread, word, half, piece, pair, code]
        codes = (
            codes.reshape(tiles, 2, 8, units, 8, 4, 4, 2)
            | upper.permute(0, 6, 3, 1, 2, 5, 7, 4, 8, 9).reshape(tiles, 2, 8, units, 8, 4, 4, 2) << 4
        )
    codes = codes.reshape(tiles * ROWS, units * SUPER)[: matrix.out, : matrix.d_in]
    scales, extra = _rows(matrix, matrix.scales), None if matrix.extra is None else _rows(matrix, matrix.extra)
    if matrix.scaling == "super_6bit":
        headers = scales.unflatten(1, (-1, 16))
        upper = torch.cat((headers[..., 12:] & 15, headers[..., 12:] >> 4), -1)
        packed = upper[..., 0::2] | upper[..., 1::2] << 4
        extra = headers[..., :4].contiguous().view(torch.float16).flatten(1)
        scales = torch.cat((headers[..., 4:12], packed), -1).flatten(1)
    elif matrix.scaling == "super_8bit":
        scales = scales.unflatten(1, (-1, 2, 8)).transpose(2, 3).flatten(1)
    groups = -(-matrix.d_in // matrix.group)
    if not matrix.scaling.startswith("super"):
        scales, extra = scales[:, :groups], None if extra is None else extra[:, :groups]
    return Blocks(codes, scales, bits, matrix.group, matrix.scaling, extra)


def _fields(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Inverse of _words, uint8 [..., fields, 2]."""
    shifts = torch.arange(0, 16, bits, dtype=torch.int32, device=words.device).unsqueeze(1)
    halves = torch.tensor([0, 16], dtype=torch.int32, device=words.device)
    return (words[..., None, None] >> shifts + halves & (1 << bits) - 1).to(torch.uint8)


def _rows(matrix: IntMatrix, tensor: torch.Tensor) -> torch.Tensor:
    """[tiles, n] in order of units and outputs -> [outputs, n of an output]."""
    units = units_of(matrix)
    return tensor.view(len(tensor), units, ROWS, -1).transpose(1, 2).reshape(len(tensor) * ROWS, -1)[: matrix.out]


def units_of(matrix: IntMatrix) -> int:
    """Units of a tile."""
    return -(-matrix.d_in // SUPER)


def pieces_of(matrix: IntMatrix) -> list[IntMatrix]:
    """Pieces of at most MOST_WEIGHTS weights, or of one tile."""
    rows = max(1, MOST_WEIGHTS // (matrix.d_in * ROWS)) * ROWS
    made = []
    for first in range(0, matrix.out, rows):
        tiles, outputs = slice(first // ROWS, (first + rows) // ROWS), min(rows, matrix.out - first)
        extra = None if matrix.extra is None else matrix.extra[tiles]
        made.append(
            replace(matrix, codes=matrix.codes[tiles], scales=matrix.scales[tiles], extra=extra, out=outputs, more=None)
        )
    return made


def arrays_of(matrix: IntMatrix) -> _Arrays:
    """Addresses of the kernels' arrays."""
    extra = None if matrix.extra is None else matrix.extra.data_ptr()
    vectors = matrix.codes.shape[-1] // VECTOR_WORDS
    return _Arrays(matrix.codes.data_ptr(), matrix.scales.data_ptr(), extra, units_of(matrix), vectors)


# --- products ---------------------------------------------------------------------------------------------------------


class Form(NamedTuple):
    """What a kernel is compiled for. columns: eights of tokens. sides: 2 for gate and up. resident: x is in shared memory."""

    bits: int
    scaling: str
    dtype: torch.dtype
    columns: int
    sides: int = 1
    resident: bool = False


def source(tile: Tile, form: Form) -> str:
    """Source text that NVRTC compiles."""
    macros: dict[str, int | str] = {
        "BITS": form.bits,
        "FORM": SCALINGS.index(form.scaling),
        "TYPE": f'"{TYPES[form.dtype]}"',
    }
    macros |= {"BRAIN": int(form.dtype is torch.bfloat16), "COLUMNS": form.columns, "SIDES": form.sides}
    macros |= {
        "ACROSS": tile.across,
        "ALONG": tile.along,
        "DEPTH": tile.depth,
        "EACH": tile.each,
        "RESIDENT": int(form.resident),
    }
    return pairs.text("block_tiles.cu", {}, **macros)


def shared_bytes(tile: Tile, columns: int, tokens: int = 0, inputs: int = 0) -> int:
    """Of the sums, and of the rows of x that are resident."""
    parts = -(-tile.along * tile.across * ROWS * (8 * columns + 1) // 4) * 16
    return parts + tokens * 2 * (inputs + 32)


@cache
def kernel(device: torch.device, tile: Tile, form: Form, name: str) -> cuda.Kernel | None:
    """name: of the function. It is loaded for all shared memory that a program may have if tile.each share a multiprocessor."""
    shared = MEMORY // tile.each - RESERVED if form.resident else shared_bytes(tile, form.columns)
    return pairs.kernel(device, source(tile, form), name, 0 if name == "block_weights" else shared)


def columns_of(tokens: int) -> int:
    """Eights of tokens that a kernel is compiled for."""
    return next(columns for columns in TILES if 8 * columns >= tokens)


def tile_for(tokens: int, outputs: int, inputs: int, sides: int = 1) -> Tile:
    """By TILES and LONG_TILES. With gate and up a program has tiles of both."""
    columns = columns_of(tokens)
    few, many, most = TILES[columns]
    tile = LONG_TILES[columns] if inputs > LONG else few if outputs <= FEW else many if outputs <= MANY else most
    return tile if tile.across % sides == 0 else Tile(2, 8, 1)


def takes_tokens(x: torch.Tensor, matrix: IntMatrix) -> bool:
    return is_tiled(matrix) and x.dtype in TYPES and 0 < len(x) <= MOST_TOKENS


class _Call(NamedTuple):
    """A product. stream: added to the result. out: memory of the result, contiguous in its rows; None: new memory. tile: None for
    that of `tile_for`."""

    x: torch.Tensor
    matrix: IntMatrix
    bias: torch.Tensor | None
    stream: torch.Tensor | None
    out: torch.Tensor | None
    kind: str | None = None
    tile: Tile | None = None


def product(
    x: torch.Tensor,
    matrix: IntMatrix,
    bias: torch.Tensor | None,
    stream: torch.Tensor | None,
    kind: str | None = None,
    tile: Tile | None = None,
) -> torch.Tensor | None:
    """x [T, in] of 1 to 64 tokens times one matrix -> [T, out], or added to the stream in its memory. kind: activation of gate and
    up, [2 F, in] -> [T, F]. tile: None for that of `tile_for`. None: not supported."""
    return _run(_Call(x, matrix, bias, stream, stream, kind, tile))


def product_into(x: torch.Tensor, matrix: IntMatrix, bias: torch.Tensor | None, out: torch.Tensor) -> bool:
    """As product, written to `out`, which may be columns of a tensor. False: not supported."""
    return _run(_Call(x, matrix, bias, None, out)) is not None


def _run(call: _Call) -> torch.Tensor | None:
    x, matrix, bias, stream, out, kind = call[:-1]
    tokens, sides = len(x), 1 if kind is None else 2
    features = matrix.out // sides
    if not takes_tokens(x, matrix) or (sides == 2 and features % ROWS):
        return None
    tile = call.tile or tile_for(tokens, matrix.out, matrix.d_in, sides)
    columns = columns_of(tokens)
    shared = shared_bytes(tile, columns, tokens, matrix.d_in)
    resident = shared <= MEMORY // tile.each - RESERVED
    form = Form(matrix.bits, matrix.scaling, x.dtype, columns, sides, resident)
    multiply = kernel(x.device, tile, form, "block_product")
    if multiply is None or (bias is not None and bias.dtype is not x.dtype):
        return None
    x = x.contiguous()
    if out is None:
        out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    groups = -(-features // (ROWS * tile.across // sides))
    pointers = (c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (x, bias, stream, out))
    sizes = (c_uint32(size) for size in (tokens, matrix.out, matrix.d_in, units_of(matrix), KINDS[kind], out.stride(0)))
    programs = min(groups, tile.each * processors(x.device))
    shared = shared if resident else shared_bytes(tile, columns)
    multiply(
        programs, LANES * tile.across * tile.along, arrays_of(matrix), *pointers, *sizes, early=True, shared=shared
    )
    return out


class Pairs(NamedTuple):
    """Pairs of tokens and experts, see ops.triton.experts. tiles: of the list, or pairs if they have no order. columns: eights of
    pairs of a tile. experts: held here. shares: float32 [pairs]."""

    chosen: torch.Tensor
    order: torch.Tensor
    places: torch.Tensor
    tiles: int
    is_sorted: bool
    columns: int
    experts: int
    shares: torch.Tensor


def expert_product(
    x: torch.Tensor, weights: IntMatrix, bias: torch.Tensor | None, out: torch.Tensor, pairs_: Pairs, kind: int = 0
) -> None:
    """A product of each pair's row of x with its expert. weights: of all experts, of which each has `out` outputs. kind: of KINDS,
    the activation of gate and up, x is [tokens, D] and out [pairs, F]; 0: x is [pairs, F] and out float32 [pairs, outputs],
    multiplied by shares."""
    sides = 2 if kind else 1
    tile = EXPERT_TILES[pairs_.columns][2 - sides]
    tokens, inputs = (8 * pairs_.columns if pairs_.is_sorted else 1), weights.d_in
    shared = shared_bytes(tile, pairs_.columns, tokens, inputs)
    resident = shared <= MEMORY // tile.each - RESERVED
    form = Form(weights.bits, weights.scaling, x.dtype, pairs_.columns, sides, resident)
    multiply = kernel(x.device, tile, form, "block_experts")
    if multiply is None:
        raise RuntimeError("The kernel of experts in blocks cannot be compiled; the log says why.")
    groups = -(-weights.out // (ROWS * tile.across))
    places = _Pairs(*(tensor.data_ptr() for tensor in (pairs_.chosen, pairs_.order, *pairs_.places)))
    pointers = (
        c_void_p(None if tensor is None else tensor.data_ptr())
        for tensor in (x, bias, None if kind else pairs_.shares, out)
    )
    per_row = len(out) // len(x)
    numbers = (weights.out, inputs, units_of(weights), kind, int(pairs_.is_sorted), per_row, pairs_.experts)
    shared = shared if resident else shared_bytes(tile, pairs_.columns)
    multiply(
        groups * pairs_.tiles, LANES * tile.across * tile.along, arrays_of(weights), places, *pointers,
        *(c_uint32(number) for number in numbers), early=True, shared=shared,
    )  # fmt: skip


def dequantize(matrix: IntMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [out, d_in] in `dtype`."""
    device, convert = matrix.codes.device, None
    if dtype in TYPES:
        convert = kernel(device, Tile(1, 1, 1), Form(matrix.bits, matrix.scaling, dtype, 1), "block_weights")
    if convert is None:
        return unpack(matrix).dequantized().to(dtype)
    out = torch.empty((matrix.out, matrix.d_in), dtype=dtype, device=device)
    units = units_of(matrix)
    sizes = (c_uint32(size) for size in (matrix.out, matrix.d_in, units))
    convert(
        -(-len(matrix.codes) * units // 8), 8 * LANES, arrays_of(matrix), c_void_p(out.data_ptr()), *sizes, early=True
    )
    return out
