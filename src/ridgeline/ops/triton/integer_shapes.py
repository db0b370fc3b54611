"""Launch configurations of integer products, by problem shape. Measured with benchmarks/products_int.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ridgeline.ops.triton.shapes import ANY, PROCESSORS


@dataclass(frozen=True, slots=True)
class IntVectorTile:
    """Programs that keep x of a few tokens and loop over rows. rows: weight rows per iteration. programs: grid size; the
    programs share all rows."""

    rows: int
    warps: int
    programs: int


@dataclass(frozen=True, slots=True)
class IntRingTile:
    """batch, block: tokens and inputs per tile. warps: consumer warps, 4 or 8; each multiplies 16 rows of the weight (of gate and
    of up). stages: blocks in the ring buffer. registers: per thread at launch. split: programs that share a tile's sum
    (split-K), a power of two. programs: persistent programs that share all tiles if split is 1."""

    batch: int
    block: int
    warps: int
    stages: int
    registers: int = 168
    split: int = 1
    programs: int = PROCESSORS


@dataclass(frozen=True, slots=True)
class IntStreamTile:
    """batch, step: tokens and inputs per tile. groups: consumer warp groups; each multiplies 64 rows. each: programs per SM.
    split: programs that share a tile's sum (split-K), a power of two."""

    batch: int
    groups: int
    step: int
    each: int
    split: int = 1

    @property
    def rows(self) -> int:
        """Weight rows of a tile. With gate and up, half of them come from each."""
        return 64 * self.groups

    @property
    def threads(self) -> int:
        return 128 * self.groups + 32


LARGEST_VECTORS = 4
"""Largest token count for integer_vector."""
FEWEST_RINGS = {True: LARGEST_VECTORS + 1, False: 2}
"""Fewer than 8 bits or not -> token count from which integer_ring is faster, on GPUs that support it."""
WIDEST_VECTORS = 65536
"""Inputs of all tokens (token count rounded up to a power of two) up to which a program keeps x in shared memory."""
MOST_TOKENS = 1024
"""Token count above which dequantizing the whole matrix first is about as fast."""
LARGE_OUTPUTS = 16384
"""Outputs above which large tiles fill the GPU. Smaller matrices need many programs."""
LARGEST_SPLIT = 8
SMALLEST_PART = 512
"""Inputs per program below which a further split along k costs more than it gains."""
_HALF = 128
"""Registers per thread at launch that let two programs of 8 warps share an SM; each may use up to 110 KB of shared memory."""
_WIDER = 8192
# Fewer than 8 bits -> token count -> (maximum inputs, maximum outputs, tile) in order. Other counts use the next larger key.
_FEW: dict[bool, dict[int, tuple[tuple[int, int, IntVectorTile], ...]]] = {
    True: {
        1: (
            (_WIDER, 4096, IntVectorTile(4, 4, 528)),
            (_WIDER, LARGE_OUTPUTS, IntVectorTile(8, 4, 396)),
            (_WIDER, ANY, IntVectorTile(4, 2, 528)),
            (ANY, ANY, IntVectorTile(8, 16, 132)),
        ),
        2: ((_WIDER, ANY, IntVectorTile(8, 8, 264)), (ANY, ANY, IntVectorTile(4, 16, 132))),
        LARGEST_VECTORS: ((_WIDER, ANY, IntVectorTile(8, 8, 264)), (ANY, ANY, IntVectorTile(8, 16, 132))),
    },
    False: {
        1: (
            (_WIDER, 4096, IntVectorTile(8, 4, 264)),
            (_WIDER, LARGE_OUTPUTS, IntVectorTile(4, 4, 396)),
            (_WIDER, ANY, IntVectorTile(4, 4, 528)),
            (ANY, ANY, IntVectorTile(2, 8, 264)),
        ),
        2: ((_WIDER, ANY, IntVectorTile(4, 8, 264)), (ANY, ANY, IntVectorTile(4, 16, 132))),
        LARGEST_VECTORS: ((_WIDER, ANY, IntVectorTile(8, 8, 264)), (ANY, ANY, IntVectorTile(8, 16, 132))),
    },
}
# Fewer than 8 bits -> token count -> (tile of gate and up, tile of other products). Other counts use the next larger key. Up to 64
# tokens dequantization takes as long as multiplication: two programs per SM hide each other's latency, and the first program of the
# next kernel prefetches weights while this kernel's last program runs. Above 64 tokens x dominates traffic: large tiles.
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
"""Inputs per scale below which a thread loads the codes of no more than this many inputs per step."""
# Fewer than 8 bits -> token count -> (tiles of gate and up, tiles of other products). Other counts use the next larger key. Without
# tiles integer_ring runs. Of several tiles, `stream_for` takes the one that gives the busiest SM the fewest rows; ties: the first.
_STREAMS: dict[bool, dict[int, tuple[tuple[IntStreamTile, ...], tuple[IntStreamTile, ...]]]] = {
    True: {
        **{
            batch: (
                (IntStreamTile(batch, 2, 256, 2), IntStreamTile(batch, 1, 256, 4)),
                (IntStreamTile(batch, 1, 256, 2),),
            )
            for batch in (8, 16, 32)
        },
        64: ((IntStreamTile(64, 2, 128, 2),), ()),
    },
    False: {
        **{
            batch: (
                (IntStreamTile(batch, 2, 128, 2), IntStreamTile(batch, 1, 128, 4)),
                (IntStreamTile(batch, 1, 128, 2),),
            )
            for batch in (8, 16, 32)
        },
        64: ((IntStreamTile(64, 2, 128, 2),), ()),
    },
}


def stream_for(tokens: int, n: int, k: int, gate: bool, bits: int, group: int) -> IntStreamTile | None:
    """Configuration of integer_stream for x [tokens, k] times a weight [n, k]. gate: the kernel also applies the activation of gate
    and up. None: another kernel is faster."""
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
    """Configuration of integer_vector. rings: integer_ring runs on this device. None: another kernel is faster."""
    few = _FEW[bits < 8]
    columns = next((count for count in few if tokens <= count), None)
    if columns is None or columns * k > WIDEST_VECTORS or (rings and tokens >= FEWEST_RINGS[bits < 8]):
        return None
    return next(tile for max_inputs, max_outputs, tile in few[columns] if k <= max_inputs and n <= max_outputs)


def ring_for(tokens: int, n: int, k: int, gate: bool, bits: int) -> IntRingTile | None:
    """Configuration of integer_ring. None: dequantizing the whole matrix first is faster."""
    many = _RINGS[bits < 8]
    key = next((key for key in many if tokens <= key), None)
    if key is None:
        return None
    gated, ungated = many[key]
    return _with_programs(gated, tokens, n // 2, 0) if gate else _with_programs(ungated, tokens, n, k)


def _with_programs(tile: IntRingTile, tokens: int, n: int, k: int) -> IntRingTile:
    """Set the number of programs so that every SM slot has one, and the split so that all programs of `tiles` run at once. k:
    inputs that may be split; 0 prevents a split."""
    places = PROCESSORS * (2 if tile.registers == _HALF else 1)
    tiles = -(-n // (16 * tile.warps)) * -(-tokens // tile.batch)
    return replace(tile, split=_split(tiles, places, k), programs=places)


def _split(tiles: int, places: int, k: int) -> int:
    """Number of programs that share a tile's sum over k inputs, such that all run at once."""
    split = 1
    while 2 * split * tiles <= places and split < LARGEST_SPLIT and 2 * split * SMALLEST_PART <= k:
        split *= 2
    return split
