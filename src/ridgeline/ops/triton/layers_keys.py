"""Division of attention among programs in the kernel of all layers, and the stream of cached keys and values through the ring.

Cached keys do not depend on this step. The producer warp loads a program's share of them between the weights before and after
attention, so that they are in shared memory when the queries are ready.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.ops.triton.gluon_names import async_load, reinterpret
from ridgeline.ops.triton.layers_table import ALIGNED, CACHE, LINES_OF_STAGE, PAGES, WINDOW, next_stage, places

MOST_PARTS = gl.constexpr(64)
"""Maximum programs that share the keys of a KV head."""
UNSPLIT_SLOTS = gl.constexpr(128)
"""Number of slots up to which one program processes all keys of a KV head. Combining parts would cost more."""
PIECE = gl.constexpr(64)
"""Elements of a head in a line of a stage."""
SMALLEST_LINES = 8
"""Minimum lines of a page, because copies into a stage must start at a multiple of 8 lines."""


@triton.constexpr_function
def slots_of_stage(DIM):
    return LINES_OF_STAGE.value * PIECE.value // DIM


@jit
def share_of(length, window, SHAPE: gl.constexpr):
    """Share of this program: KV head, part index, number of parts, first and end slot, and the first visible slot. Shares start at
    multiples of a stage's slots."""
    KV_HEADS: gl.constexpr = SHAPE[1]
    TILE: gl.constexpr = slots_of_stage(SHAPE[2])
    # The newest slot is this token's own. It is not in the cache yet.
    start = gl.where(window > 0, gl.maximum(length - window, 0), 0)
    begin = start // TILE * TILE
    slots = length - 1 - begin
    head, part = gl.program_id(0) % KV_HEADS, gl.program_id(0) // KV_HEADS
    max_parts = gl.minimum(gl.num_programs(0) // KV_HEADS, MOST_PARTS)
    each = gl.cdiv(gl.cdiv(slots, gl.where(slots <= UNSPLIT_SLOTS, 1, max_parts)), TILE) * TILE
    parts = gl.maximum(gl.cdiv(slots, gl.maximum(each, 1)), 1)
    first = begin + part * each
    last = gl.where(part < parts, gl.minimum(first + each, length - 1), 0)
    return head, part, parts, first, last, start


@triton.constexpr_function
def _slots_of_copy(DIM, PAGE_TOKENS):
    return min(LINES_OF_STAGE.value * PIECE.value // DIM, PAGE_TOKENS)


@jit
def _pages(pages_ptr, first, last, DIM: gl.constexpr, PAGE_TOKENS: gl.constexpr):
    """Pages of a stage's slots from `first` on. Slots from `last` on use page 0, which is scratch."""
    EACH: gl.constexpr = _slots_of_copy(DIM, PAGE_TOKENS)
    pages = ()
    for index in gl.static_range(slots_of_stage(DIM) // EACH):
        slot = first + index * EACH
        pages += (gl.load(pages_ptr + slot // PAGE_TOKENS, mask=slot < last, other=0),)  # type: ignore[assignment]
    return pages


@jit
def key_request_of(layer_ptr, token, SHAPE: gl.constexpr):
    """The keys of a layer that this program's ring loads, with loads of the first page numbers in flight."""
    row, length, table_stride = token
    window = gl.load(layer_ptr + WINDOW).to(gl.int32)
    head, _part, _parts, first, last, _start = share_of(length, window, SHAPE)
    pages_ptr = gl.load(layer_ptr + PAGES).to(gl.pointer_type(gl.int32)) + row.to(gl.int64) * table_stride
    place = gl.load(layer_ptr + CACHE).to(gl.int32)
    return place, head, first, last, pages_ptr, _pages(pages_ptr, first, last, SHAPE[2], SHAPE[4])


@jit
def fetch_keys(kv_desc, key_request, ring, at, SHAPE: gl.constexpr, STAGES: gl.constexpr):
    """Producer: stream a program's share of keys and values in alternating stages, see key_request_of. Returns the number of stages
    since the kernel began."""
    place, head, first, last, pages_ptr, pages = key_request
    KV_HEADS: gl.constexpr = SHAPE[1]
    DIM: gl.constexpr = SHAPE[2]
    PAGE_TOKENS: gl.constexpr = SHAPE[4]
    EACH: gl.constexpr = _slots_of_copy(DIM, PAGE_TOKENS)
    LINES: gl.constexpr = EACH * DIM // PIECE
    BLOCK: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    for begin in range(first, last, slots_of_stage(DIM)):
        next_pages = _pages(pages_ptr, begin + slots_of_stage(DIM), last, DIM, PAGE_TOKENS)
        line = begin % PAGE_TOKENS * (DIM // PIECE)
        for kind in gl.static_range(2):
            stage = next_stage(ring, at, LINES_OF_STAGE * 128, STAGES)
            stage_memory = reinterpret(ring[0].index(stage), kv_desc.dtype, [LINES_OF_STAGE, PIECE], BLOCK)
            for index in gl.static_range(LINES_OF_STAGE // LINES):
                into = stage_memory.slice(index * LINES, LINES, 0)
                where = [place, pages[index], kind * KV_HEADS + head, line, 0]
                async_load(kv_desc, where, ring[1].index(stage), into)
            at += 1
        pages = next_pages
    return at


@jit
def stage_taken(ring, at, real, layout: gl.constexpr, dtype: gl.constexpr, STAGES: gl.constexpr):
    """Load lines [LINES_OF_STAGE, PIECE] of a stage of keys or values into registers. A stage that is not `real` is not waited
    for."""
    LINES: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    stage = at % STAGES
    mbarrier.wait(ring[1].index(stage), at // STAGES & 1, pred=real)
    stage_memory = reinterpret(ring[0].index(stage), dtype, [LINES_OF_STAGE, PIECE], LINES)
    return stage_memory.load(layout)


@jit
def stages_ended(ring, at, STAGES: gl.constexpr):
    """Release a stage and the one after it."""
    mbarrier.arrive(ring[2].index(at % STAGES), count=1)
    mbarrier.arrive(ring[2].index((at + 1) % STAGES), count=1)


def streamable(caches: Sequence[torch.Tensor]) -> bool:
    """Whether TMA can load keys from caches [pages, 2, heads, tokens, dim] of equal strides: the slots of a page are a power of
    two, and pages are contiguous and aligned to 16 bytes."""
    where, (_, _, heads, tokens, dim) = places(caches), caches[0].shape
    return (
        where.lowest.stride()[1:] == (heads * tokens * dim, tokens * dim, dim, 1)
        and tokens & (tokens - 1) == 0
        and tokens * dim >= SMALLEST_LINES * PIECE.value
        and where.lowest.stride(0) * where.lowest.element_size() % ALIGNED == 0
        and (where.step | where.lowest.data_ptr()) % ALIGNED == 0
        and max(where.places) < 1 << 31
    )


def key_blocks(caches: Sequence[torch.Tensor]) -> tuple[TensorDescriptor, tuple[int, ...]]:
    """TMA descriptor of caches [pages, 2, heads, tokens, dim] as [place, pages, kinds and heads, lines, PIECE], and each cache's
    place."""
    where = places(caches)
    pages, _, heads, tokens, dim = where.lowest.shape
    shape = [max(where.places) + 1, pages, 2 * heads, tokens * dim // PIECE.value, PIECE.value]
    strides = [where.step // 2, where.lowest.stride(0), tokens * dim, PIECE.value, 1]
    lines = min(LINES_OF_STAGE.value, tokens * dim // PIECE.value)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
    return TensorDescriptor(where.lowest, shape, strides, [1, 1, 1, lines, PIECE.value], layout), where.places
