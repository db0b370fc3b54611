"""Dequantization of integer codes to 16-bit floats, in registers and of whole matrices.

A code becomes a float by a bitwise "or" into the mantissa below a fixed exponent. In 16-bit floats from 2^7 (bfloat16) or 2^10
(float16) on, the step is 1, so "or" adds the code exactly, and subtracting that power and the zero point is exact too. Weights are
rounded to x's dtype once, after scaling. With one scale per output channel they are exact.

Codes may also be e4m3 values. Sign, exponent and mantissa move to their places in the float, whose exponent then lacks the
difference of the biases. The product with the scale, or with 1, times a power of two adds it, also for subnormal codes.
Source: Kim et al. 2022, "Who Says Elephants Can't Run".
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import re
from functools import cache

import torch
import triton
import triton.language as tl

from ridgeline.ops.table import IntMatrix
from ridgeline.ops.triton.launch import OLDEST_CAPABILITY, await_inputs, overlap

# Magic exponent per dtype. It converts the codes of one bit position in both halves of a register at a time.
_MAGIC = {torch.bfloat16: ("0x43004300", "bf16x2"), torch.float16: ("0x64006400", "f16x2")}
# Of e4m3 per dtype: bits by which exponent and mantissa are shifted from the lower byte of each half, their mask, and the power of
# two of the exponents' biases.
_E4M3 = {torch.bfloat16: (4, "0x07F007F0", 2.0**120), torch.float16: (7, "0x3F803F80", 2.0**8)}
EMULATED_E4M3 = tl.constexpr("e4m3")
"""In place of PTX: Triton arithmetic converts codes that are e4m3 values."""


@cache
def conversion(bits: int, dtype: torch.dtype, scaled: bool, shifted: bool, apart: bool = False) -> str:
    """PTX that converts a register of codes to registers of two floats each: $0.. = (code - shift) * scale.

    Operands after the results: codes, shift, scale. scaled, shifted: whether scale and shift are applied. apart: results, shift and
    scale are registers of one float each, and results follow the order of the codes in the lower, then the upper half.
    """
    magic, kind = _MAGIC[dtype]
    count = 2 if bits == 8 else 4
    results = [f"r{index}" if apart else f"${index}" for index in range(count)]
    first = 2 * count if apart else count
    codes, shift, scale = f"${first}", f"${first + 1}", f"${first + 2}"
    lines = ["{ .reg .b32 c, t, u;"]
    if apart:
        lines.append(f".reg .b32 shift, scale, {', '.join(results)};")
        lines.append(f"mov.b32 shift, {{{shift}, {shift}}}; mov.b32 scale, {{{scale}, {scale}}};")
        shift, scale = "shift", "scale"
    for index, result in enumerate(results):
        width = 16 // count
        lines.append(f"shr.b32 c, {codes}, {index * width};" if index else f"mov.b32 c, {codes};")
        if bits == 8 and dtype == torch.bfloat16:
            # t: 128 + the lower seven bits. u: 128, or 256 where the eighth bit is set, which is the exponent's lowest.
            lines.append(f"lop3.b32 t, c, 0x007F007F, {magic}, 0xEA; lop3.b32 u, c, 0x00800080, {magic}, 0xEA;")
            lines.append(f"sub.rn.{kind} t, t, u;")
        elif bits == 8:
            lines.append("lop3.b32 t, c, 0x00FF00FF, 0x64806480, 0x6A;")
        else:
            lines.append(f"lop3.b32 t, c, 0x000F000F, {magic}, 0xEA;")
        if shifted:
            lines.append(f"sub.rn.{kind} t, t, {shift};")
        lines.append(f"mul.rn.{kind} {result}, t, {scale};" if scaled else f"mov.b32 {result}, t;")
        if apart:
            lines.append(f"mov.b32 {{${index}, ${count + index}}}, {result};")
    return " ".join([*lines, "}"])


@cache
def conversion_e4m3(dtype: torch.dtype, apart: bool = False) -> str:
    """As `conversion`, of codes that are e4m3 values: $0.. = code * scale, whose scale contains the power of _E4M3. The shift is
    ignored. The NaNs of e4m3 become 480, which no matrix holds."""
    (distance, mask, _), kind = _E4M3[dtype], _MAGIC[dtype][1]
    codes, scale, results = ("$4", "{$6, $6}", ["r0", "r1"]) if apart else ("$2", "$4", ["$0", "$1"])
    lines = [f"{{ .reg .b32 c, t, scale, r0, r1; mov.b32 scale, {scale};"]
    for index, result in enumerate(results):
        sign = codes if index else "c"
        moved = f"shr.b32 t, {codes}, {8 - distance};" if index else f"shl.b32 t, {codes}, {distance};"
        if not index:
            lines.append(f"shl.b32 c, {codes}, 8;")
        lines.append(f"{moved} and.b32 t, t, {mask}; lop3.b32 t, {sign}, 0x80008000, t, 0xEA;")
        lines.append(f"mul.rn.{kind} {result}, t, scale;")
        if apart:
            lines.append(f"mov.b32 {{${index}, ${2 + index}}}, {result};")
    return " ".join([*lines, "}"])


def with_fused(ptx: str) -> str:
    """A conversion for GPUs before Hopper, which multiply and subtract bfloat16 in fused operations only: a - b = b * -1 + a, and
    a * b = a * b + -0. Each is rounded once, so results are the same."""
    ptx = re.sub(r"sub\.rn\.bf16x2 (\S+), (\S+), (\S+);", r"fma.rn.bf16x2 \1, \3, minus, \2;", ptx)
    ptx = re.sub(r"mul\.rn\.bf16x2 (\S+), (\S+), (\S+);", r"fma.rn.bf16x2 \1, \2, \3, zero;", ptx)
    return ptx.replace("{", "{ .reg .b32 minus, zero; mov.b32 minus, 0xBF80BF80; mov.b32 zero, 0x80008000;", 1)


@cache
def _fuses(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY


@triton.jit
def from_e4m3(code):
    """The e4m3 value in the lower eight bits of code int32 as float32; small ones are subnormal in both."""
    bits = (code & 0x80) << 24 | (code & 0x7F) << 20
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


def shift_of(bits: int, dtype: torch.dtype) -> float:
    """The constant that `conversion` adds to a code (its unshifted result is code + constant). 8-bit codes are signed."""
    if bits == 8:
        return 0.0 if dtype == torch.bfloat16 else 1152.0
    return 128.0 if dtype == torch.bfloat16 else 1024.0


@triton.jit
def _codes(p, shift, scale, BITS: tl.constexpr, TYPE: tl.constexpr, PTX: tl.constexpr):
    """Convert p int16 [...] to its codes as floats, one tensor per code in bit order. shift, scale: shaped like p."""
    if PTX != "" and PTX != EMULATED_E4M3:
        # inline_asm_elementwise takes result types as literals only.
        operands = [p, shift, scale]
        two: tl.constexpr = "=&r,=&r,r,r,r"
        four: tl.constexpr = "=&r,=&r,=&r,=&r,r,r,r"
        if BITS == 8:
            if tl.bfloat16 == TYPE:
                return tl.inline_asm_elementwise(PTX, two, operands, (tl.bfloat16,) * 2, True, 2)
            else:
                return tl.inline_asm_elementwise(PTX, two, operands, (tl.float16,) * 2, True, 2)
        elif tl.bfloat16 == TYPE:
            return tl.inline_asm_elementwise(PTX, four, operands, (tl.bfloat16,) * 4, True, 2)
        else:
            return tl.inline_asm_elementwise(PTX, four, operands, (tl.float16,) * 4, True, 2)
    words, s, z = p.to(tl.int32), scale.to(tl.float32), shift.to(tl.float32)
    if PTX == EMULATED_E4M3:
        return (from_e4m3(words) * s).to(TYPE), (from_e4m3(words >> 8) * s).to(TYPE)
    elif BITS == 8:
        c0 = (((words << 24) >> 24).to(tl.float32) - z) * s
        c1 = (((words << 16) >> 24).to(tl.float32) - z) * s
        return c0.to(TYPE), c1.to(TYPE)
    else:
        c0 = ((words & 15).to(tl.float32) - z) * s
        c1 = ((words >> 4 & 15).to(tl.float32) - z) * s
        c2 = ((words >> 8 & 15).to(tl.float32) - z) * s
        c3 = ((words >> 12 & 15).to(tl.float32) - z) * s
        return c0.to(TYPE), c1.to(TYPE), c2.to(TYPE), c3.to(TYPE)


@triton.jit
def _widen(
    p, shift, scale, BITS: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr
):
    """Convert codes p int16 [ROWS, units] to weights [ROWS, BLOCK]. shift, scale: [ROWS, chunks, 1, 4 or 1, 1]."""
    CHUNKS: tl.constexpr = BLOCK * BITS // 512
    p = tl.reshape(p, (ROWS, CHUNKS, 4, 4, 2))
    shift = tl.broadcast_to(shift, (ROWS, CHUNKS, 4, 4, 2))
    scale = tl.broadcast_to(scale, (ROWS, CHUNKS, 4, 4, 2))
    if BITS == 8:
        c0, c1 = _codes(p, shift, scale, BITS, TYPE, PTX)
        w = tl.permute(tl.join(c0, c1), (0, 1, 3, 5, 2, 4))
    else:
        c0, c1, c2, c3 = _codes(p, shift, scale, BITS, TYPE, PTX)
        w = tl.permute(tl.join(tl.join(c0, c1), tl.join(c2, c3)), (0, 1, 3, 6, 5, 2, 4))
    return tl.reshape(w, (ROWS, BLOCK))


@triton.jit
def of_groups(row, n, first, groups, GROUP: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """Indices of the scales and zero points of a block's weights from input `first` on: [ROWS, numbers], one number per chunk, or
    four if groups are smaller than chunks."""
    CHUNK: tl.constexpr = 512 // BITS
    PIECES: tl.constexpr = 1 if GROUP % CHUNK == 0 else 4
    at = first + tl.arange(0, BLOCK // CHUNK * PIECES) * (CHUNK // PIECES)
    return tl.minimum(row, n - 1).to(tl.int64)[:, None] * groups + tl.minimum(at // GROUP, groups - 1)[None, :]


@triton.jit
def read_scales(
    scale_ptr,
    zero_ptr,
    row,
    n,
    first,
    groups,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load (scales, zero points) of a block's weights. A value that the format lacks is a placeholder. GROUP 0: a row has one
    scale, which the caller applies to the sum, and one zero point."""
    ONE: tl.constexpr = GROUP if GROUP > 0 else 512
    at = of_groups(row, n, first if GROUP > 0 else 0, groups, ONE, BITS, BLOCK)
    scale = at
    zero = at
    if GROUP > 0:
        scale = tl.load(scale_ptr + at)
    if ZEROS:
        zero = tl.load(zero_ptr + at)
    return scale, zero


@triton.jit
def _factors(
    scale,
    zero,
    SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    POWER: tl.constexpr,
    TYPE: tl.constexpr,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(shift, scale) of a block's weights from the result of `read_scales`."""
    CHUNKS: tl.constexpr = BLOCK * BITS // 512
    PIECES: tl.constexpr = 1 if GROUP % (512 // BITS) == 0 else 4
    factor = tl.full((ROWS, CHUNKS, 1, PIECES, 1), POWER, TYPE)
    shift = tl.full((ROWS, CHUNKS, 1, PIECES, 1), SHIFT, TYPE)
    if GROUP > 0:
        factor = tl.reshape((scale.to(tl.float32) * POWER).to(TYPE), (ROWS, CHUNKS, 1, PIECES, 1))
    if ZEROS:
        shift = tl.reshape((zero.to(tl.float32) + SHIFT).to(TYPE), (ROWS, CHUNKS, 1, PIECES, 1))
    return shift, factor


def constants(matrix: IntMatrix, dtype: torch.dtype, vectors: bool = False) -> dict[str, object]:
    """Compile-time constants of the kernels for a matrix and a compute dtype. vectors: for integer_vector, which leaves codes
    neither shifted nor scaled if each chunk has one scale."""
    scaled, signed = matrix.group < matrix.d_in, matrix.bits == 8
    width = 8 if signed else 4
    emulated = dtype not in _MAGIC or not matrix.codes.is_cuda
    for_device = with_fused if _fuses(matrix.codes.device) else str
    group = matrix.group if scaled else 0
    if matrix.scaling == "e4m3":
        ptx = EMULATED_E4M3.value if emulated else for_device(conversion_e4m3(dtype, vectors))
        power = 1.0 if emulated else _E4M3[dtype][2]
        return {"SHIFT": 0.0, "GROUP": group, "ZEROS": False, "BITS": width, "PTX": ptx, "POWER": power}
    shift = (0.0 if emulated else shift_of(width, dtype)) - (128.0 if signed else 0.0) * (matrix.zeros is not None)
    if matrix.zeros is None and not signed:
        shift += 1 << matrix.bits - 1
    each = not vectors or bool(scaled and matrix.group % (512 // width))
    shifted = bool(shift) or matrix.zeros is not None
    return {
        "SHIFT": shift,
        "GROUP": group,
        "ZEROS": matrix.zeros is not None,
        "BITS": width,
        "PTX": "" if emulated else for_device(conversion(width, dtype, each and scaled, each and shifted, vectors)),
        "POWER": 1.0,
    }


@triton.jit
def dequantized(
    w_ptr, scale, zero, row, first, n, units,
    SHIFT: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr,
    POWER: tl.constexpr, TYPE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Weights [ROWS, BLOCK] of rows `row` from input `first` on, of TYPE. scale, zero: of `read_scales`. A row has `units` int16 of
    codes. Codes of rows from `n` on, and after the last input, are 0. For the constants see `dequantize_kernel`; without groups the
    caller applies the scale."""
    unit = first // (16 // BITS) + tl.arange(0, BLOCK * BITS // 16)
    inside = (row < n)[:, None] & (unit < units)[None, :]
    p = tl.load(w_ptr + row.to(tl.int64)[:, None] * units + unit[None, :], mask=inside, other=0)
    shift, factor = _factors(scale, zero, SHIFT, GROUP, ZEROS, POWER, TYPE, BITS, ROWS, BLOCK)
    return _widen(p, shift, factor, BITS, TYPE, ROWS, BLOCK, PTX)


@triton.jit
def dequantize_kernel(
    w_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,
    n,
    k,
    units,
    groups,
    SHIFT: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BITS: tl.constexpr,
    PTX: tl.constexpr,
    POWER: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Dequantize ROWS x BLOCK weights per program into out [n, k]. A row has `units` int16 of codes, `groups` scales and zero
    points.

    GROUP: inputs per scale; 0: one scale per row. SHIFT: constant offset of the codes (without the zero point if ZEROS). PTX: see
    `conversion`; "" and EMULATED_E4M3 use Triton arithmetic instead. POWER: what the conversion needs scales to be multiplied by.
    """
    TYPE: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    first = tl.program_id(1) * BLOCK
    scale, zero = read_scales(scale_ptr, zero_ptr, row, n, first, groups, GROUP, ZEROS, BITS, BLOCK)
    w = dequantized(w_ptr, scale, zero, row, first, n, units, SHIFT, GROUP, ZEROS, BITS, PTX, POWER, TYPE, ROWS, BLOCK)
    if GROUP == 0:
        w = w.to(tl.float32) * tl.load(scale_ptr + row, mask=row < n, other=0.0).to(tl.float32)[:, None]
    await_inputs(PDL)
    at = first + tl.arange(0, BLOCK)
    inside = (row < n)[:, None] & (at < k)[None, :]
    tl.store(out_ptr + row.to(tl.int64)[:, None] * k + at[None, :], w.to(TYPE), mask=inside)


def dequantize(matrix: IntMatrix, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [out, d_in] in `dtype`."""
    codes = matrix.codes.view(torch.int16)
    out = torch.empty((matrix.out, matrix.d_in), dtype=dtype, device=codes.device)
    rows, block = 32, 256
    dequantize_kernel[(triton.cdiv(matrix.out, rows), triton.cdiv(matrix.d_in, block))](
        codes,
        matrix.scales,
        matrix.scales if matrix.zeros is None else matrix.zeros,
        out,
        matrix.out,
        matrix.d_in,
        codes.shape[1],
        matrix.scales.shape[1],
        **constants(matrix, dtype),
        ROWS=rows,
        BLOCK=block,
        num_warps=4,
        **overlap(codes.device),
    )
    return out
