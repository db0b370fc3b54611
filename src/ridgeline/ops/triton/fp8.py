"""e4m3 linears: a matrix-vector kernel for one token, a split-K tensor-core kernel for up to LARGEST_SMALL tokens, and cuBLAS.

The split-K kernel makes every SM stream weights. cuBLAS serves larger products, which are bound by arithmetic. `kernels` defines
which shapes use these kernels, fp8_vector or ring.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.ops.table import Fp8Matrix, Scaled
from ridgeline.ops.triton import cublas
from ridgeline.ops.triton.fp8_shapes import LARGEST_SMALL, Small, Vector
from ridgeline.ops.triton.launch import await_inputs, overlap

PROMOTED = 128
"""Inputs after which a tensor core's sum is added to a float32 accumulator (DeepSeek-V3 report, section 3.3.2)."""
SMALLEST_OUTPUTS = 64
LARGEST_SPLIT = 16


# --- one token --------------------------------------------------------------------------------------------------------


@triton.jit
def _vector_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    outputs,
    inputs: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """ROWS outputs of one token per program: x e4m3 [inputs], w e4m3 [outputs, inputs], scales float32 [1] and [outputs]. ADD: the
    result is added to out, which holds the residual stream. The first weights are loaded before the PDL wait."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < outputs
    w_row = w_ptr + tl.where(real, row, 0).to(tl.int64)[:, None] * inputs
    at = tl.arange(0, BLOCK)
    inside = at < inputs
    w = tl.load(w_row + at[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first")
    await_inputs(PDL)
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    acc = w.to(tl.float32) * x.to(tl.float32)[None, :]
    for block in tl.static_range(1, BLOCKS):
        here = block * BLOCK + at
        inside = here < inputs
        w = tl.load(w_row + here[None, :], mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        x = tl.load(x_ptr + here, mask=inside, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
    out = tl.sum(acc, 1) * (tl.load(x_scale_ptr) * tl.load(w_scale_ptr + row, mask=real, other=0.0))
    if BIAS:
        out += tl.load(bias_ptr + row, mask=real, other=0.0).to(tl.float32)
    if ADD:
        out += tl.load(out_ptr + row, mask=real, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=real)


def vector(
    x: Scaled, matrix: Fp8Matrix, bias: torch.Tensor | None, out: torch.Tensor, launch: Vector, add: bool = False
) -> None:
    """Store one token's outputs in out [1, outputs], or add them to out."""
    outputs, inputs = matrix.values.shape
    block = min(launch.inputs, triton.next_power_of_2(inputs))
    _vector_kernel[(triton.cdiv(outputs, launch.rows),)](
        x.values,
        x.scales,
        matrix.values,
        matrix.scales,
        matrix.scales if bias is None else bias,
        out,
        outputs,
        inputs,
        BIAS=bias is not None,
        ADD=add,
        ROWS=launch.rows,
        BLOCKS=triton.cdiv(inputs, block),
        BLOCK=block,
        num_warps=launch.warps,
        **overlap(out.device),
    )


# --- several tokens ---------------------------------------------------------------------------------------------------


@triton.jit
def _finish(
    acc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    row,
    token,
    outputs,
    tokens,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Scale a tile of sums [outputs, tokens], add the bias and, with ADD, the values of out; then round and store."""
    real = (row < outputs)[:, None] & (token < tokens)[None, :]
    w_scale = tl.load(w_scale_ptr + row, mask=row < outputs, other=0.0)
    x_scale = tl.load(x_scale_ptr + token, mask=token < tokens, other=0.0)
    acc, scale = tl.broadcast(acc.to(tl.float32), w_scale[:, None].to(tl.float32) * x_scale[None, :])
    at = token.to(tl.int64)[None, :] * outputs + row[:, None]
    residual = tl.zeros_like(acc)
    if ADD:
        residual = tl.load(out_ptr + at, mask=real, other=0.0).to(tl.float32)
    # fma adds the first summand in the instruction that scales. The compiler would fuse it in some kernels and not in others.
    if BIAS:
        bias = tl.load(bias_ptr + row, mask=row < outputs, other=0.0).to(tl.float32)
        acc = tl.math.fma(acc, scale, tl.broadcast(acc, bias[:, None])[1]) + residual
    else:
        acc = tl.math.fma(acc, scale, residual)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit
def _prefetch(w_ptr, first, outputs, inputs, begin, OUTPUTS: tl.constexpr, PREFETCH: tl.constexpr):
    """Prefetch PREFETCH bytes of each of OUTPUTS rows into L2, from input `begin` on, half of a row's bytes per thread."""
    part = tl.arange(0, 2 * OUTPUTS)
    row = tl.minimum(first + part % OUTPUTS, outputs - 1)
    address = (w_ptr + row.to(tl.int64) * inputs + begin + part // OUTPUTS * (PREFETCH // 2)).to(tl.int64)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [address, tl.full((2 * OUTPUTS,), PREFETCH // 2, tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit(do_not_specialize=["tokens", "turns", "shares"])
def _small_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    counter_ptr,
    tokens,
    outputs,
    inputs,
    turns,
    shares,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    SHARED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PROMOTE: tl.constexpr,
    PDL: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    """A tile [OUTPUTS, TOKENS] of W x^T per program, over `turns` blocks of the inputs; the grid is [tiles, token tiles, splits].

    Weights are the left operand, which is the long side of the tensor-core instruction. SHARED: `shares` programs per tile store
    their sums in part_ptr (split-K), and the last to arrive adds them in a fixed order. EVEN_K: all blocks of inputs are full.
    PROMOTE: inputs after which the tensor core's sum of 8-bit products, which has fewer bits than float32, is added to a float32
    accumulator; 0: exact products in float16 with float32 sums. PREFETCH: bytes of each row to prefetch before the PDL wait.
    """
    tile, token_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    at = tl.arange(0, INPUTS)
    w_row = w_ptr + tl.minimum(row, outputs - 1).to(tl.int64)[:, None] * inputs
    # Tokens past the end read other tokens, all equally often. If all programs read one row, its L2 slice would be a bottleneck.
    x_row = x_ptr + (token % tokens).to(tl.int64)[:, None] * inputs
    # Integers (w8a8) accumulate in int32, which is exact for any split.
    SUM: tl.constexpr = tl.int32 if w_ptr.dtype.element_ty == tl.int8 else tl.float32
    acc = tl.zeros([OUTPUTS, TOKENS], dtype=SUM)
    if PDL and PREFETCH > 0:
        _prefetch(w_ptr, tile * OUTPUTS, outputs, inputs, split * turns * INPUTS, OUTPUTS, PREFETCH)
    await_inputs(PDL)
    for turn in range(split * turns, tl.minimum((split + 1) * turns, tl.cdiv(inputs, INPUTS))):
        here = turn * INPUTS + at
        if EVEN_K:
            w = tl.load(w_row + here[None, :])
            x = tl.load(x_row + here[None, :])
        else:
            inside = (here < inputs)[None, :]
            w = tl.load(w_row + here[None, :], mask=inside, other=0.0)
            x = tl.load(x_row + here[None, :], mask=inside, other=0.0)
        acc = tl.dot(w, tl.trans(x), acc, max_num_imprecise_acc=PROMOTE, out_dtype=SUM)
    if not SHARED:
        _finish(acc, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, row, token, outputs, tokens, BIAS, ADD)
    else:
        place = token_tile * tl.num_programs(0) + tile
        part = part_ptr + place.to(tl.int64) * (shares * OUTPUTS * TOKENS)
        inner = tl.arange(0, OUTPUTS)[:, None] * TOKENS + tl.arange(0, TOKENS)[None, :]
        tl.store(part + split * (OUTPUTS * TOKENS) + inner, acc)
        # All threads of this program must have stored before the counter is incremented.
        tl.debug_barrier()
        before = tl.atomic_add(counter_ptr + place, 1, sem="acq_rel", scope="gpu")
        if before == shares - 1:
            acc = tl.load(part + inner)
            for other in range(1, shares):
                acc += tl.load(part + other * (OUTPUTS * TOKENS) + inner)
            _finish(acc, x_scale_ptr, w_scale_ptr, bias_ptr, out_ptr, row, token, outputs, tokens, BIAS, ADD)
            tl.store(counter_ptr + place, 0)


def splits(outputs: int, inputs: int, tokens: int, tile: int, launch: Small) -> tuple[int, int]:
    """(programs per tile, blocks of inputs per program)."""
    tiles = triton.cdiv(outputs, launch.outputs) * triton.cdiv(tokens, tile)
    turns = triton.cdiv(inputs, launch.inputs)
    wanted = min(max(1, launch.programs // tiles), turns, LARGEST_SPLIT)
    each = triton.cdiv(turns, wanted)
    return triton.cdiv(turns, each), each


def _may_prefetch(weights: torch.Tensor, dealt: int, run: int, launch: Small) -> bool:
    """Whether programs of `run` inputs each, `dealt` together, may prefetch: only within a row, at multiples of 16 bytes."""
    return dealt == weights.shape[1] and launch.prefetch_bytes <= run and weights.data_ptr() % 16 == 0


def small(
    x: Scaled, matrix: Fp8Matrix, bias: torch.Tensor | None, out: torch.Tensor, launch: Small, add: bool = False
) -> None:
    """Store the outputs of all tokens in out [T, outputs], or add them to out. Supports any T; tuned for few."""
    outputs, inputs = matrix.values.shape
    tokens = x.values.shape[0]
    tile = min(LARGEST_SMALL, max(16, triton.next_power_of_2(tokens)))
    split, turns = splits(outputs, inputs, tokens, tile, launch)
    grid = (triton.cdiv(outputs, launch.outputs), triton.cdiv(tokens, tile), split)
    if split > 1 and grid[0] * grid[1] > matrix.counters.numel():
        split, turns, grid = 1, triton.cdiv(inputs, launch.inputs), (grid[0], grid[1], 1)
    part_size = split * grid[0] * grid[1] * launch.outputs * tile if split > 1 else 0
    sums = torch.int32 if matrix.values.dtype == torch.int8 else torch.float32
    part = torch.empty(part_size, dtype=sums, device=out.device) if part_size else matrix.scales
    _small_kernel[grid](
        x.values,
        x.scales,
        matrix.values,
        matrix.scales,
        matrix.scales if bias is None else bias,
        out,
        part,
        matrix.counters,
        tokens,
        outputs,
        inputs,
        turns,
        split,
        BIAS=bias is not None,
        ADD=add,
        SHARED=split > 1,
        EVEN_K=inputs % launch.inputs == 0,
        PROMOTE=0 if launch.exact else min(PROMOTED, launch.inputs),
        TOKENS=tile,
        OUTPUTS=launch.outputs,
        INPUTS=launch.inputs,
        PREFETCH=launch.prefetch_bytes
        if _may_prefetch(matrix.values, turns * split * launch.inputs, turns * launch.inputs, launch)
        else 0,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **overlap(out.device),
    )


def pack(values: torch.Tensor, scales: torch.Tensor) -> Fp8Matrix:
    """Fp8Matrix of unchanged values and scales, with a split-K counter per output tile."""
    tiles = triton.cdiv(values.shape[0], SMALLEST_OUTPUTS)
    return Fp8Matrix(values, scales, torch.zeros(tiles, dtype=torch.int32, device=values.device))


def large(x: Scaled, matrix: Fp8Matrix, bias: torch.Tensor | None, stream: torch.Tensor | None) -> torch.Tensor:
    """cuBLAS product in bfloat16, added to the stream in place if there is one. Inputs and outputs must be multiples of 16. Sums
    have the tensor core's precision."""
    shape = (x.values.shape[0], matrix.values.shape[0])
    out = torch.empty(shape, dtype=torch.bfloat16, device=matrix.values.device) if stream is None else stream
    if bias is None and cublas.product(x, matrix, out, stream is not None):
        return out
    apart = torch._scaled_mm(
        x.values,
        matrix.values.t(),
        scale_a=x.scales.unsqueeze(1),
        scale_b=matrix.scales.unsqueeze(0),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return apart if stream is None else stream.add_(apart)
