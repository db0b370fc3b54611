"""8-bit (e4m3) linears of the compiled library; see native/fp8.cpp. Values and sums are those of the reference. Products quantize x
while they read it, so norms and activations return unquantized tensors. Scales of groups lie block by block of 16 outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ridgeline.ops.native.arena import LANES, Arena
from ridgeline.ops.native.binding import Library
from ridgeline.ops.reference import FP8, fp8_pack
from ridgeline.ops.table import Activation, Fp8Matrix, Fp8Ops, Normed, Scaled

PAD_INPUTS = 32


class NativeFp8:
    """The functions of Fp8Ops over one opened library. fixed: a token's sums are added in one order. weight_only: activations are
    not quantized, but rounded to bfloat16 if they are wider."""

    __slots__ = ("_arena", "_fixed", "_kernels", "_pack", "_weight_only")

    def __init__(self, library: Library, arena: Arena, fixed: bool, weight_only: bool) -> None:
        self._kernels, self._pack, self._arena = library.kernels, library.fp8_pack, arena
        self._fixed, self._weight_only = fixed, weight_only

    def pack(self, values: torch.Tensor, scales: torch.Tensor) -> Fp8Matrix:
        """values e4m3 [out, in] -> a matrix with blocks of 16 outputs, the last of which is padded. Scales are not padded."""
        if values.device.type != "cpu":  # the meta device: only sizes are needed
            return fp8_pack(values, scales)
        outputs, inputs = values.shape
        packed = self._arena.take(-(-outputs // LANES) * LANES, -(-inputs // PAD_INPUTS) * PAD_INPUTS, FP8)
        values = values.contiguous()
        self._pack(values.data_ptr(), packed.data_ptr(), outputs, inputs)
        return fp8_pack(packed, scales.contiguous() if scales.dim() == 1 else _in_blocks(scales))

    def linear(self, x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """See reference.fp8_linear."""
        return self._product(x, matrix, bias, dtype)

    def linear_add(
        self, x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, stream: torch.Tensor
    ) -> torch.Tensor:
        """See reference.fp8_linear_add. Writes into the stream's memory if that is contiguous and of x's dtype."""
        if stream.dtype not in self._kernels or not stream.is_contiguous():
            return stream + self._product(x, matrix, bias, stream.dtype)
        return self._product(x, matrix, bias, stream.dtype, stream)

    def _product(
        self,
        x: Activation,
        matrix: Fp8Matrix,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        stream: torch.Tensor | None = None,
    ) -> torch.Tensor:
        norm = x if isinstance(x, Normed) else None
        source = _numbers(x)
        if source.dtype is not dtype or dtype not in self._kernels:
            return self._in_float32(x, matrix, bias, stream).to(dtype)
        source = source if source.is_contiguous() else source.contiguous()
        rows, inputs = source.shape
        outputs = matrix.scales.shape[0]
        out = source.new_empty((rows, outputs)) if stream is None else stream
        self._kernels[dtype].fp8_linear(
            source.data_ptr(),
            matrix.values.data_ptr(),
            matrix.scales.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if stream is None else stream.data_ptr(),
            out.data_ptr(),
            rows,
            outputs,
            inputs,
            0 if norm is None else norm.weight.data_ptr(),
            0.0 if norm is None else norm.eps,
            norm is not None and norm.offset,
            self._fixed,
            self._weight_only,
            matrix.group,
        )
        return out

    def _in_float32(
        self, x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, stream: torch.Tensor | None
    ) -> torch.Tensor:
        """Compute in float32, for unsupported dtypes and for quantized inputs. Quantizing those again yields the same values."""
        source = _numbers(x).float()
        widened = Normed(source, x.weight.float(), x.eps, x.offset) if isinstance(x, Normed) else source
        added = None if stream is None else stream.float()
        return self._product(widened, matrix, None if bias is None else bias.float(), torch.float32, added)


def _in_blocks(scales: torch.Tensor) -> torch.Tensor:
    """Reorder [out, groups] to [groups, 16] for each block of 16 outputs; the last block may have fewer."""
    blocks = [block.t().reshape(-1) for block in scales.split(LANES)]
    return torch.cat(blocks).view(scales.shape)


def _numbers(x: Activation) -> torch.Tensor:
    if isinstance(x, Scaled):
        return x.values.float() * x.scales.unsqueeze(-1)
    return x.x if isinstance(x, Normed) else x


def fp8_ops(
    library: Library,
    arena: Arena,
    activate: Callable[[torch.Tensor, str], torch.Tensor],
    *,
    fixed: bool,
    weight_only: bool,
) -> Fp8Ops:
    """The table for 8-bit linears. weight_only: activations are not quantized. activate: the unquantized activation."""
    ops = NativeFp8(library, arena, fixed, weight_only)

    def linear_activate(
        x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype, kind: str
    ) -> torch.Tensor:
        return activate(ops.linear(x, matrix, bias, dtype), kind)

    return Fp8Ops(ops.pack, ops.linear, ops.linear_add, linear_activate)
