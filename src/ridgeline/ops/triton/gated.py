"""Gate, up and SiLU of many tokens in one kernel (gated.cu), for a card at its power limit: there it is energy that takes time.

Apart they write both products and read them again: for an 8B's chunk of 8,448 tokens 484 MB each way, beside the 242 that are
wanted. One kernel that fetches more than cuBLAS's clusters do loses that again, so here two programs share what they fetch of the
weight. Of the tiles measured at the limit, those of 128 tokens and 2 x 176 outputs did best through the engine
(docs/log/2026-11-23-gate-up-silu-one-kernel.md). Bits are those of the two kernels.
"""

from __future__ import annotations

from ctypes import c_uint32
from functools import cache

import torch

from ridgeline.ops.triton import cuda, pairs
from ridgeline.ops.triton.pairs import STAGES, STEP, THREADS, TOKENS
from ridgeline.ops.triton.shapes import PROCESSORS

FEATURES, SIDES = 88, 2
"""As in gated.cu."""
TILE_FEATURES = SIDES * FEATURES
SHARED = 1024 + 2 * (STAGES * STEP * (TOKENS + 2 * TILE_FEATURES) + TOKENS * TILE_FEATURES)
"""Bytes: what alignment may take, a ring of inputs, gate and up, and a tile of results."""


def saves(tokens: int, features: int) -> bool:
    """As pairs.saves; or if features beyond the product are a 32nd at most, and whole rounds of tiles an eleventh: tokens beyond it
    are zeros, whose products take little energy."""
    wide = -(-features // TILE_FEATURES) * TILE_FEATURES
    sparing = (
        32 * wide <= 33 * features and 11 * pairs.rounds(tokens, features, TILE_FEATURES) <= 12 * tokens * features
    )
    return sparing or pairs.saves(tokens, features, TILE_FEATURES)


@cache
def source() -> str:
    """The text that is compiled."""
    return pairs.text("gated.cu", {"SUM": FEATURES})


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """silu(x gate^T) * (x up^T), both rounded to bfloat16 before: [T, n]; None: not by this kernel.

    x [T, k], weight [2 n, k] gate's rows first, both contiguous bfloat16 at a multiple of 16 bytes, n and k in eights."""
    (tokens, inputs), features = x.shape, weight.shape[0] // 2
    if features % 8 or not pairs.takes(x, weight):
        return None
    # Compiled by the first of so many tokens, which start-up runs, even if these do not fit.
    kernel = pairs.kernel(x.device, source(), "gated_product", SHARED)
    if kernel is None or not saves(tokens, features):
        return None
    out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    maps = (
        cuda.tensor_map(x, (TOKENS, STEP)),
        cuda.tensor_map(weight, (FEATURES, STEP)),
        cuda.tensor_map(out, (TOKENS // 2, FEATURES)),
    )
    sizes = (c_uint32(size) for size in (tokens, features, inputs, pairs.group_of(tokens, inputs)))
    kernel(PROCESSORS, THREADS, *maps, *sizes)
    return out
