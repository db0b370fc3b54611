"""What a row may draw by its limits (ops.sample.Limits), found without an order of its logits.

The token drawn among all is the one drawn among the allowed, if it is one of them, and what is likelier tells whether it is: how
many those are, and what chances they have together. If it is not, nothing as unlikely is, and the draw is repeated among what is
likelier.

The pass that drew left the largest logit of each run of the vocabulary and the run's chances. These bound both from below and
above, which mostly decides; else a look reads the runs with something above the logit in question: few, unless all tokens are about
as likely. Sums are the same for any type of the logits and for any batch.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.triton.noise import score

RUN = tl.constexpr(256)
"""Logits of which the largest one is noted."""
_PAIRINGS = tl.constexpr(8)
"""Its logarithm to base 2."""
AT_ONCE = tl.constexpr(16)
"""Runs that are read at a time."""
LOG2_E = tl.constexpr(1.4426950408889634)
COLDEST = tl.constexpr(1e-5)
"""As ops.sample: temperature below which chances would overflow."""
NOBODY = tl.constexpr(0x7FFFFFFF)
_PARTS = tl.constexpr(1 << 40)
"""Parts of the likeliest token's chance in which runs' sums are added."""
_NOTHING = tl.constexpr(40.0)
"""So far below the largest, over temperature, a whole vocabulary has no mass: 2^-40 of the likeliest token's."""
_FEW = tl.constexpr(7)
"""Halvings of the range where the runs' largest logits look for a bound below which nothing is drawn again."""
_MANY = tl.constexpr(12)
"""Halvings where the bound is to spare looks at the logits."""


@triton.jit
def share(logit, largest, rate):
    """The chance of `logit` over that of `largest`. rate: log2(e) over the temperature."""
    return tl.exp2((logit - largest) * rate)


@triton.jit
def run_sums(numbers):
    """float32 [M, RUN] -> sums [M]: of pairs of pairs, as no other order is the same in every layout of the numbers."""
    for _ in tl.static_range(_PAIRINGS):
        numbers = tl.sum(tl.reshape(numbers, [numbers.shape[0], numbers.shape[1] // 2, 2]), 2)
    return tl.reshape(numbers, [numbers.shape[0]])


@triton.jit
def _four(a, b, c, d, e, f, g, h):
    """Adds four sums at a time: the threads meet once for all of them."""
    return a + e, b + f, c + g, d + h


@triton.jit
def _list(wanted, list_ptr):
    """Note the numbers of the wanted runs where all threads of the program see them -> how many these are, int32."""
    wanted = wanted.to(tl.int32)
    tl.debug_barrier()  # the last list was read
    tl.store(list_ptr + tl.cumsum(wanted, 0) - 1, tl.arange(0, wanted.shape[0]), mask=wanted > 0)
    tl.debug_barrier()
    return tl.sum(wanted, 0)


@triton.jit
def _listed(logits_ptr, list_ptr, at, many, vocab):
    """Logits float32 [AT_ONCE, RUN] of the `many` listed runs from the one at `at` on, -inf beyond; their tokens."""
    each = at + tl.arange(0, AT_ONCE)
    run = tl.load(list_ptr + each, mask=each < many, other=0)
    token = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    inside = (each < many)[:, None] & (token < vocab)
    return tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32), token


@triton.jit
def _above(logits_ptr, list_ptr, tops, bound, largest, rate, vocab):
    """How many logits are above `bound`, int32, and their chances over that of `largest`."""
    many = _list(tops > bound, list_ptr)
    count, mass = tl.zeros([AT_ONCE, RUN], tl.int32), tl.zeros([AT_ONCE, RUN], tl.float32)
    for at in range(0, many, AT_ONCE):
        logit, _ = _listed(logits_ptr, list_ptr, at, many, vocab)
        above = logit > bound
        count += above.to(tl.int32)
        mass += tl.where(above, share(logit, largest, rate), 0.0)
    parts = (run_sums(mass) * _PARTS + 0.5).to(tl.int64)
    return tl.sum(tl.sum(count, 1), 0), tl.sum(parts, 0).to(tl.float32) * (1.0 / _PARTS)


@triton.jit
def _among(
    logits_ptr, list_ptr, tops, best, drawn, bound, floor, first, second, temperature, vocab, PLAIN: tl.constexpr
):
    """What is drawn among the tokens above `bound` and not below `floor`. What a block of runs drew stands where it is one."""
    of_drawn = tl.load(logits_ptr + drawn).to(tl.float32)
    stands = (of_drawn > bound) & (of_drawn >= floor)
    top = tl.max(tl.where(stands, best, float("-inf")), 0)
    token = tl.min(tl.where(stands & (best == top), drawn, NOBODY), 0)
    blocks: tl.constexpr = [best.shape[0], tops.shape[0] // best.shape[0]]
    fallen = tl.reshape(tl.broadcast_to((stands == 0)[:, None], blocks), [tops.shape[0]])
    many = _list(fallen & (tops > bound) & (tops >= floor), list_ptr)
    highest, its = tl.full([AT_ONCE, RUN], float("-inf"), tl.float32), tl.full([AT_ONCE, RUN], NOBODY, tl.int32)
    for at in range(0, many, AT_ONCE):
        logit, others = _listed(logits_ptr, list_ptr, at, many, vocab)
        scores = score(logit, others, first, second, temperature, PLAIN)
        # Runs are visited in order, so the first of equal scores stays.
        better = (logit > bound) & (logit >= floor) & (scores > highest)
        highest, its = tl.where(better, scores, highest), tl.where(better, others, its)
    other = tl.max(tl.max(highest, 1), 0)
    its_first = tl.min(tl.min(tl.where(highest == other, its, NOBODY), 1), 0)
    return tl.where((other > top) | ((other == top) & (its_first < token)), its_first, token)


@triton.jit
def _reach(tops, weights, target, low, high, halvings: tl.constexpr):
    """Between these by halving: where `low` has risen, the runs that reach it weigh at least `target`, those that reach `high`
    less."""
    for _ in range(halvings):
        middle = low + (high - low) * 0.5
        enough = tl.sum(tl.where(tops >= middle, weights, 0.0), 0) >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low, high


@triton.jit
def _mass_of(
    k, top_p, logits_ptr, list_ptr, tops, tallest, logit, count, mass, least, most, largest, temperature, vocab
):
    """Bounds of the mass of the k largest, one of which is `logit`, closer than `least` and `most`: so close that they agree on
    whether `mass`, that of the `count` ones above it, is less than top_p of it. Where nothing is left between, `most` counts."""
    rate = LOG2_E / temperature
    logit_share = share(logit, largest, rate)
    least, most = tl.maximum(least, mass + logit_share), tl.minimum(most, mass + (k - count) * logit_share)
    if (mass >= top_p * least) & (mass < top_p * most):
        low, above = _reach(
            tops, tl.full(tops.shape, 1.0, tl.float32), k, largest - _NOTHING * temperature, logit, _MANY
        )
        least = tl.maximum(least, tl.sum(tl.where(tops > above, tallest, 0.0), 0))
        at, high = low, logit
        while (mass >= top_p * least) & (mass < top_p * most) & (at < high):
            n_above, total = _above(logits_ptr, list_ptr, tops, at, largest, rate, vocab)
            if n_above <= k:
                high = at
                least = tl.maximum(least, total)
                most = tl.minimum(most, total + (k - n_above) * share(at, largest, rate))
            else:
                low = at
                most = tl.minimum(most, total)
            middle = low + (high - low) * 0.5
            at = tl.where(middle > low, middle, high)
    return least, most


@triton.jit
def allowed(
    token,
    best,
    drawn,
    tops,
    sums,
    logits_ptr,
    list_ptr,
    first,
    second,
    temperature,
    top_k,
    top_p,
    min_p,
    vocab,
    PLAIN: tl.constexpr,
):
    """`token`, drawn among a row's logits [vocab], or what is drawn among those that its limits leave.

    best float32, drawn int32 [blocks]: scores and tokens of blocks of runs. tops float32 [runs]: their largest logits, -inf beyond;
    sums float32 [runs]: where top_p limits, their chances over that of the largest one. list_ptr: room for a number for each run.
    first, second: key words of the draw.
    """
    logit = tl.load(logits_ptr + token).to(tl.float32)
    largest, temperature = tl.max(tops, 0), tl.maximum(temperature, COLDEST)
    rate, floor = LOG2_E / temperature, tl.minimum(largest + temperature * tl.log(min_p), largest)
    top_k = tl.where(top_k < vocab, top_k, 0)
    tallest = share(tops, largest, rate)
    sums = tl.where(top_p < 1.0, sums * tallest, 0.0)
    ones = tl.full(tops.shape, 1.0, tl.float32)
    # Between these is the mass of what top_k leaves, of which top_p is a part.
    least, most = tl.full([], 0.0, tl.float32), tl.full([], float("inf"), tl.float32)
    looking = logit < largest  # which is always allowed
    while looking:
        hot = tops > logit
        each = (tl.where(hot, ones, 0.0), tl.where(hot, tallest, 0.0), tl.where(hot, sums, 0.0), sums)
        n_hot, least_above, most_above, total = tl.reduce(each, 0, _four)
        most = tl.minimum(most, total)
        refused = (logit < floor) | ((top_k > 0) & (n_hot >= top_k)) | ((top_p < 1.0) & (least_above >= top_p * most))
        sure = (top_k <= 0) & ((top_p >= 1.0) | (most_above < top_p * most))
        if (refused | sure) == 0:
            count, mass = _above(logits_ptr, list_ptr, tops, logit, largest, rate, vocab)
            refused = (top_k > 0) & (count >= top_k)
            if (refused == 0) & (top_p < 1.0):
                if top_k > 0:
                    least, most = _mass_of(
                        top_k,
                        top_p,
                        logits_ptr,
                        list_ptr,
                        tops,
                        tallest,
                        logit,
                        count,
                        mass,
                        least,
                        most,
                        largest,
                        temperature,
                        vocab,
                    )
                refused = mass >= top_p * most
        looking = refused
        if refused:
            if top_k > 0:
                low, _ = _reach(tops, ones, top_k, logit, largest, _FEW)
                floor = tl.maximum(floor, low)
            if top_p < 1.0:
                low, _ = _reach(tops, tallest, top_p * most, logit, largest, _FEW)
                floor = tl.maximum(floor, low)
            token = _among(
                logits_ptr, list_ptr, tops, best, drawn, logit, floor, first, second, temperature, vocab, PLAIN
            )
            token = tl.minimum(token, vocab - 1)
            last = logit
            logit = tl.load(logits_ptr + token).to(tl.float32)
            looking = (logit > last) & (logit < largest)
    return token
