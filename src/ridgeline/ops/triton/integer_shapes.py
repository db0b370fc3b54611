"""Launch configurations of the integer products by the shape of the problem: data, measured with benchmarks/products_int.py."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.ops.table import IntMatrix
from ridgeline.ops.triton.shapes import ANY, PROCESSORS, SMALLEST_RUN, MatrixTile


@dataclass(frozen=True, slots=True)
class IntVectorTile:
    """Programs that keep x of a few tokens and walk over rows. rows: of the weight at a time. programs: that share all
    rows."""

    rows: int
    warps: int
    programs: int


MOST_VECTORS = 4
"""Tokens above which products of large tiles are as fast."""
WIDEST_VECTORS = 65536
"""Inputs of all tokens, their number rounded up to a power of two, up to which a program keeps x in shared memory."""
MOST_TOKENS = 640
"""Tokens above which widening the whole matrix first is faster."""
WIDE = 16384
"""Outputs above which a matrix fills the chip with large tiles; smaller ones want many programs."""
_WIDER = 8192
# Bits below 8 or not -> tokens -> (inputs at most, outputs at most, tile) in order; other counts take the next.
_FEW: dict[bool, dict[int, tuple[tuple[int, int, IntVectorTile], ...]]] = {
    True: {
        1: (
            (_WIDER, 4096, IntVectorTile(4, 4, 528)),
            (_WIDER, WIDE, IntVectorTile(8, 4, 396)),
            (_WIDER, ANY, IntVectorTile(4, 2, 528)),
            (ANY, ANY, IntVectorTile(8, 16, 132)),
        ),
        2: ((_WIDER, ANY, IntVectorTile(8, 8, 264)), (ANY, ANY, IntVectorTile(4, 16, 132))),
        MOST_VECTORS: ((_WIDER, ANY, IntVectorTile(8, 8, 264)), (ANY, ANY, IntVectorTile(8, 16, 132))),
    },
    False: {
        1: (
            (_WIDER, 4096, IntVectorTile(8, 4, 264)),
            (_WIDER, WIDE, IntVectorTile(4, 4, 396)),
            (_WIDER, ANY, IntVectorTile(4, 4, 528)),
            (ANY, ANY, IntVectorTile(2, 8, 264)),
        ),
        2: ((_WIDER, ANY, IntVectorTile(4, 8, 264)), (ANY, ANY, IntVectorTile(4, 16, 132))),
        MOST_VECTORS: ((_WIDER, ANY, IntVectorTile(8, 8, 264)), (ANY, ANY, IntVectorTile(8, 16, 132))),
    },
}
# As above -> (programs for a processor that a split of sums makes at least, (outputs at most, tile) in order).
_SOME: dict[bool, dict[int, tuple[int, tuple[tuple[int, MatrixTile], ...]]]] = {
    True: {
        16: (3, ((WIDE, MatrixTile(16, 64, 128, 4, 3, 512)), (ANY, MatrixTile(32, 64, 128, 4, 4, 512)))),
        32: (3, ((ANY, MatrixTile(32, 64, 128, 4, 4, 512)),)),
        64: (1, ((WIDE, MatrixTile(64, 64, 128, 4, 4, 512)), (ANY, MatrixTile(64, 128, 128, 8, 3, 512)))),
        128: (1, ((WIDE, MatrixTile(128, 64, 128, 4, 3, 512)), (ANY, MatrixTile(128, 128, 128, 8, 3, 512)))),
        256: (1, ((WIDE, MatrixTile(128, 64, 128, 4, 3)), (ANY, MatrixTile(128, 128, 128, 8, 3)))),
        MOST_TOKENS: (0, ((4096, MatrixTile(128, 64, 128, 4, 3)), (ANY, MatrixTile(128, 128, 128, 8, 3)))),
    },
    False: {
        16: (2, ((WIDE, MatrixTile(16, 64, 256, 4, 3, 512)), (ANY, MatrixTile(32, 128, 128, 8, 4, 512)))),
        32: (2, ((WIDE, MatrixTile(32, 64, 128, 4, 4, 512)), (ANY, MatrixTile(32, 128, 128, 8, 4, 512)))),
        64: (1, ((WIDE, MatrixTile(64, 64, 128, 4, 4, 512)), (ANY, MatrixTile(64, 128, 128, 8, 3, 512)))),
        128: (1, ((ANY, MatrixTile(128, 64, 128, 4, 3, 512)),)),
        256: (1, ((ANY, MatrixTile(128, 64, 128, 4, 3)),)),
        MOST_TOKENS: (0, ((ANY, MatrixTile(128, 64, 128, 4, 3)),)),
    },
}


def tile_for(tokens: int, matrix: IntMatrix, gate: bool) -> IntVectorTile | MatrixTile | None:
    """The configuration of x [tokens, d_in] times a matrix, gate: with the activation of gate and up as part of it. None:
    the activation is faster by itself, or the matrix is better widened as a whole."""
    few, some = _FEW[matrix.bits < 8], _SOME[matrix.bits < 8]
    columns = next((count for count in few if tokens <= count), None)
    if columns is not None and columns * matrix.d_in <= WIDEST_VECTORS:
        return next(tile for most, outputs, tile in few[columns] if matrix.d_in <= most and matrix.out <= outputs)
    key = next((key for key in some if tokens <= key), None)
    if gate or key is None:
        return None
    least, tiles = some[key]
    return _split(next(tile for most, tile in tiles if matrix.out <= most), least, tokens, matrix)


def _split(tile: MatrixTile, least: int, tokens: int, matrix: IntMatrix) -> MatrixTile:
    """With so many programs per tile that every processor has `least`."""
    most = max(1, matrix.d_in // (SMALLEST_RUN * tile.block))
    tiles = -(-matrix.out // tile.rows) * -(-tokens // tile.batch)
    return replace(tile, splits=max(1, min(most, -(-least * PROCESSORS // tiles))))
