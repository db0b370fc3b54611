"""Common parts of CUDA kernels that run as clusters of two programs (pairs.cu).

Each program of a cluster loads half of the data that both multiply by, and TMA multicast writes it to both SMs. This serves
products of many tokens on a GPU at its power limit, where energy determines speed and shared loads halve their energy. In two of
the kernels the programs of a cluster multiply the same features by different tokens.
"""

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
"""Programs of a cluster, as in pairs.cu."""
TOKENS, STEP, STAGES, THREADS = 128, 64, 3, 384
"""Must equal the constants of both products' sources."""
TILE_TOKENS = PAIR * TOKENS
L2_BYTES = 24 << 20
"""Bytes of inputs that stay in the L2 cache while all features are computed: about half of it, as each half keeps its own copy."""
FEWEST, FEWEST_INPUTS = 1536, 1024
"""Tokens and k of a product below which no gain was measured."""

log = logging.getLogger(__name__)


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernels support x [T, k] times weight [n, k]: large enough, contiguous bfloat16 at addresses of 16 bytes, k a
    multiple of 8."""
    tokens, inputs = x.shape
    if tokens < FEWEST or inputs < FEWEST_INPUTS or x.dtype != torch.bfloat16 or inputs % 8:
        return False
    return all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in (x, weight))


def saves(tokens: int, features: int, tile_features: int) -> bool:
    """Whether tiles of `tile_features` features are faster than separate kernels, by 3 to 6 %.

    Padding inside tiles costs as much as real elements and may be 1/32 of the product. Idle SMs in the last wave cost little at the
    power limit; with padding they may be 1/5.
    """
    product = tokens * features
    return (
        32 * tiled(tokens, features, tile_features) <= 33 * product
        and 5 * rounds(tokens, features, tile_features) <= 6 * product
    )


def tiled(tokens: int, features: int, tile_features: int) -> int:
    """Elements of all tiles, including padding."""
    return -(-tokens // TILE_TOKENS) * -(-features // tile_features) * TILE_TOKENS * tile_features


def rounds(tokens: int, features: int, tile_features: int) -> int:
    """Elements of all waves of tiles, including padding and idle SMs."""
    once = PROCESSORS // PAIR * TILE_TOKENS * tile_features
    return -(-tiled(tokens, features, tile_features) // once) * once


def group_of(tokens: int, inputs: int) -> int:
    """Token tiles (of pairs) per group, such that a group's inputs stay in L2 and all groups have about the same size."""
    pairs, max_pairs = -(-tokens // TILE_TOKENS), max(1, L2_BYTES // (2 * inputs * TILE_TOKENS))
    return -(-pairs // -(-pairs // max_pairs))


def text(name: str, sums: Mapping[str, int], **macros: int | str) -> str:
    """Source text of a file of this directory, after its macros and pairs.cu.

    sums: accumulator registers per thread, for each wgmma that the source names. Macros have no loops, so <prefix>_NAMES and
    <prefix>_REGISTERS list the registers as wgmma's assembly takes them.
    """
    lines = [f"#define {macro} {value}" for macro, value in macros.items()]
    for prefix, count in sums.items():
        names, registers = (", ".join(form % i for i in range(count)) for form in ("%%%d", '"+f"(d[%d])'))
        lines += [f'#define {prefix}_NAMES "{names}"', f"#define {prefix}_REGISTERS {registers}"]
    folder = Path(__file__).parent
    return "\n".join((*lines, *((folder / filename).read_text() for filename in ("pairs.cu", name))))


@cache
def kernel(device: torch.device, source: str, name: str, shared: int) -> cuda.Kernel | None:
    """Load a kernel (see cuda.Kernel). None: this device or installation cannot, and the caller uses other kernels."""
    if not is_hopper(device) or not cuda.available():
        return None
    try:
        return cuda.Kernel(source, name, shared)
    except RuntimeError:
        log.warning("%s runs as several kernels, because its fused kernel cannot be loaded", name, exc_info=True)
        return None
