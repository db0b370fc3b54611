"""Functions of the kernel of all layers that dispatch on integer or floating-point weights."""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.ops.triton import layers_integers
from ridgeline.ops.triton.layers_integers import (
    code_blocks,
    fetch_integers,
    integer_elements,
    integer_product,
    integer_stages,
    scale_blocks,
    store_digits,
    store_normed_digits,
)
from ridgeline.ops.triton.layers_products import element_places, elements, fetch_product, product, store_input
from ridgeline.ops.triton.layers_ranks import received
from ridgeline.ops.triton.layers_table import PLACE, Layer, blocks, input_lines, places, pointer, rows_at_a_time, stages
from ridgeline.ops.triton.shapes import PROCESSORS


@jit
def fetched(
    descs, layer_ptr, draw_ptr, ring, tickets, done, work, WHICH: gl.constexpr, STAGES: gl.constexpr, FORM: gl.constexpr
):
    """Producer: stream this program's share of weight WHICH of a layer. done: (stages, tickets) since the kernel began."""
    HALVES: gl.constexpr = 2 if WHICH == 2 else 1
    if FORM[0]:
        return fetch_integers(descs, layer_ptr, ring, done[0], work, WHICH, HALVES, STAGES, FORM), done[1]
    else:
        place_ptr = layer_ptr + PLACE + WHICH
        return fetch_product(descs[0], place_ptr, draw_ptr + WHICH, ring, tickets, done, work, HALVES, STAGES)


@jit
def _elements(ptr, k, ring, LINES: gl.constexpr, FORM: gl.constexpr):
    if FORM[0]:
        return integer_elements(ptr, k, LINES, FORM[0])
    else:
        return elements(ptr, k, LINES, ring[0].shape[2])


@jit
def gain_of(field_ptr, k, ring, dtype: gl.constexpr, LINES: gl.constexpr, OFFSET: gl.constexpr, FORM: gl.constexpr):
    """Load a norm's gain [k] in the form that `normed_taken` needs."""
    SHIFT: gl.constexpr = 1.0 if OFFSET else 0.0
    return _elements(pointer(field_ptr, dtype), k, ring, LINES, FORM) + SHIFT


@jit
def taken(ptr, k, ring, LINES: gl.constexpr, FORM: gl.constexpr):
    """Load a product's input [k] into shared memory; returns its scale."""
    x = _elements(ptr, k, ring, LINES, FORM)
    if FORM[0]:
        return store_digits(x, ring, FORM)
    else:
        return store_input(x, ring[3], ptr.dtype.element_ty, ring[0].dtype == gl.float8e4nv)


@jit
def stream_of(ptr, peers, k, ring, LINES: gl.constexpr, FORM: gl.constexpr, HALF: gl.constexpr, SIZE: gl.constexpr):
    """Load the residual stream [k]; with several ranks (SIZE) the sum of their terms in a half of the memory."""
    if SIZE == 1:
        return _elements(ptr, k, ring, LINES, FORM)
    else:
        at = element_places(LINES, ring[0].shape[2])
        return received(peers, at, at < k, HALF, ptr.dtype.element_ty, SIZE)


@jit
def put_stream(ptr, x, k, ring):
    """Store the residual stream [k]."""
    at = element_places(x.shape[0], ring[0].shape[2])
    gl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=at < k)


@jit
def normed_taken(ptr, x, gain, k, ring, eps, FORM: gl.constexpr):
    """Load the norm of a stream x into shared memory; see `taken`. ptr: of its dtype."""
    if FORM[0]:
        return store_normed_digits(x, gain, ring, k, eps, FORM)
    else:
        x = x * gl.rsqrt(gl.sum(gl.sum(x * x, 1), 0) / k + eps) * gain
        return store_input(x, ring[3], ptr.dtype.element_ty, ring[0].dtype == gl.float8e4nv)


@jit
def post_normed(stream_ptr, term_ptr, gain, to_ptr, k, ring, eps, LINES: gl.constexpr, FORM: gl.constexpr):
    """The residual stream [k] plus the post norm of a term, rounded as norm.norm_add does. The first program also stores it, in
    memory that no program reads before the next grid barrier: the stream alternates between two vectors."""
    dtype: gl.constexpr = stream_ptr.dtype.element_ty
    term = _elements(term_ptr, k, ring, LINES, FORM)
    term = (term * gl.rsqrt(gl.sum(gl.sum(term * term, 1), 0) / k + eps) * gain).to(dtype).to(gl.float32)
    x = (_elements(stream_ptr, k, ring, LINES, FORM) + term).to(dtype).to(gl.float32)
    if gl.program_id(0) == 0:
        put_stream(to_ptr, x, k, ring)
    return x


@jit
def multiplied(
    WHICH: gl.constexpr,
    out_ptr,
    layer_ptr,
    rows,
    ring,
    tickets,
    done,
    works,
    scale,
    peers,
    OPTIONS: gl.constexpr,
):
    """Consumers: multiply this program's share of weight WHICH with the input in shared memory, and store. rows: of the weight.
    OPTIONS: see layers_kernel."""
    STAGES: gl.constexpr = OPTIONS[0]
    ROWS: gl.constexpr = OPTIONS[1]
    FORM: gl.constexpr = OPTIONS[3]
    BIASES: gl.constexpr = OPTIONS[4]
    SIZE: gl.constexpr = OPTIONS[5]
    FP8: gl.constexpr = ring[0].dtype == gl.float8e4nv
    ADD: gl.constexpr = (WHICH == 1 or WHICH == 3) and not OPTIONS[6]
    KIND: gl.constexpr = OPTIONS[2] if WHICH == 2 else 0
    EACH: gl.constexpr = ROWS[WHICH]
    work = works[WHICH]
    if FORM[0]:
        at = integer_product(
            out_ptr, layer_ptr, rows, ring, done[0], work, scale, STAGES, WHICH, ADD, KIND, FORM, BIASES
        )
        return at, done[1]
    else:
        return product(
            out_ptr,
            layer_ptr,
            rows,
            ring,
            tickets,
            done,
            work,
            scale,
            peers,
            EACH,
            STAGES,
            WHICH,
            ADD,
            KIND,
            FP8,
            BIASES,
            SIZE,
        )


@dataclass(frozen=True, slots=True)
class Cut:
    """TMA view of the weights of all layers. rows: weight rows per TMA box, by kind. columns: per layer, the places of its weights
    and scales; see layers_table."""

    rows: tuple[int, ...]
    blocks: tuple[TensorDescriptor, ...]
    scale_blocks: tuple[TensorDescriptor | None, ...]
    columns: tuple[tuple[int, ...], ...]


def cut(layers: Sequence[Layer]) -> Cut:
    first = layers[0].qkv
    kinds = list(zip(*(layer.weights for layer in layers), strict=True))
    values = [places([weights.values for weights in kind]) for kind in kinds]
    if first.bits:
        rows = (layers_integers.ROWS.value,) * len(kinds)
        cuts = tuple(code_blocks(matrices) for matrices in values)
    else:
        rows = tuple(rows_at_a_time(matrices.lowest, 1 + (kind == 2)) for kind, matrices in enumerate(values))
        cuts = tuple(blocks(matrices, row_count) for matrices, row_count in zip(values, rows, strict=True))
    scale_cuts: tuple[TensorDescriptor | None, ...] = (None,) * len(kinds)
    columns = [[0 if weights.scales is None else weights.scales.data_ptr() for weights in kind] for kind in kinds]
    if first.grouped:
        scales = [places([weights.scales for weights in kind if weights.scales is not None]) for kind in kinds]
        scale_cuts = tuple(scale_blocks(scale_places, first.bits) for scale_places in scales)
        columns = [list(scale_places.places) for scale_places in scales]
    return Cut(rows, cuts, scale_cuts, tuple(zip(*(matrices.places for matrices in values), *columns, strict=True)))


def stages_of(layer: Layer) -> int:
    """Number of ring stages of the kernel."""
    max_lines = max(input_lines(layer))
    return integer_stages(layer, max_lines, processors(layer.norms[0].device)) if layer.qkv.bits else stages(max_lines)


@cache
def processors(device: torch.device) -> int:
    """Programs of the kernel. They synchronise with each other, so each must have an SM to itself."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else PROCESSORS
