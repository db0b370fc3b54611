"""Products of one to four tokens with integer weights, on a warp's matrix unit (PTX ISA, mma.m16n8k16).

The limit is reading the weights, as long as dequantization is faster. Codes go into the matrix unit as integer_matrix.conversion
emits them, with the power of two of their exponent still added, and accumulate in float32. The accumulator starts at minus that
offset times the sum of the inputs, which removes it. Group scales are applied in float32, once per group sum.

The matrix unit takes eight columns of x, but one token is one column. The kernel therefore passes eight blocks of the inputs as
columns, with one line of the matrix unit for each of a weight row's blocks, and keeps the diagonal of the products. This is free
because the columns would be idle, and the blocks of a row are adjacent in memory. T tokens leave 8 / T blocks.

A program keeps x in shared memory and loops over groups of rows with one group of prefetch, as in gemv. Its warps share the inputs.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.ops.table import FloatInput, IntMatrix, Normed
from ridgeline.ops.triton.activation import KINDS, gated
from ridgeline.ops.triton.integer_matrix import EMULATED_E4M3, constants, from_e4m3
from ridgeline.ops.triton.integer_shapes import IntVectorTile
from ridgeline.ops.triton.launch import await_inputs, overlap


@triton.jit
def _row(place, n, KIND: tl.constexpr):
    """Row of w [n, k] at index `place` of the loop. With an activation, gate and up rows of the same feature alternate."""
    if KIND != 0:
        # A feature past the last one maps to rows at or past the end of its half. It is not stored.
        place = place // 2 + place % 2 * (n // 2)
    return place


@triton.jit
def _ahead(
    w_ptr,
    scale_ptr,
    zero_ptr,
    step,
    n,
    words,
    groups,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCKS: tl.constexpr,
    SETS: tl.constexpr,
    WARPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Load codes, scales and zero points of a group of rows, a tensor per set of chunks. Rows past the last repeat the last. The
    dimensions are in the order in which threads hold matrix fragments, so that no data is exchanged between threads."""
    CHUNK: tl.constexpr = 512 // BITS
    PIECES: tl.constexpr = 1 if GROUP % CHUNK == 0 else 4
    EIGHTS: tl.constexpr = ROWS * BLOCKS // 8
    line = tl.arange(0, EIGHTS)[None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None]
    row = tl.minimum(_row(step * ROWS + line // BLOCKS, n, KIND), n - 1)
    chunk = tl.arange(0, WARPS)[None, :, None, None] * BLOCKS + line % BLOCKS
    word = tl.arange(0, 16)[None, None, None, :]
    owner = tl.arange(0, 4)[:, None, None, None, None] * 0
    group_line = tl.arange(0, EIGHTS)[None, None, None, :, None] * 8 + tl.arange(0, 8)[None, :, None, None, None]
    group_row = tl.minimum(_row(step * ROWS + group_line // BLOCKS, n, KIND), n - 1) + owner
    group_chunk = tl.arange(0, WARPS)[None, None, :, None, None] * BLOCKS + group_line % BLOCKS
    piece = tl.arange(0, PIECES)[None, None, None, None, :] * (CHUNK // PIECES)
    w = ()
    scale = ()
    zero = ()
    for chunk_set in tl.static_range(SETS):
        at = (chunk + chunk_set * WARPS * BLOCKS) * 16
        real = (at < words) & (step * ROWS < n)
        w = w + (tl.load(w_ptr + row * words + at + word, mask=real, other=0, eviction_policy="evict_first"),)  # type: ignore[assignment]
        if GROUP > 0:
            first = (group_chunk + chunk_set * WARPS * BLOCKS) * CHUNK + piece
            place = group_row * groups + tl.minimum(first // GROUP, groups - 1)
            scale = scale + (tl.load(scale_ptr + place),)  # type: ignore[assignment]
        else:
            place = group_row + piece
        if ZEROS:
            zero = zero + (tl.load(zero_ptr + place),)  # type: ignore[assignment]
    return w, scale, zero


@triton.jit
def _lines(value, EIGHTS: tl.constexpr, WARPS: tl.constexpr):
    """Expand a value per line and warp [4, 8, WARPS, EIGHTS, 1] to one per product [WARPS, lines, 8]."""
    expanded = tl.permute(tl.broadcast_to(value, (4, 8, WARPS, EIGHTS, 2)), (2, 3, 1, 0, 4))
    return tl.reshape(expanded, (WARPS, EIGHTS * 8, 8))


@triton.jit
def _pieces(value, EIGHTS: tl.constexpr, WARPS: tl.constexpr):
    """Permute values per piece of a chunk [4, 8, WARPS, EIGHTS, 4] to the order of `_weights`."""
    return tl.permute(value, (1, 2, 3, 0, 4))


@triton.jit
def _floats(word, shift, scale, BITS: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Convert words int32 [...] of codes to floats: first the lower halves in bit order, then the upper halves."""
    operands = [word, shift, scale]
    four: tl.constexpr = "=h,=h,=h,=h,r,h,h"
    eight: tl.constexpr = "=h,=h,=h,=h,=h,=h,=h,=h,r,h,h"
    if PTX != "" and PTX != EMULATED_E4M3:
        # inline_asm_elementwise takes result types as literals only.
        if BITS == 8:
            if tl.bfloat16 == TYPE:
                return tl.inline_asm_elementwise(PTX, four, operands, (tl.bfloat16,) * 4, True, 1)
            else:
                return tl.inline_asm_elementwise(PTX, four, operands, (tl.float16,) * 4, True, 1)
        elif tl.bfloat16 == TYPE:
            return tl.inline_asm_elementwise(PTX, eight, operands, (tl.bfloat16,) * 8, True, 1)
        else:
            return tl.inline_asm_elementwise(PTX, eight, operands, (tl.float16,) * 8, True, 1)
    floats = ()
    for index in tl.static_range(32 // BITS):
        if BITS == 8:
            code = (word << (24 - 8 * index)) >> 24
        else:
            code = word >> (4 * index) & 15
        if PTX == EMULATED_E4M3:
            value = from_e4m3(code) * scale
        else:
            value = (code.to(tl.float32) - shift) * scale
        floats = floats + (value.to(TYPE),)  # type: ignore[assignment]
    return floats


@triton.jit
def _weights(
    w,
    shift,
    scale,
    BITS: tl.constexpr,
    TYPE: tl.constexpr,
    PTX: tl.constexpr,
    EIGHTS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Convert words of codes [8, WARPS, EIGHTS, 16] to floats [WARPS, lines, inputs], inputs in the order of `_columns`. shift,
    scale: for the four pieces of a chunk [8, WARPS, EIGHTS, 4, 4]."""
    w = tl.reshape(w, (8, WARPS, EIGHTS, 4, 4))
    c = _floats(w, shift, scale, BITS, TYPE, PTX)
    if BITS == 8:
        a = tl.join(tl.join(c[0], c[1]), tl.join(c[2], c[3]))
        a = tl.permute(a, (1, 2, 0, 4, 3, 5, 6))
    else:
        low = tl.join(tl.join(c[0], c[2]), tl.join(c[1], c[3]))
        a = tl.join(low, tl.join(tl.join(c[4], c[6]), tl.join(c[5], c[7])))
        a = tl.permute(a, (1, 2, 0, 4, 5, 3, 6, 7))
    return tl.reshape(a, (WARPS, EIGHTS * 8, 512 // BITS))


@triton.jit
def _inputs(
    x_ptr,
    x_stride,
    m,
    k,
    chunk_set: tl.constexpr,
    TOKENS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCKS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Load the inputs of a set of chunks: float32 [TOKENS, inputs of the set]."""
    SIZE: tl.constexpr = WARPS * BLOCKS * (512 // BITS)
    at = chunk_set * SIZE + tl.arange(0, SIZE)[None, :]
    token = tl.arange(0, TOKENS)[:, None]
    return tl.load(x_ptr + token * x_stride + at, mask=(token < m) & (at < k), other=0.0).to(tl.float32)


@triton.jit
def _columns(x, BITS: tl.constexpr, TOKENS: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr):
    """Arrange the result of `_inputs` as columns [WARPS, inputs of a chunk, TOKENS * BLOCKS]. The four codes that a thread takes of
    16 inputs are adjacent here; integer.pack defines which inputs they are."""
    CHUNK: tl.constexpr = 512 // BITS
    x = tl.reshape(x, (TOKENS, WARPS, BLOCKS, CHUNK // 16, 2, 4, 2))
    return tl.reshape(tl.permute(x, (1, 3, 5, 4, 6, 0, 2)), (WARPS, CHUNK, 8))


@triton.jit
def _put(
    out_ptr,
    bias_ptr,
    value,
    step,
    m,
    n,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    KIND: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store the outputs of a group of rows from its products [ROWS, TOKENS], after bias, residual sum or activation."""
    row = _row(step * ROWS + tl.arange(0, ROWS), n, KIND)[:, None]
    token = tl.arange(0, TOKENS)[None, :]
    if BIAS:
        value += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    if KIND == 0:
        real = (row < n) & (token < m)
        place = out_ptr + token * n + row
        if ADD:
            value += tl.load(place, mask=real, other=0.0).to(tl.float32)
        tl.store(place, value.to(out_ptr.dtype.element_ty), mask=real)
    else:
        gate, up = tl.split(tl.permute(tl.reshape(value, (ROWS // 2, 2, TOKENS)), (0, 2, 1)))
        feature = step * (ROWS // 2) + tl.arange(0, ROWS // 2)[:, None]
        real = (feature < n // 2) & (token < m)
        out = gated(gate, up, KIND).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + token * (n // 2) + feature, out, mask=real)


@triton.jit(do_not_specialize=["m"])
def integer_vector_kernel(
    x_ptr,
    gain_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    x_stride,
    m,
    n,
    k,
    words,
    groups,
    eps,
    SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BITS: tl.constexpr,
    PTX: tl.constexpr,
    POWER: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
    PRECISION: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SETS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """out [m, n] = x [m, k] W^T + bias for m <= TOKENS; W: codes [n, words] int32.

    The grid is persistent: each program loops over groups of ROWS rows. A warp takes 8 / TOKENS chunks of each of SETS sets. Groups
    that end within a chunk scale codes one by one. See gemv.resident_kernel for NORM, ADD and KIND, and
    integer_matrix.dequantize_kernel for the format of W.
    """
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    BLOCKS: tl.constexpr = 8 // TOKENS
    EIGHTS: tl.constexpr = ROWS * BLOCKS // 8
    CHUNK_SCALES: tl.constexpr = GROUP % (512 // BITS) == 0
    steps = (n + ROWS - 1) // ROWS
    first = tl.program_id(0)
    w, scale, zero = _ahead(
        w_ptr, scale_ptr, zero_ptr, first, n, words, groups, GROUP, ZEROS, BITS, KIND, BLOCKS, SETS, WARPS, ROWS
    )
    gain = ()
    if NORM:
        for chunk_set in tl.static_range(SETS):
            gain = gain + (_inputs(gain_ptr, 0, 1, k, chunk_set, 1, BITS, BLOCKS, WARPS),)  # type: ignore[assignment]
    await_inputs(PDL)
    rms = tl.zeros((TOKENS, 1), tl.float32)
    if NORM:
        for chunk_set in tl.static_range(SETS):
            part = _inputs(x_ptr, x_stride, m, k, chunk_set, TOKENS, BITS, BLOCKS, WARPS)
            rms += tl.sum(part * part, 1)[:, None]
        rms = tl.rsqrt(rms / k + eps)
    x = ()
    start = ()
    for chunk_set in tl.static_range(SETS):
        part = _inputs(x_ptr, x_stride, m, k, chunk_set, TOKENS, BITS, BLOCKS, WARPS)
        if NORM:
            part = part * rms * (gain[chunk_set] + 1.0 if OFFSET else gain[chunk_set])
        part = _columns(part.to(TYPE), BITS, TOKENS, BLOCKS, WARPS)
        x = x + (part,)  # type: ignore[assignment]
        start = start + (tl.sum(part.to(tl.float32), 1)[:, None, :],)  # type: ignore[assignment]
    for step in range(first, steps, tl.num_programs(0)):
        ahead = step + tl.num_programs(0)
        next_w, next_scale, next_zero = _ahead(
            w_ptr, scale_ptr, zero_ptr, ahead, n, words, groups, GROUP, ZEROS, BITS, KIND, BLOCKS, SETS, WARPS, ROWS
        )
        # Without a barrier ptxas would delay these loads to save registers.
        tl.debug_barrier()
        total = tl.zeros((WARPS, EIGHTS * 8, 8), tl.float32)
        for chunk_set in tl.static_range(SETS):
            if CHUNK_SCALES:
                none = tl.full((8, WARPS, EIGHTS, 4, 4), 0.0, TYPE)
                a = _weights(w[chunk_set], none, none + POWER, BITS, TYPE, PTX, EIGHTS, WARPS)
                sums = total
                if GROUP > 0:
                    sums = tl.zeros((WARPS, EIGHTS * 8, 8), tl.float32)
                sums -= start[chunk_set] * SHIFT
                if ZEROS:
                    sums -= start[chunk_set] * _lines(zero[chunk_set].to(tl.float32), EIGHTS, WARPS)
                sums = tl.dot(a, x[chunk_set], sums, input_precision=PRECISION)
                if GROUP > 0:
                    total += sums * _lines(scale[chunk_set].to(tl.float32), EIGHTS, WARPS)
                else:
                    total = sums
            else:
                factor = _pieces((scale[chunk_set].to(tl.float32) * POWER).to(TYPE), EIGHTS, WARPS)
                shift = tl.full((8, WARPS, EIGHTS, 4, 4), SHIFT, TYPE)
                if ZEROS:
                    shift = _pieces((zero[chunk_set].to(tl.float32) + SHIFT).to(TYPE), EIGHTS, WARPS)
                a = _weights(w[chunk_set], shift, factor, BITS, TYPE, PTX, EIGHTS, WARPS)
                total = tl.dot(a, x[chunk_set], total, input_precision=PRECISION)
        w, scale, zero = next_w, next_scale, next_zero
        same = tl.arange(0, EIGHTS * 8)[None, :, None] % BLOCKS == tl.arange(0, 8)[None, None, :] % BLOCKS
        total = tl.reshape(tl.where(same, total, 0.0), (WARPS, ROWS, BLOCKS, TOKENS, BLOCKS))
        value = tl.sum(tl.sum(tl.sum(total, 4), 2), 0)
        if GROUP == 0:
            row = tl.minimum(_row(step * ROWS + tl.arange(0, ROWS), n, KIND), n - 1)
            value *= tl.load(scale_ptr + row).to(tl.float32)[:, None]
        _put(out_ptr, bias_ptr, value, step, m, n, BIAS, ADD, KIND, TOKENS, ROWS)


def integer_vector_product(
    x: FloatInput,
    matrix: IntMatrix,
    bias: torch.Tensor | None,
    tile: IntVectorTile,
    stream: torch.Tensor | None = None,
    kind: str | None = None,
) -> torch.Tensor:
    """x [T, d_in] with contiguous rows, T from 1 to 8 -> x W^T + bias [T, out] in x's dtype. If x is Normed, the kernel applies the
    norm.

    stream: contiguous [T, out]; the result is added in place. kind: activation of gate and up, [2 F, d_in] -> [T, F].
    """
    norm = x if isinstance(x, Normed) else None
    source = x.x if isinstance(x, Normed) else x
    tokens, n, codes = source.shape[0], matrix.out, matrix.codes.view(torch.int32)
    assert 0 < tokens <= 8
    out = stream
    if out is None:
        out = torch.empty((tokens, n if kind is None else n // 2), dtype=source.dtype, device=source.device)
    columns = triton.next_power_of_2(tokens)
    blocks = 8 // columns
    # The matrix unit has 16 lines. Each weight row takes one line per block.
    rows = max(tile.rows, 16 // blocks)
    chunks = codes.shape[1] // 16
    integer_vector_kernel[(min(tile.programs, triton.cdiv(n, rows)),)](
        source,
        source if norm is None else norm.weight,
        codes,
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        matrix.scales if bias is None else bias,
        out,
        source.stride(0),
        tokens,
        n,
        matrix.d_in,
        codes.shape[1],
        matrix.scales.shape[1],
        0.0 if norm is None else norm.eps,
        **constants(matrix, source.dtype, vectors=True),
        BIAS=bias is not None,
        ADD=stream is not None,
        NORM=norm is not None,
        OFFSET=norm is not None and norm.offset,
        KIND=KINDS[kind],
        PRECISION="ieee" if source.dtype == torch.float32 else "tf32",
        TOKENS=columns,
        ROWS=rows,
        SETS=triton.cdiv(chunks, blocks * tile.warps),
        WARPS=tile.warps,
        num_warps=tile.warps,
        **overlap(source.device),
    )
    return out
