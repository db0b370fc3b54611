"""One token times integer weights: every program keeps x in registers and walks over rows, as in gemv.

At 4 bits a weight arrives in a quarter of the time, and turning codes into floats one by one would take longer than
reading them. Therefore x becomes integers instead, once for each program: 16 bits, relative to the largest magnitude of
the 32 inputs (16 at 8 bits) whose codes a thread reads at once, which keeps 2^-16 of that magnitude where x's own
bfloat16 keeps 2^-9 of it. Their upper and lower bytes go through the processor's products of four bytes each, whose sums
are exact (PTX ISA, dp4a); the scales of x and of the weights are multiplied by in float32.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.ops.table import IntMatrix, Normed, Plain
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.gemv import put, rows_of
from ridgeline.ops.triton.integer_shapes import IntVectorTile
from ridgeline.ops.triton.launch import await_inputs, overlap


@triton.jit
def _byte_products(a, b, total, SIGNED_A: tl.constexpr, SIGNED_B: tl.constexpr):
    """total + the products of the four bytes of a and of b, as dp4a has it; for the interpreter."""
    for byte in tl.static_range(4):
        one, other = (a << (24 - 8 * byte)) >> 24, (b << (24 - 8 * byte)) >> 24
        if not SIGNED_A:
            one = one & 255
        if not SIGNED_B:
            other = other & 255
        total += one * other
    return total


@triton.jit
def _sums(w, planes, BITS: tl.constexpr, PTX: tl.constexpr):
    """Codes of each w [ROWS, WORDS] times 16-bit numbers, int32. planes: upper and lower bytes of the numbers [1, WORDS],
    at 4 bits of those for the codes at even places and of those at odd ones."""
    if BITS == 8:
        if PTX:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 sum;
                dp4a.s32.s32 sum, $1, $2, 0;
                shl.b32 sum, sum, 8;
                dp4a.s32.u32 $0, $1, $3, sum; }""",
                "=r,r,r,r",
                [w, planes[0], planes[1]],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        return _byte_products(w, planes[1], _byte_products(w, planes[0], 0, True, True) * 256, True, False)
    else:
        if PTX:
            return tl.inline_asm_elementwise(
                """{ .reg .b32 even, odd, sum;
                and.b32 even, $1, 0x0F0F0F0F;
                shr.u32 odd, $1, 4;
                and.b32 odd, odd, 0x0F0F0F0F;
                dp4a.u32.s32 sum, even, $2, 0;
                dp4a.u32.s32 sum, odd, $4, sum;
                shl.b32 sum, sum, 8;
                dp4a.u32.u32 sum, even, $3, sum;
                dp4a.u32.u32 $0, odd, $5, sum; }""",
                "=r,r,r,r,r,r",
                [w, planes[0], planes[1], planes[2], planes[3]],
                dtype=tl.int32,
                is_pure=True,
                pack=1,
            )
        even, odd = w & 0x0F0F0F0F, (w >> 4) & 0x0F0F0F0F
        high = _byte_products(odd, planes[2], _byte_products(even, planes[0], 0, False, True), False, True)
        low = _byte_products(even, planes[1], high * 256, False, False)
        return _byte_products(odd, planes[3], low, False, False)


@triton.jit
def _bytes(a, b, c, d, BYTE: tl.constexpr, PTX: tl.constexpr):
    """One byte of each of four numbers, a's lowest; [1, WORDS]."""
    if PTX:
        CHOICE: tl.constexpr = "0x0051" if BYTE == 1 else "0x0040"
        packed = tl.inline_asm_elementwise(
            "{ .reg .b32 t, u; prmt.b32 t, $1, $2, "
            + CHOICE
            + "; prmt.b32 u, $3, $4, "
            + CHOICE
            + "; prmt.b32 $0, t, u, 0x5410; }",
            "=r,r,r,r,r",
            [a, b, c, d],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return packed[None, :]
    SHIFT: tl.constexpr = 8 * BYTE
    low = (a >> SHIFT & 255) | ((b >> SHIFT & 255) << 8)
    return (low | ((c >> SHIFT & 255) << 16) | ((d >> SHIFT & 255) << 24))[None, :]


@triton.jit
def _read(ptr, first, k, BITS: tl.constexpr, WORDS: tl.constexpr):
    """Inputs of the codes of WORDS words from `first` on, float32 [WORDS] each, in the order of `_sums`' bytes."""
    word = first + tl.arange(0, WORDS)
    at = word // 16 * (512 // BITS) + word % 4 * (128 // BITS) + word // 4 % 4 * 2
    found = ()
    for one in tl.static_range(32 // BITS):
        # Byte b of a word: parity b / 2, code b % 2 of two; at 4 bits 2 (b % 2) at even places, one more at odd ones.
        code = one % 2 if BITS == 8 else one % 2 * 2 + one // 4
        place = at + (8 * code + one % 4 // 2)
        found = found + (tl.load(ptr + place, mask=place < k, other=0.0).to(tl.float32),)  # type: ignore[assignment]
    return found


@triton.jit
def _integers(x, RUN: tl.constexpr, WORDS: tl.constexpr, PTX: tl.constexpr):
    """x as `_read` has it -> (its planes for `_sums`; of each run of words what its integers are times, and their sum, by
    which a zero point counts, [1, WORDS / RUN])."""
    COUNT: tl.constexpr = len(x)
    most = tl.abs(x[0])
    for one in tl.static_range(1, COUNT):
        most = tl.maximum(most, tl.abs(x[one]))
    # Inputs that are all 0 get any scale.
    most = tl.maximum(tl.max(tl.reshape(most, (WORDS // 4, 4)), 1), 1e-30)
    factor = tl.reshape(tl.broadcast_to((32767.0 / most)[:, None], (WORDS // 4, 4)), (WORDS,))
    numbers = ()
    known = tl.zeros((WORDS,), tl.int32)
    for one in tl.static_range(COUNT):
        number = tl.floor(x[one] * factor + 0.5).to(tl.int32)
        numbers = numbers + (number,)  # type: ignore[assignment]
        known += number
    unit = most * (1 / 32767)
    if RUN == 4:
        known = tl.sum(tl.reshape(known, (WORDS // 4, 4)), 1)
    else:
        unit = tl.reshape(tl.broadcast_to(unit[:, None], (WORDS // 4, 4)), (WORDS,))
    planes = ()
    for four in tl.static_range(COUNT // 4):
        a, b = numbers[4 * four], numbers[4 * four + 1]  # type: ignore[var-annotated]
        c, d = numbers[4 * four + 2], numbers[4 * four + 3]  # type: ignore[var-annotated]
        planes = planes + (_bytes(a, b, c, d, 1, PTX), _bytes(a, b, c, d, 0, PTX))  # type: ignore[assignment]
    return planes, unit[None, :], known[None, :]


@triton.jit
def _half(address, PTX: tl.constexpr):
    """float32 of the float16 at each address; as a computation, whose values are made where they are used."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 half; ld.global.nc.b16 half, [$1]; cvt.f32.f16 $0, half; }",
            "=r,l",
            [address.to(tl.int64)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.load(address).to(tl.float32)


@triton.jit
def _of_groups(row, first, groups, GROUP: tl.constexpr, BITS: tl.constexpr, RUN: tl.constexpr, WORDS: tl.constexpr):
    """Where the scales and zero points of rows are, [ROWS, WORDS / RUN], for WORDS words from `first` on."""
    word = first + tl.arange(0, WORDS // RUN) * RUN
    at = word // 16 * (512 // BITS) + word % 4 * (128 // BITS)
    return row[:, None] * groups + tl.minimum(at // GROUP, groups - 1)[None, :]


@triton.jit
def _ahead(
    w_ptr,
    scale_ptr,
    step,
    n,
    words,
    groups,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Codes and scales of a group of rows, a tensor for each part; behind the last row those of the last."""
    row = tl.minimum(rows_of(step, n, KIND, ROWS), n - 1)
    w = ()
    scale = ()
    for part in tl.static_range(PARTS):
        at = part * WORDS + tl.arange(0, WORDS)
        real = (step * ROWS < n) & (at < words)[None, :]
        where = w_ptr + row[:, None] * words + at[None, :]
        w = w + (tl.load(where, mask=real, other=0, eviction_policy="evict_first"),)  # type: ignore[assignment]
        if GROUP > 0:
            place = _of_groups(row, part * WORDS, groups, GROUP, BITS, RUN, WORDS)
            scale = scale + (_half(scale_ptr + place, PTX),)  # type: ignore[assignment]
        else:
            scale = scale + (tl.full((ROWS, WORDS // RUN), 1.0, tl.float32),)  # type: ignore[assignment]
    return w, scale


@triton.jit
def integer_vector_kernel(
    x_ptr,
    gain_ptr,
    w_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    n,
    k,
    words,
    groups,
    eps,
    ZERO: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    KIND: tl.constexpr,
    PDL: tl.constexpr,
    PTX: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """out [n] = x [k] W^T + bias for one token, W [n, words] int32 of codes; see gemv.resident_kernel, whose NORM, ADD and
    KIND these are, and integer.pack for the codes. A row is read in PARTS tensors of WORDS words, whose sums a thread adds
    up before threads do. GROUP: inputs per scale, 0: all. ZERO: the zero point, with ZEROS what is added to it."""
    RUN: tl.constexpr = 4 if GROUP % (512 // BITS) == 0 else 1
    steps = (n + ROWS - 1) // ROWS
    first = tl.program_id(0)
    w, scale = _ahead(w_ptr, scale_ptr, first, n, words, groups, GROUP, BITS, KIND, RUN, PARTS, WORDS, ROWS, PTX)
    gains = ()
    if NORM:
        for part in tl.static_range(PARTS):
            gains = gains + (_read(gain_ptr, part * WORDS, k, BITS, WORDS),)  # type: ignore[assignment]
    await_inputs(PDL)
    inputs = ()
    for part in tl.static_range(PARTS):
        inputs = inputs + (_read(x_ptr, part * WORDS, k, BITS, WORDS),)  # type: ignore[assignment]
    if NORM:
        squares = tl.zeros((WORDS,), tl.float32)
        for part in tl.static_range(PARTS):
            for one in tl.static_range(32 // BITS):
                squares += inputs[part][one] * inputs[part][one]
        rms = tl.rsqrt(tl.sum(squares, 0) / k + eps)
        given = inputs
        inputs = ()
        for part in tl.static_range(PARTS):
            normed = ()
            for one in tl.static_range(32 // BITS):
                gain = gains[part][one] + 1.0 if OFFSET else gains[part][one]
                normed = normed + (given[part][one] * rms * gain,)  # type: ignore[assignment]
            inputs = inputs + (normed,)  # type: ignore[assignment]
    integers = ()
    for part in tl.static_range(PARTS):
        integers = integers + (_integers(inputs[part], RUN, WORDS, PTX),)  # type: ignore[assignment]
    for step in range(first, steps, tl.num_programs(0)):
        row = tl.minimum(rows_of(step, n, KIND, ROWS), n - 1)
        value = tl.zeros((ROWS, WORDS // RUN), tl.float32)
        for part in tl.static_range(PARTS):
            planes, unit, known = integers[part]  # type: ignore[var-annotated]
            sums = _sums(w[part], planes, BITS, PTX)
            if RUN > 1:
                sums = tl.sum(tl.reshape(sums, (ROWS, WORDS // RUN, RUN)), 2)
            if ZEROS:
                place = _of_groups(row, part * WORDS, groups, GROUP if GROUP > 0 else 512, BITS, RUN, WORDS)
                sums -= (tl.load(zero_ptr + place).to(tl.int32) + ZERO) * known
            elif ZERO != 0:
                sums -= ZERO * known
            value += sums.to(tl.float32) * (unit * scale[part])
        w, scale = _ahead(
            w_ptr,
            scale_ptr,
            step + tl.num_programs(0),
            n,
            words,
            groups,
            GROUP,
            BITS,
            KIND,
            RUN,
            PARTS,
            WORDS,
            ROWS,
            PTX,
        )
        total = tl.sum(value, 1)
        if GROUP == 0:
            total *= tl.load(scale_ptr + row).to(tl.float32)
        put(out_ptr, bias_ptr, total, step, n, BIAS, ADD, KIND, ROWS)


def integer_vector_product(
    x: Plain,
    matrix: IntMatrix,
    bias: torch.Tensor | None,
    tile: IntVectorTile,
    stream: torch.Tensor | None = None,
    kind: str | None = None,
) -> torch.Tensor:
    """x [1, d_in], contiguous -> x W^T + bias [1, out] in x's dtype; a norm of x that is still to be done is done on the way.

    stream: contiguous [1, out]; the result is added into its memory. kind: activate gate and up, [2 F, d_in] -> [1, F].
    """
    norm = x if isinstance(x, Normed) else None
    source = x.x if isinstance(x, Normed) else x
    n, words = matrix.out, matrix.codes.view(torch.int32)
    out = stream
    if out is None:
        out = torch.empty((1, n if kind is None else n // 2), dtype=source.dtype, device=source.device)
    signed = matrix.bits == 8
    zero = -128 if signed else 0
    if matrix.zeros is None:
        zero = 0 if signed else 1 << matrix.bits - 1
    launch = overlap(source.device)
    integer_vector_kernel[(min(tile.programs, triton.cdiv(n, tile.rows)),)](
        source,
        source if norm is None else norm.weight,
        words,
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        matrix.scales if bias is None else bias,
        out,
        n,
        matrix.d_in,
        words.shape[1],
        matrix.scales.shape[1],
        0.0 if norm is None else norm.eps,
        ZERO=zero,
        GROUP=matrix.group if matrix.group < matrix.d_in else 0,
        ZEROS=matrix.zeros is not None,
        BITS=8 if signed else 4,
        BIAS=bias is not None,
        ADD=stream is not None,
        NORM=norm is not None,
        OFFSET=norm is not None and norm.offset,
        KIND=KINDS[kind],
        PTX=source.is_cuda,
        ROWS=tile.rows,
        PARTS=triton.cdiv(words.shape[1], tile.words),
        WORDS=tile.words,
        num_warps=tile.warps,
        **launch,
    )
    return out
