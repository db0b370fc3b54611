"""Launch configurations of unquantized products, by problem shape. Measured with benchmarks/products.py.

Small weights are bound by the gap between two kernels. They use about one program per SM and prefetch weights before x is ready.
Large weights are bound by memory bandwidth. They use large tiles and no prefetch. Shapes without an entry use cuBLAS, which was
faster on them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

PROCESSORS = 132
"""SMs of an H200: the number of programs in a wave. The tables keep this value on GPUs with a few more or fewer SMs."""
MEMORY = 227 << 10
"""Bytes of shared memory per SM."""
LARGE = 65536
"""Outputs above which a weight counts as an output head, which is bound by memory bandwidth alone."""
LARGEST_RING = 64
"""Tokens above which cuBLAS runs weights whose last wave of tiles is poorly filled. Gate and up of 128 tokens took 96 us against
77 (37,888 x 3,584) and 124 against 95 (34,816 x 5,120)."""
SMALLEST_RUN = 4
"""Blocks of k per program below which a further split along k costs more than it gains."""


@dataclass(frozen=True, slots=True)
class VectorTile:
    """rows: weight rows per program. block: elements of a row per iteration."""

    rows: int
    block: int
    warps: int


@dataclass(frozen=True, slots=True)
class ResidentTile:
    """Programs that keep x in registers. rows: weight rows per iteration. programs: grid size; the programs share all rows
    equally. stages: stages of the load pipeline.

    A kernel starts while its predecessor still occupies SMs. If more programs fit on an SM than its share, some SMs take more and
    others stay idle until the end. The register or shared-memory use must therefore limit an SM to exactly its share.
    """

    rows: int
    warps: int
    programs: int
    stages: int = 3


@dataclass(frozen=True, slots=True)
class MatrixTile:
    """batch, rows, block: tokens, weight rows and elements of a row per tile. prefetch_bytes: of each row, prefetched before x is
    ready. splits: programs that share a tile's sum (split-K)."""

    batch: int
    rows: int
    block: int
    warps: int
    stages: int
    prefetch_bytes: int = 0
    splits: int = 1


Tile = VectorTile | ResidentTile | MatrixTile


@dataclass(frozen=True, slots=True)
class _For:
    """`tile` applies to weights of up to `max_outputs` outputs and at least `min_inputs` inputs. None: others are faster."""

    max_outputs: int
    min_inputs: int
    tile: Tile | None


ANY = 1 << 62
WIDEST_RESIDENT = 8192
"""Largest k for which a program keeps x in registers."""

# Token count -> entries in order of preference; the first that matches is used. Other token counts use the next larger key.
_Table = dict[int, tuple[_For, ...]]
_LINEAR: _Table = {
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
}
# The product includes the norm of x. For two tokens a separate norm before a ring kernel is faster, most clearly if k is no power
# of two: a layer with k = 2,560 took 75 us against 60, 3,584 took 127 against 119, 1,024 took 19.5 against 17.
_NORM: _Table = {
    1: (
        _For(ANY, WIDEST_RESIDENT + 1, None),
        _For(ANY, 4097, ResidentTile(2, 16, 264, 4)),
        _For(ANY, 2049, ResidentTile(2, 8, 528, 4)),
        _For(ANY, 2048, ResidentTile(1, 2, 1056, 3)),
        _For(ANY, 0, ResidentTile(8, 2, 1056, 3)),
    ),
}
# The product includes the norm of x and the activation of gate and up.
_NORM_GATE: _Table = {
    1: (
        _For(ANY, WIDEST_RESIDENT + 1, None),
        _For(ANY, 4097, ResidentTile(2, 16, 264, 4)),
        _For(ANY, 2049, ResidentTile(2, 4, 528, 4)),
        _For(ANY, 2048, ResidentTile(2, 4, 1056, 3)),
        _For(ANY, 0, ResidentTile(4, 2, 1056, 4)),
    ),
}
# The product includes the activation only. For small weights the product without activation has tiles that fill the GPU better.
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
_TABLES = {(False, False): _LINEAR, (True, False): _NORM, (False, True): _GATE, (True, True): _NORM_GATE}


def tile_for(tokens: int, n: int, k: int, norm: bool = False, gate: bool = False) -> Tile | None:
    """Configuration of x [tokens, k] times a weight [n, k]. norm, gate: the kernel also applies the norm of x and the activation
    of a merged gate and up. None: separate kernels or cuBLAS are faster."""
    table = _TABLES[norm, gate]
    rows = table[key] if (key := next((key for key in table if tokens <= key), None)) else ()
    tile = next((row.tile for row in rows if n <= row.max_outputs and k >= row.min_inputs), None)
    if isinstance(tile, MatrixTile):
        return None if tokens > LARGEST_RING and _wastes_last_wave(tile, n) else split(tile, n, k)
    return _with_fitting_block(tile, k) if isinstance(tile, VectorTile) and n > LARGE else tile


def _with_fitting_block(tile: VectorTile, k: int) -> VectorTile:
    """Use smaller blocks if the tile's blocks cover more than 8/7 of k, because padding costs as much as real elements."""
    block = next((size for size in (tile.block, 1024, 512) if 7 * -(-k // size) * size <= 8 * k), tile.block)
    return tile if block >= tile.block else VectorTile(4, block, 4)


def _wastes_last_wave(tile: MatrixTile, n: int) -> bool:
    """Whether the last of several waves leaves more than a fifth of all waves' program slots without a tile."""
    bytes_held = 2 * tile.stages * tile.block * (tile.batch + tile.rows)
    places, tiles = PROCESSORS * (MEMORY // bytes_held), -(-n // tile.rows)
    rounds = -(-tiles // places)
    return rounds > 1 and 5 * tiles < 4 * rounds * places


def split(tile: MatrixTile, n: int, k: int) -> MatrixTile:
    """Set the number of programs per tile so that about one wave is filled."""
    max_splits = max(1, k // (SMALLEST_RUN * tile.block))
    splits = max(1, min(max_splits, PROCESSORS // -(-n // tile.rows)))
    return replace(tile, splits=splits)
