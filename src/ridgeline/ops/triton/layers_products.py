"""Products of one token in the kernel of all layers, with weights that stream through a ring in shared memory.

Programs draw groups of rows dynamically, because SMs read at different speeds: SMs that share their path to memory with fewer
others process a quarter more.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ridgeline.ops.triton.gluon_names import async_load, barrier, reinterpret
from ridgeline.ops.triton.layers_ranks import send, stream_rows
from ridgeline.ops.triton.layers_table import BIAS_AT, LINES_OF_STAGE, SCALE, gated, next_stage, pointer

TICKETS = gl.constexpr(16)
"""Maximum groups of rows that a program has drawn and not yet multiplied; more than the ring has stages."""


@jit
def ticket_slots():
    """Allocate the queue of drawn tickets: groups of rows, and barriers for full and free slots."""
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    slots = gl.allocate_shared_memory(gl.int32, [TICKETS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [TICKETS, 1], BARRIER)
    for slot in gl.static_range(TICKETS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(free.index(slot), count=1)
    return slots, full, free


@jit
def _hand_on(tickets, drawn, group):
    """Producer: pass the next group of rows to the consumers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    slots, full, free = tickets
    slot = drawn % TICKETS
    mbarrier.wait(free.index(slot), (drawn // TICKETS & 1) ^ 1)
    slots.index(slot).store(gl.full([1], group, gl.int32, LAYOUT))
    mbarrier.arrive(full.index(slot), count=1)
    return drawn + 1


@jit
def _handed_on(tickets, drawn):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    slots, full, free = tickets
    slot = drawn % TICKETS
    mbarrier.wait(full.index(slot), drawn // TICKETS & 1)
    group = gl.max(slots.index(slot).load(LAYOUT), 0)
    mbarrier.arrive(free.index(slot), count=1)
    return group, drawn + 1


@jit
def _drawn(draw_ptr, draws_per_launch):
    return (gl.atomic_add(draw_ptr, 1, sem="relaxed") % draws_per_launch).to(gl.int32)


@jit
def fetch_product(w_desc, place_ptr, draw_ptr, ring, tickets, done, work, HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Producer: draw groups of rows of one weight and stream them. done: (stages, tickets) since the kernel began. HALVES: 2 for
    gate and up, whose rows alternate. Each program draws one ticket past the end, so that all launches draw the same number."""
    groups, chunks, apart = work
    at, drawn = done
    ROWS: gl.constexpr = w_desc.block_shape[1]
    PIECES: gl.constexpr = w_desc.block_shape[2]
    matrix = gl.load(place_ptr).to(gl.int32)
    draws_per_launch = (groups + gl.num_programs(0)).to(gl.int64)
    group = _drawn(draw_ptr, draws_per_launch)
    drawn = _hand_on(tickets, drawn, group)
    while group < groups:
        for half in gl.static_range(HALVES):
            for chunk in range(chunks):
                stage = next_stage(ring, at, LINES_OF_STAGE * 128, STAGES)
                place = [matrix, group * ROWS + half * apart, chunk * PIECES, 0]
                async_load(w_desc, place, ring[1].index(stage), ring[0].index(stage))
                at += 1
        group = _drawn(draw_ptr, draws_per_launch)
        drawn = _hand_on(tickets, drawn, group)
    return at, drawn


@jit
def element_places(LINES: gl.constexpr, PIECE: gl.constexpr):
    """Indices of the elements of a vector as [LINES, PIECE]."""
    THREADS: gl.constexpr = PIECE // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [8, 1], [1, 0])
    line = gl.arange(0, LINES, gl.SliceLayout(1, LAYOUT))
    return line[:, None] * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))[None, :]


@jit
def elements(ptr, k, LINES: gl.constexpr, PIECE: gl.constexpr):
    """Load a vector [k] as [LINES, PIECE] in float32. The loads bypass L1, because other programs write while this one runs."""
    at = element_places(LINES, PIECE)
    return gl.load(ptr + at, mask=at < k, other=0.0, cache_modifier=".cg").to(gl.float32)


@jit
def store_input(x, shared_input, dtype: gl.constexpr, FP8: gl.constexpr):
    """Store a product's input in shared memory, rounded to the weights' dtype; returns its scale."""
    scale = 1.0
    x = x.to(dtype)
    if FP8:
        x_f32 = x.to(gl.float32)
        largest = gl.maximum(gl.max(gl.max(gl.abs(x_f32), 1), 0), 1e-12)
        scale = largest / 448.0
        x = x_f32 * (448.0 / largest)
    # Readers of the previous input must have finished.
    barrier()
    reinterpret(shared_input, shared_input.dtype, x.shape, shared_input.layout).store(x.to(shared_input.dtype))
    fence_async_shared()
    barrier()
    return scale


@jit
def _rows_of(ring, at, chunks, ROWS: gl.constexpr, STAGES: gl.constexpr):
    """Products of the next ROWS rows of a weight with the input, [ROWS]; and `at` afterwards.

    Line r * PIECES + p of a stage is piece p of row r, and column j of the right operand is piece j of the input. Only the sums
    with p = j count.
    """
    weights, full, free, shared_input = ring
    NUMBER: gl.constexpr = weights.dtype.primitive_bitwidth // 8
    PIECES: gl.constexpr = LINES_OF_STAGE // ROWS
    PIECE: gl.constexpr = weights.shape[2]
    SUMS: gl.constexpr = _sums(ROWS, NUMBER)
    input = reinterpret(
        shared_input, shared_input.dtype, [shared_input.shape[0] // PIECES, PIECES, PIECE], shared_input.layout
    )
    sums = gl.zeros([LINES_OF_STAGE, PIECES], gl.float32, SUMS)
    for chunk in range(chunks):
        stage = at % STAGES
        mbarrier.wait(full.index(stage), at // STAGES & 1)
        sums = warpgroup_mma(weights.index(stage), input.index(chunk).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1, pred=chunk > 0)
        at += 1
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1)
    piece = gl.arange(0, LINES_OF_STAGE, gl.SliceLayout(1, SUMS)) % PIECES
    column = gl.arange(0, PIECES, gl.SliceLayout(0, SUMS))
    line_sums = gl.sum(gl.where(piece[:, None] == column[None, :], sums, 0.0), 1)
    return gl.sum(gl.reshape(line_sums, (ROWS, PIECES)), 1), at


@triton.constexpr_function
def _sums(ROWS, NUMBER):
    """Layout of a stage's products, [lines, pieces]."""
    return gl.NVMMADistributedLayout([3, 0], [8, 1], [16, LINES_OF_STAGE.value // ROWS, 32 // NUMBER])


@jit
def _result_rows(ROWS: gl.constexpr, NUMBER: gl.constexpr):
    """0 .. ROWS - 1 in the layout of _rows_of's result."""
    PIECES: gl.constexpr = LINES_OF_STAGE // ROWS
    line = gl.arange(0, LINES_OF_STAGE, gl.SliceLayout(1, _sums(ROWS, NUMBER)))
    return gl.max(gl.reshape(line // PIECES, (ROWS, PIECES)), 1)


@jit
def _facts(ptr, scale_ptr, bias_ptr, row, rows, ADD: gl.constexpr, FP8: gl.constexpr, BIAS: gl.constexpr):
    """Issue loads of residuals, scales and biases of a product's rows."""
    residual, scales, biases = gl.zeros_like(row), gl.zeros_like(row), gl.zeros_like(row)
    if ADD:
        residual = gl.load(ptr + row, mask=row < rows, other=0.0, cache_modifier=".cg")
    if FP8:
        scales = gl.load(scale_ptr + row, mask=row < rows, other=0.0)
    if BIAS:
        biases = gl.load(bias_ptr + row, mask=row < rows, other=0.0)
    return residual, scales, biases


@jit
def _finished(value, facts, scale, ADD: gl.constexpr, FP8: gl.constexpr, BIAS: gl.constexpr):
    residual, scales, biases = facts
    if FP8:
        value *= scales * scale
    if BIAS:
        value += biases.to(gl.float32)
    if ADD:
        value += residual.to(gl.float32)
    return value


@jit
def product(
    out_ptr,
    layer_ptr,
    rows,
    ring,
    tickets,
    done,
    work,
    scale,
    peers,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    WHICH: gl.constexpr,
    ADD: gl.constexpr,
    KIND: gl.constexpr,
    FP8: gl.constexpr,
    BIASES: gl.constexpr,
    SIZE: gl.constexpr,
):
    """Consumers: multiply this program's share of weight WHICH with the input, and store. rows: rows of the weight. With ADD and
    several ranks (SIZE), the result is a term of the stream, which goes to all of them."""
    groups, chunks, apart = work
    at, drawn = done
    BIAS: gl.constexpr = (BIASES >> WHICH) & 1
    GATED: gl.constexpr = KIND != 0
    SENT: gl.constexpr = ADD and SIZE > 1
    HALF: gl.constexpr = WHICH // 2
    scale_ptr = pointer(layer_ptr + SCALE + WHICH, gl.float32)
    bias_ptr = pointer(layer_ptr + BIAS_AT + WHICH, out_ptr.dtype.element_ty)
    local_row = _result_rows(ROWS, ring[0].dtype.primitive_bitwidth // 8)
    group, drawn = _handed_on(tickets, drawn)
    while group < groups:
        row = group * ROWS + local_row
        facts = _facts(out_ptr, scale_ptr, bias_ptr, row, rows, ADD and not SENT, FP8, BIAS)
        residual = gl.zeros_like(row).to(gl.float32)
        if SENT:
            residual = stream_rows(peers, row, row < rows, 1 - HALF, out_ptr.dtype.element_ty, SIZE)
        others = _facts(out_ptr, scale_ptr, bias_ptr, row + apart, rows, False, FP8 & GATED, BIAS & GATED)
        value, at = _rows_of(ring, at, chunks, ROWS, STAGES)
        value = _finished(value, facts, scale, ADD and not SENT, FP8, BIAS)
        real = row < rows
        if GATED:
            up, at = _rows_of(ring, at, chunks, ROWS, STAGES)
            up = _finished(up, others, scale, False, FP8, BIAS)
            value = gated(value, up, KIND)
            real = row < apart
        if SENT:
            send(peers, value + residual, row, real, HALF, out_ptr.dtype.element_ty, SIZE)
        else:
            gl.store(out_ptr + row, value.to(out_ptr.dtype.element_ty), mask=real)
        group, drawn = _handed_on(tickets, drawn)
    return at, drawn
