"""Integer linears: weights of 8, 4 or 3 bits, activations in floating point.

On Hopper, products of up to 64 tokens (integer_stream) and of up to 1,024 (integer_ring) run on the tensor cores, and weights are
widened on their way. On other GPUs up to four tokens are products of a warp's matrix unit (integer_vector). Beyond, arithmetic is
the limit: the matrix is widened as a whole once (integer_matrix) and cuBLAS multiplies. Three bits are stored as four: they
save nothing here.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F

from ridgeline.ops.table import IntMatrix, IntOps, Normed, Plain, PlainOps, plain
from ridgeline.ops.triton import integer_stream
from ridgeline.ops.triton.activation import activate
from ridgeline.ops.triton.integer_matrix import dequantize
from ridgeline.ops.triton.integer_shapes import IntRingTile, IntStreamTile, IntVectorTile, tile_for
from ridgeline.ops.triton.integer_vector import integer_vector_product
from ridgeline.ops.triton.launch import gluon
from ridgeline.ops.triton.norm import rms_norm


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


@cache
def _gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _streams(x: torch.Tensor) -> bool:
    """Whether the copy engine can address x."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def _fused(
    x: Plain, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor | None, kind: str | None
) -> torch.Tensor | None:
    """The product, with all of what stands around it, by the kernels that widen on the way; None: not in one kernel, or
    not by them."""
    source = x.x if isinstance(x, Normed) else x
    if source.dtype not in (torch.bfloat16, torch.float16) or not source.shape[0] or not _gpu(source.device):
        return None
    ring = gluon(source.device, "integer_ring") if _streams(source) else None
    streams = _streams(source) and integer_stream.takes(source, matrix, bias)
    tile = tile_for(source.shape[0], matrix, kind is not None, ring is not None, streams)
    if isinstance(tile, IntStreamTile):
        if isinstance(x, Normed):
            return None
        out = integer_stream.integer_stream_product(source, matrix, bias, tile, stream, kind)
        if out is not None:
            return out
        tile = tile_for(source.shape[0], matrix, kind is not None, ring is not None, False)
    if isinstance(tile, IntVectorTile):
        # Each program would norm every token by itself.
        if source.stride(1) != 1 or (isinstance(x, Normed) and source.shape[0] > 1):
            return None
        return integer_vector_product(x, matrix, bias, tile, stream, kind)
    if not isinstance(tile, IntRingTile) or isinstance(x, Normed) or ring is None:
        return None
    product: torch.Tensor = ring.integer_ring_product(source, matrix, bias, tile, stream, kind)
    return product


def linear(x: Plain, matrix: IntMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """See IntOps."""
    out = _fused(x, matrix, bias, None, None)
    if out is not None:
        return out
    if isinstance(x, Normed):
        return linear(plain(x, rms_norm), matrix, bias)
    return F.linear(x, dequantize(matrix, x.dtype), bias)


def linear_add(x: torch.Tensor, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """See IntOps; the result takes the stream's memory."""
    out = _fused(x, matrix, bias, stream, None) if stream.is_contiguous() else None
    if out is not None:
        return out
    # A bias is the one summand that cuBLAS takes, the stream the other.
    weight = dequantize(matrix, x.dtype)
    return stream.addmm_(x, weight.t()) if bias is None else stream.add_(F.linear(x, weight, bias))


def linear_activate(x: Plain, matrix: IntMatrix, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """See IntOps."""
    out = _fused(x, matrix, bias, None, kind)
    if out is not None:
        return out
    if isinstance(x, Normed):
        return linear_activate(plain(x, rms_norm), matrix, bias, kind)
    return activate(linear(x, matrix, bias), kind)


INT_TRITON = IntOps(pack=pack, linear=linear, linear_add=linear_add, linear_activate=linear_activate)


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
