"""Launch configurations of the attention kernels, by head size: data, not search, so that start-up tries nothing."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True, slots=True)
class Tile:
    """queries: packed query rows of a program (tokens times heads of a group); the split kernel takes as many as its
    rows have. keys: slots per turn of its loop. warps, stages: of one program. registers: most of a thread that asks for keys
    before the wait, so that as many programs run at a time as of those that do not; None: these always do not."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


# Padded head size -> tile. Rows with few query tokens are bound by reading keys: small tiles, several programs per
# processor, so that one reads while another ends. Chunks are bound by arithmetic: as many queries as registers hold.
SPLIT_TILES = {
    16: Tile(16, 128, 4, 3),
    32: Tile(16, 128, 4, 3),
    64: Tile(16, 128, 4, 3),
    128: Tile(16, 64, 4, 3, 168),
    256: Tile(16, 32, 4, 3),
}
# Where all rows together make less than one program per processor: a program fills one, and a row has few parts. Smaller
# heads lose 0.5 to 12 % of a step by it (ablation.json).
WIDE_SPLIT_TILES = {256: Tile(16, 64, 8, 3)}
# Where one program for every row and head is a little more than SPLIT_PROGRAMS_PER_PROCESSOR: with less memory each, one
# more fits on a processor, and all still run at a time.
SNUG_SPLIT_TILES = {128: Tile(16, 64, 4, 2, 128)}
SNUG_PROGRAMS_PER_PROCESSOR = 4
FEWEST_WIDE_ROWS = 4
"""Rows below which wide tiles gain nothing: short contexts lose 1.9 us a layer, and long ones want the next."""
LONE_PROGRAMS_PER_PROCESSOR = 2
"""Programs with SPLIT_TILES that one or two rows of long contexts put on a processor: they leave memory for those of the
next layer, which load before these end."""
MOST_EARLY_PROGRAMS = 8
"""Programs a processor, if no row is split, up to which those of several rows ask for keys before the wait: with 15 and more a step
was slower."""
CHUNK_TILES = {
    16: Tile(64, 64, 4, 3),
    32: Tile(128, 64, 4, 3),
    64: Tile(128, 64, 8, 3),
    128: Tile(128, 64, 4, 3),
    256: Tile(64, 32, 8, 2),
}
# The same where a processor has 227 KB: 8,192 tokens of 16 heads, their scores capped, took 4.97 ms for 2.08, within a window of
# 4,096 3.88 for 1.71.
WIDE_CHUNK_TILES = {256: Tile(128, 64, 8, 2)}
# Where no row has many query tokens, programs are too few rather than too slow: smaller tiles make more of them.
SHORT_CHUNK_TILES = {
    16: Tile(64, 64, 4, 3),
    32: Tile(64, 64, 4, 3),
    64: Tile(64, 64, 4, 3),
    128: Tile(64, 64, 4, 3),
    256: Tile(64, 32, 8, 2),
}
LONGEST_SHORT_CHUNK = 1024
GLUON_VERSIONS: tuple[str, ...] = ("3.6.",)
"""Versions of Triton that kernels in Gluon were measured with."""
FLOAT32_CHUNK = Tile(32, 32, 8, 1)
FLOAT32_SPLIT = Tile(16, 32, 4, 1)

SPLIT_QUERIES = 16
"""Rows with at most this many packed queries, the least that a product takes, are left to the split kernel in any step."""
LARGER_SPLIT_QUERIES = (32, 64)
"""Steps whose rows all have at most the last many packed queries need no chunk kernel; the split one is compiled for each."""
PLAN_ROWS = (64, 512)
"""Rows for which a plan kernel is compiled; beyond, the next power of two."""
SPLIT_PROGRAMS_PER_PROCESSOR = 3
"""Programs that run at a time on one processor with SPLIT_TILES: what one wave is made of."""
SPLIT_WAVES = 4
"""With more rows than fill one wave, keys are split so finely that this many waves even out the tail."""
SMALLEST_SPLIT = 256
"""Slots below which a further split costs more than it brings."""
SMALLEST_VERIFIED_SPLIT = 64
"""The same where rows have a few query tokens: a part's program takes 2 us for each 64 slots of theirs."""
SMALLEST_OF_MANY = 960
"""The same where rows and heads alone fill more than one wave, whose tail starting with the longest runs has shortened already: a
0.6B of 91 rows lost 5 % of a step to parts of 640."""
COMBINED_ALONE = 4096
"""Numbers that a program of combine_kernel holds at a time while it puts the parts of a head together: 32 parts in one turn."""
COMBINED_ELEMENTS = 2048
"""Numbers that a program of the split kernel holds at a time while it does the same for all heads of a group. With 8,192 and 16
packed queries the kernel took 254 registers a thread, and one program less ran on a processor."""


def class_of(value: int, classes: tuple[int, ...]) -> int:
    """The smallest class that holds `value`, beyond them the next power of two: few classes, few compilations."""
    return next((size for size in classes if size >= value), triton.next_power_of_2(value))
