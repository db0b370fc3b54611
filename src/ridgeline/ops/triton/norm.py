"""RMS norm with one program per token and float32 statistics, optionally added to the residual stream."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.ops.table import FloatInput, Normed
from ridgeline.ops.triton.launch import await_inputs, overlap


@triton.jit
def _norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    x_stride,
    out_stride,
    eps,
    size: tl.constexpr,
    OFFSET: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """RMS norm of x [T, size] to out [T, size], columns of a wider matrix perhaps, one token per program. ADD: the norm is rounded
    and then added to out, which holds the residual stream."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < size
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    await_inputs(PDL)
    x_f32 = tl.load(x_ptr + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    if OFFSET:
        weight += 1.0
    scale = tl.rsqrt(tl.sum(x_f32 * x_f32, 0) / size + eps)
    normed = (x_f32 * scale * weight).to(out_ptr.dtype.element_ty)
    if ADD:
        residual = tl.load(out_ptr + token * out_stride + at, mask=inside, other=0.0)
        normed = (residual.to(tl.float32) + normed.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * out_stride + at, normed, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool) -> torch.Tensor:
    """See reference.rms_norm."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _normed(x, weight, eps, offset, out, False)


def norm_add(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool, stream: torch.Tensor) -> torch.Tensor:
    """See TokenwiseOps.norm_add; the result is written to the stream's memory."""
    return _normed(x, weight, eps, offset, stream.contiguous(), True)


def place(x: FloatInput, out: torch.Tensor) -> None:
    """See TokenwiseOps."""
    if isinstance(x, Normed):
        _normed(x.x, x.weight, x.eps, x.offset, out, False)
    else:
        out.copy_(x)


def _normed(
    x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool, out: torch.Tensor, add: bool
) -> torch.Tensor:
    tokens, size = x.shape
    block = triton.next_power_of_2(size)
    if tokens:
        _norm_kernel[(tokens,)](
            x,
            weight,
            out,
            x.stride(0),
            out.stride(0),
            eps,
            size,
            OFFSET=offset,
            ADD=add,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **overlap(x.device),
        )
    return out
