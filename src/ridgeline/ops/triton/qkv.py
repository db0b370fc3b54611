"""Fused per-head RMS norms, rotary embedding and write to the paged KV cache. The QKV projection is read once."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Heads, QkvShape, split_heads
from ridgeline.ops.triton.launch import await_inputs, overlap

MANY_TOKENS = 512
"""Token count from which tokens alone fill a GPU: a program then processes all heads of a token. Below, it processes one KV
head."""
LARGEST_TILE = 2048
"""Query elements that a program holds at a time with many tokens."""


@triton.jit
def _load(
    source, head, at, real, half: tl.constexpr, head_dim: tl.constexpr, HALF: tl.constexpr, UNROTATED: tl.constexpr
):
    """Load a tile of heads in float32: the two halves [heads, HALF] that rotary embedding combines, and the unrotated dimensions
    [heads, TAIL] (TAIL 0: none)."""
    lines = source + head[:, None] * head_dim
    tile = real[:, None] & (at < half)[None, :]
    first = tl.load(lines + at[None, :], mask=tile, other=0.0).to(tl.float32)
    second = tl.load(lines + half + at[None, :], mask=tile, other=0.0).to(tl.float32)
    unrotated = first
    if UNROTATED:
        behind = 2 * half + tl.arange(0, UNROTATED)
        unrotated = tl.load(lines + behind[None, :], mask=real[:, None] & (behind < head_dim)[None, :], other=0.0)
        unrotated = unrotated.to(tl.float32)
    return first, second, unrotated


@triton.jit
def _weights(norm_ptr, at, size, OFFSET: tl.constexpr):
    return tl.load(norm_ptr + at, mask=at < size, other=0.0).to(tl.float32)[None, :] + (1.0 if OFFSET else 0.0)


@triton.jit
def _norm(
    first,
    second,
    unrotated,
    norm_ptr,
    eps,
    at,
    half: tl.constexpr,
    head_dim: tl.constexpr,
    UNROTATED: tl.constexpr,
    OFFSET: tl.constexpr,
    element: tl.constexpr,
):
    """RMS norm of each head, rounded to the model's dtype before the rotary embedding, as in the reference."""
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if UNROTATED:
        squares += tl.sum(unrotated * unrotated, 1)
    scale = tl.rsqrt(squares / head_dim + eps)[:, None]
    first = first * scale * _weights(norm_ptr, at, half, OFFSET)
    second = second * scale * _weights(norm_ptr + half, at, half, OFFSET)
    if UNROTATED:
        unrotated = (
            unrotated * scale * _weights(norm_ptr + 2 * half, tl.arange(0, UNROTATED), head_dim - 2 * half, OFFSET)
        )
    return first.to(element).to(tl.float32), second.to(element).to(tl.float32), unrotated


@triton.jit
def _store(
    target,
    stride,
    head,
    at,
    real,
    first,
    second,
    unrotated,
    half: tl.constexpr,
    head_dim: tl.constexpr,
    UNROTATED: tl.constexpr,
):
    """Store a tile of heads, `stride` elements apart."""
    element: tl.constexpr = target.dtype.element_ty
    lines = target + head[:, None] * stride
    tile = real[:, None] & (at < half)[None, :]
    tl.store(lines + at[None, :], first.to(element), mask=tile)
    tl.store(lines + half + at[None, :], second.to(element), mask=tile)
    if UNROTATED:
        behind = 2 * half + tl.arange(0, UNROTATED)
        tl.store(lines + behind[None, :], unrotated.to(element), mask=real[:, None] & (behind < head_dim)[None, :])


@triton.jit
def _encode(
    source,
    codes_ptr,
    scales_ptr,
    head,
    real,
    head_stride,
    scale_head_stride,
    head_dim: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Store vectors of heads [HEADS], contiguous at `source`, in a format with scales; see ops.stored. A line of the tile is a
    group. GROUPS, SIZE: groups of a vector and elements of a group, padded to powers of 2."""
    line = tl.arange(0, HEADS * GROUPS)
    number = line % GROUPS
    owner = tl.reshape(tl.broadcast_to(head[:, None], (HEADS, GROUPS)), (HEADS * GROUPS,))
    known = tl.reshape(tl.broadcast_to(real[:, None], (HEADS, GROUPS)), (HEADS * GROUPS,)) & (
        number < head_dim // GROUP
    )
    at = tl.arange(0, SIZE)
    vectors = source + owner * head_dim + number * GROUP
    tile = known[:, None] & (at < GROUP)[None, :]
    elements = tl.load(vectors[:, None] + at[None, :], mask=tile, other=0.0).to(tl.float32)
    scales = tl.maximum(tl.max(tl.abs(elements), 1) / LARGEST, 6.103515625e-05).to(tl.float16)
    tl.store(scales_ptr + owner * scale_head_stride + number, scales, mask=known)
    codes = codes_ptr + owner * head_stride + number * (GROUP * BITS // 8)
    step = scales.to(tl.float32)[:, None]
    if BITS == 4:
        byte = tl.arange(0, SIZE // 2)
        even = tl.load(vectors[:, None] + 2 * byte[None, :], mask=known[:, None], other=0.0).to(tl.float32)
        odd = tl.load(vectors[:, None] + 2 * byte[None, :] + 1, mask=known[:, None], other=0.0).to(tl.float32)
        low = (_round(tl.div_rn(even, step)) + 8.0).to(tl.uint8)
        high = (_round(tl.div_rn(odd, step)) + 8.0).to(tl.uint8)
        tl.store(codes[:, None] + byte[None, :], low | (high << 4), mask=known[:, None])
    elif codes_ptr.dtype.element_ty == tl.int8:
        tl.store(codes[:, None] + at[None, :], _round(tl.div_rn(elements, step)).to(tl.int8), mask=tile)
    else:
        tl.store(codes[:, None] + at[None, :], tl.div_rn(elements, step).to(codes_ptr.dtype.element_ty), mask=tile)


@triton.jit
def _round(x):
    """x to the nearest integer, to the even one of two: the sum has no bits for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit(do_not_specialize_on_alignment=["slots_ptr", "position_ptr"])
def _qkv_kernel(
    qkv_ptr,
    cos_sin_ptr,
    position_ptr,
    slots_ptr,
    kv_ptr,
    scales_ptr,
    q_norm_ptr,
    k_norm_ptr,
    qkv_stride,
    page_stride,
    kind_stride,
    head_stride,
    scale_page_stride,
    scale_kind_stride,
    scale_head_stride,
    eps,
    n_heads: tl.constexpr,
    n_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    page_tokens: tl.constexpr,
    WRITES: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    LARGEST: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_TILE: tl.constexpr,
    HALF: tl.constexpr,
    UNROTATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, KV_HEADS KV heads (padded to KV_TILE) and their query heads (padded to HEADS) per program; the grid is [tokens, KV
    heads / KV_HEADS]. qkv [tokens, (n_heads + 2 n_kv_heads) * head_dim]: q and k are rotated in place; k and v also go to the cache
    at slots int64 [tokens]. cos_sin float32 [positions, 2, half]. All loads precede all stores, except that a format with scales
    (BITS > 0) reads the finished keys again. WRITES False: qkv has queries only, [tokens, n_heads * head_dim]."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    group: tl.constexpr = n_heads // n_kv_heads
    element: tl.constexpr = qkv_ptr.dtype.element_ty
    kv_head = tl.program_id(1) * KV_HEADS + tl.arange(0, KV_TILE)
    q_head = tl.program_id(1) * KV_HEADS * group + tl.arange(0, HEADS)
    kv_real = tl.arange(0, KV_TILE) < KV_HEADS
    q_real = tl.arange(0, HEADS) < KV_HEADS * group
    at = tl.arange(0, HALF)
    source = qkv_ptr + token * qkv_stride
    k_source = source + n_heads * head_dim
    slot = tl.load(slots_ptr + token)
    position = tl.load(position_ptr + token).to(tl.int64)
    q_first, q_second, q_unrotated = _load(source, q_head, at, q_real, half, head_dim, HALF, UNROTATED)
    if WRITES:
        k_first, k_second, k_unrotated = _load(k_source, kv_head, at, kv_real, half, head_dim, HALF, UNROTATED)
        v_first, v_second, v_unrotated = _load(
            k_source + n_kv_heads * head_dim, kv_head, at, kv_real, half, head_dim, HALF, UNROTATED
        )
    cos_sin = cos_sin_ptr + position * (2 * half) + at
    cos = tl.load(cos_sin, mask=at < half, other=1.0)[None, :]
    sin = tl.load(cos_sin + half, mask=at < half, other=0.0)[None, :]
    if Q_NORM:
        q_first, q_second, q_unrotated = _norm(
            q_first, q_second, q_unrotated, q_norm_ptr, eps, at, half, head_dim, UNROTATED, OFFSET, element
        )
    if K_NORM:
        k_first, k_second, k_unrotated = _norm(
            k_first, k_second, k_unrotated, k_norm_ptr, eps, at, half, head_dim, UNROTATED, OFFSET, element
        )
    q_turned = (q_first * cos - q_second * sin).to(element)
    q_second = (q_second * cos + q_first * sin).to(element)
    _store(source, head_dim, q_head, at, q_real, q_turned, q_second, q_unrotated, half, head_dim, UNROTATED)
    if WRITES:
        k_turned = (k_first * cos - k_second * sin).to(element)
        k_second = (k_second * cos + k_first * sin).to(element)
        k_unrotated = k_unrotated.to(element)
        _store(k_source, head_dim, kv_head, at, kv_real, k_turned, k_second, k_unrotated, half, head_dim, UNROTATED)
        if BITS > 0:
            page, place = slot // page_tokens, slot % page_tokens
            codes = kv_ptr + page * page_stride + place * (head_dim * BITS // 8)
            scales = scales_ptr + page * scale_page_stride + place * (head_dim // GROUP)
            # The program's threads have stored its keys.
            tl.debug_barrier()
            for kind in tl.static_range(2):
                _encode(
                    k_source + kind * n_kv_heads * head_dim,
                    codes + kind * kind_stride,
                    scales + kind * scale_kind_stride,
                    kv_head,
                    kv_real,
                    head_stride,
                    scale_head_stride,
                    head_dim,
                    BITS,
                    GROUP,
                    KV_TILE,
                    GROUPS,
                    SIZE,
                    LARGEST,
                )
        else:
            target = kv_ptr + (slot // page_tokens) * page_stride + (slot % page_tokens) * head_dim
            _store(
                target, head_stride, kv_head, at, kv_real, k_turned, k_second, k_unrotated, half, head_dim, UNROTATED
            )
            _store(
                target + kind_stride,
                head_stride,
                kv_head,
                at,
                kv_real,
                v_first,
                v_second,
                v_unrotated,
                half,
                head_dim,
                UNROTATED,
            )


def _kv_heads(tokens: int, shape: QkvShape, n_kv_heads: int) -> int:
    """KV heads per program, a divisor of n_kv_heads."""
    if tokens < MANY_TOKENS:
        return 1
    max_kv_heads = max(1, LARGEST_TILE // (shape.head_dim * (shape.n_heads // n_kv_heads)))
    return max(heads for heads in range(1, n_kv_heads + 1) if n_kv_heads % heads == 0 and heads <= max_kv_heads)


def qkv_write(qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs, kv_heads: int = 0) -> Heads:
    """See AttentionOps. Works in place: q, k and v are views of qkv, which is overwritten. kv_heads: KV heads per program; 0
    chooses by the number of tokens."""
    tokens, dim, n_kv_heads = qkv.shape[0], shape.head_dim, view.kv.shape[2]
    half = shape.cos_sin.shape[2]
    unrotated = dim - 2 * half
    if tokens:
        kv_heads = kv_heads or _kv_heads(tokens, shape, n_kv_heads)
        heads = triton.next_power_of_2(kv_heads * (shape.n_heads // n_kv_heads))
        scales = view.kv if view.scales is None else view.scales
        bits, group, largest = (0, dim, 1.0)
        if view.scales is not None and view.format is not None:
            bits, group, largest = view.format.bits, view.format.group or dim, view.format.largest
        _qkv_kernel[(tokens, n_kv_heads // kv_heads)](
            qkv,
            shape.cos_sin,
            step.position,
            view.slots,
            view.kv,
            scales,
            qkv if shape.q_norm is None else shape.q_norm,
            qkv if shape.k_norm is None else shape.k_norm,
            qkv.stride(0),
            view.kv.stride(0),
            view.kv.stride(1),
            view.kv.stride(2),
            *scales.stride()[:3],
            shape.norm_eps,
            n_heads=shape.n_heads,
            n_kv_heads=n_kv_heads,
            head_dim=dim,
            half=half,
            page_tokens=view.page_tokens,
            WRITES=shape.n_kv_heads > 0,
            BITS=bits,
            GROUP=group,
            GROUPS=triton.next_power_of_2(dim // group),
            SIZE=triton.next_power_of_2(group),
            LARGEST=largest,
            Q_NORM=shape.q_norm is not None,
            K_NORM=shape.k_norm is not None,
            OFFSET=shape.norm_offset,
            KV_HEADS=kv_heads,
            HEADS=heads,
            KV_TILE=triton.next_power_of_2(kv_heads),
            HALF=triton.next_power_of_2(half),
            UNROTATED=triton.next_power_of_2(unrotated) if unrotated else 0,
            num_warps=max(1, min(4, heads * dim // 1024)),
            **overlap(qkv.device),
        )
    return split_heads(qkv, shape)
