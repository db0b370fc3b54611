"""Gate, up and SiLU of many tokens in one kernel (gated.cu), for a card at its power limit: there it is energy that takes time.

Apart they write both products and read them again: for an 8B's chunk of 8,448 tokens 484 MB each way, beside the 242 that are
wanted. One kernel that fetches more than cuBLAS's clusters do loses that again, so here two programs share what they fetch of the
weight. Of the tiles measured at the limit, those of 128 tokens and 2 x 176 outputs did best through the engine (docs/log.md). Bits
are those of the two kernels.
"""

from __future__ import annotations

import logging
from ctypes import c_uint32
from functools import cache

import torch

from ridgeline.ops.triton import cuda
from ridgeline.ops.triton.launch import is_hopper
from ridgeline.ops.triton.shapes import PROCESSORS

# As in gated.cu.
TOKENS, FEATURES, SIDES, STEP, STAGES, PAIR = 128, 88, 2, 64, 3, cuda.PAIR
TILE_TOKENS, TILE_FEATURES, THREADS = PAIR * TOKENS, SIDES * FEATURES, 384
SHARED = 1024 + 2 * (STAGES * STEP * (TOKENS + 2 * TILE_FEATURES) + TOKENS * TILE_FEATURES)
"""Bytes: what alignment may take, a ring of inputs, gate and up, and a tile of results."""
HELD_BYTES = 24 << 20
"""Of inputs that stay in the L2 cache while all features pass: about half of it, as each half keeps its own copy."""
FEWEST, FEWEST_INPUTS = 1536, 1024
"""Tokens, and inputs of a model, below which nothing was measured to gain."""

log = logging.getLogger(__name__)


def saves(tokens: int, features: int) -> bool:
    """Whether it takes less than two kernels, as it does by 3 to 6 %: what tiles hold beyond the product costs as much as the
    product, so a 32nd at most; places without a tile in the last round cost little, so a fifth at most with these."""
    tiles = -(-tokens // TILE_TOKENS) * -(-features // TILE_FEATURES)
    clusters, size = PROCESSORS // PAIR, TILE_TOKENS * TILE_FEATURES
    held, rounds = tiles * size, -(-tiles // clusters) * clusters * size
    return 32 * held <= 33 * tokens * features and 5 * rounds <= 6 * tokens * features


def group_of(tokens: int, inputs: int) -> int:
    """Pairs of tiles of tokens whose inputs stay in the cache, in groups of about the same size."""
    pairs, most = -(-tokens // TILE_TOKENS), max(1, HELD_BYTES // (2 * inputs * TILE_TOKENS))
    return -(-pairs // -(-pairs // most))


def source() -> str:
    """The text that is compiled."""
    return cuda.text("gated.cu", {"SUM": FEATURES})


@cache
def _kernel(device: torch.device) -> cuda.Kernel | None:
    if not is_hopper(device) or not cuda.available():
        return None
    try:
        return cuda.Kernel(source(), "gated_product", SHARED)
    except RuntimeError:
        log.warning("gate, up and their activation run as two kernels", exc_info=True)
        return None


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """silu(x gate^T) * (x up^T), both rounded to bfloat16 before: [T, n]; None: not by this kernel.

    x [T, k], weight [2 n, k] gate's rows first, both contiguous bfloat16 at a multiple of 16 bytes, n and k in eights."""
    (tokens, inputs), features = x.shape, weight.shape[0] // 2
    if tokens < FEWEST or inputs < FEWEST_INPUTS or x.dtype != torch.bfloat16 or (inputs | features) % 8:
        return None
    if any(one.data_ptr() % 16 or not one.is_contiguous() for one in (x, weight)):
        return None
    # Compiled by the first of so many tokens, which start-up rehearses, even if these do not fit.
    if (kernel := _kernel(x.device)) is None or not saves(tokens, features):
        return None
    out = torch.empty((tokens, features), dtype=x.dtype, device=x.device)
    maps = (
        cuda.tensor_map(x, (TOKENS, STEP)),
        cuda.tensor_map(weight, (FEATURES, STEP)),
        cuda.tensor_map(out, (TOKENS // 2, FEATURES)),
    )
    sizes = (c_uint32(one) for one in (tokens, features, inputs, group_of(tokens, inputs)))
    kernel(PROCESSORS, THREADS, *maps, *sizes)
    return out
