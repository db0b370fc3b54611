"""W8A8 linears: int8 weights and activations, integer tensor-core products, scales applied to the sums.

Weights use the layout of integer.pack, which permutes inputs for the weight-only kernels. Sums do not depend on the order of
inputs, so activations are quantized in the same permutation and one copy of the weights serves both. One token uses dp4a in
registers. Up to LARGEST_SMALL tokens the ring and split-K kernels of e4m3 run with int8 operands. Above, `large` runs, which is
bound by arithmetic. Sums are exact, because int32 holds 2^17 products of 127 x 128. A token's results therefore depend neither on
the other tokens nor on the kernel.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.ops.reference import OUTLIER
from ridgeline.ops.table import FloatInput, IntMatrix, Normed, Scaled
from ridgeline.ops.triton.fp8 import _finish
from ridgeline.ops.triton.fp8_shapes import Large, Vector
from ridgeline.ops.triton.launch import await_inputs, overlap
from ridgeline.ops.triton.norm import rms_norm
from ridgeline.ops.triton.quantize import WIDEST_ROW

CHUNK = 64
"""Inputs within which integer.pack permutes. Rows of codes are padded to a multiple."""


# --- inputs -----------------------------------------------------------------------------------------------------------


@triton.jit
def _nearest(x):
    """Round x, at most 2^22, to the nearest integer, ties to even. Adding 1.5 * 2^23 discards all fractional bits."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _step_of(amax):
    """Scale of a token, such that its largest input is code 127. The lower bound keeps it above zero."""
    return tl.math.div_rn(tl.maximum(amax, 1e-30), 127.0)


@triton.jit
def _as_packed(x, step, BLOCK: tl.constexpr):
    """Quantize inputs x [BLOCK] to codes in the order of integer.pack."""
    codes = _nearest(tl.math.div_rn(x, step)).to(tl.int8)
    return tl.reshape(tl.permute(tl.reshape(codes, (BLOCK // 64, 4, 2, 4, 2)), (0, 3, 1, 4, 2)), (BLOCK,))


@triton.jit
def _codes_kernel(
    x_ptr,
    gain_ptr,
    out_ptr,
    scale_ptr,
    x_stride,
    eps,
    size: tl.constexpr,
    padded_size: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantize one token of `size` inputs per program to codes [padded_size], with zeros after the last, and its scale. NORM: first
    apply the norm and round to x's dtype; requires BLOCKS 1."""
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * x_stride
    out_ptr += token * padded_size
    at = tl.arange(0, BLOCK)
    gain = at.to(tl.float32)
    if NORM:
        gain = tl.load(gain_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        if OFFSET:
            gain += 1.0
    await_inputs(PDL)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    if NORM:
        rms = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
        x = (x * rms * gain).to(x_ptr.dtype.element_ty).to(tl.float32)
    amax = tl.max(tl.abs(x), 0)
    for block in range(1, BLOCKS):
        here = block * BLOCK + at
        amax = tl.maximum(amax, tl.max(tl.abs(tl.load(x_ptr + here, mask=here < size, other=0.0).to(tl.float32)), 0))
    step = _step_of(amax)
    tl.store(out_ptr + at, _as_packed(x, step, BLOCK), mask=at < padded_size)
    for block in range(1, BLOCKS):
        here = block * BLOCK + at
        x = tl.load(x_ptr + here, mask=here < size, other=0.0).to(tl.float32)
        tl.store(out_ptr + here, _as_packed(x, step, BLOCK), mask=here < padded_size)
    tl.store(scale_ptr + token, step)


def codes(x: FloatInput, widest_row: int = WIDEST_ROW) -> Scaled:
    """Quantize x [T, D] with contiguous rows, after its norm if it is Normed, as reference.in_8_bits does. The values are int8 [T,
    D rounded up to CHUNK] in the order of integer.pack. widest_row: inputs that a program holds at once."""
    norm = x if isinstance(x, Normed) else None
    source = x.x if isinstance(x, Normed) else x
    tokens, size = source.shape
    if norm is not None and size > widest_row:
        return codes(rms_norm(source, norm.weight, norm.eps, norm.offset))
    padded_size = triton.cdiv(size, CHUNK) * CHUNK
    block = min(widest_row, triton.next_power_of_2(padded_size))
    values = torch.empty((tokens, padded_size), dtype=torch.int8, device=source.device)
    out = Scaled(values, torch.empty(tokens, dtype=torch.float32, device=source.device))
    if tokens:
        _codes_kernel[(tokens,)](
            source,
            source if norm is None else norm.weight,
            values,
            out.scales,
            source.stride(0),
            0.0 if norm is None else norm.eps,
            size,
            padded_size,
            NORM=norm is not None,
            OFFSET=norm is not None and norm.offset,
            BLOCKS=triton.cdiv(padded_size, block),
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **overlap(source.device),
        )
    return out


@triton.jit
def _round_inliers_kernel(
    x_ptr,
    empty_ptr,
    out_ptr,
    x_stride,
    size: tl.constexpr,
    LIMIT: tl.constexpr,
    PDL: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round the inliers of one token per program; see round_inliers."""
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * x_stride
    out_ptr += token * size
    await_inputs(PDL)
    amax = 0.0
    for block in range(BLOCKS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        counts = (tl.abs(x) < LIMIT) & (tl.load(empty_ptr + at, mask=at < size, other=1) == 0)
        amax = tl.maximum(amax, tl.max(tl.where(counts, tl.abs(x), 0.0), 0))
    step = _step_of(amax)
    for block in range(BLOCKS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
        inlier = _nearest(tl.math.div_rn(tl.where(tl.abs(x) < LIMIT, x, 0.0), step)) * step
        kept = tl.load(empty_ptr + at, mask=at < size, other=1) == 0
        x = tl.where(kept, tl.where(tl.abs(x) < LIMIT, inlier, x), 0.0)
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < size)


def round_inliers(x: torch.Tensor, empty: torch.Tensor, widest_row: int = WIDEST_ROW) -> torch.Tensor:
    """See reference.round_inliers. Rows of x must be contiguous. widest_row: see codes."""
    tokens, size = x.shape
    out = torch.empty((tokens, size), dtype=x.dtype, device=x.device)
    block = min(widest_row, triton.next_power_of_2(size))
    if tokens:
        _round_inliers_kernel[(tokens,)](
            x,
            empty.view(torch.uint8),
            out,
            x.stride(0),
            size,
            LIMIT=OUTLIER,
            BLOCKS=triton.cdiv(size, block),
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
            **overlap(x.device),
        )
    return out


# --- products ---------------------------------------------------------------------------------------------------------


@triton.jit
def _four(w, x, total, PTX: tl.constexpr):
    """total + the dot product of the four codes in each word of w and x. All are int32."""
    if PTX:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [w, x, total], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for byte in tl.static_range(4):
            total += (w << (24 - 8 * byte) >> 24) * (x << (24 - 8 * byte) >> 24)
        return total


@triton.jit
def _vector_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    outputs,
    words: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS outputs of one token per program, for rows of `words` int32 with four codes each. The first weights are loaded before
    the PDL wait."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    w_row = w_ptr + tl.minimum(row, outputs - 1).to(tl.int64)[:, None] * words
    at = tl.arange(0, BLOCK)
    w = tl.load(w_row + at[None, :], mask=(at < words)[None, :], other=0, eviction_policy="evict_first")
    await_inputs(PDL)
    x = tl.load(x_ptr + at, mask=at < words, other=0)[None, :]
    total = _four(w, x, tl.zeros((ROWS, BLOCK), tl.int32), PTX)
    for block in tl.static_range(1, BLOCKS):
        here = block * BLOCK + at
        w = tl.load(w_row + here[None, :], mask=(here < words)[None, :], other=0, eviction_policy="evict_first")
        total = _four(w, tl.load(x_ptr + here, mask=here < words, other=0)[None, :], total, PTX)
    sums = tl.sum(total, 1)[:, None]
    _finish(sums, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, row, tl.arange(0, 1), outputs, 1, BIAS, ADD)


def vector(
    x: Scaled, matrix: IntMatrix, bias: torch.Tensor | None, out: torch.Tensor, launch: Vector, add: bool = False
) -> None:
    """Store one token's outputs in out [1, outputs], or add them to out."""
    words = x.values.shape[1] // 4
    block = min(launch.inputs // 4, triton.next_power_of_2(words))
    _vector_kernel[(triton.cdiv(matrix.out, launch.rows),)](
        x.values.view(torch.int32),
        x.scales,
        matrix.codes.view(torch.int32),
        matrix.scales,
        matrix.scales if bias is None else bias,
        out,
        matrix.out,
        words,
        BIAS=bias is not None,
        ADD=add,
        PTX=out.is_cuda,
        ROWS=launch.rows,
        BLOCKS=triton.cdiv(words, block),
        BLOCK=block,
        num_warps=launch.warps,
        **overlap(out.device),
    )


@triton.jit(do_not_specialize=["tokens", "outputs"])
def _large_kernel(
    x_desc,
    w_desc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    outputs,
    blocks,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    BAND: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile [TOKENS, OUTPUTS] of x W^T per program, over all `blocks` of the inputs. Programs of BAND token tiles are consecutive
    for each weight tile, so that weights stay in L2."""
    token_tiles = tl.cdiv(tokens, TOKENS)
    band = BAND * tl.cdiv(outputs, OUTPUTS)
    first = tl.program_id(0) // band * BAND
    size = tl.minimum(token_tiles - first, BAND)
    token_tile = first + tl.program_id(0) % band % size
    tile = tl.program_id(0) % band // size
    await_inputs(PDL)
    acc = tl.zeros((TOKENS, OUTPUTS), tl.int32)
    for block in tl.range(blocks, num_stages=STAGES):
        x = x_desc.load([token_tile * TOKENS, block * INPUTS])
        w = w_desc.load([tile * OUTPUTS, block * INPUTS])
        acc = tl.dot(x, w.T, acc, out_dtype=tl.int32)
    row = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    _finish(tl.trans(acc), x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, row, token, outputs, tokens, BIAS, ADD)


def large(
    x: Scaled, matrix: IntMatrix, bias: torch.Tensor | None, out: torch.Tensor, launch: Large, add: bool = False
) -> None:
    """Store the outputs of all tokens in out [T, outputs], or add them to out."""
    tokens, inputs = x.values.shape
    tiles = triton.cdiv(tokens, launch.tokens) * triton.cdiv(matrix.out, launch.outputs)
    _large_kernel[(tiles,)](
        TensorDescriptor.from_tensor(x.values, [launch.tokens, launch.inputs]),
        TensorDescriptor.from_tensor(matrix.codes.view(torch.int8), [launch.outputs, launch.inputs]),
        x.scales,
        matrix.scales,
        matrix.scales if bias is None else bias,
        out,
        tokens,
        matrix.out,
        triton.cdiv(inputs, launch.inputs),
        BIAS=bias is not None,
        ADD=add,
        BAND=launch.band,
        TOKENS=launch.tokens,
        OUTPUTS=launch.outputs,
        INPUTS=launch.inputs,
        STAGES=launch.stages,
        num_warps=launch.warps,
        **overlap(out.device),
    )
