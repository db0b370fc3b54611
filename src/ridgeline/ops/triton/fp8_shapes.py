"""Launch configurations of 8-bit products (e4m3 and integers), by problem shape. Measured with benchmarks/products_fp8.py and
benchmarks/products_w8a8.py."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from ridgeline.ops.triton.shapes import PROCESSORS, ResidentTile


@dataclass(frozen=True, slots=True)
class Vector:
    """Launch of the matrix-vector kernel. rows: output channels per program; inputs: per iteration."""

    rows: int
    inputs: int
    warps: int


@dataclass(frozen=True, slots=True)
class Small:
    """Launch of the split-K product. outputs, inputs: of a tile; programs: wanted grid size, reached by splitting the inputs.
    prefetch_bytes: of each weight row, if a program reads so many. exact: see PROMOTE in fp8._small_kernel."""

    outputs: int
    inputs: int
    programs: int
    warps: int
    stages: int
    prefetch_bytes: int = 512
    exact: bool = False


LARGE_OUTPUTS = 16384
"""Outputs above which large tiles fill the GPU. Smaller matrices need many programs."""
# Measured with benchmarks/products_fp8.py --sweep.
VECTOR = Vector(1, 2048, 4)
"""For one token that fp8_vector does not support."""
# (maximum outputs, minimum inputs) -> launch of fp8_vector; the first match is used. Measured in complete steps of an 8B.
RESIDENT = (
    (1 << 62, 4097, ResidentTile(2, 8, 264, 4)),
    (4096, 0, ResidentTile(8, 8, 132, 5)),
    (LARGE_OUTPUTS, 0, ResidentTile(4, 4, 264, 4)),
    (1 << 62, 0, ResidentTile(4, 4, 528, 4)),
)
MANY = Small(64, 128, 132, 4, 6)
# Tokens of a tile -> launches for up to LARGE_OUTPUTS outputs and for more; None: cuBLAS is faster.
SMALL: dict[int, tuple[Small, Small | None]] = {
    16: (MANY, Small(128, 256, 264, 8, 3)),
    32: (MANY, Small(128, 128, 132, 8, 4)),
    64: (MANY, MANY),
    128: (MANY, None),
}
LARGEST_SMALL = 128
"""Token count up to which the split-K product runs; also its largest token tile."""


@dataclass(frozen=True, slots=True)
class Large:
    """Launch of the large product: tokens, outputs and inputs of a tile. band: token tiles that run consecutively, so that they
    read the same weights from L2."""

    tokens: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    band: int = 16


# Measured with benchmarks/products_w8a8.py --sweep.
INT_VECTOR = Vector(2, 4096, 4)
LARGE = Large(128, 128, 128, 4, 3)
"""Two programs share an SM, so that one multiplies while the other stores."""
LONELY = Large(128, 128, 128, 8, 4)
"""Used if every program has an SM to itself."""


def resident_for(outputs: int, inputs: int) -> ResidentTile:
    """Launch of fp8_vector."""
    return next(tile for max_outputs, min_inputs, tile in RESIDENT if outputs <= max_outputs and inputs >= min_inputs)


def small_for(tokens: int, outputs: int) -> Small | None:
    """Launch of the split-K product. None: too many tokens for it."""
    if tokens > LARGEST_SMALL:
        return None
    return SMALL[max(16, triton.next_power_of_2(tokens))][outputs > LARGE_OUTPUTS]


def large_for(tokens: int, outputs: int) -> Large:
    """Launch of the large integer product."""
    tiles = triton.cdiv(tokens, LONELY.tokens) * triton.cdiv(outputs, LONELY.outputs)
    return LONELY if tiles <= PROCESSORS else LARGE
