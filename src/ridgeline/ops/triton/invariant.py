"""Batch-invariant products: the sums of a token are added in one order, independent of the number of tokens in the batch.

The weight's shape alone (n outputs, k inputs) defines the order. k is divided into `runs(n, k)` runs of complete BLOCKs. The matrix
unit sums each run from zero, block by block, in float32. Runs are added in order. gemm_small computes few tokens, with runs as its
split-K parts. A kernel with large tiles computes many tokens and loops over the runs. In both the weight is the left operand, so
tokens only affect the tile's short side. Source: He et al. 2025, "Defeating Nondeterminism in LLM Inference", which names
batch-dependent reduction order as the cause.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.core.errors import ConfigError
from ridgeline.ops.blocks import widened_blocks
from ridgeline.ops.reference import mixed_inputs
from ridgeline.ops.table import (
    Activation,
    AttentionOps,
    FloatInput,
    FloatOps,
    Fp8Matrix,
    Fp8Ops,
    Normed,
    Programs,
    Scaled,
    apply_norm,
)
from ridgeline.ops.triton import blocks, fp8, quantize
from ridgeline.ops.triton.activation import KINDS, gated
from ridgeline.ops.triton.experts import TritonExperts
from ridgeline.ops.triton.fp8_shapes import Small
from ridgeline.ops.triton.gemm_small import _biased, matrix_product
from ridgeline.ops.triton.integer import widened, with_e4m3
from ridgeline.ops.triton.invariant_attention import InvariantAttention
from ridgeline.ops.triton.launch import await_inputs, overlap
from ridgeline.ops.triton.norm import rms_norm
from ridgeline.ops.triton.qkv import qkv_write
from ridgeline.ops.triton.shapes import MatrixTile
from ridgeline.ops.triton.table import TRITON
from ridgeline.ops.triton.w8a8 import round_inliers

BLOCK = 128
"""Inputs of which runs are multiples: a block of the kernel for few tokens, and a multiple of the other kernel's block."""
ROWS = 64
"""Weight rows of a tile of few tokens."""
LARGEST_FEW = 256
"""Largest token count of the kernel for few tokens."""
# Token tile -> launch. `splits` depends on the weight.
FEW = {
    16: MatrixTile(16, ROWS, BLOCK, 4, 5, prefetch_bytes=512),
    32: MatrixTile(32, ROWS, BLOCK, 4, 4, prefetch_bytes=512),
    64: MatrixTile(64, ROWS, BLOCK, 4, 6, prefetch_bytes=512),
    128: MatrixTile(128, ROWS, BLOCK, 4, 4, prefetch_bytes=512),
}
MANY = MatrixTile(256, 128, 64, 8, 4)
MANY_RUNS = MatrixTile(128, 128, 64, 8, 4)
"""For more than one run, whose sums take as many registers as the total."""
FLOAT32_FEW, FLOAT32_MANY = MatrixTile(16, ROWS, 32, 4, 2), MatrixTile(64, ROWS, 32, 4, 2)
LARGEST_RUNS = 8
SMALLEST_RUN = 4 * BLOCK
PROCESSORS = 132
"""Programs that fill an H200. It is a constant so that sums do not depend on the GPU's SM count."""
GROUP = 16
"""Row tiles that run consecutively for each token tile, so that their data stays in L2."""


def runs(n: int, k: int) -> int:
    """Number of runs for a weight [n, k]: enough to fill one wave if n is small."""
    return max(1, min(LARGEST_RUNS, k // SMALLEST_RUN, PROCESSORS // -(-n // ROWS)))


# --- many tokens ------------------------------------------------------------------------------------------------------


@triton.jit
def _place(program, row_tiles, batches, GROUP: tl.constexpr):
    """(row tile, token tile) of a program: groups of GROUP row tiles pass over all tokens."""
    group = program // (GROUP * batches)
    first = group * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    inner = program % (GROUP * batches)
    return first + inner % size, inner // size


@triton.jit(do_not_specialize=["m", "row_tiles", "batches"])
def _many_kernel(
    w_desc,
    x_desc,
    bias_ptr,
    out_ptr,
    m,
    n,
    k,
    row_tiles,
    batches,
    RUNS: tl.constexpr,
    RUN_BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
    BATCH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """gemm_small.matrix_kernel with all runs of a tile in one program. RUN_BLOCK: inputs of which runs are multiples, itself a
    multiple of BLOCK."""
    await_inputs(PDL)
    row_tile, batch_tile = _place(tl.program_id(0), row_tiles, batches, GROUP)
    counted = (k + RUN_BLOCK - 1) // RUN_BLOCK
    blocks = (k + BLOCK - 1) // BLOCK
    EACH: tl.constexpr = RUN_BLOCK // BLOCK
    total = tl.zeros((ROWS, BATCH), tl.float32)
    total_up = total
    for run in tl.static_range(RUNS):
        begin = run * counted // RUNS * EACH
        end = tl.minimum((run + 1) * counted // RUNS * EACH, blocks)
        acc = tl.zeros((ROWS, BATCH), tl.float32)
        up = acc
        for block in tl.range(begin, end, num_stages=STAGES):
            w = w_desc.load([row_tile * ROWS, block * BLOCK])
            x = x_desc.load([batch_tile * BATCH, block * BLOCK])
            acc = tl.dot(w, x.T, acc, input_precision=PRECISION)
            if KIND != 0:
                w = w_desc.load([n + row_tile * ROWS, block * BLOCK])
                up = tl.dot(w, x.T, up, input_precision=PRECISION)
        if run == 0:
            total, total_up = acc, up
        else:
            total, total_up = total + acc, total_up + up
    row = row_tile * ROWS + tl.arange(0, ROWS)
    token = batch_tile * BATCH + tl.arange(0, BATCH)
    where = out_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
    real = (row < n)[:, None] & (token < m)[None, :]
    total = _biased(total, bias_ptr, row, n, BIAS)
    if KIND != 0:
        total = gated(total, _biased(total_up, bias_ptr + n, row, n, BIAS), KIND)
    if ADD:
        total += tl.load(where, mask=real, other=0.0).to(tl.float32)
    tl.store(where, total.to(out_ptr.dtype.element_ty), mask=real)


def many_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tile: MatrixTile,
    stream: torch.Tensor | None,
    kind: str | None,
) -> torch.Tensor:
    """See gemm_small.matrix_product. tile.splits: number of runs."""
    tokens, k = x.shape
    sides = 1 if kind is None else 2
    n, rows = weight.shape[0] // sides, tile.rows // sides
    row_tiles, batches = triton.cdiv(n, rows), triton.cdiv(tokens, tile.batch)
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device) if stream is None else stream
    _many_kernel[(row_tiles * batches,)](
        TensorDescriptor.from_tensor(weight, [rows, tile.block]),
        TensorDescriptor.from_tensor(x, [tile.batch, tile.block]),
        weight if bias is None else bias,
        out,
        tokens,
        n,
        k,
        row_tiles,
        batches,
        RUNS=tile.splits,
        RUN_BLOCK=FLOAT32_FEW.block if x.dtype == torch.float32 else BLOCK,
        BIAS=bias is not None,
        ADD=stream is not None,
        KIND=KINDS[kind],
        BATCH=tile.batch,
        ROWS=rows,
        BLOCK=tile.block,
        GROUP=GROUP,
        PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
        STAGES=tile.stages,
        num_warps=tile.warps,
        **overlap(x.device),
    )
    return out


# --- the operations ---------------------------------------------------------------------------------------------------


def tile_of(tokens: int, n: int, k: int, dtype: torch.dtype) -> MatrixTile:
    """Launch of x [tokens, k] times a weight [n, k]. `splits` does not depend on `tokens`."""
    count = runs(n, k)
    if dtype == torch.float32:
        tile = FLOAT32_FEW if tokens <= LARGEST_FEW else FLOAT32_MANY
    elif tokens <= LARGEST_FEW:
        tile = FEW[min(128, max(16, triton.next_power_of_2(tokens)))]
    else:
        tile = MANY if count == 1 else MANY_RUNS
    return replace(tile, splits=count)


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stream: torch.Tensor | None, kind: str | None
) -> torch.Tensor:
    tokens, k = x.shape
    if not tokens:
        return x.new_empty((0, weight.shape[0] // (1 if kind is None else 2))) if stream is None else stream
    if x.stride(1) != 1 or (x.stride(0) * x.element_size() | x.data_ptr()) % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    tile = tile_of(tokens, weight.shape[0], k, x.dtype)
    return (matrix_product if tokens <= LARGEST_FEW else many_product)(x, weight, bias, tile, stream, kind)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return the weight contiguous. Raises ConfigError if TMA cannot address its rows."""
    if weight.shape[1] * weight.element_size() % 16:
        raise ConfigError(
            f"--deterministic does not support a matrix with {weight.shape[1]} inputs, because its rows must be multiples of "
            "16 bytes: leave --deterministic out.",
            param="deterministic",
        )
    return weight.contiguous()


def linear(x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See reference.linear."""
    return _product(apply_norm(x, rms_norm), packed, bias, None, None)


def linear_add(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """See reference.linear_add; the result is written to the stream's memory."""
    return _product(x, packed, bias, stream.contiguous(), None)


def linear_activate(x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """See reference.linear_activate."""
    return _product(apply_norm(x, rms_norm), packed, bias, None, kind)


# --- 8 bits -----------------------------------------------------------------------------------------------------------

FP8_TILE = Small(64, 128, PROCESSORS, 4, 6)
FP8_TOKENS = 128
"""Tokens per launch: few enough that reading the weights again costs about as much as the products."""


def _fp8_product(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, out: torch.Tensor, add: bool) -> None:
    """Run the split-K kernel for FP8_TOKENS tokens at a time. Its split of the inputs then depends on the weight alone."""
    if isinstance(x, Normed):
        x = quantize.rms_norm(x.x, x.weight, x.eps, x.offset)
    elif not isinstance(x, Scaled):
        x = quantize.quantize(x)
    for at in range(0, out.shape[0], FP8_TOKENS):
        part = slice(at, at + FP8_TOKENS)
        fp8.small(Scaled(x.values[part], x.scales[part]), matrix, bias, out[part], FP8_TILE, add)


def fp8_linear(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """See reference.fp8_linear."""
    source = x.values if isinstance(x, Scaled) else x.x if isinstance(x, Normed) else x
    out = torch.empty((source.shape[0], matrix.values.shape[0]), dtype=dtype, device=source.device)
    _fp8_product(x, matrix, bias, out, False)
    return out


def fp8_linear_add(x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """See reference.fp8_linear_add; the result is written to the stream's memory."""
    stream = stream.contiguous()
    _fp8_product(x, matrix, bias, stream, True)
    return stream


def fp8_linear_activate(
    x: Activation, matrix: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype, kind: str
) -> Scaled:
    """See reference.fp8_linear_activate."""
    return quantize.activate(fp8_linear(x, matrix, bias, dtype), kind)


FP8_INVARIANT = Fp8Ops(fp8.pack, fp8_linear, fp8_linear_add, fp8_linear_activate)
_UNQUANTIZED = FloatOps(pack, linear, linear_add, linear_activate)
_INTEGER = widened(_UNQUANTIZED)


INVARIANT = replace(
    TRITON,
    name="triton, batch-invariant",
    # The heads of a program determine how they are normalised: one KV head for any number of tokens.
    attention=AttentionOps(partial(qkv_write, kv_heads=1), InvariantAttention(), TRITON.attention.kv_formats),
    matmul=replace(
        TRITON.matmul,
        unquantized=_UNQUANTIZED,
        fp8=FP8_INVARIANT,
        fp8_weight=with_e4m3(_INTEGER),
        integer=_INTEGER,
        mixed=mixed_inputs(_INTEGER, _UNQUANTIZED, TRITON.tokenwise, round_inliers),
        blocks=widened_blocks(blocks.pack, blocks.dequantize, blocks.pieces, _UNQUANTIZED, TRITON.tokenwise),
    ),
    programs=Programs(),
    experts=TritonExperts(fixed=True),
)
