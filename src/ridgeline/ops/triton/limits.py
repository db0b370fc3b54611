"""Sampling limits (ops.sample.Limits: top_k, top_p, min_p) without sorting the logits.

The token drawn among all tokens is the token drawn among the allowed ones, if it is allowed. Whether it is follows from the
likelier tokens: their number and their total probability. If it is not allowed, no less likely token is, and the draw is repeated
among the likelier tokens.

The drawing pass stores the largest logit of each run of the vocabulary and the run's probability mass. They bound the count and the
mass from below and above, which is usually conclusive. Otherwise the kernel reads the runs whose largest logit exceeds the logit in
question. These are few unless all tokens are about equally likely. Sums are the same for any dtype of the logits and any batch.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.triton.noise import score

RUN = tl.constexpr(256)
"""Logits per run, of which the largest is stored."""
_PAIRINGS = tl.constexpr(8)
"""log2(RUN)."""
AT_ONCE = tl.constexpr(16)
"""Runs that are read at a time."""
LOG2_E = tl.constexpr(1.4426950408889634)
COLDEST = tl.constexpr(1e-5)
"""Temperature below which probabilities would overflow, as in ops.sample."""
NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_PARTS = tl.constexpr(1 << 40)
"""Fixed-point unit in which the sums of runs are added: this fraction of the likeliest token's probability."""
_NOTHING = tl.constexpr(40.0)
"""Distance from the largest logit, in units of temperature, below which a vocabulary has negligible mass (2^-40 of the maximum)."""
_FEW = tl.constexpr(7)
"""Bisection steps on the runs' largest logits for a bound below which nothing is drawn again."""
_MANY = tl.constexpr(12)
"""Bisection steps where a tighter bound saves passes over the logits."""


@triton.jit
def share(logit, largest, rate):
    """Probability of `logit` relative to `largest`. rate: log2(e) / temperature."""
    return tl.exp2((logit - largest) * rate)


@triton.jit
def run_sums(numbers):
    """Sum float32 [M, RUN] over runs -> [M], in pairwise order, which is the same for every register layout."""
    for _ in tl.static_range(_PAIRINGS):
        numbers = tl.sum(tl.reshape(numbers, [numbers.shape[0], numbers.shape[1] // 2, 2]), 2)
    return tl.reshape(numbers, [numbers.shape[0]])


@triton.jit
def _add_four(a, b, c, d, e, f, g, h):
    """Combine four sums in one reduction, so that threads synchronise once for all of them."""
    return a + e, b + f, c + g, d + h


@triton.jit
def _list(wanted, list_ptr):
    """Write the indices of the wanted runs to list_ptr, visible to all threads of the program. Returns their number, int32."""
    wanted = wanted.to(tl.int32)
    tl.debug_barrier()  # all threads have read the previous list
    tl.store(list_ptr + tl.cumsum(wanted, 0) - 1, tl.arange(0, wanted.shape[0]), mask=wanted > 0)
    tl.debug_barrier()
    return tl.sum(wanted, 0)


@triton.jit
def _listed(logits_ptr, list_ptr, at, many, vocab):
    """Logits float32 [AT_ONCE, RUN] of the listed runs from index `at` on (of `many`), -inf past the end; and their tokens."""
    each = at + tl.arange(0, AT_ONCE)
    run = tl.load(list_ptr + each, mask=each < many, other=0)
    token = run[:, None] * RUN + tl.arange(0, RUN)[None, :]
    inside = (each < many)[:, None] & (token < vocab)
    return tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32), token


@triton.jit
def _above(logits_ptr, list_ptr, tops, bound, largest, rate, vocab):
    """Number of logits above `bound`, int32, and their total probability relative to `largest`."""
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
    logits_ptr, list_ptr, tops, best, drawn, bound, floor, first, second, temperature, vocab, LIBRARY_LOG: tl.constexpr
):
    """Draw among the tokens above `bound` and not below `floor`. The token drawn by a block of runs is kept if it is one of
    them."""
    of_drawn = tl.load(logits_ptr + drawn).to(tl.float32)
    stands = (of_drawn > bound) & (of_drawn >= floor)
    top = tl.max(tl.where(stands, best, float("-inf")), 0)
    token = tl.min(tl.where(stands & (best == top), drawn, NO_TOKEN), 0)
    blocks: tl.constexpr = [best.shape[0], tops.shape[0] // best.shape[0]]
    fallen = tl.reshape(tl.broadcast_to((stands == 0)[:, None], blocks), [tops.shape[0]])
    many = _list(fallen & (tops > bound) & (tops >= floor), list_ptr)
    highest, next_token = (
        tl.full([AT_ONCE, RUN], float("-inf"), tl.float32),
        tl.full([AT_ONCE, RUN], NO_TOKEN, tl.int32),
    )
    for at in range(0, many, AT_ONCE):
        logit, others = _listed(logits_ptr, list_ptr, at, many, vocab)
        scores = score(logit, others, first, second, temperature, LIBRARY_LOG)
        # Runs are visited in order, so the first of equal scores is kept.
        better = (logit > bound) & (logit >= floor) & (scores > highest)
        highest, next_token = tl.where(better, scores, highest), tl.where(better, others, next_token)
    next_score = tl.max(tl.max(highest, 1), 0)
    first_token = tl.min(tl.min(tl.where(highest == next_score, next_token, NO_TOKEN), 1), 0)
    return tl.where((next_score > top) | ((next_score == top) & (first_token < token)), first_token, token)


@triton.jit
def _reach(tops, weights, target, low, high, halvings: tl.constexpr):
    """Bisect between `low` and `high`: runs with largest logit >= low weigh at least `target` if `low` was raised, and runs with
    largest logit >= high weigh less."""
    for _ in range(halvings):
        middle = low + (high - low) * 0.5
        enough = tl.sum(tl.where(tops >= middle, weights, 0.0), 0) >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low, high


@triton.jit
def _mass_of(
    k, top_p, logits_ptr, list_ptr, tops, tallest, logit, count, mass, mass_min, mass_max, largest, temperature, vocab
):
    """Tighten bounds of the mass of the k largest logits, until both agree on whether `mass` is less than top_p of it.

    `logit` is one of the k largest; `mass` is that of the `count` logits above it. If no float lies between the bounds, mass_max
    counts.
    """
    rate = LOG2_E / temperature
    logit_share = share(logit, largest, rate)
    mass_min, mass_max = (
        tl.maximum(mass_min, mass + logit_share),
        tl.minimum(mass_max, mass + (k - count) * logit_share),
    )
    if (mass >= top_p * mass_min) & (mass < top_p * mass_max):
        low, above = _reach(
            tops, tl.full(tops.shape, 1.0, tl.float32), k, largest - _NOTHING * temperature, logit, _MANY
        )
        mass_min = tl.maximum(mass_min, tl.sum(tl.where(tops > above, tallest, 0.0), 0))
        at, high = low, logit
        while (mass >= top_p * mass_min) & (mass < top_p * mass_max) & (at < high):
            n_above, total = _above(logits_ptr, list_ptr, tops, at, largest, rate, vocab)
            if n_above <= k:
                high = at
                mass_min = tl.maximum(mass_min, total)
                mass_max = tl.minimum(mass_max, total + (k - n_above) * share(at, largest, rate))
            else:
                low = at
                mass_max = tl.minimum(mass_max, total)
            middle = low + (high - low) * 0.5
            at = tl.where(middle > low, middle, high)
    return mass_min, mass_max


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
    LIBRARY_LOG: tl.constexpr,
):
    """Return `token`, drawn among a row's logits [vocab], if the row's limits allow it, otherwise a token drawn among the allowed
    ones.

    best float32, drawn int32 [blocks]: scores and tokens of blocks of runs. tops float32 [runs]: largest logits, -inf past the end.
    sums float32 [runs]: with top_p, the mass of each run relative to its largest logit. list_ptr: space for one int32 per run.
    first, second: key words of the draw.
    """
    logit = tl.load(logits_ptr + token).to(tl.float32)
    largest, temperature = tl.max(tops, 0), tl.maximum(temperature, COLDEST)
    rate, floor = LOG2_E / temperature, tl.minimum(largest + temperature * tl.log(min_p), largest)
    top_k = tl.where(top_k < vocab, top_k, 0)
    tallest = share(tops, largest, rate)
    sums = tl.where(top_p < 1.0, sums * tallest, 0.0)
    ones = tl.full(tops.shape, 1.0, tl.float32)
    # Bounds of the mass that top_k leaves, of which top_p takes a share.
    mass_min, mass_max = tl.full([], 0.0, tl.float32), tl.full([], float("inf"), tl.float32)
    looking = logit < largest  # the largest logit is always allowed
    while looking:
        hot = tops > logit
        each = (tl.where(hot, ones, 0.0), tl.where(hot, tallest, 0.0), tl.where(hot, sums, 0.0), sums)
        n_hot, above_min, above_max, total = tl.reduce(each, 0, _add_four)
        mass_max = tl.minimum(mass_max, total)
        refused = (logit < floor) | ((top_k > 0) & (n_hot >= top_k)) | ((top_p < 1.0) & (above_min >= top_p * mass_max))
        sure = (top_k <= 0) & ((top_p >= 1.0) | (above_max < top_p * mass_max))
        if (refused | sure) == 0:
            count, mass = _above(logits_ptr, list_ptr, tops, logit, largest, rate, vocab)
            refused = (top_k > 0) & (count >= top_k)
            if (refused == 0) & (top_p < 1.0):
                if top_k > 0:
                    mass_min, mass_max = _mass_of(
                        top_k,
                        top_p,
                        logits_ptr,
                        list_ptr,
                        tops,
                        tallest,
                        logit,
                        count,
                        mass,
                        mass_min,
                        mass_max,
                        largest,
                        temperature,
                        vocab,
                    )
                refused = mass >= top_p * mass_max
        looking = refused
        if refused:
            if top_k > 0:
                low, _ = _reach(tops, ones, top_k, logit, largest, _FEW)
                floor = tl.maximum(floor, low)
            if top_p < 1.0:
                low, _ = _reach(tops, tallest, top_p * mass_max, logit, largest, _FEW)
                floor = tl.maximum(floor, low)
            token = _among(
                logits_ptr, list_ptr, tops, best, drawn, logit, floor, first, second, temperature, vocab, LIBRARY_LOG
            )
            token = tl.minimum(token, vocab - 1)
            last = logit
            logit = tl.load(logits_ptr + token).to(tl.float32)
            looking = (logit > last) & (logit < largest)
    return token
