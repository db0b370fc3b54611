"""Which of cuBLASLt's kernels multiplies many tokens in 16 bits: the one whose tiles cost least.

Its heuristic gives a short list for each shape, and torch takes the first of it, which is often neither the fastest of the list
(448 tokens by gate and up of an 8B: 264 us for 150) nor has tiles as wide as these tokens. But all are of one family, which makes
the same bits and takes any shape, so that a kernel can be named instead of asked for: by its tile, by the side along which two
programs share what they fetch, and by what follows from these. Its time follows from little too: whole rounds of tiles, and of a
tile what is multiplied, stored in shared memory and fetched (see _time: within 3 % of nine in ten of 3,000 measurements).

Numbers are those of cublasLt.h, of 13; what one of them means that has no name there, `form`, was read off what the heuristic
lists (cublas compares both before it names a kernel).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from ridgeline.ops.triton.shapes import PROCESSORS

ALGORITHM, STAGES = 66, 35
"""Of the whole family (CUBLASLT_ALGO_CONFIG_ID, CUBLASLT_MATMUL_STAGES_64xAUTO)."""
OUTPUT_PAIR, TOKEN_PAIR = 3, 5
"""cublasLtClusterShape_t: two programs of different outputs share their tokens, or the other way around."""
MOST_ALONE = 128 * 176
"""Outputs of a tile up to which one of a program's two groups of warps makes it by itself, while the other stores or fetches;
larger ones are made by both together."""

# cublasLtMatmulTile_t: outputs -> tokens -> its number. The first have outputs on the side of the instruction that counts in 64,
# the others tokens.
_BY_OUTPUTS = {
    128: {96: 33, 104: 402, 112: 403, 120: 404, 128: 20, 136: 405, 144: 406, 152: 407, 160: 29, 168: 408, 176: 409}
    | {184: 410, 200: 411, 208: 412, 216: 413, 224: 414, 232: 415, 240: 416, 248: 417, 272: 419, 288: 421, 304: 423},
    192: {112: 460, 128: 31, 144: 463, 160: 465, 176: 467, 208: 470},
    256: {96: 495, 104: 496, 112: 497, 120: 498, 128: 24, 136: 499, 144: 500, 152: 501, 160: 502},
}
_BY_TOKENS = {112: {128: 165}, 144: {128: 184}, 160: {128: 30}, 168: {128: 197}, 176: {128: 201}} | {
    128: {192: 32, 256: 23},
    192: {192: 209},
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """outputs, tokens: of a tile. tile: its number. by_tokens: see _BY_TOKENS. pair: one of the two above."""

    outputs: int
    tokens: int
    tile: int
    by_tokens: bool
    pair: int

    @property
    def alone(self) -> bool:
        return self.outputs * self.tokens <= MOST_ALONE

    @property
    def form(self) -> int:
        """CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION."""
        return (not self.by_tokens) + 2 * (self.pair == TOKEN_PAIR) + 4 * (not self.alone)


KERNELS = tuple(
    Kernel(outputs, tokens, number, bool(by_tokens), pair)
    for by_tokens, table in enumerate((_BY_OUTPUTS, _BY_TOKENS))
    for outputs, numbers in table.items()
    for tokens, number in numbers.items()
    for pair in (OUTPUT_PAIR, TOKEN_PAIR)
)
THRIFTY = next(one for one in KERNELS if (one.outputs, one.tokens, one.pair) == (176, 128, TOKEN_PAIR))
"""For a card at its power limit, where the kernel that takes less energy is faster. Gate and up of an 8B take 3 % less than by
torch's choice at 700 W, 0.5 to 1 % less than by the next of those listed; of 929 configurations that run none was faster on a cold
card, and none of the best dozen cheaper at the limit."""

FEWEST, THRIFTY_FEWEST = 257, 2048
"""Tokens below which other kernels were measured, and from which on the limit was."""
WIDTH = 8
"""Tokens between two widths of tiles: counts between two multiples make the same tiles."""
SIDE, STORED = 6, 150
"""What a row of either operand costs as it is stored, and as it is fetched, in products of numbers; and what a tile that is made
by two groups takes as it is stored, while nothing is multiplied, in steps of k."""
LAST_ROUND = 0.28
"""Of the time of a tile in the places that the last round leaves without one: others are faster meanwhile."""
RAGGED, THIN = 0.8, 1.15
"""A last tile of tokens that is less full than that takes one group by itself longer, at times by half: measured at up to one
round, and not explained."""
FULLEST, LEAST = 0.78, 1 << 33
"""Of the chip, and products of numbers: where the best of these kernels makes less of it (few tiles, or small ones), torch's is as
good; below some 20 us nothing was gained by whole layers, and a launch from Python costs more than torch's."""


def _time(kernel: Kernel, tokens: int, n: int, k: int) -> float | None:
    """Of x [tokens, k] by a weight of n outputs, in products of numbers by one processor; None: a pair would lack a half."""
    wide, high = -(-tokens // kernel.tokens), -(-n // kernel.outputs)
    along_tokens = kernel.pair == TOKEN_PAIR
    if (wide if along_tokens else high) % 2:
        return None
    rounds = wide * high / PROCESSORS
    area, sides = kernel.outputs * kernel.tokens, kernel.outputs + kernel.tokens
    fetched = sides - (kernel.outputs if along_tokens else kernel.tokens) / 2
    tile = k * (area + SIDE * (sides + fetched)) + (0 if kernel.alone else STORED * area)
    thin = kernel.alone and tokens < (wide - 1 + RAGGED) * kernel.tokens
    return (LAST_ROUND * rounds + (1 - LAST_ROUND) * -(-wide * high // PROCESSORS)) * tile * (THIN if thin else 1)


def saves(tokens: int, n: int) -> bool:
    """Whether the thrifty kernel makes [tokens, n] for less than others: what its tiles hold beyond that loses what it
    saves (at 3,333 and 5,123 tokens), so a 64th at most, and places without a tile in their last round take time, so a 16th at
    most with these."""
    pair = THRIFTY.outputs * 2 * THRIFTY.tokens
    tiles = -(-n // THRIFTY.outputs) * -(-tokens // (2 * THRIFTY.tokens))
    rounds = -(-2 * tiles // PROCESSORS) * PROCESSORS * pair // 2
    return tokens >= THRIFTY_FEWEST and 64 * tiles * pair <= 65 * tokens * n and 16 * rounds <= 17 * tokens * n


def kernel_for(tokens: int, n: int, k: int) -> Kernel | None:
    """The kernel of x [tokens, k] by a weight [n, k]; None: torch's is as good, or nothing was measured."""
    if tokens >= THRIFTY_FEWEST:
        return THRIFTY if saves(tokens, n) else None
    return _fastest(-(-tokens // WIDTH) * WIDTH, n, k) if tokens >= FEWEST else None


@cache
def _fastest(tokens: int, n: int, k: int) -> Kernel | None:
    """As above, once for each multiple of WIDTH."""
    times = [(time, place) for place, one in enumerate(KERNELS) if (time := _time(one, tokens, n, k)) is not None]
    time, place = min(times, default=(0.0, 0))
    wanted = tokens * n * k
    return KERNELS[place] if time and wanted >= LEAST and wanted > FULLEST * PROCESSORS * time else None
