"""Keys and values that the cache stores in 8 or 4 bits (core.spec.KvFormat): the formulas, in PyTorch.

Each vector (a key or a value of one head and token) has its own scales, so that writing a token changes no other one: one scale in
fp8 and int8, one for each 32 elements in int4. Integers are symmetric. Four bits: element 2 i lies in the low half of byte i and
element 2 i + 1 in the high half, each as code + 8.

Sources: scales by token and head as in Atom (Zhao et al. 2024), which has small groups in 4 bits too. KIVI (Liu et al. 2024) scales
keys by channel instead, over a block of tokens, and so has to wait until a block is full.
"""

from __future__ import annotations

import torch

from ridgeline.core.spec import KvFormat
from ridgeline.ops.step import KvView

SMALLEST_SCALE = 2.0**-14
"""The smallest normal float16. Smaller vectors are stored as if their scale were this one."""


def store(vectors: torch.Tensor, kv_format: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """vectors [..., d] -> (stored [..., d or d / 2], scales [..., scales of a vector]) in the types of the format."""
    *lead, dim = vectors.shape
    group = kv_format.group or dim
    groups = vectors.float().reshape(*lead, dim // group, group)
    scales = (groups.abs().amax(-1) / kv_format.largest).clamp(min=SMALLEST_SCALE)
    scales = scales.to(getattr(torch, str(kv_format.scale_dtype)))
    scaled = (groups / scales.float().unsqueeze(-1)).reshape(*lead, dim)
    if kv_format.dtype.startswith("float"):
        return scaled.to(getattr(torch, kv_format.dtype)), scales
    codes = scaled.round()
    if kv_format.bits == 8:
        return codes.to(torch.int8), scales
    pairs = (codes + 8.0).to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def load(stored: torch.Tensor, scales: torch.Tensor, kv_format: KvFormat) -> torch.Tensor:
    """Inverse of `store`: float32 [..., d]."""
    values = stored
    if kv_format.bits == 4:
        values = torch.stack((stored & 15, stored >> 4), -1).flatten(-2).to(torch.int8) - 8
    dim = values.shape[-1]
    return values.float() * scales.float().repeat_interleave(kv_format.group or dim, -1)


def pages_of(view: KvView, pages: torch.Tensor) -> torch.Tensor:
    """Keys and values of some pages, [len(pages), 2, kv_heads, page_tokens, d]: as stored, or in float32 if they have scales."""
    if view.scales is None or view.format is None:
        return view.kv[pages]
    return load(view.kv[pages], view.scales[pages], view.format)


def put(vectors: torch.Tensor, kind: int, view: KvView) -> None:
    """Write vectors [T, kv_heads, d] to view.slots. kind: 0 for keys, 1 for values."""
    page, place = view.slots // view.page_tokens, view.slots % view.page_tokens
    if view.scales is None or view.format is None:
        view.kv[page, kind, :, place] = vectors.to(view.kv.dtype)
        return
    stored, scales = store(vectors, view.format)
    # Bytes, because PyTorch does not index tensors of e4m3 on every device.
    view.kv.view(torch.uint8)[page, kind, :, place] = stored.view(torch.uint8)
    view.scales[page, kind, :, place] = scales
