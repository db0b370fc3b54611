"""All that lies between the attention of one layer and that of the next, for one token, in one kernel, on Hopper.

One token makes a decoder read every weight once, and nothing bounds it but that. Between two kernels the reading stops:
the next may ask for weights only when it has room, and its first answers take a microsecond. Here one program per
processor runs the output projection, the feed-forward and the next layer's qkv. One of its warps streams the program's
share of all four weights through a ring in shared memory, without a stop, since no weight depends on a token; the others
multiply what is there. Between two products all programs wait for each other, and the ring holds as much as memory
brings meanwhile.

A program of the next kernel of this kind comes up as soon as this one's has ended, and fills its ring while attention runs
(programmatic dependent launch).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.launch import overlap

ROWS = gl.constexpr(16)
"""Rows of the weight that a program takes at a time."""
PIECES = gl.constexpr(8)
"""Parts of a row side by side in a stage, of 128 bytes each."""
STAGE = 16384
"""Bytes of a stage."""
MEMORY = 12 * STAGE
"""Bytes of shared memory for the ring and a product's input; the rest is left to the attention that runs beside."""
REGISTERS = 96
"""Of a thread at launch, for 8 warps that multiply and 4 that fetch; attention must find room for its own."""


@jit
def _fetch_product(w_desc, ring, at, work, HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Stream a program's share of one weight; `at` counts stages from the kernel's first one on. HALVES: 2 for gate and up,
    whose rows come in turns."""
    weights, full, free = ring[0], ring[1], ring[2]
    groups, chunks, apart = work
    PIECE: gl.constexpr = weights.shape[2]
    BYTES: gl.constexpr = ROWS * PIECES * 128
    for group in range(gl.program_id(0), groups, gl.num_programs(0)):
        for half in gl.static_range(HALVES):
            for chunk in range(chunks):
                stage = at % STAGES
                mbarrier.wait(free.index(stage), (at // STAGES & 1) ^ 1)
                mbarrier.expect(full.index(stage), BYTES)
                for piece in gl.static_range(PIECES):
                    place = [group * ROWS + half * apart, (chunk * PIECES + piece) * PIECE]
                    target = weights.index(stage).slice(piece * ROWS, ROWS, 0)
                    tma.async_copy_global_to_shared(w_desc, place, full.index(stage), target)
                at += 1
    return at


@jit
def _fetch(descs, ring, works, STAGES: gl.constexpr):
    """Stream a program's share of all weights."""
    at = _fetch_product(descs[0], ring, gl.to_tensor(0), works[0], 1, STAGES)
    at = _fetch_product(descs[1], ring, at, works[1], 2, STAGES)
    at = _fetch_product(descs[2], ring, at, works[2], 1, STAGES)
    _fetch_product(descs[3], ring, at, works[3], 1, STAGES)


@jit
def _elements(ptr, k, LINES: gl.constexpr, PIECE: gl.constexpr):
    """A vector [k] as [LINES, PIECE] in float32, past the processor's own cache: other programs write while this one runs."""
    THREADS: gl.constexpr = PIECE // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // THREADS, THREADS], [8, 1], [1, 0])
    line = gl.arange(0, LINES, gl.SliceLayout(1, LAYOUT))
    at = line[:, None] * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.load(ptr + at, mask=at < k, other=0.0, cache_modifier=".cg").to(gl.float32)


@jit
def _input(x, held, dtype: gl.constexpr, FP8: gl.constexpr):
    """Put a product's input into shared memory, rounded as the weights want it; returns its scale."""
    scale = 1.0
    x = x.to(dtype)
    if FP8:
        wide = x.to(gl.float32)
        largest = gl.maximum(gl.max(gl.max(gl.abs(wide), 1), 0), 1e-12)
        scale = largest / 448.0
        x = wide * (448.0 / largest)
    # Whoever still reads the input before this one must be done.
    gl.thread_barrier()
    held._reinterpret(held.dtype, x.shape, held.layout).store(x.to(held.dtype))
    fence_async_shared()
    gl.thread_barrier()
    return scale


@jit
def _normed(x, gain, k, eps):
    return x * gl.rsqrt(gl.sum(gl.sum(x * x, 1), 0) / k + eps) * gain


@jit
def _rows_of(ring, at, chunks, STAGES: gl.constexpr):
    """Products of the next ROWS rows of a weight with the input, [ROWS]; `at` afterwards.

    Row p * ROWS + r of a stage is piece p of row r, and column j of the other side piece j of the input: what counts are
    the sums on the diagonal of pieces.
    """
    weights, full, free, held = ring
    NUMBER: gl.constexpr = weights.dtype.primitive_bitwidth // 8
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, PIECES, 32 // NUMBER])
    sums = gl.zeros([PIECES * ROWS, PIECES], gl.float32, SUMS)
    for chunk in range(chunks):
        stage = at % STAGES
        mbarrier.wait(full.index(stage), at // STAGES & 1)
        sums = warpgroup_mma(weights.index(stage), held.index(chunk).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=[sums])
        mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1, pred=chunk > 0)
        at += 1
    sums = warpgroup_mma_wait(0, deps=[sums])
    mbarrier.arrive(free.index((at + STAGES - 1) % STAGES), count=1)
    high = gl.arange(0, PIECES * ROWS, gl.SliceLayout(1, SUMS)) // ROWS
    wide = gl.arange(0, PIECES, gl.SliceLayout(0, SUMS))
    own = gl.sum(gl.where(high[:, None] == wide[None, :], sums, 0.0), 1)
    return gl.sum(gl.reshape(own, (PIECES, ROWS)), 0), at


@jit
def _scaled(value, tensors, row, scale, FP8: gl.constexpr, BIAS: gl.constexpr):
    _out_ptr, scale_ptr, bias_ptr, rows = tensors
    if FP8:
        value *= gl.load(scale_ptr + row, mask=row < rows, other=0.0) * scale
    if BIAS:
        value += gl.load(bias_ptr + row, mask=row < rows, other=0.0).to(gl.float32)
    return value


@jit
def _product(
    tensors,
    ring,
    at,
    work,
    scale,
    STAGES: gl.constexpr,
    ADD: gl.constexpr,
    KIND: gl.constexpr,
    FP8: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Multiply a program's share of one weight with the input, and write. tensors: (out, scales, bias, rows of the weight)."""
    groups, chunks, apart = work[0], work[1], work[2]
    out_ptr, rows = tensors[0], tensors[3]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    for group in range(gl.program_id(0), groups, gl.num_programs(0)):
        row = group * ROWS + gl.arange(0, ROWS, LAYOUT)
        before = gl.zeros([ROWS], gl.float32, LAYOUT)
        if ADD:
            before = gl.load(out_ptr + row, mask=row < rows, other=0.0, cache_modifier=".cg").to(gl.float32)
        value, at = _rows_of(ring, at, chunks, STAGES)
        value = before + _scaled(gl.convert_layout(value, LAYOUT), tensors, row, scale, FP8, BIAS)
        real = row < rows
        if KIND != 0:
            up, at = _rows_of(ring, at, chunks, STAGES)
            up = _scaled(gl.convert_layout(up, LAYOUT), tensors, row + apart, scale, FP8, BIAS)
            # See activation.gated.
            inner = value
            if KIND == 2:
                inner = 1.5957691216057308 * (value + 0.044715 * value * value * value)
            value = value / (1.0 + gl.exp(-inner)) * up
            real = row < apart
        gl.store(out_ptr + row, value.to(out_ptr.dtype.element_ty), mask=real)
    return at


@jit
def _meet(counter_ptr):
    """Wait until all programs are here, and all that they wrote can be read. The counter goes on for ever."""
    gl.thread_barrier()
    arrived = gl.atomic_add(counter_ptr, 1, sem="acq_rel") + 1
    programs = gl.num_programs(0).to(gl.int64)
    goal = (arrived + programs - 1) // programs * programs
    while arrived < goal:
        arrived = gl.atomic_add(counter_ptr, 0, sem="acquire")


@jit
def _multiply(
    tensors,
    ring,
    works,
    inputs,
    sizes,
    eps,
    counter_ptr,
    STAGES: gl.constexpr,
    LINES: gl.constexpr,
    KIND: gl.constexpr,
    OFFSET: gl.constexpr,
    FP8: gl.constexpr,
    BIASES: gl.constexpr,
    PDL: gl.constexpr,
):
    """The products one after the other, each from what the one before has written."""
    held = ring[3]
    heads, model, features = sizes
    attended_ptr, stream_ptr, gated_ptr, first_gain_ptr, second_gain_ptr = inputs
    PIECE: gl.constexpr = held.shape[2]
    dtype: gl.constexpr = stream_ptr.dtype.element_ty
    SHIFT: gl.constexpr = 1.0 if OFFSET else 0.0
    gain = _elements(first_gain_ptr, model, LINES[1], PIECE) + SHIFT
    if PDL:
        gdc_wait()
    scale = _input(_elements(attended_ptr, heads, LINES[0], PIECE), held, dtype, FP8)
    at = _product(tensors[0], ring, gl.to_tensor(0), works[0], scale, STAGES, True, 0, FP8, BIASES & 1)
    _meet(counter_ptr)
    x = _normed(_elements(stream_ptr, model, LINES[1], PIECE), gain, model, eps)
    scale = _input(x, held, dtype, FP8)
    at = _product(tensors[1], ring, at, works[1], scale, STAGES, False, KIND, FP8, BIASES & 2)
    gain = _elements(second_gain_ptr, model, LINES[1], PIECE) + SHIFT
    _meet(counter_ptr)
    scale = _input(_elements(gated_ptr, features, LINES[2], PIECE), held, dtype, FP8)
    at = _product(tensors[2], ring, at, works[2], scale, STAGES, True, 0, FP8, BIASES & 4)
    _meet(counter_ptr)
    x = _normed(_elements(stream_ptr, model, LINES[1], PIECE), gain, model, eps)
    scale = _input(x, held, dtype, FP8)
    _product(tensors[3], ring, at, works[3], scale, STAGES, False, 0, FP8, BIASES & 8)


@jit
def between_kernel(
    out_desc,
    gate_up_desc,
    down_desc,
    qkv_desc,
    scales,
    biases,
    attended_ptr,
    stream_ptr,
    gated_ptr,
    qkv_ptr,
    feed_forward_gain_ptr,
    next_gain_ptr,
    counter_ptr,
    heads,
    model,
    features,
    qkv,
    eps,
    LINES: gl.constexpr,
    STAGES: gl.constexpr,
    KIND: gl.constexpr,
    OFFSET: gl.constexpr,
    FP8: gl.constexpr,
    BIASES: gl.constexpr,
    PDL: gl.constexpr,
):
    """stream += out(attended); gated = act(gate_up(norm(stream))); stream += down(gated); qkv = next qkv(norm(stream)).

    The descriptors cut weights [rows, k] into ROWS x 128 bytes. attended [heads], stream [model], gated [features], qkv [qkv]
    in one 16-bit dtype. scales: of the weights' rows, float32, for each weight (FP8). biases: for each weight; bit i of
    BIASES: whether weight i has one. LINES: of 128 bytes that hold `heads`, `model` and `features` inputs, powers of two.
    counter: int64, met by as many programs as this kernel has, in every kernel alike.
    """
    if PDL:
        gdc_launch_dependents()
    number: gl.constexpr = out_desc.dtype
    NUMBER: gl.constexpr = number.primitive_bitwidth // 8
    PIECE: gl.constexpr = 128 // NUMBER
    MOST: gl.constexpr = max(LINES[0], LINES[1], LINES[2])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    weights = gl.allocate_shared_memory(number, [STAGES, PIECES * ROWS, PIECE], out_desc.layout)
    held = gl.allocate_shared_memory(number, [MOST // PIECES, PIECES, PIECE], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    fence_async_shared()
    ring = (weights, full, free, held)
    RUN: gl.constexpr = PIECES * PIECE
    works = (
        (gl.cdiv(model, ROWS), gl.cdiv(heads, RUN), 0),
        (gl.cdiv(features, ROWS), gl.cdiv(model, RUN), features),
        (gl.cdiv(model, ROWS), gl.cdiv(features, RUN), 0),
        (gl.cdiv(qkv, ROWS), gl.cdiv(model, RUN), 0),
    )
    tensors = (
        (stream_ptr, scales[0], biases[0], model),
        (gated_ptr, scales[1], biases[1], 2 * features),
        (stream_ptr, scales[2], biases[2], model),
        (qkv_ptr, scales[3], biases[3], qkv),
    )
    inputs = (attended_ptr, stream_ptr, gated_ptr, feed_forward_gain_ptr, next_gain_ptr)
    sizes = (heads, model, features)
    descs = (out_desc, gate_up_desc, down_desc, qkv_desc)
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    tensors,
                    ring,
                    works,
                    inputs,
                    sizes,
                    eps,
                    counter_ptr,
                    STAGES,
                    LINES,
                    KIND,
                    OFFSET,
                    FP8,
                    BIASES,
                    PDL,
                ),
            ),
            (_fetch, (descs, ring, works, STAGES)),
        ],
        [1],
        [40],
    )


@dataclass(frozen=True, slots=True)
class Weights:
    """A weight for the kernel: values [rows, k], of 16 bits or e4m3 with scales float32 [rows]; bias [rows]."""

    values: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Between:
    """What lies between two attentions, all of it in one number format. qkv, qkv_norm: of the next layer; behind the last one
    None and any gain of the same size."""

    out: Weights
    norm: torch.Tensor
    gate_up: Weights
    down: Weights
    qkv_norm: torch.Tensor
    qkv: Weights | None
    eps: float
    offset: bool
    activation: str


def _blocks(values: torch.Tensor) -> TensorDescriptor:
    """values [rows, k] for the copy engine."""
    size = values.element_size()
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * size, rank=2)
    return TensorDescriptor(values, list(values.shape), list(values.stride()), [ROWS.value, 128 // size], layout)


def lines(k: int, values: torch.Tensor) -> int:
    """Lines of 128 bytes that hold k inputs, of the type of `values`, in shared memory: a power of two."""
    return max(32, triton.next_power_of_2(triton.cdiv(k * values.element_size(), 128)))


def stages(most: int) -> int:
    """Stages of the ring beside inputs of `most` lines."""
    return (MEMORY - most * 128) // STAGE


def between(parts: Between, attended: torch.Tensor, stream: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
    """attended [1, heads], stream [1, model], which is changed -> the next layer's qkv [1, rows]; no rows behind the last one.
    counter: int64 [1], zero at first, the same for all layers. All programs of the kernel must run at a time, since they wait
    for each other: two of its kind may not be on two streams of a device at once, nor on a device shared through MPS."""
    weights = (parts.out, parts.gate_up, parts.down, parts.qkv or parts.gate_up)
    heads, model, features = (one.values.shape[1] for one in weights[:3])
    gated = torch.empty(features, dtype=stream.dtype, device=stream.device)
    rows = 0 if parts.qkv is None else parts.qkv.values.shape[0]
    qkv = torch.empty((1, rows), dtype=stream.dtype, device=stream.device)
    held = tuple(lines(k, parts.out.values) for k in (heads, model, features))
    between_kernel[(processors(stream.device),)](
        *(_blocks(one.values) for one in weights),
        tuple(stream if one.scales is None else one.scales for one in weights),
        tuple(stream if one.bias is None else one.bias for one in weights),
        attended,
        stream,
        gated,
        qkv if rows else stream,
        parts.norm,
        parts.qkv_norm,
        counter,
        heads,
        model,
        features,
        rows,
        parts.eps,
        LINES=held,
        STAGES=stages(max(held)),
        KIND=KINDS[parts.activation],
        OFFSET=parts.offset,
        FP8=parts.out.scales is not None,
        BIASES=sum(1 << index for index, one in enumerate(weights[: 4 if rows else 3]) if one.bias is not None),
        num_warps=8,
        maxnreg=REGISTERS,
        **overlap(stream.device),
    )
    return qkv


@cache
def processors(device: torch.device) -> int:
    """Programs of the kernel: they wait for each other, so each has a processor for itself."""
    return torch.cuda.get_device_properties(device).multi_processor_count
