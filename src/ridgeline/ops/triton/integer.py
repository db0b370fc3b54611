"""Memory layout of integer weights of 8, 4 or 3 bits, and of e4m3 weights. Activations are floating point.

On Hopper, integer_stream (up to 64 tokens) and integer_ring (up to 1,024) run on tensor cores and dequantize weights in registers.
On other GPUs integer_vector multiplies up to four tokens with a warp's matrix unit. Larger products are bound by arithmetic:
integer_matrix dequantizes the whole matrix once and cuBLAS multiplies. Three bits are stored as four, because a denser layout is
not faster here. e4m3 weights lie as codes of 8 bits do, and the same kernels multiply by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F

from ridgeline.ops.blocks import pieces_of
from ridgeline.ops.reference import FP8
from ridgeline.ops.table import (
    Activation,
    FloatInput,
    FloatOps,
    Fp8Matrix,
    Fp8Ops,
    IntMatrix,
    IntOps,
    Normed,
    Scaled,
    apply_norm,
)
from ridgeline.ops.triton.integer_matrix import dequantize
from ridgeline.ops.triton.norm import rms_norm


def pack(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group: int) -> IntMatrix:
    """Pack codes (see IntOps). Each row is a sequence of 64-byte chunks, with 128 codes of 4 bits or 64 signed codes of 8 bits.
    Codes after the last input are 0.

    The order within a chunk is the one in which the four threads that share a row hold it in tensor-core instructions (PTX ISA,
    fragments of wgmma's matrix A): thread, piece, parity, and code `j` of an int16 from its lowest bits on hold input
    piece * 8 codes + 8 j + 2 thread + parity. The 16 bytes that a thread loads from a chunk are exactly those it multiplies.
    """
    ordered = _ordered(codes, 2 if bits == 8 else 4)
    packed = ordered ^ 128 if bits == 8 else ordered[..., 0::2] | ordered[..., 1::2] << 4
    kept = None if zeros is None else zeros.contiguous()
    return IntMatrix(packed.flatten(1), scales.half().contiguous(), kept, bits, group, *codes.shape)


def _ordered(codes: torch.Tensor, per: int) -> torch.Tensor:
    """codes [out, in] in the order of `pack`, with `per` codes of an int16: [out, chunks, thread, piece, parity, per]."""
    rows, inputs = codes.shape
    return F.pad(codes, (0, -inputs % (32 * per))).view(rows, -1, 4, per, 4, 2).permute(0, 1, 4, 2, 5, 3)


def pack_e4m3(values: torch.Tensor, scales: torch.Tensor) -> Fp8Matrix:
    """values e4m3 [out, in], scales float32 [out] or [out, groups] -> a matrix whose values lie as codes of 8 bits do (`pack`)."""
    packed = _ordered(values.view(torch.uint8), 2).flatten(1).view(FP8)
    return Fp8Matrix(packed, scales.contiguous(), scales.new_empty(0, dtype=torch.int32))


def as_codes(matrix: Fp8Matrix, inputs: int) -> IntMatrix:
    """The memory of `pack_e4m3` as the kernels for integers read it. inputs: of the linear, without padding."""
    outputs, scales = len(matrix.scales), matrix.scales if matrix.group else matrix.scales.unsqueeze(1)
    made = IntMatrix(matrix.values, scales, None, 8, matrix.group or inputs, outputs, inputs, scaling="e4m3")
    return replace(made, inputs="rounded") if matrix.rounded else made


def with_e4m3(ops: IntOps) -> Fp8Ops:
    """Linears with e4m3 weights and unquantized inputs, by the linears `ops` with integers. They keep the guarantees of `ops`."""

    def given(x: Activation, matrix: Fp8Matrix) -> tuple[FloatInput, IntMatrix]:
        assert not isinstance(x, Scaled)
        return x, as_codes(matrix, (x.x if isinstance(x, Normed) else x).shape[1])

    def linear(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return ops.linear(*given(x, matrix), bias).to(dtype)

    def linear_add(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
        source, codes = given(x, matrix)
        return ops.linear_add(apply_norm(source, rms_norm), codes, bias, stream)

    def linear_activate(
        x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype, kind: str
    ) -> torch.Tensor:
        return ops.linear_activate(*given(x, matrix), bias, kind).to(dtype)

    return Fp8Ops(pack_e4m3, linear, linear_add, linear_activate)


def weights(matrix: IntMatrix) -> Iterator[torch.Tensor]:
    """See IntOps."""
    return (dequantize(piece, torch.float32) for piece in pieces_of(matrix))


def widened(ops: FloatOps) -> IntOps:
    """Integer linears that dequantize the matrix for every product and multiply with `ops`. They keep the guarantees of `ops`."""

    def weight(x: FloatInput, matrix: IntMatrix) -> torch.Tensor:
        return ops.pack(dequantize(matrix, (x.x if isinstance(x, Normed) else x).dtype))

    return IntOps(
        pack=pack,
        linear=lambda x, matrix, bias: ops.linear(x, weight(x, matrix), bias),
        linear_add=lambda x, matrix, bias, stream: ops.linear_add(x, weight(x, matrix), bias, stream),
        linear_activate=lambda x, matrix, bias, kind: ops.linear_activate(x, weight(x, matrix), bias, kind),
    )
