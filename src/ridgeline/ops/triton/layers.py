"""One persistent kernel that runs one token through all layers of a decoder, on Hopper.

With one token a decoder reads every weight once and is bound by memory bandwidth. Between two kernels reading stops: the next
kernel can issue loads only when SMs have room, and its first data arrive a microsecond later. Here one program per SM runs all
layers. Its producer warp streams the program's share of all weights through a ring in shared memory without interruption, because
weights do not depend on the token. It also streams the program's share of cached keys. The consumer warps multiply and attend. A
grid barrier precedes each part of a layer; the ring holds as much as memory delivers in six microseconds, which covers the barrier.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ridgeline.ops.triton.gluon_names import barrier
from ridgeline.ops.triton.layers_attention import attention, attention_inputs
from ridgeline.ops.triton.layers_forms import (
    fetched,
    gain_of,
    multiplied,
    normed_taken,
    post_normed,
    put_stream,
    stream_of,
    taken,
)
from ridgeline.ops.triton.layers_integers import integer_buffers
from ridgeline.ops.triton.layers_keys import fetch_keys, key_request_of
from ridgeline.ops.triton.layers_products import ticket_slots
from ridgeline.ops.triton.layers_ranks import begin, links, sums_before
from ridgeline.ops.triton.layers_table import FIELDS, LINES_OF_STAGE, NORM, POST_NORM

FETCHING = gl.constexpr(40)
"""Registers per producer thread."""


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
    """Producer: stream this program's share of all weights, and of cached keys and values."""
    done = (gl.to_tensor(0), gl.to_tensor(0))
    rows_ptr, length_ptr, table_stride = token
    row, length = gl.to_tensor(0), gl.to_tensor(0)
    for layer in range(layers):
        layer_ptr, draw_ptr = table_ptr + layer * FIELDS, draws_ptr + layer * 4
        key_request = key_request_of(layer_ptr, (row, length, table_stride), SHAPE)
        done = fetched(descs[0], layer_ptr, draw_ptr, ring, tickets, done, works[0], 0, STAGES, FORM)
        if layer == 0:
            # Weights do not depend on the previous kernel, but keys do.
            if PDL:
                gdc_wait()
            row, length = gl.load(rows_ptr), gl.load(length_ptr)
            key_request = key_request_of(layer_ptr, (row, length, table_stride), SHAPE)
        done = (fetch_keys(kv_desc, key_request, ring, done[0], SHAPE, STAGES), done[1])
        done = fetched(descs[1], layer_ptr, draw_ptr, ring, tickets, done, works[1], 1, STAGES, FORM)
        done = fetched(descs[2], layer_ptr, draw_ptr, ring, tickets, done, works[2], 2, STAGES, FORM)
        done = fetched(descs[3], layer_ptr, draw_ptr, ring, tickets, done, works[3], 3, STAGES, FORM)


@jit
def _arrive(counter_ptr):
    """Increment the grid barrier's counter. Publishes everything that this program wrote."""
    barrier()
    gl.atomic_add(counter_ptr, 1, sem="release")


@jit
def _await(counter_ptr, goal):
    """Wait until the counter, which is never reset, has reached `goal` arrivals."""
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
    ranks,
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
    SIZE: gl.constexpr,
    POST: gl.constexpr,
    PDL: gl.constexpr,
):
    """Consumers: compute the parts of each layer in sequence, with a grid barrier between them. Several ranks (SIZE) have two more:
    behind the words of the first stream, and before the sum of the last layer. POST has the latter."""
    SEVERAL: gl.constexpr = 1 if SIZE > 1 else 0
    LAST: gl.constexpr = 1 if SIZE > 1 or POST else 0
    stream_ptr, qkv_ptr, attended_ptr, gated_ptr, middle_ptr, term_ptr = vectors
    sum_ptr = term_ptr if POST else stream_ptr
    OPTIONS: gl.constexpr = (STAGES, ROWS, KIND, FORM, BIASES, SIZE, POST)
    heads, model, features, qkv = sizes
    rows_ptr, length_ptr, position_ptr, slot_ptr, table_stride = token
    counter_ptr = buffers[3]
    programs = gl.num_programs(0).to(gl.int64)
    dtype: gl.constexpr = stream_ptr.dtype.element_ty
    if PDL:
        gdc_wait()
    token = (gl.load(rows_ptr), gl.load(length_ptr), gl.load(position_ptr), slot_ptr, table_stride)
    # Every launch adds the same number of arrivals, so the counter tells where this launch began.
    ever = programs * (5 * layers - 1 + SEVERAL + LAST)
    goal = gl.atomic_add(counter_ptr, 0, sem="relaxed") // ever * ever
    linked, number = links(ranks, SIZE), sums_before(ranks, SIZE)
    if SIZE > 1:
        begin(stream_ptr, (linked, number), model, dtype, SIZE)
        _arrive(counter_ptr)
    done = (gl.to_tensor(0), gl.to_tensor(0))
    for layer in range(layers):
        layer_ptr = table_ptr + layer * FIELDS
        # Loads that do not depend on other programs are issued before the barrier.
        gain = gain_of(layer_ptr + NORM, model, ring, dtype, LINES[1], OFFSET, FORM)
        if POST:
            before_ptr = table_ptr + gl.maximum(layer - 1, 0) * FIELDS
            post = gain_of(before_ptr + POST_NORM + 1, model, ring, dtype, LINES[1], OFFSET, FORM)
        ahead = attention_inputs(layer_ptr, token, strides, SHAPE, dtype)
        if layer + SEVERAL > 0:
            goal += programs
            _await(counter_ptr, goal)
        peers = (linked, number)
        if POST:
            x = _joined(layer, post, vectors, model, ring, eps, LINES[1], FORM)
        else:
            x = stream_of(stream_ptr, peers, model, ring, LINES[1], FORM, 1, SIZE)
        by = normed_taken(stream_ptr, x, gain, model, ring, eps, FORM)
        done = multiplied(0, qkv_ptr, layer_ptr, qkv, ring, tickets, done, works, by, peers, OPTIONS)
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
        peers = (linked, number + 1)
        done = multiplied(1, sum_ptr, layer_ptr, model, ring, tickets, done, works, by, peers, OPTIONS)
        _arrive(counter_ptr)
        gain = gain_of(layer_ptr + NORM + 1, model, ring, dtype, LINES[1], OFFSET, FORM)
        if POST:
            post = gain_of(layer_ptr + POST_NORM, model, ring, dtype, LINES[1], OFFSET, FORM)
        goal += programs
        _await(counter_ptr, goal)
        if POST:
            x = post_normed(stream_ptr, term_ptr, post, middle_ptr, model, ring, eps, LINES[1], FORM)
        else:
            x = stream_of(stream_ptr, peers, model, ring, LINES[1], FORM, 0, SIZE)
        by = normed_taken(stream_ptr, x, gain, model, ring, eps, FORM)
        done = multiplied(2, gated_ptr, layer_ptr, 2 * features, ring, tickets, done, works, by, peers, OPTIONS)
        _arrive(counter_ptr)
        goal += programs
        _await(counter_ptr, goal)
        by = taken(gated_ptr, features, ring, LINES[2], FORM)
        number += 2
        peers = (linked, number)
        done = multiplied(3, sum_ptr, layer_ptr, model, ring, tickets, done, works, by, peers, OPTIONS)
        if layer + 1 < layers + LAST:
            _arrive(counter_ptr)
    if POST:
        goal += programs
        if gl.program_id(0) == 0:
            last_ptr = table_ptr + (layers - 1) * FIELDS
            post = gain_of(last_ptr + POST_NORM + 1, model, ring, dtype, LINES[1], OFFSET, FORM)
            _await(counter_ptr, goal)
            _joined(layers, post, vectors, model, ring, eps, LINES[1], FORM)
    if SIZE > 1:
        _put_last(stream_ptr, model, ring, counter_ptr, goal + programs, (linked, number), ranks, LINES[1], FORM, SIZE)


@jit
def _joined(layer, post, vectors, model, ring, eps, LINES: gl.constexpr, FORM: gl.constexpr):
    """The residual stream before a layer, with the post norm of the feed-forward before it; post: the norm's gain."""
    stream_ptr, _, _, _, middle_ptr, term_ptr = vectors
    if layer > 0:
        x = post_normed(middle_ptr, term_ptr, post, stream_ptr, model, ring, eps, LINES, FORM)
    else:
        x = stream_of(stream_ptr, (), model, ring, LINES, FORM, 1, 1)
    return x


@jit
def _put_last(
    stream_ptr,
    model,
    ring,
    counter_ptr,
    goal,
    peers,
    ranks,
    LINES: gl.constexpr,
    FORM: gl.constexpr,
    SIZE: gl.constexpr,
):
    """Store the sum of the last layer, and its number for the next launch."""
    if gl.program_id(0) == 0:
        _await(counter_ptr, goal)
        put_stream(stream_ptr, stream_of(stream_ptr, peers, model, ring, LINES, FORM, 1, SIZE), model, ring)
        gl.store(ranks[1], peers[1])


@jit
def _works(sizes, ROWS: gl.constexpr, EACH: gl.constexpr):
    """For each weight: (groups of rows, stages per group, rows between gate and up). EACH: inputs per line."""
    qkv, heads, model, features = sizes
    return (
        (gl.cdiv(qkv, ROWS[0]), gl.cdiv(model, LINES_OF_STAGE // ROWS[0] * EACH), 0),
        (gl.cdiv(model, ROWS[1]), gl.cdiv(heads, LINES_OF_STAGE // ROWS[1] * EACH), 0),
        (gl.cdiv(features, ROWS[2]), gl.cdiv(model, LINES_OF_STAGE // ROWS[2] * EACH), features),
        (gl.cdiv(model, ROWS[3]), gl.cdiv(features, LINES_OF_STAGE // ROWS[3] * EACH), 0),
    )


@jit
def _ring(desc, LINES: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, FORM: gl.constexpr):
    """Allocate shared memory: the ring of stages with a product's input, and the queue of tickets."""
    number: gl.constexpr = desc.dtype
    PIECE: gl.constexpr = desc.block_shape[3]
    MAX_LINES: gl.constexpr = max(LINES[0], LINES[1], LINES[2], LINES[3])
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
    # Each FORM must allocate only what it uses: the compiler reuses the memory of unused barriers, which corrupts data.
    tickets = ()
    if FORM[0]:
        DIGITS: gl.constexpr = gl.SwizzledSharedLayout(16, 1, 8, [1, 0])
        shared_input = gl.allocate_shared_memory(gl.int8, [MAX_LINES // 8, 16, 128], DIGITS)
        ring = (weights, full, free, shared_input) + integer_buffers(STAGES, MAX_LINES, GROUPS, FORM)
    else:
        shared_input = gl.allocate_shared_memory(number, [MAX_LINES, PIECE], BLOCK)
        ring = (weights, full, free, shared_input)
        tickets = ticket_slots()
    fence_async_shared()
    return ring, tickets


@jit(do_not_specialize=["layers", "rank"])
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
    middle_ptr,
    term_ptr,
    rows_ptr,
    length_ptr,
    position_ptr,
    slot_ptr,
    part_ptr,
    part_sums_ptr,
    arrivals_ptr,
    counter_ptr,
    draws_ptr,
    peers_ptr,
    sums_ptr,
    rank,
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
    SIZE: gl.constexpr,
    POST: gl.constexpr,
    PDL: gl.constexpr,
):
    """Run `layers` layers: qkv = norm(stream) qkv'; attended = attention(qkv); stream += attended out'; gated = act(norm(stream)
    gate_up'); stream += gated down'. The grid has one program per SM.

    Weights: the descriptors divide weights [place, rows, k] into stages of ROWS rows and lines of 128 bytes. e4m3 weights have a
    scale per row, and inputs are quantized to e4m3. FORM: (bits of integer codes, 0 for floats; whether groups of codes have
    scales, which then have descriptors too). GROUPS: maximum groups of code rows per program. Bit i of BIASES: weight i has a bias.
    table: int64 [layers, FIELDS].

    Vectors: stream [model], qkv [qkv], attended [heads], gated [features], and with POST, where what is added to the stream has a
    norm, middle [model] and term [model] (otherwise None), in one 16-bit dtype, which is also the cache's. LINES:
    lines of 128 inputs or bytes for `heads`, `model` and `features` inputs and for the attention exchange between warps, powers of
    two. Bit 0 of NORMS: queries are normalised, bit 1: keys.

    Attention: rows, length, position int32 [1]: see StepInputs; slot int64 [groups]. part float32 [MOST_PARTS, heads]: attention
    over a program's keys. part_sums [MOST_PARTS, query heads]: log2 of its sum of exponentials. arrivals int32 [KV heads]: zero
    between attentions. SHAPE: query heads, KV heads, head size, half of the rotated dimensions, slots per page. scale: includes
    log2(e). counter int64: arrivals at the grid barrier. draws int64 [layers, 4]: tickets for groups of rows. Both are zero at
    first and require the same grid, layers and groups in all launches.

    Ranks: with SIZE > 1, out and down are this rank's terms of sums over ranks, see layers_ranks. peers: int64 [SIZE + 1], see
    peers.Vectors. sums int32 [1]: number of sums so far. Otherwise both are None.
    """
    if PDL:
        gdc_launch_dependents()
    ring, tickets = _ring(out_desc, LINES, STAGES, GROUPS, FORM)
    PIECE: gl.constexpr = out_desc.block_shape[3]
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
                    (stream_ptr, qkv_ptr, attended_ptr, gated_ptr, middle_ptr, term_ptr),
                    (heads, model, features, qkv),
                    (rows_ptr, length_ptr, position_ptr, slot_ptr, table_stride),
                    (page_stride, kind_stride, head_stride),
                    (part_ptr, part_sums_ptr, arrivals_ptr, counter_ptr),
                    (peers_ptr, sums_ptr, rank),
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
                    SIZE,
                    POST,
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
