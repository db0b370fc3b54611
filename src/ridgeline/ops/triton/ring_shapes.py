"""Launch configurations of ring kernels, by problem shape. Measured as in shapes, and in complete steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.ops.triton.shapes import ANY, PROCESSORS

SHORTEST_SPLIT = 2048
"""Inputs below which no sum is split: the ring holds most of a weight row before x is ready."""
SMALLEST_PART = 512
"""Inputs per program below which a further split along k costs more than it gains."""
LARGEST_SPLIT_TOKENS = 192
"""Token count above which any split along k costs more than it gains."""
SMALL = 1 << 23
"""Elements of a weight below which it counts as small."""
THIRDS, LONG = (4225, 5632), 8192
"""Outputs for which tiles of 64 rows leave a third of the SMs idle and cannot be halved. Three programs per tile of 128 rows fill
the GPU. LONG: inputs from which this is faster."""


@dataclass(frozen=True, slots=True)
class RingTile:
    """batch, rows, block: tokens, weight rows and elements of a row per tile. stages: blocks in the ring buffer. registers: per
    thread at launch. split: programs that share a tile's sum (split-K). programs: persistent programs that share all tiles if split
    is 1, at most one per tile."""

    batch: int
    rows: int
    block: int
    warps: int
    stages: int
    registers: int
    split: int = 1
    programs: int = 1 << 30


@dataclass(frozen=True, slots=True)
class _For:
    """`tile` applies to weights of up to `max_outputs` outputs and `max_elements` elements, and of at least `min_outputs` outputs
    and `min_inputs` inputs. None: the kernels of shapes are faster."""

    max_outputs: int
    tile: RingTile | None
    max_elements: int = ANY
    min_outputs: int = 0
    min_inputs: int = 0

    def holds(self, n: int, k: int) -> bool:
        return self.min_outputs <= n <= self.max_outputs and n * k <= self.max_elements and k >= self.min_inputs


# Token count -> entries in order, as in shapes. A ring fills an SM's shared memory: with half of it, two programs would share one
# SM while other SMs are idle. Up to 16 tokens the product alone gains nothing but complete steps do, because the ring fills while
# the kernels between two products run. Above 64 tokens x is as large as the weights of a tile, and both come through L2: a step of
# an 8B gained 0.5 % at 128 tokens and 0.7 % at 256. Small weights still gain there, because they wait mainly for the previous
# kernel. From 97 tokens on, down and output projections gain too (2 % of a step of an 8B at 128); at 96 they lose 2 %.
_LINEAR: dict[int, tuple[_For, ...]] = {
    1: (),
    8: (
        _For(THIRDS[1], RingTile(8, 128, 128, 4, 6, 128), min_outputs=THIRDS[0], min_inputs=LONG),
        _For(16384, RingTile(8, 64, 128, 4, 12, 96)),
    ),
    16: (
        _For(THIRDS[1], RingTile(16, 128, 128, 4, 6, 128), min_outputs=THIRDS[0], min_inputs=LONG),
        _For(16384, RingTile(16, 64, 128, 4, 10, 96)),
    ),
    32: (
        _For(THIRDS[1], RingTile(32, 128, 128, 4, 5, 128), min_outputs=THIRDS[0], min_inputs=LONG),
        _For(16384, RingTile(32, 64, 128, 4, 8, 96)),
        _For(ANY, RingTile(32, 128, 128, 4, 5, 128)),
    ),
    64: (
        _For(THIRDS[1], RingTile(64, 128, 128, 4, 4, 168), min_outputs=THIRDS[0], min_inputs=LONG),
        _For(16384, RingTile(64, 64, 128, 4, 6, 128)),
        _For(ANY, RingTile(64, 128, 128, 4, 4, 168, programs=PROCESSORS)),
    ),
    96: (_For(16384, RingTile(64, 64, 128, 4, 6, 128, programs=PROCESSORS), SMALL),),
    128: (
        _For(16384, RingTile(64, 64, 128, 4, 6, 128, programs=PROCESSORS), SMALL),
        _For(4096, RingTile(128, 64, 128, 4, 4, 168)),
    ),
    192: (_For(16384, RingTile(64, 64, 128, 4, 6, 128, programs=PROCESSORS), SMALL),),
    256: (
        _For(4095, RingTile(64, 64, 128, 4, 6, 128, programs=PROCESSORS), SMALL),
        _For(16384, RingTile(128, 64, 128, 4, 4, 168, programs=PROCESSORS), SMALL),
    ),
}
# With the activation of a merged gate and up, for large weights only: those of a 0.6B have too few tiles. At 192 tokens a 3B lost
# 10 % of a step. Above 64 tokens wide.plan_for takes precedence, and these entries serve the remaining shapes.
_GATE: dict[int, tuple[_For, ...]] = {
    1: (),
    8: (
        _For(16384, None, SMALL),
        _For(ANY, RingTile(8, 128, 128, 4, 6, 128, programs=PROCESSORS)),
    ),
    16: (
        _For(16384, None, SMALL),
        _For(ANY, RingTile(16, 128, 128, 4, 6, 128, programs=PROCESSORS)),
    ),
    32: (
        _For(16384, None, SMALL),
        _For(ANY, RingTile(32, 128, 128, 4, 5, 128)),
    ),
    64: (
        _For(16384, None, SMALL),
        _For(ANY, RingTile(64, 128, 128, 4, 4, 168, programs=PROCESSORS)),
    ),
    96: (_For(16384, RingTile(128, 128, 64, 8, 6, 128, programs=PROCESSORS), min_outputs=16384),),
    128: (
        _For(16384, None, SMALL),
        _For(16384, RingTile(128, 128, 64, 8, 6, 128, programs=PROCESSORS)),
    ),
    256: (_For(16384, RingTile(128, 128, 64, 8, 6, 128, programs=PROCESSORS), SMALL),),
}
# 8-bit values, in blocks of two products (see ring._promoted_sums). cuBLAS runs gate and up of 65 to 128 tokens: every ring tile
# that fits into registers reads x too often.
_LINEAR8: dict[int, tuple[_For, ...]] = {
    1: (),
    16: (_For(ANY, RingTile(16, 64, 256, 4, 10, 96)),),
    32: (_For(ANY, RingTile(32, 64, 256, 4, 8, 128)),),
    64: (_For(ANY, RingTile(64, 64, 256, 4, 6, 128)),),
    128: (
        _For(4096, RingTile(64, 64, 256, 4, 6, 128), 2 * SMALL),
        _For(16384, RingTile(128, 64, 256, 4, 4, 168)),
    ),
}
_GATE8: dict[int, tuple[_For, ...]] = {
    1: (),
    16: (_For(ANY, RingTile(16, 128, 128, 4, 11, 128, programs=PROCESSORS)),),
    32: (_For(ANY, RingTile(32, 128, 128, 4, 10, 128, programs=PROCESSORS)),),
    64: (_For(ANY, RingTile(64, 128, 128, 4, 8, 168, programs=PROCESSORS)),),
    128: (),
}


def ring_for(tokens: int, n: int, k: int, gate: bool = False) -> RingTile | None:
    """Configuration of x [tokens, k] times a weight [n, k]. gate: the kernel also applies the activation of a merged gate and up.
    None: other kernels are faster."""
    return _choice(_GATE if gate else _LINEAR, tokens, n, k)


def ring8_for(tokens: int, n: int, k: int, gate: bool = False) -> RingTile | None:
    """Configuration for 8-bit floats or integers; see ring_for."""
    return _choice(_GATE8 if gate else _LINEAR8, tokens, n, k)


def _choice(table: dict[int, tuple[_For, ...]], tokens: int, n: int, k: int) -> RingTile | None:
    rows = table[key] if (key := next((key for key in table if tokens <= key), None)) else ()
    tile = next((row.tile for row in rows if row.holds(n, k)), None)
    return None if tile is None else _split(tile, tokens, n, k)


def _split(tile: RingTile, tokens: int, n: int, k: int) -> RingTile:
    """Set the number of programs per tile so that about one wave is filled. The split is a power of two, or three where that fills
    the wave better than two or nearly as well as four. Each program writes the results of at least one token."""
    tiles = -(-n // tile.rows) * -(-tokens // tile.batch)
    split = 1
    if tokens <= LARGEST_SPLIT_TOKENS and k >= SHORTEST_SPLIT:
        while 2 * split <= tile.batch and 2 * split * tiles <= PROCESSORS and 2 * split * SMALLEST_PART <= k:
            split *= 2
        if split in (2, 4) and 9 * tiles >= 2 * PROCESSORS and 3 * tiles <= PROCESSORS:
            split = 3
    return replace(tile, split=split)
