"""Linears of every number format on a GPU: by the kernel that `kernels` names for a shape, else by cuBLAS through torch, with the
norm before and the activation behind as operations of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

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
from ridgeline.ops.triton import integer, kernels, quantize, w8a8
from ridgeline.ops.triton.activation import activate
from ridgeline.ops.triton.fp8 import pack as fp8_pack
from ridgeline.ops.triton.fp8_vector import ALIGNED
from ridgeline.ops.triton.integer_matrix import dequantize
from ridgeline.ops.triton.norm import rms_norm
from ridgeline.ops.triton.products import ProductShape, multiply


def _addressed(x: torch.Tensor) -> bool:
    """Whether the copy engine can address the rows of x, 16-bit numbers."""
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


# --- floating point ---------------------------------------------------------------------------------------------------


def pack(weight: torch.Tensor) -> torch.Tensor:
    return weight


def _fused(
    x: FloatInput, weight: torch.Tensor, bias: torch.Tensor | None, stream: torch.Tensor | None, kind: str | None
) -> torch.Tensor | None:
    """The product with all of what stands around it, by one kernel; None: there is none for it."""
    norm = isinstance(x, Normed)
    source = x.x if isinstance(x, Normed) else x
    (tokens, k), n, dtype = source.shape, weight.shape[0], source.dtype
    aligned = _addressed(source) and k % 8 == 0 and weight.is_contiguous() and weight.data_ptr() % 16 == 0
    add, biased = stream is not None, bias is not None
    shape = ProductShape(tokens, n, k, dtype, dtype, source.device, aligned, norm, kind, add, biased)
    return multiply(kernels.PLAIN, shape, x, weight, bias, stream)


def linear(x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See reference.linear."""
    out = _fused(x, packed, bias, None, None)
    if out is not None:
        return out
    if isinstance(x, Normed):
        return linear(apply_norm(x, rms_norm), packed, bias)
    return F.linear(x, packed, bias)


def linear_add(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """See reference.linear_add; the result takes the stream's memory."""
    out = _fused(x, packed, bias, stream, None) if stream.is_contiguous() else None
    if out is not None:
        return out
    # A bias is the one summand that cuBLAS takes, the stream the other.
    return stream.addmm_(x, packed.t()) if bias is None else stream.add_(F.linear(x, packed, bias))


def linear_activate(x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """See reference.linear_activate."""
    out = _fused(x, packed, bias, None, kind)
    if out is not None:
        return out
    if isinstance(x, Normed):
        return linear_activate(apply_norm(x, rms_norm), packed, bias, kind)
    return activate(linear(x, packed, bias), kind)


UNQUANTIZED = FloatOps(pack, linear, linear_add, linear_activate)


# --- integers ---------------------------------------------------------------------------------------------------------


def _int_fused(
    x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor | None, kind: str | None
) -> torch.Tensor | None:
    """As _fused, by the kernels that widen on the way."""
    norm = isinstance(x, Normed)
    source = x.x if isinstance(x, Normed) else x
    tokens, n, k, dtype = source.shape[0], matrix.out, matrix.d_in, source.dtype
    options = (norm, kind, stream is not None, bias is not None, matrix.bits, matrix.group)
    shape = ProductShape(tokens, n, k, dtype, dtype, source.device, _addressed(source), *options)
    return multiply(kernels.INTEGER, shape, x, matrix, bias, stream)


def int_linear(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """See IntOps."""
    out = _int_fused(x, matrix, bias, None, None)
    if out is not None:
        return out
    if isinstance(x, Normed):
        return int_linear(apply_norm(x, rms_norm), matrix, bias)
    return F.linear(x, dequantize(matrix, x.dtype), bias)


def int_linear_add(x: torch.Tensor, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """See IntOps; the result takes the stream's memory."""
    out = _int_fused(x, matrix, bias, stream, None) if stream.is_contiguous() else None
    if out is not None:
        return out
    # A bias is the one summand that cuBLAS takes, the stream the other.
    weight = dequantize(matrix, x.dtype)
    return stream.addmm_(x, weight.t()) if bias is None else stream.add_(F.linear(x, weight, bias))


def int_linear_activate(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """See IntOps."""
    out = _int_fused(x, matrix, bias, None, kind)
    if out is not None:
        return out
    if isinstance(x, Normed):
        return int_linear_activate(apply_norm(x, rms_norm), matrix, bias, kind)
    return activate(int_linear(x, matrix, bias), kind)


INT_TRITON = IntOps(integer.pack, int_linear, int_linear_add, int_linear_activate, integer.weights)
FP8_WEIGHT_TRITON = integer.with_e4m3(INT_TRITON)


# --- e4m3 -------------------------------------------------------------------------------------------------------------


def _scaled(x: Activation) -> Scaled:
    """x in 8 bits, its norm done first where it is still to be."""
    if isinstance(x, Scaled):
        return x
    return quantize.rms_norm(x.x, x.weight, x.eps, x.offset) if isinstance(x, Normed) else quantize.quantize(x)


def _quantizing(
    x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, into: torch.Tensor | torch.dtype, kind: str | None
) -> torch.Tensor | None:
    """The product by a kernel that quantizes x as it reads it, into a stream or as the type that is asked for."""
    if isinstance(x, Scaled):
        return None
    norm = isinstance(x, Normed)
    source, tensors = (x.x, (x.x, x.weight)) if isinstance(x, Normed) else (x, (x,))
    aligned = matrix.values.data_ptr() % ALIGNED == 0 and all(
        tensor.dtype in kernels.HALVES and tensor.stride(-1) == 1 and tensor.data_ptr() % 8 == 0 for tensor in tensors
    )
    (tokens, k), (stream, out) = source.shape, _target(into)
    options = (source.dtype, out, source.device, aligned, norm, kind, stream is not None, bias is not None)
    return multiply(kernels.FP8, ProductShape(tokens, matrix.values.shape[0], k, *options), x, matrix, bias, stream)


def _quantized(
    x: Scaled, matrix: Fp8Matrix, bias: torch.Tensor | None, into: torch.Tensor | torch.dtype, kind: str | None
) -> torch.Tensor | None:
    """The same of an x that is quantized."""
    shape = _shape_of_8_bits(x, matrix.values, into, kind, bias is not None)
    return multiply(kernels.FP8, shape, x, matrix, bias, _target(into)[0])


def _target(into: torch.Tensor | torch.dtype) -> tuple[torch.Tensor | None, torch.dtype]:
    """(stream or None, type of the result)."""
    return (into, into.dtype) if isinstance(into, torch.Tensor) else (None, into)


def _shape_of_8_bits(
    x: Scaled, weight: torch.Tensor, into: torch.Tensor | torch.dtype, kind: str | None, biased: bool
) -> ProductShape:
    (tokens, k), (stream, out) = x.values.shape, _target(into)
    aligned = not k % 16 and not (x.values.data_ptr() | weight.data_ptr()) % 16
    options = (x.values.dtype, out, weight.device, aligned, False, kind, stream is not None, biased)
    return ProductShape(tokens, weight.shape[0], k, *options)


def fp8_linear(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See reference.fp8_linear."""
    out = _quantizing(x, matrix, bias, dtype, None)
    out = _quantized(_scaled(x), matrix, bias, dtype, None) if out is None else out
    return matrix.scales.new_empty((0, matrix.values.shape[0]), dtype=dtype) if out is None else out


def fp8_linear_add(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """See reference.fp8_linear_add; the result takes the stream's memory."""
    stream = stream.contiguous()
    out = _quantizing(x, matrix, bias, stream, None)
    out = _quantized(_scaled(x), matrix, bias, stream, None) if out is None else out
    return stream if out is None else out


def fp8_linear_activate(
    x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype, kind: str
) -> Activation:
    """See Fp8Ops; plain where the activation is part of the product: the next one quantizes it."""
    out = _quantizing(x, matrix, bias, dtype, kind)
    if out is not None:
        return out
    scaled = _scaled(x)
    out = _quantized(scaled, matrix, bias, dtype, kind)
    return quantize.activate(fp8_linear(scaled, matrix, bias, dtype), kind) if out is None else out


FP8_TRITON = Fp8Ops(fp8_pack, fp8_linear, fp8_linear_add, fp8_linear_activate)


# --- integers on both sides -------------------------------------------------------------------------------------------


def w8a8_linear(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None) -> torch.Tensor:
    """See MatmulOps.w8a8."""
    dtype = (x.x if isinstance(x, Normed) else x).dtype
    out = _rounded(w8a8.codes(x), matrix, bias, dtype)
    return matrix.scales.new_empty((0, matrix.out), dtype=dtype) if out is None else out


def w8a8_linear_add(
    x: torch.Tensor, matrix: IntMatrix, bias: torch.Tensor | None, stream: torch.Tensor
) -> torch.Tensor:
    """See MatmulOps.w8a8; the result takes the stream's memory."""
    stream = stream.contiguous()
    out = _rounded(w8a8.codes(x), matrix, bias, stream)
    return stream if out is None else out


def w8a8_linear_activate(x: FloatInput, matrix: IntMatrix, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """See MatmulOps.w8a8."""
    return activate(w8a8_linear(x, matrix, bias), kind)


def _rounded(
    x: Scaled, matrix: IntMatrix, bias: torch.Tensor | None, into: torch.Tensor | torch.dtype
) -> torch.Tensor | None:
    """The product; None: of no tokens."""
    shape = _shape_of_8_bits(x, matrix.codes, into, None, bias is not None)
    return multiply(kernels.W8A8, shape, x, matrix, bias, _target(into)[0])


W8A8_TRITON = IntOps(integer.pack, w8a8_linear, w8a8_linear_add, w8a8_linear_activate)
