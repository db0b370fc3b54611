"""q, k and v of many tokens in one kernel (heads.cu): their product, the turn of q's and k's heads, and the way of k and v into the
pages, for a card at its power limit: there it is energy that takes time.

Apart they write what the product makes, read it again, and write all of it a second time and k and v a third: for an 8B's chunk of
8,448 tokens 329 MB, of which 104 are wanted. Bits are those of the two kernels.
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_void_p
from functools import cache

import torch

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import QkvShape
from ridgeline.ops.triton import cuda, pairs
from ridgeline.ops.triton.pairs import PAIR, STAGES, STEP, THREADS, TOKENS
from ridgeline.ops.triton.shapes import PROCESSORS

WIDE, NARROW, MULTIPLIERS = 256, 128, 8
"""As in heads.cu."""
TILE_FEATURES = WIDE + NARROW
ROWS_OF_WARP, SPARE, BARRIER = 16, 16, 8
"""Rows that a warp stages at a time; bytes behind each, so that eight of them lie in different banks; bytes of a barrier."""
HEAD_SIZES = (64, 128)


class Target(ctypes.Structure):
    """Where heads go, as in heads.cu: rows of a head's size each."""

    _fields_ = (
        ("q", c_void_p),
        ("cache", c_void_p),
        ("slots", c_void_p),
        ("queries", c_uint32),
        ("keys", c_uint32),
        ("page_tokens", c_uint32),
        ("page_rows", c_uint32),
        ("kind_rows", c_uint32),
        ("head_rows", c_uint32),
    )


def shared(head: int) -> int:
    """Bytes: a ring of inputs, a head of each warp's tokens, and the ring's barriers."""
    return (
        2 * STAGES * STEP * (TOKENS + TILE_FEATURES)
        + MULTIPLIERS * ROWS_OF_WARP * (2 * head + SPARE)
        + 2 * STAGES * BARRIER
    )


@cache
def source(head: int) -> str:
    """The text that is compiled."""
    return pairs.text("heads.cu", {"WIDE": WIDE // 2, "NARROW": NARROW // 2}, HEAD_SIZE=head)


def _knows(shape: QkvShape, view: KvView) -> bool:
    """Whether these heads and pages are what the kernel writes: whole heads turn, rows of the cache lie at multiples of their
    size."""
    size, kv = shape.head_dim, view.kv
    return (
        size in HEAD_SIZES
        and shape.cos_sin.shape[2] * 2 == size
        and shape.q_norm is None
        and shape.k_norm is None
        and shape.cos_sin.dtype == torch.float32
        and shape.cos_sin.is_contiguous()
        and kv.dtype == torch.bfloat16
        and not any(stride % size for stride in kv.stride()[:3])
        and kv.stride(3) == size
        and not (kv.data_ptr() | shape.cos_sin.data_ptr()) % 16
    )


def turned_heads(
    x: torch.Tensor, weight: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs
) -> torch.Tensor | None:
    """q [T, Hq, d] of qkv_write(x weight^T, shape, view, step), with k and v in their pages; None: not by this kernel.

    x [T, inputs], weight [(Hq + 2 Hkv) * d, inputs], both contiguous bfloat16 at a multiple of 16 bytes."""
    (tokens, inputs), features, size = x.shape, weight.shape[0], shape.head_dim
    if not pairs.takes(x, weight) or not _knows(shape, view):
        return None
    # Compiled by the first of so many tokens, which start-up rehearses, even if these do not fit.
    kernel = pairs.kernel(x.device, source(size), "turned_heads", shared(size))
    if kernel is None or not pairs.saves(tokens, features, TILE_FEATURES):
        return None
    q = torch.empty((tokens, shape.n_heads, size), dtype=x.dtype, device=x.device)
    page, kind, head = (stride // size for stride in view.kv.stride()[:3])
    target = Target(
        q.data_ptr(),
        view.kv.data_ptr(),
        view.slots.data_ptr(),
        shape.n_heads,
        shape.n_kv_heads,
        view.page_tokens,
        page,
        kind,
        head,
    )
    kernel(
        PROCESSORS,
        THREADS,
        cuda.tensor_map(x, (TOKENS, STEP)),
        cuda.tensor_map(weight, (TILE_FEATURES // PAIR, STEP)),
        target,
        *(c_void_p(one.data_ptr()) for one in (shape.cos_sin, step.position)),
        *(c_uint32(one) for one in (tokens, features, inputs, pairs.group_of(tokens, inputs))),
    )
    return q
