"""Memory layout of integer weights of 8, 4 or 3 bits. Activations are floating point.

On Hopper, integer_stream (up to 64 tokens) and integer_ring (up to 1,024) run on tensor cores and dequantize weights in registers.
On other GPUs integer_vector multiplies up to four tokens with a warp's matrix unit. Larger products are bound by arithmetic:
integer_matrix dequantizes the whole matrix once and cuBLAS multiplies. Three bits are stored as four, because a denser layout is
not faster here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ridgeline.ops.table import FloatInput, FloatOps, IntMatrix, IntOps, Normed
from ridgeline.ops.triton.integer_matrix import dequantize


def pack(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group: int) -> IntMatrix:
    """Pack codes (see IntOps). Each row is a sequence of 64-byte chunks, with 128 codes of 4 bits or 64 signed codes of 8 bits.
    Codes after the last input are 0.

    The order within a chunk is the one in which the four threads that share a row hold it in tensor-core instructions (PTX ISA,
    fragments of wgmma's matrix A): thread, piece, parity, and code `j` of an int16 from its lowest bits on hold input
    piece * 8 codes + 8 j + 2 thread + parity. The 16 bytes that a thread loads from a chunk are exactly those it multiplies.
    """
    per = 2 if bits == 8 else 4
    rows, inputs = codes.shape
    codes = F.pad(codes, (0, -inputs % (32 * per)))
    ordered = codes.view(rows, -1, 4, per, 4, 2).permute(0, 1, 4, 2, 5, 3)
    packed = ordered ^ 128 if per == 2 else ordered[..., 0::2] | ordered[..., 1::2] << 4
    kept = None if zeros is None else zeros.contiguous()
    return IntMatrix(packed.reshape(rows, -1), scales.half().contiguous(), kept, bits, group, rows, inputs)


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
