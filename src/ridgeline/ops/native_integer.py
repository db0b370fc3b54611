"""Integer linears of the compiled library; see native/integer.h and native/integer_rounded.h. All are batch-invariant, except those
whose outliers depend on the batch."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import torch

from ridgeline.ops.blocks import SCALINGS, Blocks
from ridgeline.ops.native.arena import LANES, Arena
from ridgeline.ops.native.binding import GATES, IntWeights, Library
from ridgeline.ops.reference import ROW_CODES, block_pack, int_pack
from ridgeline.ops.table import FloatInput, FloatOps, IntMatrix, IntOps, Normed, TokenwiseOps, apply_norm

INPUTS = ("float", "rounded", "batch-outliers", "token-outliers")
"""IntMatrix.inputs in the order of Inputs in integer.h. SCALINGS are in the order of Scaling there."""


class NativeInteger:
    """The functions of IntOps over one opened library. tokenwise, unquantized: of the same table. inputs: see IntMatrix."""

    __slots__ = ("_arena", "_inputs", "_kernels", "_pack", "_tokenwise", "_unquantized")

    def __init__(
        self, library: Library, arena: Arena, tokenwise: TokenwiseOps, unquantized: FloatOps, inputs: str
    ) -> None:
        self._kernels, self._pack, self._arena = library.kernels, library.int_pack, arena
        self._tokenwise, self._unquantized, self._inputs = tokenwise, unquantized, inputs

    def pack(
        self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, bits: int, group: int
    ) -> IntMatrix:
        """See IntOps. Codes are in blocks of 16 outputs, with scales and zeros of the 16 outputs adjacent."""
        if codes.device.type != "cpu":  # the meta device: only sizes are needed
            return replace(int_pack(codes, scales, zeros, bits, group), inputs=self._inputs)
        packed, laid = self._packed(codes, bits), self._blocks(scales.half())
        laid_zeros = None if zeros is None else self._blocks(zeros)
        outputs, inputs = codes.shape
        return IntMatrix(packed, laid, laid_zeros, bits, group, outputs, inputs, None, self._inputs)

    def _packed(self, codes: torch.Tensor, bits: int) -> torch.Tensor:
        """Codes [out, in] in the layout of integer.h, with the outputs padded."""
        outputs, inputs = codes.shape
        rows, width = -(-outputs // LANES) * LANES, -(-inputs // ROW_CODES) * ROW_CODES * bits // 8
        packed, codes = self._arena.take(rows, width, torch.uint8), codes.contiguous()
        self._pack(codes.data_ptr(), packed.data_ptr(), outputs, inputs, bits)
        return packed

    def pack_blocks(self, blocks: Blocks) -> IntMatrix:
        """See MatmulOps.blocks."""
        if blocks.codes.device.type != "cpu":  # the meta device: only sizes are needed
            return block_pack(blocks)
        codes, scales = self._packed(blocks.codes, blocks.bits), self._blocks(blocks.scales)
        matrix = IntMatrix(codes, scales, None, blocks.bits, blocks.group, *blocks.codes.shape)
        extra = None if blocks.extra is None else self._blocks(blocks.extra)
        return replace(matrix, scaling=blocks.scaling, extra=extra)

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Reorder [out, groups] to memory [out / 16, groups, 16], as a tensor of the padded outputs."""
        outputs, groups = values.shape
        rows = -(-outputs // LANES) * LANES
        packed = self._arena.take(rows, groups, values.dtype)
        padded = torch.nn.functional.pad(values, (0, 0, 0, rows - outputs))
        packed.view(-1, groups, LANES).copy_(padded.view(-1, LANES, groups).transpose(1, 2))
        return packed

    def linear(self, x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        """See reference.int_linear."""
        return self._product(x, matrix, bias)

    def linear_add(
        self, x: torch.Tensor, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor
    ) -> torch.Tensor:
        """See reference.int_linear_add. Writes into the stream's memory if that is contiguous and of x's dtype."""
        if stream.dtype is not x.dtype or not stream.is_contiguous():
            return self._product(x, matrix, bias).add_(stream)
        return self._product(x, matrix, bias, stream)

    def linear_activate(self, x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        """See reference.int_linear_activate. Fuses the activation if each half consists of whole blocks of outputs."""
        if matrix.out % (2 * LANES) or matrix.more is not None:
            return self._tokenwise.activate(self._product(x, matrix, bias), kind)
        return self._product(x, matrix, bias, None, kind)

    def _product(
        self,
        x: FloatInput,
        matrix: IntMatrix,
        bias: torch.Tensor | None,
        stream: torch.Tensor | None = None,
        kind: str | None = None,
    ) -> torch.Tensor:
        """Run the norm before a product, the product and its epilogue in one call."""
        norm = x if isinstance(x, Normed) else None
        source = x.x if isinstance(x, Normed) else x
        kernels = self._kernels.get(source.dtype)
        if kernels is None or (norm is not None and norm.weight.dtype is not source.dtype):
            return self._in_float32(apply_norm(x, self._tokenwise.rms_norm), matrix, bias, stream, kind)
        source = source if source.is_contiguous() else source.contiguous()
        rows, inputs = source.shape
        outputs = outputs_of(matrix)
        out = source.new_empty((rows, outputs if kind is None else outputs // 2)) if stream is None else stream
        weights = int_weights(matrix)
        kernels.int_linear(
            source.data_ptr(),
            ctypes.byref(weights),
            0 if bias is None else bias.data_ptr(),
            0 if stream is None else stream.data_ptr(),
            out.data_ptr(),
            rows,
            outputs,
            inputs,
            0 if kind is None else GATES[kind],
            0 if norm is None else norm.weight.data_ptr(),
            0.0 if norm is None else norm.eps,
            norm is not None and norm.offset,
        )
        return out

    def _in_float32(
        self,
        x: torch.Tensor,
        matrix: IntMatrix,
        bias: torch.Tensor | None,
        stream: torch.Tensor | None,
        kind: str | None,
    ) -> torch.Tensor:
        """Compute in float32, for dtypes without kernels. Kept columns have that dtype and are multiplied apart."""
        bias_f32, stream_f32 = (None if tensor is None else tensor.float() for tensor in (bias, stream))
        if matrix.kept is None:
            return self._product(x.float(), matrix, bias_f32, stream_f32, kind).to(x.dtype)
        kept, columns, is_kept = matrix.kept
        rest = x.float().masked_fill(is_kept, 0.0)
        out = self._product(rest, replace(matrix, kept=None), bias_f32, stream_f32).to(x.dtype)
        out = self._unquantized.linear_add(x.index_select(1, kept), columns, None, out)
        return out if kind is None else self._tokenwise.activate(out, kind)


def outputs_of(matrix: IntMatrix) -> int:
    """Outputs of a matrix with those of `more`."""
    return matrix.out if matrix.more is None else matrix.out + outputs_of(matrix.more)


def int_weights(matrix: IntMatrix) -> IntWeights:
    """The kernels' struct of a packed matrix. It keeps the structs behind its pointers alive."""
    zeros = None if matrix.zeros is None else matrix.zeros.data_ptr()
    weights = IntWeights(matrix.codes.data_ptr(), matrix.scales.data_ptr(), zeros, matrix.bits, matrix.group)
    weights.inputs = INPUTS.index(matrix.inputs)
    if matrix.kept is not None:
        kept, columns, _ = matrix.kept
        weights.kept, weights.kept_columns, weights.n_kept = kept.data_ptr(), columns.data_ptr(), len(kept)
    weights.scaling = SCALINGS.index(matrix.scaling)
    weights.extra = None if matrix.extra is None else matrix.extra.data_ptr()
    if matrix.more is not None:
        weights.kept_more = more = int_weights(matrix.more)  # type: ignore[attr-defined]
        weights.blocks, weights.more = matrix.out // LANES, ctypes.addressof(more)
    return weights


def int_ops(
    library: Library, arena: Arena, tokenwise: TokenwiseOps, unquantized: FloatOps, inputs: str = "float"
) -> IntOps:
    """The table for integer linears that read their inputs so."""
    ops = NativeInteger(library, arena, tokenwise, unquantized, inputs)
    return IntOps(pack=ops.pack, linear=ops.linear, linear_add=ops.linear_add, linear_activate=ops.linear_activate)


def block_ops(library: Library, arena: Arena, tokenwise: TokenwiseOps, unquantized: FloatOps) -> IntOps:
    """The table for weights in blocks."""
    ops = NativeInteger(library, arena, tokenwise, unquantized, "float")
    return IntOps(ops.pack_blocks, ops.linear, ops.linear_add, ops.linear_activate)
