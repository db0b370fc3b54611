"""Launch configurations of ring by the shape of the problem: data, measured as in shapes, in whole steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.ops.triton.shapes import ANY, PROCESSORS

SHORTEST_SPLIT = 2048
"""Inputs below which no sum is split: most of a row of the weight is in the ring by the time x is there."""
SMALLEST_PART = 512
"""Inputs below which a further split of a sum costs more than it brings."""
MOST_SPLIT_TOKENS = 192
"""Tokens above which any split does."""
SMALL = 1 << 23
"""Numbers of a weight that counts as small."""
THIRDS, LONG = (4225, 5632), 8192
"""Outputs whose tiles of 64 rows leave a third of the chip without one and cannot be cut in two, where three programs to a tile of
128 fill it, and inputs from which that pays."""


@dataclass(frozen=True, slots=True)
class RingTile:
    """batch, rows, block: tokens, rows of the weight and elements of a row at a time. stages: blocks in the ring.
    registers: a thread's at launch. split: programs that share a tile's sum. programs: that share all tiles where there is no
    split, at most one each."""

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
    """tile serves weights of up to `most` outputs and `numbers` numbers, and of at least `fewest` outputs and `inputs` inputs;
    None: not so fast as the kernels of shapes."""

    most: int
    tile: RingTile | None
    numbers: int = ANY
    fewest: int = 0
    inputs: int = 0

    def holds(self, n: int, k: int) -> bool:
        return self.fewest <= n <= self.most and n * k <= self.numbers and k >= self.inputs


# Tokens -> rows in order, as in shapes. A ring fills a processor's memory: with half of it, two programs come to one
# processor while others have none. Products of up to 16 tokens gain nothing by themselves, whole steps do: the ring fills while
# what stands between two products runs. Above 64, x is as large as the weights that it meets, and a program's share of either
# comes through L2: a step of an 8B gained 0.5 % at 128 tokens and 0.7 % at 256. Small weights still gain there, as what they
# wait for is the kernel before. Of 97 tokens and more ends of blocks gain too (2 % of a step of an 8B at 128), of 96 they lose 2.
_PLAIN: dict[int, tuple[_For, ...]] = {
    1: (),
    8: (
        _For(THIRDS[1], RingTile(8, 128, 128, 4, 6, 128), fewest=THIRDS[0], inputs=LONG),
        _For(16384, RingTile(8, 64, 128, 4, 12, 96)),
    ),
    16: (
        _For(THIRDS[1], RingTile(16, 128, 128, 4, 6, 128), fewest=THIRDS[0], inputs=LONG),
        _For(16384, RingTile(16, 64, 128, 4, 10, 96)),
    ),
    32: (
        _For(THIRDS[1], RingTile(32, 128, 128, 4, 5, 128), fewest=THIRDS[0], inputs=LONG),
        _For(16384, RingTile(32, 64, 128, 4, 8, 96)),
        _For(ANY, RingTile(32, 128, 128, 4, 5, 128)),
    ),
    64: (
        _For(THIRDS[1], RingTile(64, 128, 128, 4, 4, 168), fewest=THIRDS[0], inputs=LONG),
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
# The activation of a merged gate and up as part of it. Of large weights alone: those of a 0.6B have too few tiles. Of 192 tokens a
# 3B lost 10 % of a step. Above 64 tokens wide.plan_for is asked before, and this is for what it leaves.
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
    96: (_For(16384, RingTile(128, 128, 64, 8, 6, 128, programs=PROCESSORS), fewest=16384),),
    128: (
        _For(16384, None, SMALL),
        _For(16384, RingTile(128, 128, 64, 8, 6, 128, programs=PROCESSORS)),
    ),
    256: (_For(16384, RingTile(128, 128, 64, 8, 6, 128, programs=PROCESSORS), SMALL),),
}
# Of 8 bits: the same, in blocks of two products (see ring._promoted_sums). Gate and up of 65 to 128 tokens are cuBLAS's: every
# tile of ours that registers hold reads x too often.
_PLAIN8: dict[int, tuple[_For, ...]] = {
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
    """The configuration of x [tokens, k] times a weight [n, k], with the activation of a merged gate and up as part of it.
    None: other kernels are faster."""
    return _choice(_GATE if gate else _PLAIN, tokens, n, k)


def ring8_for(tokens: int, n: int, k: int, gate: bool = False) -> RingTile | None:
    """The same of 8-bit floats or integers."""
    return _choice(_GATE8 if gate else _PLAIN8, tokens, n, k)


def _choice(table: dict[int, tuple[_For, ...]], tokens: int, n: int, k: int) -> RingTile | None:
    rows = table[key] if (key := next((key for key in table if tokens <= key), None)) else ()
    tile = next((row.tile for row in rows if row.holds(n, k)), None)
    return None if tile is None else _split(tile, tokens, n, k)


def _split(tile: RingTile, tokens: int, n: int, k: int) -> RingTile:
    """With so many programs per tile that one wave is about full, each of which has a token of it at least: a power of two, or
    three where these fill it better than two, or nearly as well as four."""
    tiles = -(-n // tile.rows) * -(-tokens // tile.batch)
    split = 1
    if tokens <= MOST_SPLIT_TOKENS and k >= SHORTEST_SPLIT:
        while 2 * split <= tile.batch and 2 * split * tiles <= PROCESSORS and 2 * split * SMALLEST_PART <= k:
            split *= 2
        if split in (2, 4) and 9 * tiles >= 2 * PROCESSORS and 3 * tiles <= PROCESSORS:
            split = 3
    return replace(tile, split=split)
