"""Launch configurations of the products by the shape of the problem: data, measured once with benchmarks/products.py.

Small weights are bound by the ramp from one kernel to the next: about one program per processor, and weights asked for
before x is there. Large ones are bound by memory alone: large tiles, nothing asked for. Problems without a row here go
to cuBLAS, which was faster on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PROCESSORS = 132
"""Of an H200: programs of one wave. A few more or less change little, so that the split of sums stays data."""
MEMORY = 227 << 10
"""Bytes of shared memory of a processor."""
LARGE = 65536
"""Outputs of a head, which is bound by memory alone."""
LARGEST_RING = 64
"""Tokens above which a weight whose tiles do not divide is cuBLAS's: gate and up of 128 tokens took 96 us for 77 (37,888 x 3,584)
and 124 for 95 (34,816 x 5,120)."""
SMALLEST_RUN = 4
"""Blocks of k below which a further split of a sum costs more than it brings."""


@dataclass(frozen=True, slots=True)
class VectorTile:
    """rows: of the weight per program. block: elements of a row at a time."""

    rows: int
    block: int
    warps: int


@dataclass(frozen=True, slots=True)
class ResidentTile:
    """Programs that keep x in registers. rows: of the weight at a time. programs: that share all rows, each as many.
    stages: of the pipeline that brings them.

    A kernel comes up while the one before it still holds processors. Where more programs fit on one than its share, some
    take more and others stay idle to the end, so the registers or the pipeline's memory must leave room for just so many.
    """

    rows: int
    warps: int
    programs: int
    stages: int = 3


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


Tile = VectorTile | ResidentTile | MatrixTile


@dataclass(frozen=True, slots=True)
class _For:
    """tile serves weights of up to `most` outputs and at least `inputs` inputs; None: not so fast as the alternative."""

    most: int
    inputs: int
    tile: Tile | None


ANY = 1 << 62
WIDEST_RESIDENT = 8192
"""Inputs up to which a program keeps x in registers."""

# Tokens -> rows in order; the first that fits serves. Counts without a key of their own take the next key.
_Table = dict[int, tuple[_For, ...]]
_PLAIN: _Table = {
    1: (
        _For(16384, 16385, VectorTile(8, 2048, 8)),
        _For(2048, 4097, VectorTile(4, 2048, 8)),
        _For(16384, 8192, ResidentTile(2, 16, 132, 3)),
        _For(4096, 4097, ResidentTile(2, 8, 264, 4)),
        _For(4096, 4096, ResidentTile(4, 8, 132, 5)),
        _For(1024, 2048, ResidentTile(4, 4, 264, 3)),
        _For(2048, 2048, VectorTile(4, 2048, 8)),
        _For(4096, 0, VectorTile(4, 1024, 4)),
        _For(ANY, 4096, VectorTile(2, 4096, 8)),
        _For(ANY, 2048, VectorTile(4, 2048, 8)),
        _For(ANY, 0, VectorTile(4, 1024, 4)),
    ),
    2: (
        _For(2048, 4096, VectorTile(4, 2048, 8)),
        _For(2048, 2049, ResidentTile(8, 16, 132)),
        _For(2048, 2048, ResidentTile(4, 4, 528)),
        _For(16384, 4096, None),
        _For(16384, 0, VectorTile(4, 512, 2)),
    ),
    4: (_For(2048, 0, VectorTile(2, 1024, 4)),),
    64: (),
    128: (
        _For(16383, 0, None),
        _For(ANY, 2048, MatrixTile(128, 128, 64, 8, 3)),
    ),
}
# The norm of x as part of the product. Of two tokens a ring behind a norm by itself is faster, most where inputs are no power of
# two: a layer of 2,560 took 75 us for 60, of 3,584 127 for 119, of 1,024 19.5 for 17.
_NORM: _Table = {
    1: (
        _For(ANY, WIDEST_RESIDENT + 1, None),
        _For(ANY, 4097, ResidentTile(2, 16, 264, 4)),
        _For(ANY, 2049, ResidentTile(2, 8, 528, 4)),
        _For(ANY, 2048, ResidentTile(1, 2, 1056, 3)),
        _For(ANY, 0, ResidentTile(8, 2, 1056, 3)),
    ),
}
# The norm, and the activation of gate and up.
_NORM_GATE: _Table = {
    1: (
        _For(ANY, WIDEST_RESIDENT + 1, None),
        _For(ANY, 4097, ResidentTile(2, 16, 264, 4)),
        _For(ANY, 2049, ResidentTile(2, 4, 528, 4)),
        _For(ANY, 2048, ResidentTile(2, 4, 1056, 3)),
        _For(ANY, 0, ResidentTile(4, 2, 1056, 4)),
    ),
}
# The activation alone. Small weights: the product by itself has tiles that fill the chip.
_GATE: _Table = {
    64: (),
    96: (
        _For(16384, 0, None),
        _For(ANY, 0, MatrixTile(128, 256, 64, 8, 4)),
    ),
    128: (
        _For(16384, 0, None),
        _For(ANY, 0, MatrixTile(128, 128, 64, 8, 3)),
    ),
}
_TABLES = {(False, False): _PLAIN, (True, False): _NORM, (False, True): _GATE, (True, True): _NORM_GATE}


def tile_for(tokens: int, n: int, k: int, norm: bool = False, gate: bool = False) -> Tile | None:
    """The configuration of x [tokens, k] times a weight [n, k], with the norm of x and the activation of a merged gate
    and up as part of it. None: they are faster by themselves, or the product is faster in cuBLAS."""
    table = _TABLES[norm, gate]
    rows = table[key] if (key := next((key for key in table if tokens <= key), None)) else ()
    tile = next((row.tile for row in rows if n <= row.most and k >= row.inputs), None)
    if isinstance(tile, MatrixTile):
        return None if tokens > LARGEST_RING and _uneven(tile, n) else split(tile, n, k)
    return _even(tile, k) if isinstance(tile, VectorTile) and n > LARGE else tile


def _even(tile: VectorTile, k: int) -> VectorTile:
    """With smaller blocks, where those of the tile hold more than a seventh beyond k: that costs as if it were there."""
    block = next((size for size in (tile.block, 1024, 512) if 7 * -(-k // size) * size <= 8 * k), tile.block)
    return tile if block >= tile.block else VectorTile(4, block, 4)


def _uneven(tile: MatrixTile, n: int) -> bool:
    """Whether more than a fifth of the chip's places have no tile in the last of several rounds."""
    bytes_held = 2 * tile.stages * tile.block * (tile.batch + tile.rows)
    places, tiles = PROCESSORS * (MEMORY // bytes_held), -(-n // tile.rows)
    rounds = -(-tiles // places)
    return rounds > 1 and 5 * tiles < 4 * rounds * places


def split(tile: MatrixTile, n: int, k: int) -> MatrixTile:
    """With so many programs per tile that one wave is about full."""
    most = max(1, k // (SMALLEST_RUN * tile.block))
    splits = max(1, min(most, PROCESSORS // -(-n // tile.rows)))
    return replace(tile, splits=splits)
