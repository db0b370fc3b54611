"""Products of a few to 256 tokens on Hopper: a warp-specialized kernel with a TMA ring buffer.

A program computes tiles ROWS x BATCH of out^T = W x^T, with weight rows on the long side of the matrix unit. The producer warp
fills the ring with weights before it waits for the kernel that computes x (PDL). It continues with the next tile's weights while
the consumer warps store the last tile's results.

Few tiles are split along k (split-K). The programs of a tile wait for each other. A power of two of them then add the parts in a
fixed order, each for its share of the tokens, so that results do not depend on timing.

For e4m3 the matrix unit accumulates with fewer bits than float32. Sums over PROMOTED inputs are therefore added to a float32
accumulator while the next ones run (DeepSeek-V3 report, section 3.3.2). Integer sums are exact. Both are scaled per token and
output.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental.gluon import constexpr_function, jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.ops.table import Fp8Matrix, Scaled
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.gluon_names import async_load, barrier
from ridgeline.ops.triton.launch import overlap
from ridgeline.ops.triton.ring_shapes import RingTile

COUNTERS = 4096
"""Largest number of tiles with split-K. More tiles than this run without a split."""
ROUND = gl.constexpr(64)
"""Sum of the increments of all programs of a tile per product. It is also the largest number of programs per tile."""
PROMOTED = 128
"""Inputs after which a sum of 8-bit products is added to the float32 accumulator; also the width of a TMA box."""


@cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """Split-K arrival counters, one per tile. Each is a multiple of ROUND before and after every product."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


@constexpr_function
def _ending(split):
    """Number of a tile's programs that store results: the largest power of two up to `split`, so that tokens divide equally."""
    return 1 << (split.bit_length() - 1)


@jit
def _share(work, SPLIT: gl.constexpr):
    """Work of a program: (first tile, number of tiles, first block of each, number of blocks of each)."""
    tiles, blocks, _batches = work
    program = gl.program_id(0)
    if SPLIT == 1:
        first, count, begin, run = program, gl.cdiv(tiles - program, gl.num_programs(0)), 0, blocks
    else:
        begin = program % SPLIT * blocks // SPLIT
        first, count, run = program // SPLIT, 1, (program % SPLIT + 1) * blocks // SPLIT - begin
    return first, count, begin, run


@jit
def _weights(w_desc, tile, block, stage, ring, batches, n, SIDES: gl.constexpr):
    """Issue TMA loads of a block of a tile's weights, and set the byte count that the barrier expects, including x."""
    weights, tokens, full, _free = ring
    ROWS: gl.constexpr = weights.shape[1]
    PIECE: gl.constexpr = weights.shape[2]
    PIECES: gl.constexpr = tokens.shape[0] // full.shape[0]
    row = tile // batches * ROWS
    SIZE: gl.constexpr = weights.dtype.primitive_bitwidth // 8
    mbarrier.expect(full.index(stage), (ROWS * SIDES + tokens.shape[1]) * PIECES * PIECE * SIZE)
    for piece in gl.static_range(PIECES):
        for side in gl.static_range(SIDES):
            target = weights.index((stage * PIECES + piece) * SIDES + side)
            place = [row + side * n, (block * PIECES + piece) * PIECE]
            async_load(w_desc, place, full.index(stage), target)


@jit
def _tokens(x_desc, tile, block, stage, ring, batches):
    """Issue TMA loads of a block of a tile's x."""
    _weights, tokens, full, _free = ring
    BATCH: gl.constexpr = tokens.shape[1]
    PIECE: gl.constexpr = tokens.shape[2]
    PIECES: gl.constexpr = tokens.shape[0] // full.shape[0]
    for piece in gl.static_range(PIECES):
        place = [tile % batches * BATCH, (block * PIECES + piece) * PIECE]
        async_load(x_desc, place, full.index(stage), tokens.index(stage * PIECES + piece))


@jit
def _fetch(
    w_desc,
    x_desc,
    ring,
    work,
    n,
    SIDES: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Producer warp: fill the ring for all blocks of all tiles. Weights of the first stages are loaded before the PDL wait."""
    free, batches = ring[3], work[2]
    first, count, begin, run = _share(work, SPLIT)
    early = gl.minimum(run, STAGES)
    for at in range(early):
        _weights(w_desc, first, begin + at, at, ring, batches, n, SIDES)
    if PDL:
        gdc_wait()
    for at in range(early):
        _tokens(x_desc, first, begin + at, at, ring, batches)
    for at in range(early, count * run):
        tile = first + at // run * gl.num_programs(0)
        block = begin + at % run
        stage = at % STAGES
        mbarrier.wait(free.index(stage), (at // STAGES & 1) ^ 1)
        _weights(w_desc, tile, block, stage, ring, batches, n, SIDES)
        _tokens(x_desc, tile, block, stage, ring, batches)


@jit
def _place(
    tile, skip, m, n, batches, ROWS: gl.constexpr, TOKENS: gl.constexpr, BATCH: gl.constexpr, LAYOUT: gl.constexpr
):
    """Offsets int64 [ROWS, TOKENS] in out of a tile's results from its token `skip` on, and the mask of real ones."""
    row = tile // batches * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    token = tile % batches * BATCH + skip + gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    return token.to(gl.int64)[None, :] * n + row[:, None], (row < n)[:, None] & (token < m)[None, :]


@jit
def _residual(out_ptr, place, ROWS: gl.constexpr, TOKENS: gl.constexpr, ADD: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the values of out that a tile's results are added to; zeros without ADD. No other program writes them, so the load is
    issued before the sums are complete, which hides its latency."""
    where, real = place
    residual = gl.zeros([ROWS, TOKENS], out_ptr.dtype.element_ty, LAYOUT)
    if ADD:
        residual = gl.load(out_ptr + where, mask=real, other=0.0)
    return residual


@jit
def _finish(
    total,
    up,
    residual,
    place,
    tensors,
    row,
    n,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    KIND: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Turn sums of a tile whose first row is `row` into results and store them at `place` in LAYOUT, which coalesces the stores.
    residual: what they are added to."""
    bias_ptr, out_ptr = tensors[0], tensors[1]
    where, real = place
    out_row = row + gl.arange(0, total.shape[0], gl.SliceLayout(1, total.type.layout))
    if BIAS:
        total += gl.load(bias_ptr + out_row, mask=out_row < n, other=0.0).to(gl.float32)[:, None]
    if KIND != 0:
        if BIAS:
            up += gl.load(bias_ptr + n + out_row, mask=out_row < n, other=0.0).to(gl.float32)[:, None]
        # See activation.gated.
        inner = total
        if KIND == 2:
            inner = 1.5957691216057308 * (total + 0.044715 * total * total * total)
        total = total / (1.0 + gl.exp(-inner)) * up
    if ADD:
        total = gl.convert_layout(total, LAYOUT) + residual.to(gl.float32)
    gl.store(out_ptr + where, gl.convert_layout(total.to(out_ptr.dtype.element_ty), LAYOUT), mask=real)


@jit
def _exchange(total, up, tensors, tile, SIDES: gl.constexpr, SPLIT: gl.constexpr, LAYOUT: gl.constexpr):
    """Share a partial sum with the tile's other programs, and return the complete sums for this program's share of the tokens. The
    result is meaningless for a program without a share."""
    part_ptr, arrivals_ptr = tensors[2], tensors[3]
    ROWS: gl.constexpr = total.shape[0]
    BATCH: gl.constexpr = total.shape[1]
    SIZE: gl.constexpr = ROWS * BATCH
    ENDING: gl.constexpr = _ending(SPLIT)
    SHARE: gl.constexpr = BATCH // ENDING
    part = gl.program_id(0) % SPLIT
    row_index = gl.arange(0, ROWS, gl.SliceLayout(1, total.type.layout))
    column = gl.arange(0, BATCH, gl.SliceLayout(0, total.type.layout))
    parts = part_ptr + tile.to(gl.int64) * (SPLIT * SIDES * SIZE)
    place = parts + part * (SIDES * SIZE) + column[None, :] * ROWS + row_index[:, None]
    gl.store(place, total)
    if SIDES == 2:
        gl.store(place + SIZE, up)
    # All threads must have stored their parts before one thread increments the counter.
    barrier()
    each = ROUND // SPLIT
    if ENDING != SPLIT:
        each += (part == 0).to(gl.int32) * (ROUND % SPLIT)
    arrived = gl.atomic_add(arrivals_ptr + tile, each, sem="acq_rel")
    # Differences stay correct when the counter overflows. A program without a share does not wait.
    goal = (arrived | (ROUND - 1)) + 1
    arrived = arrived + each if ENDING == SPLIT else gl.where(part < ENDING, arrived + each, goal)
    while arrived - goal < 0:
        arrived = gl.atomic_add(arrivals_ptr + tile, 0, sem="acquire")
    row_index = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = part % ENDING * SHARE + gl.arange(0, SHARE, gl.SliceLayout(0, LAYOUT))
    place = parts + column[None, :] * ROWS + row_index[:, None]
    sums = gl.load(place, cache_modifier=".cg")
    ups = sums
    for other in gl.static_range(1, SPLIT):
        sums += gl.load(place + other * (SIDES * SIZE), cache_modifier=".cg")
    if SIDES == 2:
        ups = gl.load(place + SIZE, cache_modifier=".cg")
        for other in gl.static_range(1, SPLIT):
            ups += gl.load(place + (other * SIDES + 1) * SIZE, cache_modifier=".cg")
    return sums, ups


@jit
def _sums(ring, at, run, SUMS: gl.constexpr, SIDES: gl.constexpr, STAGES: gl.constexpr):
    """Sums of a tile's blocks: (rows of w, rows of up). `at`: number of the tile's first block in the ring's sequence."""
    weights, tokens, full, free = ring
    SHAPE: gl.constexpr = [weights.shape[1], tokens.shape[1]]
    PIECES: gl.constexpr = tokens.shape[0] // STAGES
    SUM: gl.constexpr = gl.int32 if weights.dtype.is_int() else gl.float32
    total = gl.zeros(SHAPE, SUM, SUMS)
    up = gl.zeros(SHAPE, SUM, SUMS)
    for block in range(run):
        stage = (at + block) % STAGES
        mbarrier.wait(full.index(stage), (at + block) // STAGES & 1)
        for piece in gl.static_range(PIECES):
            x = tokens.index(stage * PIECES + piece).permute((1, 0))
            w = (stage * PIECES + piece) * SIDES
            total = warpgroup_mma(weights.index(w), x, total, is_async=True)
            if SIDES == 2:
                up = warpgroup_mma(weights.index(w + 1), x, up, is_async=True)
        if SIDES == 2:
            total, up = warpgroup_mma_wait(2 * PIECES, deps=[total, up])
        else:
            total = warpgroup_mma_wait(PIECES, deps=[total])
        mbarrier.arrive(free.index((at + block + STAGES - 1) % STAGES), count=1, pred=block > 0)
    if SIDES == 2:
        total, up = warpgroup_mma_wait(0, deps=[total, up])
    else:
        total = warpgroup_mma_wait(0, deps=[total])
    mbarrier.arrive(free.index((at + run + STAGES - 1) % STAGES), count=1)
    return total, up


@jit
def _promoted_sums(ring, at, run, SUMS: gl.constexpr, SIDES: gl.constexpr, STAGES: gl.constexpr):
    """_sums for e4m3, with two products per block. No product continues into the next block, because ptxas would then serialize all
    of them."""
    weights, tokens, full, free = ring
    SHAPE: gl.constexpr = [weights.shape[1], tokens.shape[1]]
    total = gl.zeros(SHAPE, gl.float32, SUMS)
    up = gl.zeros(SHAPE, gl.float32, SUMS)
    even = gl.zeros(SHAPE, gl.float32, SUMS)
    odd = gl.zeros(SHAPE, gl.float32, SUMS)
    for block in range(run):
        stage = (at + block) % STAGES
        mbarrier.wait(full.index(stage), (at + block) // STAGES & 1)
        x = tokens.index(2 * stage // SIDES).permute((1, 0))
        even = warpgroup_mma(weights.index(2 * stage), x, even, use_acc=False, is_async=True)
        x = tokens.index((2 * stage + 1) // SIDES).permute((1, 0))
        odd = warpgroup_mma(weights.index(2 * stage + 1), x, odd, use_acc=False, is_async=True)
        even = warpgroup_mma_wait(1, deps=[even])
        total += even
        odd = warpgroup_mma_wait(0, deps=[odd])
        mbarrier.arrive(free.index(stage), count=1)
        if SIDES == 2:
            up += odd
        else:
            total += odd
    return total, up


@jit
def _scaled(total, tensors, row, token, m, n):
    """Scale sums of 8-bit products by their row scales, from `row` on, and their token scales, from `token` on."""
    row_index = row + gl.arange(0, total.shape[0], gl.SliceLayout(1, total.type.layout))
    column = token + gl.arange(0, total.shape[1], gl.SliceLayout(0, total.type.layout))
    w_scale = gl.load(tensors[4] + row_index, mask=row_index < n, other=0.0)
    x_scale = gl.load(tensors[5] + column, mask=column < m, other=0.0)
    return total.to(gl.float32) * (w_scale.to(gl.float32)[:, None] * x_scale[None, :])


@jit
def _multiply(
    tensors,
    ring,
    work,
    m,
    n,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    KIND: gl.constexpr,
    SIDES: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Consumer warps: multiply the blocks in the ring and store the results."""
    weights, tokens, _full, _free = ring
    batches = work[2]
    ROWS: gl.constexpr = weights.shape[1]
    BATCH: gl.constexpr = tokens.shape[1]
    EIGHT: gl.constexpr = weights.dtype.primitive_bitwidth == 8
    ROW_WARPS: gl.constexpr = WARPS if WARPS * 16 <= ROWS else ROWS // 16
    WARP_TOKENS: gl.constexpr = BATCH // (WARPS // ROW_WARPS)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [ROW_WARPS, WARPS // ROW_WARPS], [16, WARP_TOKENS, 32 if EIGHT else 16]
    )
    # Both layouts put a warp's threads along rows, which are adjacent in memory: from accumulators, and from the split-K workspace.
    FROM_SUMS: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [ROW_WARPS, WARPS // ROW_WARPS], [0, 1])
    FROM_PARTS: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
    STORED: gl.constexpr = FROM_SUMS if SPLIT == 1 else FROM_PARTS
    ENDING: gl.constexpr = _ending(SPLIT)
    SHARE: gl.constexpr = BATCH // ENDING
    if PDL:
        gdc_wait()
    first, count, _begin, run = _share(work, SPLIT)
    skip = gl.program_id(0) % SPLIT * SHARE
    if ENDING != SPLIT:
        # The token offset m masks all stores of a program without a share.
        skip = gl.where(gl.program_id(0) % SPLIT < ENDING, skip, m)
    for turn in range(count):
        tile = first + turn * gl.num_programs(0)
        place = _place(tile, skip, m, n, batches, ROWS, SHARE, BATCH, STORED)
        residual = _residual(tensors[1], place, ROWS, SHARE, ADD, STORED)
        at = turn * run
        if weights.dtype.is_fp8():
            sums, ups = _promoted_sums(ring, at, run, SUMS, SIDES, STAGES)
        else:
            sums, ups = _sums(ring, at, run, SUMS, SIDES, STAGES)
        row = tile // batches * ROWS
        if SPLIT > 1:
            sums, ups = _exchange(sums, ups, tensors, tile, SIDES, SPLIT, STORED)
        if EIGHT:
            # Layout conversion precedes scaling, so that scaling and residual sum become one instruction, as in fp8._finish.
            if ADD:
                sums = gl.convert_layout(sums, STORED)
            token = tile % batches * BATCH + skip
            sums = _scaled(sums, tensors, row, token, m, n)
            if SIDES == 2:
                ups = _scaled(ups, tensors, row + n, token, m, 2 * n)
        _finish(sums, ups, residual, place, tensors, row, n, BIAS, ADD, KIND, STORED)


@jit(do_not_specialize=["m", "tiles", "batches"])
def ring_kernel(
    w_desc,
    x_desc,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrivals_ptr,
    w_scale_ptr,
    x_scale_ptr,
    m,
    n,
    k,
    tiles,
    batches,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    KIND: gl.constexpr,
    BATCH: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """out [m, n] = x [m, k] w [features, k]^T + bias; one producer warp and WARPS consumer warps per program.

    The grid is tiles * SPLIT, or a persistent grid if SPLIT is 1. ROWS: features of a tile (of gate and of up). BIAS, ADD, KIND:
    see gemm_small.matrix_kernel, also for w with gate and up. w_desc, x_desc: TMA descriptors. part [tiles, SPLIT, sides, BATCH,
    ROWS]: float32, or int32 for integers. arrivals: int32, see _arrivals. w_scale [features], x_scale [m]: for 8-bit w and x.
    """
    if PDL:
        gdc_launch_dependents()
    SIDES: gl.constexpr = 1 if KIND == 0 else 2
    PIECE: gl.constexpr = w_desc.block_shape[1]
    PIECES: gl.constexpr = BLOCK // PIECE
    gl.static_assert(not w_desc.dtype.is_fp8() or PIECES * SIDES == 2)
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    weights = gl.allocate_shared_memory(w_desc.dtype, [STAGES * PIECES * SIDES, ROWS, PIECE], w_desc.layout)
    tokens = gl.allocate_shared_memory(x_desc.dtype, [STAGES * PIECES, BATCH, PIECE], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    ring = (weights, tokens, full, free)
    work = (tiles, (k + BLOCK - 1) // BLOCK, batches)
    tensors = (bias_ptr, out_ptr, part_ptr, arrivals_ptr, w_scale_ptr, x_scale_ptr)
    gl.warp_specialize(
        [
            (_multiply, (tensors, ring, work, m, n, BIAS, ADD, KIND, SIDES, SPLIT, STAGES, WARPS, PDL)),
            (_fetch, (w_desc, x_desc, ring, work, n, SIDES, SPLIT, STAGES, PDL)),
        ],
        [1],
        [24],
    )


def _blocks(values: torch.Tensor, rows: int, block: int) -> TensorDescriptor:
    """TMA descriptor of values [R, k], with a box of `rows` x `block`; 8-bit values use PROMOTED for `block`."""
    bits = 8 * values.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2)
    box = [rows, PROMOTED if bits == 8 else block]
    return TensorDescriptor(values, list(values.shape), list(values.stride()), box, layout)


def ring_product(
    x: torch.Tensor | Scaled,
    weight: torch.Tensor | Fp8Matrix,
    bias: torch.Tensor | None,
    tile: RingTile,
    into: torch.Tensor | torch.dtype | None = None,
    kind: str | None = None,
) -> torch.Tensor:
    """gemm_small.matrix_product for 16-bit floats, or for x and weight both in 8 bits. into: the residual stream, or the dtype of
    the result (x's by default)."""
    values, x_scales = (x.values, x.scales) if isinstance(x, Scaled) else (x, x)
    matrix, w_scales = (weight.values, weight.scales) if isinstance(weight, Fp8Matrix) else (weight, weight)
    tokens, k = values.shape
    sides = 1 if kind is None else 2
    n, rows = matrix.shape[0] // sides, tile.rows // sides
    batches, blocks = triton.cdiv(tokens, tile.batch), triton.cdiv(k, tile.block)
    tiles = triton.cdiv(n, rows) * batches
    split = tile.split if tile.split <= blocks and tiles <= COUNTERS else 1
    out = into
    if not isinstance(out, torch.Tensor):
        out = torch.empty((tokens, n), dtype=out or values.dtype, device=values.device)
    part, arrivals = out, out
    if split > 1:
        shape = (tiles, split, tile.batch, tile.rows)
        sums = torch.int32 if matrix.dtype == torch.int8 else torch.float32
        part, arrivals = torch.empty(shape, dtype=sums, device=out.device), _arrivals(out.device)
    ring_kernel[(min(tile.programs, tiles) if split == 1 else tiles * split,)](
        _blocks(matrix, rows, tile.block),
        _blocks(values, tile.batch, tile.block),
        w_scales if bias is None else bias,
        out,
        part,
        arrivals,
        w_scales,
        x_scales,
        tokens,
        n,
        k,
        tiles,
        batches,
        BIAS=bias is not None,
        ADD=out is into,
        KIND=KINDS[kind],
        BATCH=tile.batch,
        ROWS=rows,
        BLOCK=tile.block,
        SPLIT=split,
        STAGES=tile.stages,
        WARPS=tile.warps,
        num_warps=tile.warps,
        maxnreg=tile.registers,
        **overlap(out.device),
    )
    return out
