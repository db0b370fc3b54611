"""Matrix-vector products for one to four tokens: every program streams a few rows of the weight, in float32.

What limits them is reading the weight, and for small matrices the ramp between two kernels. Therefore a program starts
loading its weights, which no kernel of a step writes, before it waits for the kernel that makes x (programmatic
dependent launch, CUDA C++ programming guide, section "Programmatic Dependent Launch and Synchronization").
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.ops.triton.launch import overlap
from ridgeline.ops.triton.shapes import VectorTile


@triton.jit
def _weights(w_row, at, k, EVEN: tl.constexpr):
    """[ROWS, BLOCK] of the weight, read once and first to leave the caches."""
    if EVEN:
        return tl.load(w_row + at[None, :], eviction_policy="evict_first")
    else:
        return tl.load(w_row + at[None, :], mask=(at < k)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _part(x_ptr, w, at, k, EVEN: tl.constexpr):
    """w [ROWS, BLOCK] in float32 times one token's x [BLOCK]."""
    if EVEN:
        x = tl.load(x_ptr + at)
    else:
        x = tl.load(x_ptr + at, mask=at < k, other=0.0)
    return w * x.to(tl.float32)[None, :]


@triton.jit
def _store(out_ptr, bias_ptr, total, row, n, BIAS: tl.constexpr):
    value = tl.sum(total, 1)
    if BIAS:
        value += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, value.to(out_ptr.dtype.element_ty), mask=row < n)


@triton.jit
def vector_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    n,
    k,
    TOKENS: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [TOKENS, n] = x [TOKENS, k] w [n, k]^T + bias, ROWS rows of w per program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, BLOCK)
    w_row = w_ptr + tl.minimum(row, n - 1).to(tl.int64)[:, None] * k
    w = _weights(w_row, at, k, EVEN)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    total0 = tl.zeros((ROWS, BLOCK), tl.float32)
    total1 = total0
    total2 = total0
    total3 = total0
    for start in range(0, k, BLOCK):
        here = start + at
        if start > 0:
            w = _weights(w_row, here, k, EVEN)
        wide = w.to(tl.float32)
        total0 += _part(x_ptr, wide, here, k, EVEN)
        if TOKENS > 1:
            total1 += _part(x_ptr + x_stride, wide, here, k, EVEN)
        if TOKENS > 2:
            total2 += _part(x_ptr + 2 * x_stride, wide, here, k, EVEN)
        if TOKENS > 3:
            total3 += _part(x_ptr + 3 * x_stride, wide, here, k, EVEN)
    _store(out_ptr, bias_ptr, total0, row, n, BIAS)
    if TOKENS > 1:
        _store(out_ptr + n, bias_ptr, total1, row, n, BIAS)
    if TOKENS > 2:
        _store(out_ptr + 2 * n, bias_ptr, total2, row, n, BIAS)
    if TOKENS > 3:
        _store(out_ptr + 3 * n, bias_ptr, total3, row, n, BIAS)


def vector_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: VectorTile) -> torch.Tensor:
    """x [T, k] with T <= 4 and contiguous rows, weight [n, k] contiguous -> x weight^T + bias [T, n] in x's dtype."""
    tokens, k = x.shape
    n = weight.shape[0]
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device)
    vector_kernel[(triton.cdiv(n, tile.rows),)](
        x,
        weight,
        weight if bias is None else bias,
        out,
        x.stride(0),
        n,
        k,
        TOKENS=tokens,
        BIAS=bias is not None,
        EVEN=k % tile.block == 0,
        ROWS=tile.rows,
        BLOCK=tile.block,
        num_warps=tile.warps,
        **overlap(x.device),
    )
    return out
