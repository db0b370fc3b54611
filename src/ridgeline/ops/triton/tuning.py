"""Launch configurations of the attention kernels, by head size. They are constants: nothing is tuned at start-up."""

from __future__ import annotations

from dataclasses import dataclass

import triton


@dataclass(frozen=True, slots=True)
class Tile:
    """queries: packed query rows of a program (tokens times heads of a group); the split kernel takes as many as its rows have.
    keys: slots per iteration. warps, stages: of a program. registers: limit per thread for a program that loads keys before the PDL
    wait, so that as many programs are resident as without early loads; None: no early loads."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


# Padded head size -> tile. Rows with few query tokens are bound by reading keys: small tiles and several programs per SM, so that
# one reads while another ends. Chunks are bound by arithmetic: as many queries as fit into registers.
SPLIT_TILES = {
    16: Tile(16, 128, 4, 3),
    32: Tile(16, 128, 4, 3),
    64: Tile(16, 128, 4, 3),
    128: Tile(16, 64, 4, 3, 168),
    256: Tile(16, 32, 4, 3),
}
# Caches of so many bits, read as words. Warps of a tile with up to 16 columns (see words); more columns take as many times more.
WORD_TILES = {
    8: {
        16: Tile(16, 32, 1, 3),
        32: Tile(16, 32, 1, 3),
        64: Tile(16, 32, 1, 3),
        128: Tile(16, 32, 1, 3, 224),
        256: Tile(16, 32, 2, 3),
    },
    4: {32: Tile(16, 32, 1, 3), 64: Tile(16, 32, 1, 3), 128: Tile(16, 32, 1, 4, 255), 256: Tile(16, 32, 2, 3)},
}
WORD_PROGRAMS_PER_PROCESSOR = {8: 8, 4: 8}
# Used if all rows together make less than one program per SM: a program fills an SM, and a row has few parts. Smaller heads lose
# 0.5 to 12 % of a step with it (ablation.json).
WIDE_SPLIT_TILES = {256: Tile(16, 64, 8, 3)}
# Used if one program for every row and head is slightly more than SPLIT_PROGRAMS_PER_PROCESSOR: with less shared memory each, an
# additional program fits on an SM, and all still run in one wave.
SNUG_SPLIT_TILES = {128: Tile(16, 64, 4, 2, 128)}
SNUG_PROGRAMS_PER_PROCESSOR = 4
FEWEST_WIDE_ROWS = 4
"""Rows below which wide tiles gain nothing: short contexts lose 1.9 us a layer, and long ones use LONE_PROGRAMS_PER_PROCESSOR."""
LONE_PROGRAMS_PER_PROCESSOR = 2
"""Programs per SM with SPLIT_TILES for one or two rows of long contexts. They leave shared memory for programs of the next layer,
which load before these end."""
MOST_EARLY_PROGRAMS = 8
"""Programs per SM without split rows up to which programs of several rows load keys before the PDL wait. With 15 and more a step
was slower."""
CHUNK_TILES = {
    16: Tile(64, 64, 4, 3),
    32: Tile(128, 64, 4, 3),
    64: Tile(128, 64, 8, 3),
    128: Tile(128, 64, 4, 3),
    256: Tile(64, 32, 8, 2),
}
# Used on GPUs with 227 KB of shared memory per SM: 8,192 tokens of 16 heads took 2.08 ms against 4.97 with capped scores, and 1.71
# against 3.88 with a window of 4,096.
WIDE_CHUNK_TILES = {256: Tile(128, 64, 8, 2)}
# Used if no row has many query tokens. Too few programs are the limit then, so smaller tiles make more of them.
SHORT_CHUNK_TILES = {
    16: Tile(64, 64, 4, 3),
    32: Tile(64, 64, 4, 3),
    64: Tile(64, 64, 4, 3),
    128: Tile(64, 64, 4, 3),
    256: Tile(64, 32, 8, 2),
}
LONGEST_SHORT_CHUNK = 1024
GLUON_VERSIONS: tuple[str, ...] = ("3.6.", "3.9.")
"""Triton versions on which the Gluon kernels were measured."""
FLOAT32_CHUNK = Tile(32, 32, 8, 1)
FLOAT32_SPLIT = Tile(16, 32, 4, 1)

SPLIT_QUERIES = 16
"""Packed queries of a row up to which the split kernel runs it in any step; also the smallest tile of a matrix product."""
LARGER_SPLIT_QUERIES = (32, 64)
"""If all rows have at most the last value of packed queries, a step needs no chunk kernel. split_kernel is compiled for each
value."""
PLAN_ROWS = (64, 512)
"""Row counts for which a plan kernel is compiled. Larger counts use the next power of two."""
SPLIT_PROGRAMS_PER_PROCESSOR = 3
"""Programs per SM that run at a time with SPLIT_TILES; they make up one wave."""
SPLIT_WAVES = 4
"""With more rows than fill one wave, keys are split finely enough for this many waves, which balances the tail."""
SMALLEST_SPLIT = 256
"""Slots per part below which a further split costs more than it gains."""
SMALLEST_VERIFIED_SPLIT = 64
"""SMALLEST_SPLIT for one row, and for rows of a few query tokens: a part takes 2 us for each 64 slots."""
SMALLEST_OF_MANY = 960
"""SMALLEST_SPLIT where rows and heads fill more than one wave. The longest parts start first, which already shortens the tail: a
0.6B of 91 rows lost 5 % of a step to parts of 640."""
COMBINED_ALONE = 4096
"""Elements that a program of combine_kernel holds at a time: 32 parts of a head per iteration."""
COMBINED_ELEMENTS = 2048
"""Elements that a program of split_kernel holds at a time when it combines the parts of all heads of a group. With 8,192 and 16
packed queries the kernel took 254 registers per thread, and one program less fitted on an SM."""


def class_of(value: int, classes: tuple[int, ...]) -> int:
    """The smallest class of at least `value`; above all classes, the next power of two. Few classes mean few compilations."""
    return next((size for size in classes if size >= value), triton.next_power_of_2(value))
