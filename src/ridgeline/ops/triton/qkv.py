"""Per-head norms, rotary embedding and the write into the paged cache, fused: the projection is read once."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import QkvShape
from ridgeline.ops.triton.launch import await_inputs, overlap

BLOCK_HEADS = 4


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, is_q, at, inside, Q: tl.constexpr, K: tl.constexpr, OFFSET: tl.constexpr):
    """Weights [heads, width] of the norms of a tile of query and key heads, 1 where there is none."""
    add = 1.0 if OFFSET else 0.0
    q = tl.full((at.shape[0],), 1.0, tl.float32)
    k = tl.full((at.shape[0],), 1.0, tl.float32)
    if Q:
        q = tl.load(q_norm_ptr + at, mask=inside, other=0.0).to(tl.float32) + add
    if K:
        k = tl.load(k_norm_ptr + at, mask=inside, other=0.0).to(tl.float32) + add
    return tl.where(is_q[:, None], q[None, :], k[None, :])


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def _qkv_kernel(
    qkv_ptr,
    cos_sin_ptr,
    position_ptr,
    slots_ptr,
    kv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    qkv_stride,
    page_stride,
    kind_stride,
    head_stride,
    eps,
    n_heads: tl.constexpr,
    n_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    page_tokens: tl.constexpr,
    Q_NORM: tl.constexpr,
    K_NORM: tl.constexpr,
    OFFSET: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token, HEADS heads. Each head is two halves that turn into each other and, if REST, a rest that stays."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    turned: tl.constexpr = n_heads + n_kv_heads
    real = head < turned + n_kv_heads
    is_q = head < n_heads
    is_v = head >= turned
    at = tl.arange(0, HALF)
    inside = at < half
    tile = real[:, None] & inside[None, :]
    source = qkv_ptr + token * qkv_stride + head[:, None] * head_dim
    first = tl.load(source + at[None, :], mask=tile, other=0.0).to(tl.float32)
    second = tl.load(source + half + at[None, :], mask=tile, other=0.0).to(tl.float32)
    behind = 2 * half + tl.arange(0, REST)
    rest_tile = real[:, None] & (behind < head_dim)[None, :]
    rest = tl.load(source + behind[None, :], mask=rest_tile, other=0.0).to(tl.float32)
    if Q_NORM or K_NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
        scale = tl.rsqrt(squares / head_dim + eps)
        normed = (is_q & Q_NORM) | ((head >= n_heads) & (head < turned) & K_NORM)
        scale = tl.where(normed, scale, 1.0)[:, None]
        plain = is_v[:, None]
        weight = _norm_weight(q_norm_ptr, k_norm_ptr, is_q, at, inside, Q_NORM, K_NORM, OFFSET)
        first = first * scale * tl.where(plain, 1.0, weight)
        weight = _norm_weight(q_norm_ptr, k_norm_ptr, is_q, at + half, inside, Q_NORM, K_NORM, OFFSET)
        second = second * scale * tl.where(plain, 1.0, weight)
        weight = _norm_weight(q_norm_ptr, k_norm_ptr, is_q, behind, behind < head_dim, Q_NORM, K_NORM, OFFSET)
        rest = rest * scale * tl.where(plain, 1.0, weight)
        # The norm's result is rounded to the model's dtype before it turns, as in the reference.
        first = first.to(qkv_ptr.dtype.element_ty).to(tl.float32)
        second = second.to(qkv_ptr.dtype.element_ty).to(tl.float32)
    position = tl.load(position_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * (2 * half) + at, mask=inside, other=1.0)[None, :]
    sin = tl.load(cos_sin_ptr + position * (2 * half) + half + at, mask=inside, other=0.0)[None, :]
    cos = tl.where(is_v[:, None], 1.0, cos)
    sin = tl.where(is_v[:, None], 0.0, sin)
    turned_first = (first * cos - second * sin).to(qkv_ptr.dtype.element_ty)
    turned_second = (second * cos + first * sin).to(qkv_ptr.dtype.element_ty)
    stays = rest.to(qkv_ptr.dtype.element_ty)
    fresh = tile & (is_v == 0)[:, None]
    tl.store(source + at[None, :], turned_first, mask=fresh)
    tl.store(source + half + at[None, :], turned_second, mask=fresh)
    tl.store(source + behind[None, :], stays, mask=rest_tile & (is_v == 0)[:, None])
    slot = tl.load(slots_ptr + token)
    kind = tl.where(is_v, 1, 0)
    kv_head = head - n_heads - kind * n_kv_heads
    place = kind.to(tl.int64) * kind_stride + kv_head.to(tl.int64) * head_stride
    target = kv_ptr + (slot // page_tokens) * page_stride + (slot % page_tokens) * head_dim + place[:, None]
    kept = (is_q == 0)[:, None]
    element = kv_ptr.dtype.element_ty
    tl.store(target + at[None, :], turned_first.to(element), mask=tile & kept)
    tl.store(target + half + at[None, :], turned_second.to(element), mask=tile & kept)
    tl.store(target + behind[None, :], stays.to(element), mask=rest_tile & kept)


def qkv_write(
    qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See Ops. Works in place: q, k and v are views of qkv, which is overwritten."""
    tokens, dim = qkv.shape[0], shape.head_dim
    sizes = (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
    half = shape.cos_sin.shape[2]
    rest = dim - 2 * half
    if tokens:
        _qkv_kernel[(tokens, triton.cdiv(sum(sizes), BLOCK_HEADS))](
            qkv,
            shape.cos_sin,
            step.position,
            view.slots,
            view.kv,
            qkv if shape.q_norm is None else shape.q_norm,
            qkv if shape.k_norm is None else shape.k_norm,
            qkv.stride(0),
            view.kv.stride(0),
            view.kv.stride(1),
            view.kv.stride(2),
            shape.norm_eps,
            n_heads=shape.n_heads,
            n_kv_heads=shape.n_kv_heads,
            head_dim=dim,
            half=half,
            page_tokens=view.page_tokens,
            Q_NORM=shape.q_norm is not None,
            K_NORM=shape.k_norm is not None,
            OFFSET=shape.norm_offset,
            HEADS=BLOCK_HEADS,
            HALF=triton.next_power_of_2(half),
            REST=triton.next_power_of_2(max(rest, 1)),
            num_warps=1 if dim <= 128 else 2,
            **overlap(qkv.device),
        )
    q, k, v = qkv.view(tokens, sum(sizes), dim).split(sizes, 1)
    return q, k, v
