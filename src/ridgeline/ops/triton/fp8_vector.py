"""8-bit (e4m3) matrix-vector product of one token, fused with the operations around it in a decoder.

The structure is that of gemv.resident_kernel: a program keeps x, loops over rows of the weight, applies the norm before and the
activation or residual sum after the product. It also quantizes x, so no other kernel runs between two products. Weights are loaded
as 32-bit words of four values, which two instructions convert. Extracting single bytes would cost more than the product.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from ridgeline.ops.table import FloatInput, Fp8Matrix, Normed
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.gemv import put, rows_of, stream_of
from ridgeline.ops.triton.launch import gdc_wait, overlap
from ridgeline.ops.triton.quantize import scale_of
from ridgeline.ops.triton.shapes import ResidentTile

WORD = 4
"""e4m3 weights in a 32-bit word, and 16-bit elements of x in a 64-bit word."""
ALIGNED = 16
"""Inputs must be a multiple of this, so that weight rows start at multiples of 16 bytes."""
WIDEST = 16384
"""Largest k for which a program keeps x in registers."""


@triton.jit
def _element(words, INDEX: tl.constexpr, dtype: tl.constexpr):
    """Element INDEX of the four 16-bit numbers in each of `words` int64, in float32."""
    return (words >> (16 * INDEX)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def _weight(words, INDEX: tl.constexpr):
    """Element INDEX of the four e4m3 numbers in each of `words` int32, in float32."""
    return ((words >> (8 * INDEX)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)


@triton.jit
def _dot(w, x0, x1, x2, x3, PACKED: tl.constexpr):
    """Words w [ROWS, WORDS] of four e4m3 times x [WORDS]: exact products summed in float32, [ROWS, WORDS]. PACKED: use the
    instruction that converts two values at once."""
    if PACKED:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b;
            .reg .b32 pair;
            .reg .f32 one, two;
            mov.b32 {low, high}, $1;
            cvt.rn.f16x2.e4m3x2 pair, low;
            mov.b32 {a, b}, pair;
            cvt.f32.f16 one, a;
            cvt.f32.f16 two, b;
            mul.rn.f32 one, one, $2;
            fma.rn.f32 one, two, $3, one;
            cvt.rn.f16x2.e4m3x2 pair, high;
            mov.b32 {a, b}, pair;
            cvt.f32.f16 two, a;
            fma.rn.f32 one, two, $4, one;
            cvt.f32.f16 two, b;
            fma.rn.f32 $0, two, $5, one;
            }""",
            "=f,r,f,f,f,f",
            [w, x0[None, :], x1[None, :], x2[None, :], x3[None, :]],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        total = _weight(w, 0) * x0[None, :] + _weight(w, 1) * x1[None, :]
        return total + _weight(w, 2) * x2[None, :] + _weight(w, 3) * x3[None, :]


@triton.jit
def _words(w_ptr, group, at, n, words, KIND: tl.constexpr, EVEN_K: tl.constexpr, ROWS: tl.constexpr):
    """Load a group of rows [ROWS, WORDS] of the weight."""
    row = w_ptr + tl.minimum(rows_of(group, n, KIND, ROWS), n - 1).to(tl.int64)[:, None] * words + at[None, :]
    if EVEN_K:
        return tl.load(row, eviction_policy="evict_first")
    else:
        return tl.load(row, mask=(at < words)[None, :], other=0, eviction_policy="evict_first")


@triton.jit
def _normed(x, rms, gain, INDEX: tl.constexpr, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """x * rms * (gain + offset), rounded to dtype. rms: reciprocal root mean square."""
    weight = _element(gain, INDEX, dtype)
    if OFFSET:
        weight += 1.0
    return (x * rms * weight).to(dtype).to(tl.float32)


@triton.jit
def _rounded(x, factor):
    return (x * factor).to(tl.float8e4nv).to(tl.float32)


@triton.jit
def _quantized(
    x_ptr, gain, at, words, k, eps, NORM: tl.constexpr, OFFSET: tl.constexpr, EVEN_K: tl.constexpr, dtype: tl.constexpr
):
    """Apply the norm and round to e4m3: the token's four parts [WORDS] in float32, and their scale."""
    if EVEN_K:
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=at < words, other=0)
    x0, x1, x2, x3 = _element(x, 0, dtype), _element(x, 1, dtype), _element(x, 2, dtype), _element(x, 3, dtype)
    if NORM:
        rms = tl.rsqrt(tl.sum(x0 * x0 + x1 * x1 + x2 * x2 + x3 * x3, 0) / k + eps)
        x0 = _normed(x0, rms, gain, 0, OFFSET, dtype)
        x1 = _normed(x1, rms, gain, 1, OFFSET, dtype)
        x2 = _normed(x2, rms, gain, 2, OFFSET, dtype)
        x3 = _normed(x3, rms, gain, 3, OFFSET, dtype)
    largest = tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3)))
    factor, scale = scale_of(tl.max(largest, 0))
    return _rounded(x0, factor), _rounded(x1, factor), _rounded(x2, factor), _rounded(x3, factor), scale


@triton.jit(do_not_specialize_on_alignment=["n"])
def _kernel(
    x_ptr,
    gain_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    n,
    k,
    eps,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    KIND: tl.constexpr,
    EVEN_K: tl.constexpr,
    PACKED: tl.constexpr,
    PDL: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """out [n] = x [k] w [n, k]^T + bias with a persistent grid; ADD, NORM, OFFSET, KIND and STAGES as in gemv.resident_kernel.

    x_ptr, gain_ptr: int64 words of four 16-bit numbers of out's dtype. w_ptr: int32 words of four e4m3.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    at = tl.arange(0, WORDS)
    words = k // 4
    groups = (n + ROWS - 1) // ROWS
    first = tl.program_id(0)
    gain = at.to(tl.int64)
    if NORM:
        gain = tl.load(gain_ptr + at, mask=at < words, other=0)
    if PDL:
        gdc_launch_dependents()
    x0 = tl.zeros((WORDS,), tl.float32)
    x1, x2, x3, scale = x0, x0, x0, 0.0
    residual = tl.zeros((ROWS,), dtype)
    step = tl.num_programs(0)
    for group in tl.range(first, groups, step, num_stages=STAGES):
        w = _words(w_ptr, group, at, n, words, KIND, EVEN_K, ROWS)
        w_scale = tl.load(w_scale_ptr + tl.minimum(rows_of(group, n, KIND, ROWS), n - 1))
        if group == first:
            # The loop's first weights are in flight. Only the code below depends on the previous kernel.
            if PDL:
                gdc_wait()
            x0, x1, x2, x3, scale = _quantized(x_ptr, gain, at, words, k, eps, NORM, OFFSET, EVEN_K, dtype)
            residual = stream_of(out_ptr, group, n, ADD, ROWS)
        next_residual = stream_of(out_ptr, group + step, n, ADD, ROWS)
        part = _dot(w, x0, x1, x2, x3, PACKED)
        put(
            out_ptr, bias_ptr, residual.to(tl.float32) + tl.sum(part, 1) * (w_scale * scale), group, n, BIAS, KIND, ROWS
        )
        residual = next_residual


@cache
def has_shared_memory(device: torch.device) -> bool:
    """Whether the device has as much shared memory as the GPU on which the launches were measured."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def product(
    x: FloatInput,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    tile: ResidentTile,
    stream: torch.Tensor | None = None,
    kind: str | None = None,
) -> torch.Tensor:
    """x [1, k] -> quantize(x) weight^T + bias [1, n] in x's dtype. If x is Normed, the kernel applies the norm. kernels.FP8 lists
    the shapes.

    stream: contiguous [1, n]; the result is added in place. kind: activation of gate and up, weight [2 F, k] -> [1, F].
    """
    norm = x if isinstance(x, Normed) else None
    source = x.x if isinstance(x, Normed) else x
    n, k = matrix.values.shape
    out = stream
    if out is None:
        out = torch.empty((1, n if kind is None else n // 2), dtype=source.dtype, device=source.device)
    block = triton.next_power_of_2(k)
    values = source.view(-1).view(torch.int64)
    _kernel[(min(tile.programs, triton.cdiv(n, tile.rows)),)](
        values,
        values if norm is None else norm.weight.view(torch.int64),
        matrix.values.view(torch.int32),
        matrix.scales,
        matrix.scales if bias is None else bias,
        out,
        n,
        k,
        0.0 if norm is None else norm.eps,
        BIAS=bias is not None,
        ADD=stream is not None,
        NORM=norm is not None,
        OFFSET=norm is not None and norm.offset,
        KIND=KINDS[kind],
        EVEN_K=k == block,
        PACKED=source.is_cuda,
        STAGES=tile.stages,
        ROWS=tile.rows,
        WORDS=block // WORD,
        num_warps=tile.warps,
        **overlap(source.device),
    )
    return out
