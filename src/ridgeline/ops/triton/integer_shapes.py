"""Launch configurations of the integer products by the shape of the problem: data, measured with benchmarks/products_int.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ridgeline.ops.triton.shapes import ANY, PROCESSORS


@dataclass(frozen=True, slots=True)
class IntVectorTile:
    """Programs that keep x of a few tokens and walk over rows. rows: of the weight at a time. programs: that share all
    rows."""

    rows: int
    warps: int
    programs: int


@dataclass(frozen=True, slots=True)
class IntRingTile:
    """batch, block: tokens and inputs at a time. warps: that multiply 16 rows of the weight each, of each side of a gate; 4
    or 8. stages: blocks in the ring. registers: a thread's at launch. split: programs that share a tile's sum, a power of
    two. programs: that share all tiles where there is no split."""

    batch: int
    block: int
    warps: int
    stages: int
    registers: int = 168
    split: int = 1
    programs: int = PROCESSORS


@dataclass(frozen=True, slots=True)
class IntStreamTile:
    """batch, step: tokens and inputs at a time. groups: of four warps that multiply 64 rows each. each: programs that share a
    processor. split: programs that share a tile's sum, a power of two."""

    batch: int
    groups: int
    step: int
    each: int
    split: int = 1

    @property
    def rows(self) -> int:
        """Of the weight; of gate and of up half as many."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * self.groups + 32


MOST_VECTORS = 4
"""Tokens above which no vectors are multiplied."""
FEWEST_RINGS = {True: MOST_VECTORS + 1, False: 2}
"""Bits below 8 or not -> tokens from which products through a ring are faster, where it runs."""
WIDEST_VECTORS = 65536
"""Inputs of all tokens, their number rounded up to a power of two, up to which a program keeps x in shared memory."""
MOST_TOKENS = 1024
"""Tokens above which widening the whole matrix first is about as fast."""
WIDE = 16384
"""Outputs above which a matrix fills the chip with large tiles; smaller ones want many programs."""
MOST_SPLIT = 8
SMALLEST_PART = 512
"""Inputs below which a further split of a sum costs more than it brings."""
_HALF = 128
"""Registers of a thread at launch with which, as with up to 110 KB of memory, two programs of 8 warps share a processor."""
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
# Bits below 8 or not -> tokens -> (tile of gate and up, tile of others); other counts take the next. Up to 64 tokens
# widening is as long as multiplying: two programs to a processor hide what one waits for, and the next kernel's first
# program asks for its weights while this one's last still runs. Above, x is what is read most: large tiles.
_RINGS: dict[bool, dict[int, tuple[IntRingTile, IntRingTile]]] = {
    True: {
        16: (IntRingTile(16, 256, 4, 4, _HALF), IntRingTile(16, 256, 4, 6, _HALF)),
        32: (IntRingTile(32, 256, 4, 3, _HALF), IntRingTile(32, 256, 4, 4, _HALF)),
        64: (IntRingTile(64, 256, 4, 2, _HALF), IntRingTile(64, 128, 4, 5, _HALF)),
        MOST_TOKENS: (IntRingTile(128, 128, 8, 4), IntRingTile(128, 128, 8, 5)),
    },
    False: {
        16: (IntRingTile(16, 128, 4, 5, _HALF), IntRingTile(16, 128, 4, 8, _HALF)),
        32: (IntRingTile(32, 128, 4, 4, _HALF), IntRingTile(32, 128, 4, 6, _HALF)),
        64: (IntRingTile(64, 128, 4, 3, _HALF), IntRingTile(64, 128, 4, 4, _HALF)),
        MOST_TOKENS: (IntRingTile(128, 128, 8, 3), IntRingTile(128, 128, 8, 4)),
    },
}
FINEST = 128
"""Inputs of a scale below which a thread holds those of no more than as many inputs."""
# Bits below 8 or not -> tokens -> (tiles of gate and up, tiles of others); other counts take the next, and no tiles leave it to
# the ring. Of several that which has the fewest rows on the processor with the most; of equals the first.
_STREAMS: dict[bool, dict[int, tuple[tuple[IntStreamTile, ...], tuple[IntStreamTile, ...]]]] = {
    True: {
        **{
            most: ((IntStreamTile(most, 2, 256, 2), IntStreamTile(most, 1, 256, 4)), (IntStreamTile(most, 1, 256, 2),))
            for most in (8, 16, 32)
        },
        64: ((IntStreamTile(64, 2, 128, 2),), ()),
    },
    False: {
        **{
            most: ((IntStreamTile(most, 2, 128, 2), IntStreamTile(most, 1, 128, 4)), (IntStreamTile(most, 1, 128, 2),))
            for most in (8, 16, 32)
        },
        64: ((IntStreamTile(64, 2, 128, 2),), ()),
    },
}


def stream_for(tokens: int, n: int, k: int, gate: bool, bits: int, group: int) -> IntStreamTile | None:
    """The configuration of integer_stream for x [tokens, k] times a weight [n, k], gate: with the activation of gate and up as
    part of it. None: it is not as fast."""
    table = _STREAMS[bits < 8]
    key = next((key for key in table if tokens <= key), None)
    tiles = () if key is None else table[key][0 if gate else 1]
    if not tiles:
        return None

    def fullest(tile: IntStreamTile) -> int:
        return -(-n // (tile.rows * PROCESSORS)) * tile.rows

    tile = min(tiles, key=fullest)
    if group < k and math.gcd(group, FINEST) < FINEST:
        tile = replace(tile, step=min(tile.step, FINEST))
    return replace(tile, split=1 if gate else _split(-(-n // tile.rows), PROCESSORS * tile.each, k))


def vector_for(tokens: int, n: int, k: int, bits: int, rings: bool) -> IntVectorTile | None:
    """The configuration of integer_vector. rings: whether integer_ring runs on this device. None: it is not as fast."""
    few = _FEW[bits < 8]
    columns = next((count for count in few if tokens <= count), None)
    if columns is None or columns * k > WIDEST_VECTORS or (rings and tokens >= FEWEST_RINGS[bits < 8]):
        return None
    return next(tile for most, outputs, tile in few[columns] if k <= most and n <= outputs)


def ring_for(tokens: int, n: int, k: int, gate: bool, bits: int) -> IntRingTile | None:
    """The configuration of integer_ring. None: the matrix is better widened as a whole."""
    many = _RINGS[bits < 8]
    key = next((key for key in many if tokens <= key), None)
    if key is None:
        return None
    gated, plain = many[key]
    return _dealt(gated, tokens, n // 2, 0) if gate else _dealt(plain, tokens, n, k)


def _dealt(tile: IntRingTile, tokens: int, n: int, k: int) -> IntRingTile:
    """With a program for each place on the chip, and as many for each tile of n outputs as then all run at once. k: inputs
    that may be split."""
    places = PROCESSORS * (2 if tile.registers == _HALF else 1)
    tiles = -(-n // (16 * tile.warps)) * -(-tokens // tile.batch)
    return replace(tile, split=_split(tiles, places, k), programs=places)


def _split(tiles: int, places: int, k: int) -> int:
    """Programs that share a tile's sum of k inputs, so that all run at once."""
    split = 1
    while 2 * split * tiles <= places and split < MOST_SPLIT and 2 * split * SMALLEST_PART <= k:
        split *= 2
    return split
