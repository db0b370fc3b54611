"""Inputs of fp8 linears: RMS norm, gated activation or unchanged values, quantized to e4m3 with one scale per token.

Each program processes one token.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.ops.table import Scaled
from ridgeline.ops.triton.activation import KINDS, gated
from ridgeline.ops.triton.launch import await_inputs, overlap

FP8 = torch.float8_e4m3fn
LARGEST = tl.constexpr(448.0)
SMALLEST_AMAX = tl.constexpr(1e-12)
WIDEST_ROW = 16384
"""Elements of a row that a program processes at a time. It can hold a tail of as many; longer rows are read twice."""
MANY = 1024
"""Token count from which every SM always has several programs."""


@triton.jit
def scale_of(amax):
    """(factor of the values, scale): 448 / amax and amax / 448, with the reference's rounding."""
    amax = tl.maximum(amax, SMALLEST_AMAX)
    return tl.math.div_rn(LARGEST, amax), tl.math.div_rn(amax, LARGEST)


@triton.jit
def _rounded(x, dtype: tl.constexpr, FAST: tl.constexpr):
    """Round x, float32, to `dtype`, and return it in float32. FAST: convert two values per instruction; single conversions run on
    the unit of exponentials and are slower."""
    if FAST and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 both;
            cvt.rn.bf16x2.f32 both, $3, $2;
            shl.b32 $0, both, 16;
            and.b32 $1, both, 0xffff0000;
            }""",
            "=f,=f,f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    return x.to(dtype).to(tl.float32)


@triton.jit
def _norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    eps,
    size: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMS norm of one token per program, rounded to x's dtype, then quantized: out e4m3 [T, size], scale float32 [T]."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        weight += 1.0
    await_inputs(PDL)
    x_f32 = tl.load(x_ptr + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    rms = tl.rsqrt(tl.sum(x_f32 * x_f32, 0) / size + eps)
    normed = _rounded(x_f32 * rms * weight, x_ptr.dtype.element_ty, PDL)
    factor, scale = scale_of(tl.max(tl.abs(normed), 0))
    tl.store(out_ptr + token * size + at, (normed * factor).to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + token, scale)


@triton.jit
def _source(x_ptr, at, size, ACTIVATION: tl.constexpr, PDL: tl.constexpr):
    """Load the values at `at` in float32: x, or act(gate) * up rounded to x's dtype."""
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    if ACTIVATION != 0:
        up = tl.load(x_ptr + size + at, mask=at < size, other=0.0).to(tl.float32)
        x = _rounded(gated(x, up, ACTIVATION, PDL), x_ptr.dtype.element_ty, PDL)
    return x


@triton.jit
def _quantize_kernel(
    x_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    size,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Quantize one token of `size` values per program. ACTIVATION: see activation.KINDS; 0 reads x, otherwise x = (gate, up). TAIL:
    elements after the only block, 0: none."""
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * x_stride
    out_ptr += token * size
    at = tl.arange(0, BLOCK)
    await_inputs(PDL)
    if BLOCKS == 1:
        x = _source(x_ptr, at, size, ACTIVATION, PDL)
        amax = tl.max(tl.abs(x), 0)
        if TAIL > 0:
            behind = BLOCK + tl.arange(0, TAIL)
            tail = _source(x_ptr, behind, size, ACTIVATION, PDL)
            amax = tl.maximum(amax, tl.max(tl.abs(tail), 0))
        factor, scale = scale_of(amax)
        tl.store(out_ptr + at, (x * factor).to(tl.float8e4nv), mask=at < size)
        if TAIL > 0:
            tl.store(out_ptr + behind, (tail * factor).to(tl.float8e4nv), mask=behind < size)
    else:
        amax = 0.0
        for block in range(BLOCKS):
            here = block * BLOCK + at
            amax = tl.maximum(amax, tl.max(tl.abs(_source(x_ptr, here, size, ACTIVATION, PDL)), 0))
        factor, scale = scale_of(amax)
        for block in range(BLOCKS):
            here = block * BLOCK + at
            x = _source(x_ptr, here, size, ACTIVATION, PDL)
            tl.store(out_ptr + here, (x * factor).to(tl.float8e4nv), mask=here < size)
    tl.store(scale_ptr + token, scale)


def _allocate(tokens: int, size: int, like: torch.Tensor) -> Scaled:
    values = torch.empty((tokens, size), dtype=FP8, device=like.device)
    return Scaled(values, torch.empty(tokens, dtype=torch.float32, device=like.device))


def _warps(tokens: int, block: int) -> int:
    """Warps of a program: many for few tokens, which are bound by latency; few for many tokens, which are bound by instructions."""
    return min(32, max(1, block // (512 if tokens < MANY else 1024)))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool) -> Scaled:
    """reference.quantize(reference.rms_norm(x))."""
    tokens, size = x.shape
    out = _allocate(tokens, size, x)
    block = triton.next_power_of_2(size)
    if tokens:
        _norm_kernel[(tokens,)](
            x,
            weight,
            out.values,
            out.scales,
            x.stride(0),
            eps,
            size,
            OFFSET=offset,
            BLOCK=block,
            num_warps=min(16, _warps(tokens, block)),
            **overlap(x.device),
        )
    return out


def _blocks(size: int, activates: bool, widest_row: int) -> tuple[int, int, int]:
    """(BLOCKS, BLOCK, TAIL) of a row: powers of two that cover it with little padding. Without an activation, two reads of a wide
    row are faster than holding it (28,672: 187 us against 229)."""
    block = min(widest_row, 1 << (size.bit_length() - 1))
    tail = triton.next_power_of_2(size - block) if size > block else 0
    if tail == block < widest_row:
        return 1, 2 * block, 0
    if tail > widest_row or (block == widest_row and tail and not activates):
        return triton.cdiv(size, block), block, 0
    return 1, block, tail


def _quantized(x: torch.Tensor, size: int, activation: int, widest_row: int) -> Scaled:
    tokens = x.shape[0]
    out = _allocate(tokens, size, x)
    blocks, block, tail = _blocks(size, activation != 0, widest_row)
    if tokens:
        _quantize_kernel[(tokens,)](
            x,
            out.values,
            out.scales,
            x.stride(0),
            size,
            ACTIVATION=activation,
            BLOCKS=blocks,
            BLOCK=block,
            TAIL=tail,
            num_warps=_warps(tokens, block),
            **overlap(x.device),
        )
    return out


def activate(gate_up: torch.Tensor, kind: str, widest_row: int = WIDEST_ROW) -> Scaled:
    """See reference.fp8_activate."""
    return _quantized(gate_up, gate_up.shape[1] // 2, KINDS[kind], widest_row)


def quantize(x: torch.Tensor, widest_row: int = WIDEST_ROW) -> Scaled:
    """See reference.quantize; x [T, D] with contiguous rows."""
    return _quantized(x, x.shape[1], 0, widest_row)
