"""Integer weights for some tokens on Hopper, in CUDA C++ (integer_stream.cu): widening is instructions, so these are counted.

With numbers below a bfloat16's exponents one "and" makes two floats of two codes, and one fused operation scales them and takes the
zero point off, rounded once as in integer_matrix: 9 instructions for 8 codes where there were 15. Programs take no more than their
share of a processor, so that the next kernel's come up beside them and ask for their weights before its inputs are there. What was
measured of each part: docs/log/2026-11-23-integer-stream-2-to-64.md.
"""

from __future__ import annotations

from ctypes import c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache

import torch

from ridgeline.ops.table import IntMatrix
from ridgeline.ops.triton import cuda, pairs
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.integer_shapes import IntStreamTile
from ridgeline.ops.triton.shapes import MEMORY

TYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}
OURS = 1 << 10
"""Bytes of each program that the driver takes; what alignment may take is as much."""
BARRIERS = 256
MOST_STAGES = 8
COUNTERS = 4096
"""Tiles that may be shared: more than this are dealt whole."""
SMALLEST_STEP = 128


@dataclass(frozen=True, slots=True)
class Form:
    """What a kernel is compiled for of a matrix. group: inputs of a scale, 0: all. zero: of all groups, None: each its own."""

    bits: int
    group: int
    zero: int | None

    @classmethod
    def of(cls, matrix: IntMatrix) -> Form:
        bits, zero = 8 if matrix.bits == 8 else 4, 1 << matrix.bits - 1
        return cls(bits, matrix.group if matrix.group < matrix.d_in else 0, zero if matrix.zeros is None else None)


def ring(tile: IntStreamTile, bits: int) -> tuple[int, int]:
    """(stages, bytes of a program): as many as leave room for its fellows, and for the sums of a tile."""
    stage = tile.step * 2 * tile.batch + tile.rows * tile.step * bits // 8
    stages = min(MOST_STAGES, ((MEMORY + OURS) // tile.each - 2 * OURS - BARRIERS) // stage)
    return stages, OURS + max(stages * stage, 4 * tile.batch * (tile.rows + 4))


def source(tile: IntStreamTile, form: Form, dtype: torch.dtype, sides: int) -> str:
    """The text that is compiled."""
    sums = tile.batch // 2
    left, right = ", ".join(f"%{sums + i}" for i in range(4)), f"%{sums + 4}"
    words = {"TYPE": TYPES[dtype], "PRODUCT": tile.batch, "LEFT": f"{{{left}}}", "RIGHT": right}
    numbers: dict[str, int | str] = {
        "BATCH": tile.batch,
        "GROUPS": tile.groups,
        "STEP": tile.step,
        "STAGES": ring(tile, form.bits)[0],
        "EACH": tile.each,
        "SIDES": sides,
        "BITS": form.bits,
        "GROUP": form.group,
        "ZEROS": int(form.zero is None),
        "ZERO": f"{form.zero or 0}.0f",
    }
    return pairs.text(
        "integer_stream.cu", {"SUM": sums}, **numbers, **{name: f'"{word}"' for name, word in words.items()}
    )


@cache
def kernel(device: torch.device, tile: IntStreamTile, form: Form, dtype: torch.dtype, sides: int) -> cuda.Kernel | None:
    return pairs.kernel(device, source(tile, form, dtype, sides), "integer_product", ring(tile, form.bits)[1])


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Counters of the programs that have written their part of a tile: whole rounds before and after every product."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def integer_stream_product(
    x: torch.Tensor,
    matrix: IntMatrix,
    bias: torch.Tensor | None,
    tile: IntStreamTile,
    stream: torch.Tensor | None = None,
    kind: str | None = None,
) -> torch.Tensor | None:
    """See integer_ring_product; which shapes: kernels.INTEGER. None: it cannot be compiled, or the bias has another type."""
    if bias is not None and bias.dtype != x.dtype:
        return None
    (tokens, inputs), sides = x.shape, 1 if kind is None else 2
    multiply = kernel(x.device, tile, Form.of(matrix), x.dtype, sides)
    if multiply is None:
        return None
    codes, features, tile_features = matrix.codes.view(torch.int16), matrix.out // sides, tile.rows // sides
    batches = -(-tokens // tile.batch)
    tiles = -(-features // tile_features) * batches
    split = tile.split if tiles <= COUNTERS else 1
    out = torch.empty((tokens, features), dtype=x.dtype, device=x.device) if stream is None else stream
    part, arrivals = out, out
    if split > 1:
        part = torch.empty((tiles, split, tile.batch, tile.rows), dtype=torch.float32, device=x.device)
        arrivals = _arrivals(x.device)
    width = tile.step * (8 if matrix.bits == 8 else 4) // 16
    maps = cuda.tensor_map(codes, (tile_features, width)), cuda.tensor_map(x, (tile.batch, 64))
    tensors = (matrix.scales, matrix.zeros, bias, stream, out, part, arrivals)
    pointers = (c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors)
    sizes = (tokens, features, inputs, matrix.scales.shape[1], batches, split, KINDS[kind])
    multiply(tiles * split, tile.threads, *maps, *pointers, *(c_uint32(size) for size in sizes), early=True)
    return out
