"""Integer products of one token with weights of 8 or 4 bits, in the kernel of all layers; the integer form of layers_products.

Inputs are quantized to 16 bits: the largest of each 128 inputs becomes 127 * 256, and each input becomes two signed 8-bit digits,
x = (256 high + low) * step. Digits are columns of the matrix unit's right operand (PTX ISA, mma.m16n8k32), so products are exact,
and 16 bits cost as much as 8, because the columns would be idle. 8-bit codes are multiplied as they are stored. 4-bit codes need a
shift and one logic operation for four of them. Each group's integer sum is converted to float once and multiplied by the step and
the group's scale.

A warp processes one of eight pieces of each row. The sums of a program's rows in each piece stay in shared memory until the product
ends. Each thread then adds up one row, so threads do not synchronise within a product.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.ops.triton.gluon_names import async_load, barrier, reinterpret
from ridgeline.ops.triton.layers_table import (
    BIAS_AT,
    LINES_OF_STAGE,
    MEMORY,
    PLACE,
    SCALE,
    STAGE,
    Layer,
    Places,
    gated,
    next_stage,
    pointer,
)

ROWS = gl.constexpr(16)
"""Rows of a weight per stage."""
PIECES = gl.constexpr(8)
"""Pieces of 128 bytes of each row in a stage."""
LINE = gl.constexpr(128)
"""Inputs that share a step. Inputs of a line in one group also share a scale."""


@jit
def integer_buffers(STAGES: gl.constexpr, MAX_LINES: gl.constexpr, GROUPS: gl.constexpr, FORM: gl.constexpr):
    """Allocate the shared memory of integer weights: group scales of each stage, steps of the input, sums of a program's rows in
    each piece, sums of squares. GROUPS: maximum groups of rows per program."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    SCALES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)
    scales = gl.allocate_shared_memory(gl.float16, [STAGES if FORM[1] else 1, ROWS, PIECES * 8 // FORM[0]], SCALES)
    steps = gl.allocate_shared_memory(gl.float32, [MAX_LINES // PIECES, PIECES], LINEAR)
    parts = gl.allocate_shared_memory(gl.float32, [2 * GROUPS, PIECES, ROWS], FLAT)
    squares = gl.allocate_shared_memory(gl.float32, [MAX_LINES], LINEAR)
    return scales, steps, parts, squares


@jit
def fetch_integers(
    descs,
    layer_ptr,
    ring,
    at,
    work,
    WHICH: gl.constexpr,
    HALVES: gl.constexpr,
    STAGES: gl.constexpr,
    FORM: gl.constexpr,
):
    """Producer: stream this program's share of weight WHICH of a layer. at: stages since the kernel began. HALVES: see
    fetch_product."""
    weights, full, scales = ring[0], ring[1], ring[4]
    w_desc, scale_desc = descs
    groups, chunks, apart = work
    BYTES: gl.constexpr = LINES_OF_STAGE * 128 + (ROWS * scales.shape[2] * 2 if FORM[1] else 0)
    matrix = gl.load(layer_ptr + PLACE + WHICH).to(gl.int32)
    scale_matrix = matrix
    if FORM[1]:
        scale_matrix = gl.load(layer_ptr + SCALE + WHICH).to(gl.int32)
    for group in range(gl.program_id(0), groups, gl.num_programs(0)):
        for half in gl.static_range(HALVES):
            for chunk in range(chunks):
                stage = next_stage(ring, at, BYTES, STAGES)
                row = group * ROWS + half * apart
                place = [matrix, chunk * PIECES, row, 0]
                async_load(w_desc, place, full.index(stage), weights.index(stage))
                if FORM[1]:
                    place = [scale_matrix, row, chunk * scales.shape[2]]
                    async_load(scale_desc, place, full.index(stage), scales.index(stage))
                at += 1
    return at


@triton.constexpr_function
def _spread(LINES, BITS):
    """Layout of an input [LINES, 128]: a thread loads 8 contiguous elements, and holds elements whose digits are contiguous."""
    LINES = int(getattr(LINES, "value", LINES))
    more = []
    size = 32
    while size < LINES:
        more.append([size, 0])
        size *= 2
    registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 16]], [[0, 8], [0, 32], [0, 64]]
    if int(getattr(BITS, "value", BITS)) == 8:
        registers, lanes = [[0, 1], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32], [0, 64]]
    return gl.DistributedLinearLayout(
        registers + more, lanes + [[1, 0], [2, 0]], [[4, 0], [8, 0], [16, 0]], [], [LINES, 128]
    )


@jit
def integer_elements(ptr, k, LINES: gl.constexpr, BITS: gl.constexpr):
    """Load a vector [k] as [LINES, 128] in float32; see elements."""
    LAYOUT: gl.constexpr = _spread(LINES, BITS)
    line = gl.arange(0, LINES, gl.SliceLayout(1, LAYOUT))
    at = line[:, None] * LINE + gl.arange(0, LINE, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(ptr + at, mask=at < k, other=0.0, cache_modifier=".cg").to(gl.float32)


@jit
def _digits_stored(x, ring, BITS: gl.constexpr):
    """Quantize a product's input [LINES, 128] into shared memory: digits [runs, 2 * PIECES, 128] in the order of the codes, and
    steps [runs, PIECES]. A run is the part of a stage, over all pieces, that lies in one group. All readers of the previous input
    have finished, because they have passed a grid barrier since."""
    shared_input, steps = ring[3], ring[5]
    LINES: gl.constexpr = x.shape[0]
    RUNS: gl.constexpr = 8 // BITS
    largest = gl.maximum(gl.max(gl.abs(x), 1), 1e-30)
    step = largest * (1.0 / 32512.0)
    # Adding 1.5 * 2^23 rounds to an integer, which is in the lower bits of the sum. The constant also adds 128 (12583040 = 1.5 *
    # 2^23 + 128).
    integer = (x * (32512.0 / largest)[:, None] + 12583040.0).to(gl.int32, bitcast=True)
    low, high = (integer ^ 128).to(gl.int8), (integer >> 8).to(gl.int8)
    digits = gl.join(low, high)
    # See integer.pack for the order of codes. A line's digits are 16 units of 16 bytes: (half of the line, digit, thread).
    if BITS == 4:
        # Input 32 i + 16 l + 8 h + 2 t + p: piece i, upper bits (h) of byte 2 p + l of thread t.
        digits = gl.reshape(digits, (LINES // PIECES // RUNS, PIECES, RUNS, 2, 2, 2, 2, 4, 2, 2))
        digits = gl.permute(digits, (0, 2, 1, 3, 9, 7, 4, 6, 8, 5))
        step = step * 0.0625
    else:
        # Input 64 c + 16 i + 8 j + 2 t + p: chunk c, piece i, byte 2 p + j of thread t.
        digits = gl.reshape(digits, (LINES // PIECES // RUNS, PIECES, RUNS, 2, 4, 2, 4, 2, 2))
        digits = gl.permute(digits, (0, 2, 1, 3, 8, 6, 4, 7, 5))
    digits = gl.reshape(digits, (LINES * 2, LINE))
    step = gl.permute(gl.reshape(step, (LINES // PIECES // RUNS, PIECES, RUNS)), (0, 2, 1))
    step = gl.reshape(step, (LINES // PIECES, PIECES))
    reinterpret(shared_input, shared_input.dtype, digits.shape, shared_input.layout).store(digits)
    reinterpret(steps, gl.float32, step.shape, gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(step)


@jit
def store_digits(x, ring, FORM: gl.constexpr):
    """Quantize a product's input into shared memory; returns the scale of all products, 1."""
    _digits_stored(x, ring, FORM[0])
    barrier()
    return 1.0


@jit
def store_normed_digits(x, gain, ring, k, eps, FORM: gl.constexpr):
    """`store_digits` for the norm of x. Returns the norm as a scale of all products, so that digits do not wait for its sum."""
    LINES: gl.constexpr = x.shape[0]
    ALL_SQUARES: gl.constexpr = gl.BlockedLayout([LINES // 32], [32], [8], [0])
    squares = reinterpret(ring[7], gl.float32, [LINES], ring[7].layout)
    squares.store(gl.sum(x * x, 1))
    _digits_stored(x * gain, ring, FORM[0])
    barrier()
    return gl.rsqrt(gl.sum(squares.load(ALL_SQUARES), 0) / k + eps)


@triton.constexpr_function
def _sums():
    """Layout of sums [PIECES, ROWS, 4] with digits combined; the four are equal."""
    return gl.DistributedLinearLayout(
        [[0, 8, 0]],
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [],
        [8, 16, 4],
    )


MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
LEFT_CODES = gl.constexpr(gl.DotOperandLayout(0, MMA, 4))
RIGHT_DIGITS = gl.constexpr(gl.DotOperandLayout(1, MMA, 4))


@triton.constexpr_function
def _codes():
    """Layout of a stage's codes as int32 [128, 32]: a thread holds its matrix fragment of rows r and r + 8 of a piece. The order of
    rows in lanes avoids bank conflicts among eight lanes."""
    registers, lanes = [[0, 1], [0, 2], [8, 0], [0, 16]], [[0, 4], [0, 8], [4, 0], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0], [64, 0]], [], [128, 32])


@triton.constexpr_function
def _scales(RUNS):
    """Layout of a stage's group scales [ROWS, PIECES * RUNS], matching the codes: a thread holds those of its rows and its warp's
    piece."""
    RUNS = int(getattr(RUNS, "value", RUNS))
    registers = [[0, 1]] if RUNS == 2 else []
    rows = [[0, 0], [0, 0], [4, 0], [1, 0], [2, 0]]
    warps = [[0, RUNS], [0, 2 * RUNS], [0, 4 * RUNS]]
    return gl.DistributedLinearLayout([*registers, [8, 0]], rows, warps, [], [16, 8 * RUNS])


@jit
def _taken(ring, stage, FORM: gl.constexpr):
    """Load a stage into registers: (codes int32 [128, 32], group scales float32 [PIECES, ROWS] of each run)."""
    weights, scales = ring[0], ring[4]
    RUNS: gl.constexpr = 8 // FORM[0]
    BLOCK: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    codes = reinterpret(weights.index(stage), gl.int32, [128, 32], BLOCK).load(_codes())
    if FORM[1]:
        scale = gl.reshape(scales.index(stage).load(_scales(RUNS)).to(gl.float32), (2, 2, 2, 2, PIECES, RUNS))
        scale = gl.permute(scale, (4, 0, 2, 3, 1, 5))
        if RUNS == 1:
            return codes, (gl.reshape(scale, (PIECES, ROWS)),)
        else:
            return codes, gl.split(gl.reshape(scale, (PIECES, ROWS, RUNS)))
    else:
        return codes, (0.0, 0.0)


@jit
def _bytes(words):
    """Split int32 [PIECES, ROWS, n] into bytes: int8 [PIECES, ROWS, n, 2, 2]."""
    even_bytes = gl.join(words.to(gl.int8), (words >> 16).to(gl.int8))
    return gl.join(even_bytes, gl.join((words >> 8).to(gl.int8), (words >> 24).to(gl.int8)))


@jit
def _weights(codes, BITS: gl.constexpr):
    """Weights of a stage, int8 [PIECES, ROWS, 128] for each run; 4-bit codes as 16 * (code - 8). Rows are in order (half, r1, r0,
    r2)."""
    codes = gl.permute(gl.reshape(codes, (PIECES, 2, 2, 2, 2, 2, 16)), (0, 1, 3, 4, 2, 6, 5))
    if BITS == 8:
        codes = gl.reshape(gl.permute(codes, (0, 1, 2, 3, 4, 6, 5)), (PIECES, ROWS, 32))
        # Bytes of (chunk, thread, piece).
        w = gl.reshape(_bytes(codes), (PIECES, ROWS, 2, 4, 2, 2, 4))
        return (gl.convert_layout(gl.reshape(gl.permute(w, (0, 1, 2, 4, 5, 3, 6)), (PIECES, ROWS, 128)), LEFT_CODES),)
    else:
        first, second = gl.split(gl.reshape(codes, (PIECES, ROWS, 16, 2)))
        return _widened(first), _widened(second)


@jit
def _widened(codes):
    """Convert 4-bit codes, int32 [PIECES, ROWS, 16], to int8 [PIECES, ROWS, 128], 16 * (code - 8)."""
    # (bits & 0xF0F0F0F0) ^ 0x80808080 in one instruction.
    taken: gl.constexpr = "lop3.b32 $0, $1, 0xF0F0F0F0, 0x80808080, 0x6A;"
    low = gl.inline_asm_elementwise(taken, "=r,r", [codes << 4], gl.int32, True, 1)
    high = gl.inline_asm_elementwise(taken, "=r,r", [codes], gl.int32, True, 1)
    both = gl.join(_bytes(low), _bytes(high))
    both = gl.permute(gl.reshape(both, (PIECES, ROWS, 4, 4, 4, 2)), (0, 1, 3, 5, 2, 4))
    return gl.convert_layout(gl.reshape(both, (PIECES, ROWS, 128)), LEFT_CODES)


@jit
def _digits(shared_input, run):
    """Load the digits of a run as columns int8 [PIECES, 128, 8], low and high alternating."""
    FROM: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0]],
        [[0, 16], [0, 32], [0, 64], [0, 0], [0, 0]],
        [[2, 0], [4, 0], [8, 0]],
        [],
        [16, 128],
    )
    COLUMN_BYTES: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 2], [0, 0, 0, 0, 0, 4], [0, 0, 0, 0, 0, 8], [0, 1, 0, 0, 0, 0]],
        [[0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0], [0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 2, 0, 0, 0]],
        [[1, 0, 0, 0, 0, 0], [2, 0, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]],
        [],
        [8, 2, 4, 2, 4, 16],
    )
    x = gl.convert_layout(gl.reshape(shared_input.index(run).load(FROM), (PIECES, 2, 1, 2, 4, 16)), COLUMN_BYTES)
    x = gl.broadcast(x, gl.zeros([PIECES, 2, 4, 2, 4, 16], gl.int8, COLUMN_BYTES))[0]
    x = gl.permute(gl.reshape(x, (PIECES, 2, 4, 2, 4, 2, 2, 4)), (0, 1, 5, 6, 4, 7, 2, 3))
    return gl.convert_layout(gl.reshape(x, (PIECES, 128, 8)), RIGHT_DIGITS)


@jit
def _factor(steps, run, scale, FORM: gl.constexpr):
    """Scale of a run's integer sums, [PIECES, ROWS or 1]: the step, times group scales if there are any."""
    SUMS: gl.constexpr = gl.SliceLayout(2, _sums())
    step = gl.expand_dims(steps.index(run).load(gl.SliceLayout(1, SUMS)), 1)
    if FORM[1]:
        return step * gl.convert_layout(scale, SUMS)
    else:
        return step


@jit
def _rows_of(ring, at, chunks, STAGES: gl.constexpr, FORM: gl.constexpr):
    """Products of each piece of the next ROWS rows of a weight with the input, [PIECES, ROWS]; and `at` afterwards."""
    full, free, shared_input, steps = ring[1], ring[2], ring[3], ring[5]
    RUNS: gl.constexpr = 8 // FORM[0]
    total = gl.zeros([PIECES, ROWS, 4], gl.float32, _sums())
    for chunk in range(chunks):
        mbarrier.wait(full.index(at % STAGES), at // STAGES & 1)
        codes, scale = _taken(ring, at % STAGES, FORM)
        mbarrier.arrive(free.index(at % STAGES), count=1)
        w = _weights(codes, FORM[0])
        for run in gl.static_range(RUNS):
            none = gl.zeros([PIECES, ROWS, 8], gl.int32, MMA)
            sums = mma_v2(w[run], _digits(shared_input, chunk * RUNS + run), none)
            low, high = gl.split(gl.reshape(sums, (PIECES, ROWS, 4, 2)))
            value = gl.convert_layout((high * 256 + low).to(gl.float32), _sums())
            total += value * gl.expand_dims(_factor(steps, chunk * RUNS + run, scale[run], FORM), 2)
        at += 1
    row_sums = gl.sum(total, 2) * 0.25
    # Reorder (half, r1, r0, r2) to rows.
    row_sums = gl.permute(gl.reshape(row_sums, (PIECES, 2, 2, 2, 2)), (0, 1, 4, 2, 3))
    return gl.reshape(row_sums, (PIECES, ROWS)), at


@jit
def _facts(scale_ptr, bias_ptr, row, real, SCALED: gl.constexpr, BIAS: gl.constexpr):
    """Load scales and biases of rows, float32; 1 and 0 without them."""
    scales, biases = gl.full(row.shape, 1.0, gl.float32, row.type.layout), gl.zeros_like(row).to(gl.float32)
    if SCALED:
        scales = gl.load(scale_ptr + row, mask=real, other=0.0).to(gl.float32)
    if BIAS:
        biases = gl.load(bias_ptr + row, mask=real, other=0.0).to(gl.float32)
    return scales, biases


@jit
def integer_product(
    out_ptr,
    layer_ptr,
    rows,
    ring,
    at,
    work,
    scale,
    STAGES: gl.constexpr,
    WHICH: gl.constexpr,
    ADD: gl.constexpr,
    KIND: gl.constexpr,
    FORM: gl.constexpr,
    BIASES: gl.constexpr,
):
    """Consumers: multiply this program's share of weight WHICH with the input, and store. rows: rows of the weight. scale: common
    to all products."""
    groups, chunks, apart = work
    parts = ring[6]
    GROUPS: gl.constexpr = parts.shape[0] // 2
    GATED: gl.constexpr = KIND != 0
    BIAS: gl.constexpr = (BIASES >> WHICH) & 1
    PIECE_SUMS: gl.constexpr = gl.BlockedLayout([1, 8, 1], [2, 1, 16], [8, 1, 1], [2, 1, 0])
    LAYOUT: gl.constexpr = gl.SliceLayout(1, PIECE_SUMS)
    turn = gl.arange(0, GROUPS, gl.SliceLayout(1, LAYOUT))[:, None]
    row = (gl.program_id(0) + turn * gl.num_programs(0)) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    real = row < (apart if GATED else rows)
    # Residuals, biases and scales are loaded while weights are multiplied.
    scale_ptr = pointer(layer_ptr + SCALE + WHICH, gl.float16)
    bias_ptr = pointer(layer_ptr + BIAS_AT + WHICH, out_ptr.dtype.element_ty)
    scales, before = _facts(scale_ptr, bias_ptr, row, real, not FORM[1], BIAS)
    up_scales, up_biases = _facts(scale_ptr, bias_ptr, row + apart, real, GATED and not FORM[1], GATED and BIAS)
    if ADD:
        before += gl.load(out_ptr + row, mask=real, other=0.0, cache_modifier=".cg").to(gl.float32)
    for index in range(gl.cdiv(groups - gl.program_id(0), gl.num_programs(0))):
        for half in gl.static_range(2 if GATED else 1):
            pieces, at = _rows_of(ring, at, chunks, STAGES, FORM)
            parts.index(half * GROUPS + index).store(pieces)
    barrier()
    ended = reinterpret(parts, gl.float32, parts.shape, gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    value = gl.sum(ended.slice(0, GROUPS, 0).load(PIECE_SUMS), 1) * (scales * scale) + before
    if GATED:
        up = gl.sum(ended.slice(GROUPS, GROUPS, 0).load(PIECE_SUMS), 1) * (up_scales * scale) + up_biases
        value = gated(value, up, KIND)
    gl.store(out_ptr + row, value.to(out_ptr.dtype.element_ty), mask=real)
    return at


def code_blocks(where: Places) -> TensorDescriptor:
    """TMA descriptor of codes [rows, bytes] as [place, pieces of 128 bytes, rows, 128]. Places overlap in memory."""
    codes = where.lowest
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=4)
    rows, size = codes.shape
    shape = [max(where.places) + 1, size // 128, rows, 128]
    return TensorDescriptor(codes, shape, [where.step, 128, size, 1], [1, PIECES.value, ROWS.value, 128], layout)


def scale_blocks(where: Places, bits: int) -> TensorDescriptor:
    """TMA descriptor of group scales [rows, groups] as [place, rows, groups]."""
    scales = where.lowest
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=3)
    rows, groups = scales.shape
    shape, strides = [max(where.places) + 1, rows, groups], [where.step // 2, groups, 1]
    return TensorDescriptor(scales, shape, strides, [1, ROWS.value, 8 * PIECES.value // bits], layout)


def groups_of(layer: Layer, programs: int) -> int:
    """The kernel's GROUPS. A row of gate and its row of up count once."""
    if not layer.qkv.bits:
        return 0
    rows = max(layer.qkv.values.shape[0], layer.qkv.inputs, layer.down.inputs)
    return triton.next_power_of_2(triton.cdiv(rows, ROWS.value * programs))


def integer_stages(layer: Layer, max_lines: int, programs: int) -> int:
    """Ring stages that fit beside inputs of `max_lines` lines (two digits, a step and a sum of squares each) and
    `integer_buffers`."""
    other_bytes = max_lines * (2 * LINE.value + 4 + 4) + groups_of(layer, programs) * 2 * PIECES.value * ROWS.value * 4
    scales = ROWS.value * PIECES.value * 8 // layer.qkv.bits * 2 if layer.qkv.grouped else 0
    return (MEMORY - other_bytes) // (STAGE + scales)
