"""Launch configurations of products in 8 bits, e4m3 and integers, by the shape of the problem: data, measured with
benchmarks/products_fp8.py and benchmarks/products_w8a8.py."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from ridgeline.ops.triton.shapes import PROCESSORS, ResidentTile


@dataclass(frozen=True, slots=True)
class Vector:
    """Launch of the matrix-vector kernel. rows: output channels of a program; inputs: of one turn of its loop."""

    rows: int
    inputs: int
    warps: int


@dataclass(frozen=True, slots=True)
class Small:
    """Launch of the small product. outputs, inputs: of a tile; programs: how many are wanted, by splitting the inputs. asked:
    bytes of each row of weights asked for before x is there, if a program takes so many. exact: see PROMOTE in the kernel."""

    outputs: int
    inputs: int
    programs: int
    warps: int
    stages: int
    asked: int = 512
    exact: bool = False


WIDE = 16384
"""Outputs above which a matrix fills the chip with large tiles; smaller ones want many programs."""
# Measured with benchmarks/products_fp8.py --sweep.
VECTOR = Vector(1, 2048, 4)
"""Of one token that fp8_vector does not take."""
# (most outputs, fewest inputs) -> launch of fp8_vector; the first that fits serves. Measured in whole steps of an 8B.
RESIDENT = (
    (1 << 62, 4097, ResidentTile(2, 8, 264, 4)),
    (4096, 0, ResidentTile(8, 8, 132, 5)),
    (WIDE, 0, ResidentTile(4, 4, 264, 4)),
    (1 << 62, 0, ResidentTile(4, 4, 528, 4)),
)
MANY = Small(64, 128, 132, 4, 6)
# Tokens of a tile -> launches for up to WIDE outputs and for more; None: cuBLAS is faster.
SMALL: dict[int, tuple[Small, Small | None]] = {
    16: (MANY, Small(128, 256, 264, 8, 3)),
    32: (MANY, Small(128, 128, 132, 8, 4)),
    64: (MANY, MANY),
    128: (MANY, None),
}
LARGEST_SMALL = 128
"""Tokens up to which the small product serves; also the largest tile of tokens."""


@dataclass(frozen=True, slots=True)
class Large:
    """Launch of the large product: tokens, outputs and inputs of a tile. band: tiles of tokens that are neighbours in time,
    so that they read the same weights from the cache."""

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    band: int = 16


# Measured with benchmarks/products_w8a8.py --sweep.
INT_VECTOR = Vector(2, 4096, 4)
LARGE = Large(128, 128, 128, 4, 3)
"""Two programs share a processor, so that one multiplies while the other stores."""
LONELY = Large(128, 128, 128, 8, 4)
"""Where every program has a processor for itself."""


def resident_for(outputs: int, inputs: int) -> ResidentTile:
    """The launch of fp8_vector."""
    return next(tile for most, least, tile in RESIDENT if outputs <= most and inputs >= least)


def small_for(tokens: int, outputs: int) -> Small | None:
    """The launch of the small product for so many tokens; None: more than it is good for."""
    if tokens > LARGEST_SMALL:
        return None
    return SMALL[max(16, triton.next_power_of_2(tokens))][outputs > WIDE]


def large_for(tokens: int, outputs: int) -> Large:
    """The launch of the large product of integers."""
    tiles = triton.cdiv(tokens, LONELY.tokens) * triton.cdiv(outputs, LONELY.outputs)
    return LONELY if tiles <= PROCESSORS else LARGE
