"""Launch configurations of the integer products by the shape of the problem: data, measured with benchmarks/products_int.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.ops.table import IntMatrix
from ridgeline.ops.triton.shapes import ANY, PROCESSORS, SMALLEST_RUN, MatrixTile


@dataclass(frozen=True, slots=True)
class IntVectorTile:
    """Programs that keep one token's x in registers. rows: of the weight at a time. words: of 4 bytes of a row in one
    tensor, at least 32 for each warp. programs: that share all rows."""

    rows: int
    words: int
    warps: int
    programs: int


WIDEST_VECTOR = 16384
"""Inputs up to which a program keeps x in registers."""
MOST_TOKENS = 640
"""Tokens above which widening the whole matrix first is faster."""
PER_PROCESSOR = 2
"""Programs that share the sums of small matrices, so that each processor has so many: half of them wait for memory."""
MOST_SPLIT = 256
"""Tokens above which parts of sums are as much to write and read as weights."""
WIDE = 16384
"""Outputs above which a matrix fills the chip with large tiles; smaller ones want many programs."""
# Tokens -> (outputs at most, tile) in order; counts without a key of their own take the next key.
_SOME: dict[int, tuple[tuple[int, MatrixTile], ...]] = {
    16: ((WIDE, MatrixTile(16, 64, 256, 4, 4, 512)), (ANY, MatrixTile(16, 128, 128, 8, 5))),
    32: ((WIDE, MatrixTile(32, 64, 256, 4, 3, 512)), (ANY, MatrixTile(32, 128, 128, 8, 5))),
    64: ((WIDE, MatrixTile(64, 64, 128, 4, 4, 512)), (ANY, MatrixTile(64, 128, 128, 8, 4))),
    256: ((WIDE, MatrixTile(128, 64, 128, 4, 3, 512)), (ANY, MatrixTile(128, 128, 128, 8, 3))),
    MOST_TOKENS: ((4096, MatrixTile(128, 64, 128, 4, 3)), (ANY, MatrixTile(256, 128, 128, 8, 3))),
}
# Not swept yet in the kernel's present form: what was best in an earlier one, where registers allow.
# (bits below 8, inputs at most) -> outputs at most, tile, in order; one token.
_ONE: dict[tuple[bool, int], tuple[tuple[int, IntVectorTile], ...]] = {
    (True, 8192): (
        (4096, IntVectorTile(8, 256, 8, 132)),
        (WIDE, IntVectorTile(16, 512, 16, 132)),
        (ANY, IntVectorTile(8, 256, 8, 396)),
    ),
    (True, WIDEST_VECTOR): ((ANY, IntVectorTile(4, 512, 16, 132)),),
    (False, 8192): (
        (4096, IntVectorTile(8, 256, 8, 264)),
        (WIDE, IntVectorTile(4, 256, 8, 396)),
        (ANY, IntVectorTile(2, 128, 4, 528)),
    ),
    (False, WIDEST_VECTOR): ((ANY, IntVectorTile(2, 512, 16, 132)),),
}


def tile_for(tokens: int, matrix: IntMatrix, gate: bool) -> IntVectorTile | MatrixTile | None:
    """The configuration of x [tokens, d_in] times a matrix, gate: with the activation of gate and up as part of it. None:
    the activation is faster by itself, or the matrix is better widened as a whole."""
    if tokens == 1 and matrix.d_in <= WIDEST_VECTOR:
        widest = next(most for packed, most in _ONE if packed == (matrix.bits < 8) and matrix.d_in <= most)
        tiles = _ONE[matrix.bits < 8, widest]
        return next(tile for most, tile in tiles if matrix.out <= most)
    key = next((key for key in _SOME if tokens <= key), None)
    if gate or key is None:
        return None
    return _split(next(tile for most, tile in _SOME[key] if matrix.out <= most), tokens, matrix)


def _split(tile: MatrixTile, tokens: int, matrix: IntMatrix) -> MatrixTile:
    """With so many programs per tile that every processor has PER_PROCESSOR."""
    if tokens > MOST_SPLIT:
        return tile
    most = max(1, matrix.d_in // (SMALLEST_RUN * tile.block))
    tiles = -(-matrix.out // tile.rows) * -(-tokens // tile.batch)
    return replace(tile, splits=max(1, min(most, PER_PROCESSOR * PROCESSORS // tiles)))
