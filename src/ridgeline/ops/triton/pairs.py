"""What kernels of pairs of programs share (pairs.cu): two programs on two processors, each of which fetches a half of what both
multiply by (multicast). For many tokens and a card at its power limit: there it is energy that takes time, and what is fetched once
costs half. Two of them are products, of the same features by different tokens."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from ridgeline.ops.triton import cuda
from ridgeline.ops.triton.launch import is_hopper
from ridgeline.ops.triton.shapes import PROCESSORS

PAIR = 2
"""Programs that fetch together, as in pairs.cu."""
TOKENS, STEP, STAGES, THREADS = 128, 64, 3, 384
"""As in the texts of both products."""
TILE_TOKENS = PAIR * TOKENS
HELD_BYTES = 24 << 20
"""Of inputs that stay in the L2 cache while all features pass: about half of it, as each half keeps its own copy."""
FEWEST, FEWEST_INPUTS = 1536, 1024
"""Tokens, and inputs of a model, below which nothing was measured to gain."""

log = logging.getLogger(__name__)


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the products multiply x [T, k] by weight [n, k]: enough of both, contiguous bfloat16 at a multiple of 16 bytes, k in
    eights."""
    tokens, inputs = x.shape
    if tokens < FEWEST or inputs < FEWEST_INPUTS or x.dtype != torch.bfloat16 or inputs % 8:
        return False
    return all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (x, weight))


def saves(tokens: int, features: int, tile_features: int) -> bool:
    """Whether tiles of `tile_features` features are faster than separate kernels, by 3 to 6 %.

    Padding inside tiles costs as much as the product: at most 1/32 of it. Idle places in the last round of tiles cost little at
    a power limit: at most 1/5, padding included."""
    product = tokens * features
    return (
        32 * tiled(tokens, features, tile_features) <= 33 * product
        and 5 * rounds(tokens, features, tile_features) <= 6 * product
    )


def tiled(tokens: int, features: int, tile_features: int) -> int:
    """Results of all tiles, padding included."""
    return -(-tokens // TILE_TOKENS) * -(-features // tile_features) * TILE_TOKENS * tile_features


def rounds(tokens: int, features: int, tile_features: int) -> int:
    """Results of all rounds of tiles, padding and idle places included."""
    once = PROCESSORS // PAIR * TILE_TOKENS * tile_features
    return -(-tiled(tokens, features, tile_features) // once) * once


def group_of(tokens: int, inputs: int) -> int:
    """Pairs of tiles of tokens whose inputs stay in the cache, in groups of about the same size."""
    pairs, most = -(-tokens // TILE_TOKENS), max(1, HELD_BYTES // (2 * inputs * TILE_TOKENS))
    return -(-pairs // -(-pairs // most))


def text(name: str, sums: Mapping[str, int], **macros: int | str) -> str:
    """A source text of this folder, behind what pairs of programs share (pairs.cu) and its own macros.

    sums: of a thread, for each product that the text names: a macro has no loop, so <prefix>_NAMES and <prefix>_REGISTERS list them
    as wgmma takes them."""
    lines = [f"#define {macro} {value}" for macro, value in macros.items()]
    for prefix, count in sums.items():
        names, registers = (", ".join(form % i for i in range(count)) for form in ("%%%d", '"+f"(d[%d])'))
        lines += [f'#define {prefix}_NAMES "{names}"', f"#define {prefix}_REGISTERS {registers}"]
    folder = Path(__file__).parent
    return "\n".join((*lines, *((folder / filename).read_text() for filename in ("pairs.cu", name))))


@cache
def kernel(device: torch.device, source: str, name: str, shared: int) -> cuda.Kernel | None:
    """See cuda.Kernel; None where it cannot be: what it does is done by others."""
    if not is_hopper(device) or not cuda.available():
        return None
    try:
        return cuda.Kernel(source, name, shared)
    except RuntimeError:
        log.warning("%s runs as several kernels, because its fused kernel cannot be loaded", name, exc_info=True)
        return None
