"""Products with integer or e4m3 weights for 2 to 64 tokens on Hopper, in CUDA C++ (integer_stream.cu).

Dequantization is bound by instruction issue. With codes in the low mantissa bits of bfloat16, one "and" yields two floats, and one
fused multiply-add scales them and removes the zero point. The result is rounded once, as in integer_matrix. This takes 9
instructions for 8 codes, against 15 there. Programs use at most their share of an SM, so that programs of the next kernel become
resident beside them and prefetch weights before their inputs are ready. Measurements:
docs/log/2026-11-23-integer-stream-2-to-64.md.
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
DRIVER_BYTES = 1 << 10
"""Bytes of shared memory per program that the driver reserves. Alignment may take as much again."""
BARRIERS = 256
MOST_STAGES = 8
COUNTERS = 4096
"""Largest number of tiles with split-K. More tiles than this run without a split."""
SMALLEST_STEP = 128


@dataclass(frozen=True, slots=True)
class Form:
    """Compile-time format of a matrix. group: inputs per scale, 0: one scale per row. zero: common zero point; None: one per
    group. is_e4m3: codes are e4m3 values, with float32 scales."""

    bits: int
    group: int
    zero: int | None
    is_e4m3: bool = False

    @classmethod
    def of(cls, matrix: IntMatrix) -> Form:
        group = matrix.group if matrix.group < matrix.d_in else 0
        if matrix.scaling == "e4m3":
            return cls(8, group, 0, True)
        bits, zero = 8 if matrix.bits == 8 else 4, 1 << matrix.bits - 1
        return cls(bits, group, zero if matrix.zeros is None else None)


def ring(tile: IntStreamTile, bits: int) -> tuple[int, int]:
    """(stages, bytes of shared memory per program). The stages leave room for the SM's other programs and for a tile's sums."""
    stage = tile.step * 2 * tile.batch + tile.rows * tile.step * bits // 8
    stages = min(MOST_STAGES, ((MEMORY + DRIVER_BYTES) // tile.each - 2 * DRIVER_BYTES - BARRIERS) // stage)
    return stages, DRIVER_BYTES + max(stages * stage, 4 * tile.batch * (tile.rows + 4))


def source(tile: IntStreamTile, form: Form, dtype: torch.dtype, sides: int) -> str:
    """Source text that NVRTC compiles."""
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
        "E4M3": int(form.is_e4m3),
    }
    return pairs.text(
        "integer_stream.cu", {"SUM": sums}, **numbers, **{name: f'"{word}"' for name, word in words.items()}
    )


@cache
def kernel(device: torch.device, tile: IntStreamTile, form: Form, dtype: torch.dtype, sides: int) -> cuda.Kernel | None:
    return pairs.kernel(device, source(tile, form, dtype, sides), "integer_product", ring(tile, form.bits)[1])


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Split-K arrival counters, one per tile. Each is a multiple of a full round before and after every product."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def integer_stream_product(
    x: torch.Tensor,
    matrix: IntMatrix,
    bias: torch.Tensor | None,
    tile: IntStreamTile,
    stream: torch.Tensor | None = None,
    kind: str | None = None,
) -> torch.Tensor | None:
    """See integer_ring_product; kernels.INTEGER lists the shapes. None: compilation failed or the bias has another dtype."""
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
