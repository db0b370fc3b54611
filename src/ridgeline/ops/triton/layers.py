"""All layers of a decoder for one token, in one kernel, on Hopper.

One token makes a decoder read every weight once, and nothing bounds it but that. Between two kernels the reading stops:
the next may ask for weights only when it has room, and its first answers take a microsecond. Here one program per
processor runs every layer. One of its warps streams the program's share of all weights through a ring in shared memory,
without a stop, since no weight depends on a token, and its share of old keys, which depend on none of this step; the others
multiply what is there, and attend. Before each part of a layer all programs wait for each other, and the ring holds as much
as memory brings in six microseconds.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.launch import overlap
from ridgeline.ops.triton.layers_attention import asked_ahead, attention
from ridgeline.ops.triton.layers_forms import (
    cut,
    fetched,
    gain_of,
    multiplied,
    normed_taken,
    processors,
    stages_of,
    taken,
)
from ridgeline.ops.triton.layers_integers import groups_of, integer_buffers
from ridgeline.ops.triton.layers_keys import MOST_PARTS, fetch_keys, key_blocks, keys_asked
from ridgeline.ops.triton.layers_products import ticket_slots
from ridgeline.ops.triton.layers_table import FIELDS, LINES_OF_STAGE, NORM, Layer, fields, input_lines

REGISTERS = 168
"""Of a thread at launch, for 8 warps that multiply and 4 that fetch."""
FETCHING = gl.constexpr(40)
"""Of a thread that fetches."""


@jit
def _fetch(
    descs,
    kv_desc,
    table_ptr,
    draws_ptr,
    layers,
    token,
    ring,
    tickets,
    works,
    STAGES: gl.constexpr,
    FORM: gl.constexpr,
    SHAPE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Stream a program's share of all weights, and of old keys and values."""
    done = (gl.to_tensor(0), gl.to_tensor(0))
    rows_ptr, length_ptr, table_stride = token
    row, length = gl.to_tensor(0), gl.to_tensor(0)
    for layer in range(layers):
        layer_ptr, draw_ptr = table_ptr + layer * FIELDS, draws_ptr + layer * 4
        key_request = keys_asked(layer_ptr, (row, length, table_stride), SHAPE)
        done = fetched(descs[0], layer_ptr, draw_ptr, ring, tickets, done, works[0], 0, STAGES, FORM)
        if layer == 0:
            # No weight depends on the kernel before this one, but keys do.
            if PDL:
                gdc_wait()
            row, length = gl.load(rows_ptr), gl.load(length_ptr)
            key_request = keys_asked(layer_ptr, (row, length, table_stride), SHAPE)
        done = (fetch_keys(kv_desc, key_request, ring, done[0], SHAPE, STAGES), done[1])
        done = fetched(descs[1], layer_ptr, draw_ptr, ring, tickets, done, works[1], 1, STAGES, FORM)
        done = fetched(descs[2], layer_ptr, draw_ptr, ring, tickets, done, works[2], 2, STAGES, FORM)
        done = fetched(descs[3], layer_ptr, draw_ptr, ring, tickets, done, works[3], 3, STAGES, FORM)


@jit
def _arrive(counter_ptr):
    """Publish all that this program wrote to the programs that wait for it."""
    gl.thread_barrier()
    gl.atomic_add(counter_ptr, 1, sem="release")


@jit
def _await(counter_ptr, goal):
    """Wait until `goal` programs have arrived, in all that have ever run."""
    while gl.atomic_add(counter_ptr, 0, sem="acquire") < goal:
        pass


@jit
def _multiply(
    table_ptr,
    layers,
    ring,
    tickets,
    works,
    vectors,
    sizes,
    token,
    strides,
    buffers,
    eps,
    scale,
    STAGES: gl.constexpr,
    ROWS: gl.constexpr,
    LINES: gl.constexpr,
    KIND: gl.constexpr,
    OFFSET: gl.constexpr,
    FORM: gl.constexpr,
    BIASES: gl.constexpr,
    SHAPE: gl.constexpr,
    NORMS: gl.constexpr,
    PDL: gl.constexpr,
):
    """The parts of each layer one after the other, each from what the one before has written."""
    stream_ptr, qkv_ptr, attended_ptr, gated_ptr = vectors
    heads, model, features, qkv = sizes
    rows_ptr, length_ptr, position_ptr, slot_ptr, table_stride = token
    counter_ptr = buffers[3]
    programs = gl.num_programs(0).to(gl.int64)
    dtype: gl.constexpr = stream_ptr.dtype.element_ty
    if PDL:
        gdc_wait()
    token = (gl.load(rows_ptr), gl.load(length_ptr), gl.load(position_ptr), slot_ptr, table_stride)
    # All programs arrive as often in every launch.
    ever = programs * (5 * layers - 1)
    goal = gl.atomic_add(counter_ptr, 0, sem="relaxed") // ever * ever
    done = (gl.to_tensor(0), gl.to_tensor(0))
    for layer in range(layers):
        layer_ptr = table_ptr + layer * FIELDS
        # What does not depend on other programs is asked for before they are awaited.
        gain = gain_of(layer_ptr + NORM, model, ring, dtype, LINES[1], OFFSET, FORM)
        ahead = asked_ahead(layer_ptr, token, strides, SHAPE, dtype)
        if layer > 0:
            goal += programs
            _await(counter_ptr, goal)
        by = normed_taken(stream_ptr, gain, model, ring, eps, LINES[1], FORM)
        done = multiplied(0, qkv_ptr, layer_ptr, qkv, ring, tickets, done, works, by, STAGES, ROWS, KIND, FORM, BIASES)
        _arrive(counter_ptr)
        goal += programs
        _await(counter_ptr, goal)
        at = attention(
            ahead,
            qkv_ptr,
            attended_ptr,
            buffers,
            ring,
            done[0],
            eps,
            scale,
            STAGES,
            SHAPE,
            NORMS,
            OFFSET,
        )
        done = (at, done[1])
        _arrive(counter_ptr)
        goal += programs
        _await(counter_ptr, goal)
        by = taken(attended_ptr, heads, ring, LINES[0], FORM)
        done = multiplied(
            1, stream_ptr, layer_ptr, model, ring, tickets, done, works, by, STAGES, ROWS, KIND, FORM, BIASES
        )
        _arrive(counter_ptr)
        gain = gain_of(layer_ptr + NORM + 1, model, ring, dtype, LINES[1], OFFSET, FORM)
        goal += programs
        _await(counter_ptr, goal)
        by = normed_taken(stream_ptr, gain, model, ring, eps, LINES[1], FORM)
        done = multiplied(
            2, gated_ptr, layer_ptr, 2 * features, ring, tickets, done, works, by, STAGES, ROWS, KIND, FORM, BIASES
        )
        _arrive(counter_ptr)
        goal += programs
        _await(counter_ptr, goal)
        by = taken(gated_ptr, features, ring, LINES[2], FORM)
        done = multiplied(
            3, stream_ptr, layer_ptr, model, ring, tickets, done, works, by, STAGES, ROWS, KIND, FORM, BIASES
        )
        if layer + 1 < layers:
            _arrive(counter_ptr)


@jit
def _works(sizes, ROWS: gl.constexpr, EACH: gl.constexpr):
    """Of each weight: groups of rows, stages of a group, and rows between gate and up. EACH: inputs of a line."""
    qkv, heads, model, features = sizes
    return (
        (gl.cdiv(qkv, ROWS[0]), gl.cdiv(model, LINES_OF_STAGE // ROWS[0] * EACH), 0),
        (gl.cdiv(model, ROWS[1]), gl.cdiv(heads, LINES_OF_STAGE // ROWS[1] * EACH), 0),
        (gl.cdiv(features, ROWS[2]), gl.cdiv(model, LINES_OF_STAGE // ROWS[2] * EACH), features),
        (gl.cdiv(model, ROWS[3]), gl.cdiv(features, LINES_OF_STAGE // ROWS[3] * EACH), 0),
    )


@jit(do_not_specialize=["layers"])
def layers_kernel(
    qkv_desc,
    out_desc,
    gate_up_desc,
    down_desc,
    qkv_scale_desc,
    out_scale_desc,
    gate_up_scale_desc,
    down_scale_desc,
    kv_desc,
    table_ptr,
    stream_ptr,
    qkv_ptr,
    attended_ptr,
    gated_ptr,
    rows_ptr,
    length_ptr,
    position_ptr,
    slot_ptr,
    part_ptr,
    part_sums_ptr,
    arrivals_ptr,
    counter_ptr,
    draws_ptr,
    layers,
    heads,
    model,
    features,
    qkv,
    table_stride,
    page_stride,
    kind_stride,
    head_stride,
    eps,
    scale,
    ROWS: gl.constexpr,
    LINES: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    KIND: gl.constexpr,
    OFFSET: gl.constexpr,
    FORM: gl.constexpr,
    BIASES: gl.constexpr,
    SHAPE: gl.constexpr,
    NORMS: gl.constexpr,
    PDL: gl.constexpr,
):
    """For each of `layers`: qkv = norm(stream) qkv'; attended = attention(qkv); stream += attended out'; gated = act(norm(stream)
    gate_up'); stream += gated down'.

    The descriptors cut weights [place, rows, k] into stages of ROWS rows, all lines of 128 bytes. table int64 [layers, FIELDS].
    stream [model], qkv [qkv], attended [heads], gated [features] in one 16-bit dtype, as the cache. rows, length, position int32
    [1]: see StepInputs; slot int64 [groups]. part float32 [MOST_PARTS, heads] and part_sums [MOST_PARTS, query heads]: attention to
    a program's keys, and the logarithm of its sum of exponentials, to the base of 2. arrivals: int32 [KV heads], zero between
    attentions. SHAPE: query heads, KV heads, their size, half of what turns of them, slots of a page.
    counter: int64, counts arrivals; draws: int64 [layers, 4], tickets for groups of rows; both for launches with as many programs,
    layers and groups, zero at first. LINES: of 128 inputs or bytes that hold `heads`, `model` and `features` inputs and what warps
    exchange of attention, powers of two. Weights of e4m3 have a scale per row, and inputs are rounded to it. FORM: bits of codes,
    0: weights are floats; whether groups of codes have scales, then cut by descriptors too. GROUPS: of rows of codes that a
    program has at most. Bit i of BIASES: whether weight i has a bias; of NORMS: whether queries, and keys, are normed. scale: of
    scores, times log2(e).
    """
    if PDL:
        gdc_launch_dependents()
    number: gl.constexpr = out_desc.dtype
    PIECE: gl.constexpr = out_desc.block_shape[3]
    MOST: gl.constexpr = max(LINES[0], LINES[1], LINES[2], LINES[3])
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    BLOCK: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=number.primitive_bitwidth, rank=2
    )
    weights = gl.allocate_shared_memory(number, [STAGES, LINES_OF_STAGE, PIECE], BLOCK)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=1)
    # A form must not declare what it does not need: the memory of unused barriers is given to others, which then go wrong.
    tickets = ()
    if FORM[0]:
        DIGITS: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
        shared_input = gl.allocate_shared_memory(gl.int8, [MOST // 8, 16, 128], DIGITS)
        ring = (weights, full, free, shared_input) + integer_buffers(STAGES, MOST, GROUPS, FORM)
    else:
        shared_input = gl.allocate_shared_memory(number, [MOST, 1, PIECE], BLOCK)
        ring = (weights, full, free, shared_input)
        tickets = ticket_slots()
    fence_async_shared()
    EACH: gl.constexpr = PIECE * 8 // FORM[0] if FORM[0] else PIECE
    works = _works((qkv, heads, model, features), ROWS, EACH)
    descs = (
        (qkv_desc, qkv_scale_desc),
        (out_desc, out_scale_desc),
        (gate_up_desc, gate_up_scale_desc),
        (down_desc, down_scale_desc),
    )
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    table_ptr,
                    layers,
                    ring,
                    tickets,
                    works,
                    (stream_ptr, qkv_ptr, attended_ptr, gated_ptr),
                    (heads, model, features, qkv),
                    (rows_ptr, length_ptr, position_ptr, slot_ptr, table_stride),
                    (page_stride, kind_stride, head_stride),
                    (part_ptr, part_sums_ptr, arrivals_ptr, counter_ptr),
                    eps,
                    scale,
                    STAGES,
                    ROWS,
                    LINES,
                    KIND,
                    OFFSET,
                    FORM,
                    BIASES,
                    SHAPE,
                    NORMS,
                    PDL,
                ),
            ),
            (
                _fetch,
                (
                    descs,
                    kv_desc,
                    table_ptr,
                    draws_ptr,
                    layers,
                    (rows_ptr, length_ptr, table_stride),
                    ring,
                    tickets,
                    works,
                    STAGES,
                    FORM,
                    SHAPE,
                    PDL,
                ),
            ),
        ],
        [1],
        [FETCHING],
    )


class Layers:
    """Runs a stream [1, model] through `layers`, alike but for their numbers. All programs of the kernel must run at a time, since
    they wait for each other: two of its kind may not be on two streams of a device at once, nor on a device shared through MPS."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = tuple(layers)
        device = layers[0].norms[0].device
        self._programs = processors(device)
        self._cut = cut(layers)
        self._fields = [[*columns, *fields(layer)] for layer, columns in zip(layers, self._cut.columns, strict=True)]
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._draws = torch.zeros(4 * len(layers), dtype=torch.int64, device=device)
        self._arrivals = torch.zeros(layers[0].shape.n_kv_heads, dtype=torch.int32, device=device)
        self._tables: dict[tuple[tuple[int, ...], ...], tuple[TensorDescriptor, torch.Tensor]] = {}

    def __call__(self, stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
        """stream, which is changed, behind the last layer."""
        first, view = self._layers[0], views[0]
        shape, dim = first.shape, first.shape.head_dim
        heads, model, features = (weights.inputs for weights in (first.out, first.qkv, first.down))
        rows = first.qkv.values.shape[0]
        layers_kernel[(self._programs,)](
            *self._cut.blocks,
            *self._cut.scale_blocks,
            *self._table(views),
            stream,
            *(stream.new_empty(size) for size in (rows, heads, features)),
            step.rows,
            step.length,
            step.position,
            view.slots,
            stream.new_empty(MOST_PARTS.value * shape.n_heads * dim, dtype=torch.float32),
            stream.new_empty(MOST_PARTS.value * shape.n_heads, dtype=torch.float32),
            self._arrivals,
            self._counter,
            self._draws,
            len(self._layers),
            heads,
            model,
            features,
            rows,
            view.table.stride(0),
            *view.kv.stride()[:3],
            shape.norm_eps,
            view.scale * math.log2(math.e),
            ROWS=self._cut.rows,
            LINES=input_lines(first),
            STAGES=stages_of(first),
            GROUPS=groups_of(first, self._programs),
            KIND=KINDS[first.activation],
            OFFSET=shape.norm_offset,
            FORM=(first.qkv.bits, first.qkv.grouped),
            BIASES=sum(1 << index for index, weights in enumerate(first.weights) if weights.bias is not None),
            SHAPE=(shape.n_heads, shape.n_kv_heads, dim, shape.cos_sin.shape[2], view.page_tokens),
            NORMS=(shape.q_norm is not None) + 2 * (shape.k_norm is not None),
            num_warps=8,
            maxnreg=REGISTERS,
            **overlap(stream.device),
        )
        return stream

    def _table(self, views: Sequence[KvView]) -> tuple[TensorDescriptor, torch.Tensor]:
        """The caches for the copy engine, and what the kernel must know of each layer; made where these caches are first used,
        before a graph is captured."""
        slots = views[0].slots
        view_rows = tuple(
            (
                view.kv.data_ptr(),
                view.table.data_ptr(),
                (view.slots.data_ptr() - slots.data_ptr()) // 8,
                view.window or 0,
            )
            for view in views
        )
        if view_rows not in self._tables:
            blocks, where = key_blocks([view.kv for view in views])
            rows = [
                [*fields, *view_row, place]
                for fields, view_row, place in zip(self._fields, view_rows, where, strict=True)
            ]
            self._tables[view_rows] = blocks, torch.tensor(rows, dtype=torch.int64, device=slots.device)
        return self._tables[view_rows]
