"""Gate, up and SiLU of many tokens in one kernel (gated.cu), for a GPU at its power limit.

Separate kernels write both products and read them again: for an 8B's chunk of 8,448 tokens that is 484 MB each way, beside the 242
MB of the result. A fused kernel that loads more than cuBLAS's clusters do would lose this gain, so two programs share loads of the
weight (pairs). Of the tiles measured at the power limit, 128 tokens and 2 x 176 outputs were fastest in the engine
(docs/log/2026-11-23-gate-up-silu-one-kernel.md). Results are bitwise equal to those of the separate kernels.
"""

from __future__ import annotations

from ctypes import c_uint32
from functools import cache

import torch

from ridgeline.ops.triton import cuda, pairs
from ridgeline.ops.triton.pairs import STAGES, STEP, THREADS, TOKENS
from ridgeline.ops.triton.shapes import PROCESSORS

FEATURES, SIDES = 88, 2
"""Must equal the constants of gated.cu."""
TILE_FEATURES = SIDES * FEATURES
SHARED = 1024 + 2 * (STAGES * STEP * (TOKENS + 2 * TILE_FEATURES) + TOKENS * TILE_FEATURES)
"""Bytes of shared memory: alignment, the ring of inputs, gate and up, and a tile of results."""


def saves(tokens: int, features: int) -> bool:
    """Whether the kernel is faster: see pairs.saves. It also is if padding of features is at most 1/32 and complete waves exceed
    the product by at most 1/11: padding tokens are zeros, whose products take little energy."""
    wide = -(-features // TILE_FEATURES) * TILE_FEATURES
    sparing = (
        32 * wide <= 33 * features and 11 * pairs.rounds(tokens, features, TILE_FEATURES) <= 12 * tokens * features
    )
    return sparing or pairs.saves(tokens, features, TILE_FEATURES)


@cache
def source() -> str:
    """Source text that NVRTC compiles."""
    return pairs.text("gated.cu", {"SUM": FEATURES})


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """silu(x gate^T) * (x up^T) [T, n], with both products rounded to bfloat16 first. None: the kernel does not support the inputs.

    x [T, k], weight [2 n, k] with gate's rows first. Both are contiguous bfloat16 at addresses of 16 bytes. n and k are multiples
    of 8.
    """
    (tokens, inputs), features = x.shape, weight.shape[0] // 2
    if features % 8 or not pairs.takes(x, weight):
        return None
    # The first call with so many tokens compiles, even if its shape does not use the kernel. Start-up makes such a call.
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
