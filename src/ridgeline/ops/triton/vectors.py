"""Keys and values of a tile of slots, from a cache in the model's type or in a format with scales (ops.stored)."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_computed(x, BITS: tl.constexpr):
    """Queries in the type of the products. float16 holds every stored code, and conversions to it are cheapest."""
    if BITS > 0 and x.dtype == tl.bfloat16:
        return x.to(tl.float16)
    else:
        return x


@triton.jit
def pages_of_tile(pages_ptr, slot, first, end, page_tokens: tl.constexpr, KEYS: tl.constexpr):
    """Page numbers int64 of the slots first .. first + KEYS - 1: a scalar if they lie in one page, otherwise [KEYS]."""
    if page_tokens % KEYS == 0:
        return tl.load(pages_ptr + first // page_tokens).to(tl.int64)
    else:
        return tl.load(pages_ptr + slot // page_tokens, mask=slot < end, other=0).to(tl.int64)


@triton.jit
def _load_vectors(
    codes_ptr,
    scales_ptr,
    page,
    place,
    inside,
    page_stride,
    scale_page_stride,
    head_dim: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    element: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Vectors [KEYS, WIDTH] of one kind and head in the type `element`. codes_ptr, scales_ptr: of page 0. place, inside [KEYS]:
    slot within its page, and whether to load it (MASKED). BITS, SCALES: bits of an element and scales of a vector in a format with
    scales; BITS 0: the cache is in the type `element`."""
    at = tl.arange(0, WIDTH)
    place = place.to(tl.int64)
    line = page * page_stride + place * (head_dim * BITS // 8 if BITS > 0 else head_dim)
    if BITS == 4:
        byte = tl.arange(0, WIDTH // 2)
        pairs = tl.load(
            codes_ptr + line[:, None] + byte[None, :], mask=inside[:, None] & (byte < head_dim // 2)[None, :], other=0
        )
        codes = tl.reshape(tl.join(_whole(pairs & 15, 8, element), _whole(pairs >> 4, 8, element)), (KEYS, WIDTH))
    else:
        pointer = codes_ptr + line[:, None] + at[None, :]
        if MASKED:
            real = inside[:, None]
            if head_dim != WIDTH:
                real = real & (at < head_dim)[None, :]
            codes = tl.load(pointer, mask=real, other=0.0)
        elif head_dim != WIDTH:
            codes = tl.load(pointer, mask=(at < head_dim)[None, :], other=0.0)
        else:
            codes = tl.load(pointer)
        if codes.dtype == tl.int8:
            codes = _whole((codes ^ -128).to(tl.uint8, bitcast=True), 128, element)
    vectors = codes
    if BITS > 0:
        line = scales_ptr + page * scale_page_stride + place * SCALES
        if SCALES == 1:
            scales = tl.load(line, mask=inside, other=0.0)[:, None]
        else:
            groups: tl.constexpr = WIDTH // (head_dim // SCALES)
            number = tl.arange(0, groups)
            real = inside[:, None] & (number < SCALES)[None, :]
            scales = tl.load(line[:, None] + number[None, :], mask=real, other=0.0)
            scales = tl.reshape(tl.broadcast_to(scales[:, :, None], (KEYS, groups, head_dim // SCALES)), (KEYS, WIDTH))
        vectors = codes.to(element) * scales.to(element)
    return vectors


@triton.jit
def _whole(codes, zero: tl.constexpr, element: tl.constexpr):
    """codes - zero in the type `element`, from uint8. In float16 a code is the last bits of 1024 + code, which saves the slow
    conversion of integers."""
    if element == tl.float16:
        return (codes.to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + zero)
    else:
        return codes.to(element) - zero


@triton.jit
def load_keys_values(
    codes_ptr,
    scales_ptr,
    page,
    place,
    inside,
    page_stride,
    kind_stride,
    scale_page_stride,
    scale_kind_stride,
    head_dim: tl.constexpr,
    BITS: tl.constexpr,
    SCALES: tl.constexpr,
    KEYS: tl.constexpr,
    WIDTH: tl.constexpr,
    element: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(keys, values) [KEYS, WIDTH] of one head; see _load_vectors. Values lie kind_stride behind keys."""
    keys = _load_vectors(
        codes_ptr,
        scales_ptr,
        page,
        place,
        inside,
        page_stride,
        scale_page_stride,
        head_dim,
        BITS,
        SCALES,
        KEYS,
        WIDTH,
        element,
        MASKED,
    )
    codes_ptr += kind_stride
    scales_ptr += scale_kind_stride
    values = _load_vectors(
        codes_ptr,
        scales_ptr,
        page,
        place,
        inside,
        page_stride,
        scale_page_stride,
        head_dim,
        BITS,
        SCALES,
        KEYS,
        WIDTH,
        element,
        MASKED,
    )
    return keys, values
