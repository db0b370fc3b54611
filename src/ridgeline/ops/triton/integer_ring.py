"""Products with integer weights for tens to hundreds of tokens on Hopper: codes stream by TMA as in ring, consumer warps
dequantize.

A program computes tiles of out^T = W x^T. The 16 bytes of a chunk that a thread loads hold exactly the weights of its wgmma
fragment, so threads exchange nothing (integer.pack defines the layout). A thread dequantizes the weights of the next 64 inputs
while the products of the last 64 run. wgmma reads both sets of weights directly from registers. Each set stays named in the wait
that ends its products, because the compiler would otherwise overwrite it early. Where two programs share an SM, one also
dequantizes while the other multiplies.

integer_matrix describes dequantization; ring describes the producer warp and the split-K reduction. Weights are rounded to x's
dtype once, after scaling. With one scale per output channel they are exact, and the sum is scaled.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import cache

import torch
import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.ops.table import IntMatrix
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.gluon_names import async_load
from ridgeline.ops.triton.integer_matrix import constants
from ridgeline.ops.triton.integer_shapes import IntRingTile
from ridgeline.ops.triton.launch import overlap
from ridgeline.ops.triton.ring import COUNTERS, _arrivals, _exchange, _finish, _place, _residual, _share


@jit
def _weights(w_desc, tile, block, stage, ring, work, n, SIDES: gl.constexpr):
    """Issue TMA loads of a block of a tile's codes, and set the byte count that the barrier expects, including x."""
    codes, tokens, full, _free = ring
    CHUNKS: gl.constexpr = codes.shape[0] // full.shape[0] // SIDES
    HALVES: gl.constexpr = tokens.shape[0] // full.shape[0]
    ROWS: gl.constexpr = codes.shape[1]
    BYTES: gl.constexpr = CHUNKS * SIDES * ROWS * 64 + HALVES * tokens.shape[1] * 128
    mbarrier.expect(full.index(stage), BYTES)
    row = tile // work[2] * ROWS
    for side in gl.static_range(SIDES):
        for chunk in gl.static_range(CHUNKS):
            place = [side * n + row, (block * CHUNKS + chunk) * 32]
            target = codes.index((stage * SIDES + side) * CHUNKS + chunk)
            async_load(w_desc, place, full.index(stage), target)


@jit
def _tokens(x_desc, tile, block, stage, ring, work):
    """Issue TMA loads of a block of a tile's x."""
    _codes, tokens, full, _free = ring
    HALVES: gl.constexpr = tokens.shape[0] // full.shape[0]
    token = tile % work[2] * tokens.shape[1]
    for half in gl.static_range(HALVES):
        target = tokens.index(stage * HALVES + half)
        async_load(x_desc, [token, (block * HALVES + half) * 64], full.index(stage), target)


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
    free = ring[3]
    first, count, begin, run = _share(work, SPLIT)
    early = gl.minimum(count * run, STAGES)
    for at in range(early):
        tile = first + at // run * gl.num_programs(0)
        _weights(w_desc, tile, begin + at % run, at, ring, work, n, SIDES)
    if PDL:
        gdc_wait()
    for at in range(early):
        tile = first + at // run * gl.num_programs(0)
        _tokens(x_desc, tile, begin + at % run, at, ring, work)
    for at in range(early, count * run):
        tile = first + at // run * gl.num_programs(0)
        stage = at % STAGES
        mbarrier.wait(free.index(stage), (at // STAGES & 1) ^ 1)
        _weights(w_desc, tile, begin + at % run, stage, ring, work, n, SIDES)
        _tokens(x_desc, tile, begin + at % run, stage, ring, work)


@jit
def _read(
    matrix,
    row,
    block,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    BITS: gl.constexpr,
    BLOCK: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Load (scales, zero points) of a block's weights: a tensor [ROWS, 1, pieces, 1] for each step of 64 inputs, with one piece if
    the step has one scale. A value that the format lacks is a placeholder."""
    scale_ptr, zero_ptr, groups = matrix
    CHUNK: gl.constexpr = 512 // BITS
    PIECES: gl.constexpr = 4 * 64 // CHUNK if GROUP % CHUNK != 0 else 1
    STEPS: gl.constexpr = BLOCK // 64
    ONE: gl.constexpr = GROUP if GROUP > 0 else 1 << 30
    piece = gl.arange(0, PIECES, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, LAYOUT))))
    piece = gl.expand_dims(gl.expand_dims(gl.expand_dims(piece, 0), 1), 3) * (CHUNK // 4)
    scales = ()
    zeros = ()
    for step in gl.static_range(STEPS):
        # A chunk of 4-bit codes is two steps. They share a scale unless groups are smaller than a chunk.
        within = piece + (step * 64 if PIECES > 1 else step * 64 // CHUNK * CHUNK)
        at = row * groups + gl.minimum((block * BLOCK + within) // ONE, groups - 1)
        scale = at
        zero = at
        if GROUP > 0:
            scale = gl.load(scale_ptr + at)
        if ZEROS:
            zero = gl.load(zero_ptr + at)
        scales = scales + (scale,)  # type: ignore[assignment]
        zeros = zeros + (zero,)  # type: ignore[assignment]
    return scales, zeros


@jit
def _widen(
    p,
    scale,
    zero,
    FORM: gl.constexpr,
    TYPE: gl.constexpr,
    TO: gl.constexpr,
):
    """Dequantize codes p int16 [ROWS, 4, pieces, 2] of a step to weights [ROWS, 64] in registers, in wgmma's operand layout."""
    ROWS: gl.constexpr = p.shape[0]
    LAYOUT: gl.constexpr = p.type.layout
    SHIFT: gl.constexpr = FORM[0]
    GROUP: gl.constexpr = FORM[1]
    ZEROS: gl.constexpr = FORM[2]
    BITS: gl.constexpr = FORM[3]
    PTX: gl.constexpr = FORM[4]
    POWER: gl.constexpr = FORM[5]
    factor = gl.full([ROWS, 1, 1, 1], POWER, TYPE, LAYOUT)
    shift = gl.full([ROWS, 1, 1, 1], SHIFT, TYPE, LAYOUT)
    if GROUP > 0:
        factor = (scale.to(gl.float32) * POWER).to(TYPE)
    if ZEROS:
        shift = (zero.to(gl.float32) + SHIFT).to(TYPE)
    operands = [p, gl.broadcast(shift, p)[0], gl.broadcast(factor, p)[0]]
    two: gl.constexpr = "=&r,=&r,r,r,r"
    four: gl.constexpr = "=&r,=&r,=&r,=&r,r,r,r"
    # inline_asm_elementwise takes result types as literals only.
    if BITS == 8:
        if gl.bfloat16 == TYPE:
            c0, c1 = gl.inline_asm_elementwise(PTX, two, operands, (gl.bfloat16,) * 2, True, 2)
        else:
            c0, c1 = gl.inline_asm_elementwise(PTX, two, operands, (gl.float16,) * 2, True, 2)
        w = gl.permute(gl.join(c0, c1), (0, 2, 4, 1, 3))
    else:
        if gl.bfloat16 == TYPE:
            c0, c1, c2, c3 = gl.inline_asm_elementwise(PTX, four, operands, (gl.bfloat16,) * 4, True, 2)
        else:
            c0, c1, c2, c3 = gl.inline_asm_elementwise(PTX, four, operands, (gl.float16,) * 4, True, 2)
        w = gl.permute(gl.join(gl.join(c0, c1), gl.join(c2, c3)), (0, 2, 5, 4, 1, 3))
    return gl.convert_layout(gl.reshape(w, (ROWS, 64)), TO)


@jit
def _codes(codes, first, step: gl.constexpr, BITS: gl.constexpr, CHUNK_LAYOUT: gl.constexpr, LAYOUT: gl.constexpr):
    """Load a step's codes int16 [ROWS, 4, pieces, 2] from a block's chunks in shared memory. CHUNK_LAYOUT: register layout of a
    chunk. LAYOUT: layout of the result."""
    ROWS: gl.constexpr = codes.shape[1]
    if BITS == 8:
        p = gl.reshape(codes.index(first + step).load(CHUNK_LAYOUT), (ROWS, 4, 4, 2))
    else:
        p = gl.reshape(codes.index(first + step // 2).load(CHUNK_LAYOUT), (ROWS, 4, 2, 2, 2))
        low, high = gl.split(gl.permute(p, (0, 1, 3, 4, 2)))
        if step % 2 == 0:
            p = low
        else:
            p = high
    return gl.convert_layout(p, LAYOUT)


@jit
def _multiply(
    tensors,
    matrix,
    ring,
    work,
    m,
    n,
    FORM: gl.constexpr,
    BIAS: gl.constexpr,
    ADD: gl.constexpr,
    KIND: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Consumer warps: dequantize and multiply the blocks in the ring, then store. FORM: (SHIFT, GROUP, ZEROS, BITS, PTX, POWER)."""
    codes, tokens, full, free = ring
    batches = work[2]
    GROUP: gl.constexpr = FORM[1]
    ZEROS: gl.constexpr = FORM[2]
    BITS: gl.constexpr = FORM[3]
    SIDES: gl.constexpr = 1 if KIND == 0 else 2
    ROWS: gl.constexpr = codes.shape[1]
    BATCH: gl.constexpr = tokens.shape[1]
    STEPS: gl.constexpr = tokens.shape[0] // STAGES
    CHUNKS: gl.constexpr = codes.shape[0] // STAGES // SIDES
    TYPE: gl.constexpr = tokens.dtype
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BATCH, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    # A thread holds rows r and r + 8 of its warp's 16, and 16 bytes of a chunk.
    PIECES4: gl.constexpr = [[0, 0, 1, 0], [0, 0, 2, 0]] if BITS == 8 else [[0, 0, 1, 0]]
    LANES2: gl.constexpr = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    LANES4: gl.constexpr = [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    SIDE2: gl.constexpr = [[16, 0], [32, 0]] if ROWS == 64 else [[16, 0], [32, 0], [64, 0]]
    SIDE4: gl.constexpr = (
        [[16, 0, 0, 0], [32, 0, 0, 0]] if ROWS == 64 else [[16, 0, 0, 0], [32, 0, 0, 0], [64, 0, 0, 0]]
    )
    FRAGMENT2: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], LANES2, SIDE2, [], [ROWS, 32]
    )
    FRAGMENT4: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 1]] + PIECES4 + [[8, 0, 0, 0]], LANES4, SIDE4, [], [ROWS, 4, 4 if BITS == 8 else 2, 2]
    )
    # Layouts with the threads of a warp along rows, which are adjacent in memory: to store accumulators, and parts of split-K.
    FROM_SUMS: gl.constexpr = gl.BlockedLayout([8, 1], [2, 16], [WARPS, 1], [0, 1])
    FROM_PARTS: gl.constexpr = gl.BlockedLayout([4, 1], [16, 2], [1, WARPS], [0, 1])
    first, count, begin, run = _share(work, SPLIT)
    at = 0
    up = gl.zeros([ROWS, BATCH], gl.float32, SUMS)
    w0 = gl.zeros([ROWS, 64], TYPE, LEFT)
    w1 = gl.zeros([ROWS, 64], TYPE, LEFT)
    for turn in range(count):
        tile = first + turn * gl.num_programs(0)
        line = tile // batches * ROWS
        line += gl.arange(0, ROWS, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, FRAGMENT4))))
        row = gl.expand_dims(gl.expand_dims(gl.expand_dims(line, 1), 2), 3)
        row = gl.minimum(row, SIDES * n - 1)
        row_up = gl.minimum(row + n, SIDES * n - 1)
        scale, zero = _read(matrix, row, begin, GROUP, ZEROS, BITS, STEPS * 64, FRAGMENT4)
        scale_up, zero_up = scale, zero
        if SIDES == 2:
            scale_up, zero_up = _read(matrix, row_up, begin, GROUP, ZEROS, BITS, STEPS * 64, FRAGMENT4)
        total = gl.zeros([ROWS, BATCH], gl.float32, SUMS)
        if SIDES == 2:
            up = gl.zeros([ROWS, BATCH], gl.float32, SUMS)
        for block in range(run):
            stage = at % STAGES
            next_scale, next_zero = _read(matrix, row, begin + block + 1, GROUP, ZEROS, BITS, STEPS * 64, FRAGMENT4)
            next_scale_up, next_zero_up = next_scale, next_zero
            if SIDES == 2:
                next_scale_up, next_zero_up = _read(
                    matrix, row_up, begin + block + 1, GROUP, ZEROS, BITS, STEPS * 64, FRAGMENT4
                )
            mbarrier.wait(full.index(stage), at // STAGES & 1)
            for step in gl.static_range(STEPS):
                x = tokens.index(stage * STEPS + step).permute((1, 0))
                chunks = stage * SIDES * CHUNKS
                p = _codes(codes, chunks, step, BITS, FRAGMENT2, FRAGMENT4)
                if SIDES == 2:
                    w0 = _widen(p, scale[step], zero[step], FORM, TYPE, LEFT)
                    total = warpgroup_mma(w0, x, total, is_async=True)
                    total, up, w1 = warpgroup_mma_wait(1, deps=[total, up, w1])
                    if step == 0:
                        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1, pred=block > 0)
                    p = _codes(codes, chunks + CHUNKS, step, BITS, FRAGMENT2, FRAGMENT4)
                    w1 = _widen(p, scale_up[step], zero_up[step], FORM, TYPE, LEFT)
                    up = warpgroup_mma(w1, x, up, is_async=True)
                    total, up, w0 = warpgroup_mma_wait(1, deps=[total, up, w0])
                elif step % 2 == 0:
                    w0 = _widen(p, scale[step], zero[step], FORM, TYPE, LEFT)
                    total = warpgroup_mma(w0, x, total, is_async=True)
                    total, w1 = warpgroup_mma_wait(1, deps=[total, w1])
                    if step == 0:
                        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1, pred=block > 0)
                else:
                    w1 = _widen(p, scale[step], zero[step], FORM, TYPE, LEFT)
                    total = warpgroup_mma(w1, x, total, is_async=True)
                    total, w0 = warpgroup_mma_wait(1, deps=[total, w0])
            scale, zero, scale_up, zero_up = next_scale, next_zero, next_scale_up, next_zero_up
            at += 1
        total, up, w1 = warpgroup_mma_wait(0, deps=[total, up, w1])
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1)
        if GROUP == 0:
            out_row = tile // batches * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))
            total *= gl.load(matrix[0] + out_row, mask=out_row < n, other=0.0).to(gl.float32)[:, None]
            if SIDES == 2:
                up *= gl.load(matrix[0] + n + out_row, mask=out_row < n, other=0.0).to(gl.float32)[:, None]
        if PDL:
            gdc_wait()
        first_row = tile // batches * ROWS
        if SPLIT == 1:
            place = _place(tile, 0, m, n, batches, ROWS, BATCH, BATCH, FROM_SUMS)
            residual = _residual(tensors[1], place, ROWS, BATCH, ADD, FROM_SUMS)
            _finish(total, up, residual, place, tensors, first_row, n, BIAS, ADD, KIND, FROM_SUMS)
        else:
            skip = gl.program_id(0) % SPLIT * (BATCH // SPLIT)
            place = _place(tile, skip, m, n, batches, ROWS, BATCH // SPLIT, BATCH, FROM_PARTS)
            residual = _residual(tensors[1], place, ROWS, BATCH // SPLIT, ADD, FROM_PARTS)
            sums, ups = _exchange(total, up, tensors, tile, SIDES, SPLIT, FROM_PARTS)
            _finish(sums, ups, residual, place, tensors, first_row, n, BIAS, ADD, KIND, FROM_PARTS)


@jit(do_not_specialize=["m", "tiles", "batches"])
def integer_ring_kernel(
    w_desc,
    x_desc,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    part_ptr,
    arrivals_ptr,
    m,
    n,
    k,
    groups,
    tiles,
    batches,
    SHIFT: gl.constexpr,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    BITS: gl.constexpr,
    PTX: gl.constexpr,
    POWER: gl.constexpr,
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
    """out [m, n] = x [m, k] W^T + bias with dequantization; one producer warp and WARPS (4 or 8) consumer warps per program.

    ROWS: features of a tile (of gate and of up), 16 per consumer warp. See integer_matrix.dequantize_kernel for the format of W and
    ring.ring_kernel for the other parameters.
    """
    if PDL:
        gdc_launch_dependents()
    SIDES: gl.constexpr = 1 if KIND == 0 else 2
    HALVES: gl.constexpr = BLOCK // 64
    CHUNKS: gl.constexpr = BLOCK * BITS // 512
    dtype: gl.constexpr = out_ptr.dtype.element_ty
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    codes = gl.allocate_shared_memory(gl.int16, [STAGES * SIDES * CHUNKS, ROWS, 32], w_desc.layout)
    tokens = gl.allocate_shared_memory(dtype, [STAGES * HALVES, BATCH, 64], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    ring = (codes, tokens, full, free)
    work = (tiles, (k + BLOCK - 1) // BLOCK, batches)
    tensors = (bias_ptr, out_ptr, part_ptr, arrivals_ptr)
    matrix = (scale_ptr, zero_ptr, groups)
    FORM: gl.constexpr = (SHIFT, GROUP, ZEROS, BITS, PTX, POWER)
    gl.warp_specialize(
        [
            (_multiply, (tensors, matrix, ring, work, m, n, FORM, BIAS, ADD, KIND, SPLIT, STAGES, WARPS, PDL)),
            (_fetch, (w_desc, x_desc, ring, work, n, SIDES, SPLIT, STAGES, PDL)),
        ],
        [1],
        [24],
    )


@cache
def _layout(width: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=16, rank=2)


def _blocks(values: torch.Tensor, rows: int, width: int) -> TensorDescriptor:
    """TMA descriptor of values [R, k] of 16 bits, with a box of `rows` x `width` bytes."""
    return TensorDescriptor(values, list(values.shape), list(values.stride()), [rows, width // 2], _layout(width))


def integer_ring_product(
    x: torch.Tensor,
    matrix: IntMatrix,
    bias: torch.Tensor | None,
    tile: IntRingTile,
    stream: torch.Tensor | None = None,
    kind: str | None = None,
) -> torch.Tensor:
    """x [T, d_in] with contiguous rows, 16-bit floats -> x W^T + bias [T, out] in x's dtype. Address and rows of x must be
    multiples of 16 bytes.

    stream: contiguous [T, out]; the result is added in place. kind: activation of gate and up, [2 F, d_in] -> [T, F].
    """
    tokens, k = x.shape
    codes = matrix.codes.view(torch.int16)
    n = matrix.out // (1 if kind is None else 2)
    rows, batches = 16 * tile.warps, triton.cdiv(tokens, tile.batch)
    tiles = triton.cdiv(n, rows) * batches
    blocks = triton.cdiv(k, tile.block)
    split = tile.split if tile.split <= blocks and tiles <= COUNTERS else 1
    out = torch.empty((tokens, n), dtype=x.dtype, device=x.device) if stream is None else stream
    part, arrivals = out, out
    if split > 1:
        shape = (tiles, split, 1 if kind is None else 2, tile.batch, rows)
        part, arrivals = torch.empty(shape, dtype=torch.float32, device=x.device), _arrivals(x.device)
    integer_ring_kernel[(min(tile.programs, tiles) if split == 1 else tiles * split,)](
        _blocks(codes, rows, 64),
        _blocks(x, tile.batch, 128),
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        matrix.scales if bias is None else bias,
        out,
        part,
        arrivals,
        tokens,
        n,
        k,
        matrix.scales.shape[1],
        tiles,
        batches,
        **constants(matrix, x.dtype),
        BIAS=bias is not None,
        ADD=stream is not None,
        KIND=KINDS[kind],
        BATCH=tile.batch,
        ROWS=rows,
        BLOCK=tile.block,
        SPLIT=split,
        STAGES=tile.stages,
        WARPS=tile.warps,
        num_warps=tile.warps,
        maxnreg=tile.registers,
        **overlap(x.device),
    )
    return out
