"""How integer weights of 8, 4 or 3 bits lie in memory; their inputs are in floating point.

On Hopper, products of up to 64 tokens (integer_stream) and of up to 1,024 (integer_ring) run on the tensor cores, and weights are
widened on their way. On other GPUs up to four tokens are products of a warp's matrix unit (integer_vector). Beyond, arithmetic is
the limit: the matrix is widened as a whole once (integer_matrix) and cuBLAS multiplies. Three bits are stored as four: they
save nothing here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ridgeline.ops.table import IntMatrix, IntOps, Normed, Plain, PlainOps
from ridgeline.ops.triton.integer_matrix import dequantize


def pack(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group: int) -> IntMatrix:
    """See IntOps. Every row is a run of chunks of 64 bytes, 128 codes of 4 bits or 64 signed ones of 8; behind the last
    input codes are 0.

    The order within a chunk is the one in which the tensor cores' instructions want a row from the four threads that share
    it (PTX ISA, fragments of wgmma's matrix A): thread, piece, parity and code `j` of an int16, its lowest bits first,
    hold input piece * 8 codes + 8 j + 2 thread + parity. So 16 bytes of a chunk are all that one thread needs of it.
    """
    per = 2 if bits == 8 else 4
    rows, inputs = codes.shape
    codes = F.pad(codes, (0, -inputs % (32 * per)))
    ordered = codes.view(rows, -1, 4, per, 4, 2).permute(0, 1, 4, 2, 5, 3)
    packed = ordered ^ 128 if per == 2 else ordered[..., 0::2] | ordered[..., 1::2] << 4
    kept = None if zeros is None else zeros.contiguous()
    return IntMatrix(packed.reshape(rows, -1), scales.half().contiguous(), kept, bits, group, rows, inputs)


def widened(ops: PlainOps) -> IntOps:
    """Integer linears whose every product widens the matrix for `ops`, with what these promise of their sums."""

    def weight(x: Plain, matrix: IntMatrix) -> torch.Tensor:
        return ops.pack(dequantize(matrix, (x.x if isinstance(x, Normed) else x).dtype))

    return IntOps(
        pack=pack,
        linear=lambda x, matrix, bias: ops.linear(x, weight(x, matrix), bias),
        linear_add=lambda x, matrix, bias, stream: ops.linear_add(x, weight(x, matrix), bias, stream),
        linear_activate=lambda x, matrix, bias, kind: ops.linear_activate(x, weight(x, matrix), bias, kind),
    )
