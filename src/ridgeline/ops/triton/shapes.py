"""Launch configurations of the products by the shape of the problem: data, measured once with benchmarks/products.py.

Small weights are bound by the ramp from one kernel to the next: about one program per processor, and weights asked for
before x is there. Large ones are bound by memory alone: large tiles, nothing asked for. Problems without a row here go
to cuBLAS, which was faster on them.
"""

from __future__ import annotations

from dataclasses import dataclass

PROCESSORS = 132
"""Of an H200: programs of one wave. A few more or less change little, so that the split of sums stays data."""
SMALLEST_RUN = 4
"""Blocks of k below which a further split of a sum costs more than it brings."""


@dataclass(frozen=True, slots=True)
class VectorTile:
    """rows: of the weight per program. block: elements of a row at a time."""

    rows: int
    block: int
    warps: int


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """batch, rows, block: tokens, rows of the weight and elements of a row at a time. asked: bytes of each row asked for
    before x is there. splits: programs that share a tile's sum."""

    batch: int
    rows: int
    block: int
    warps: int
    stages: int
    asked: int = 0
    splits: int = 1


@dataclass(frozen=True, slots=True)
class _For:
    """tile serves weights of up to `most` outputs and at least `inputs` inputs."""

    most: int
    inputs: int
    tile: VectorTile | MatrixTile


ANY = 1 << 62

# Tokens -> rows in order; the first that fits serves. More than four tokens are counted up to the next key.
_TILES: dict[int, tuple[_For, ...]] = {
    1: (
        _For(2048, 2048, VectorTile(4, 2048, 8)),
        _For(4096, 0, VectorTile(4, 1024, 4)),
        _For(ANY, 2048, VectorTile(2, 2048, 8)),
        _For(ANY, 0, VectorTile(4, 1024, 4)),
    ),
    2: (
        _For(2048, 2048, VectorTile(4, 2048, 8)),
        _For(16384, 4096, MatrixTile(16, 64, 256, 4, 3, asked=512)),
        _For(16384, 0, VectorTile(4, 512, 2)),
        _For(65536, 0, MatrixTile(16, 64, 128, 4, 5)),
        _For(ANY, 0, MatrixTile(16, 128, 128, 4, 3)),
    ),
    4: (
        _For(2048, 0, VectorTile(2, 1024, 4)),
        _For(16384, 4096, MatrixTile(16, 64, 256, 4, 3, asked=512)),
        _For(16384, 0, MatrixTile(16, 64, 128, 4, 5, asked=512)),
        _For(65536, 0, MatrixTile(16, 64, 128, 4, 5)),
        _For(ANY, 0, MatrixTile(16, 128, 128, 4, 3)),
    ),
    16: (
        _For(2048, 0, MatrixTile(16, 32, 128, 4, 6, asked=512)),
        _For(16384, 4096, MatrixTile(16, 64, 256, 4, 3, asked=512)),
        _For(16384, 0, MatrixTile(16, 64, 128, 4, 5, asked=512)),
        _For(65536, 0, MatrixTile(16, 64, 128, 4, 5)),
        _For(ANY, 0, MatrixTile(16, 128, 128, 4, 3)),
    ),
    32: (
        _For(2048, 0, MatrixTile(32, 32, 128, 4, 6, asked=512)),
        _For(16384, 4096, MatrixTile(32, 64, 256, 4, 4, asked=512)),
        _For(16384, 0, MatrixTile(32, 64, 128, 4, 4, asked=512)),
        _For(ANY, 0, MatrixTile(32, 64, 128, 4, 4)),
    ),
    64: (
        _For(16384, 0, MatrixTile(64, 64, 128, 4, 6, asked=512)),
        _For(ANY, 2048, MatrixTile(64, 128, 128, 8, 4)),
        _For(ANY, 0, MatrixTile(64, 64, 128, 4, 3)),
    ),
    128: (_For(ANY, 2048, MatrixTile(128, 128, 64, 8, 3)),),
}
# Smaller weights than these are cuBLAS's.
_FEWEST_OUTPUTS = {64: 4096, 128: 16384}


def tile_for(tokens: int, n: int, k: int) -> VectorTile | MatrixTile | None:
    """The configuration of x [tokens, k] times a weight [n, k]; None: cuBLAS is faster."""
    key = next((key for key in _TILES if tokens <= key), None)
    if key is None or n < _FEWEST_OUTPUTS.get(key, 0):
        return None
    tile = next((row.tile for row in _TILES[key] if n <= row.most and k >= row.inputs), None)
    return split(tile, n, k) if isinstance(tile, MatrixTile) else tile


def split(tile: MatrixTile, n: int, k: int) -> MatrixTile:
    """With so many programs per tile that one wave is about full."""
    most = max(1, k // (SMALLEST_RUN * tile.block))
    splits = max(1, min(most, PROCESSORS // -(-n // tile.rows)))
    return MatrixTile(tile.batch, tile.rows, tile.block, tile.warps, tile.stages, tile.asked, splits)
