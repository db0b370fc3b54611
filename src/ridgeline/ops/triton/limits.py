"""What a row may draw by its limits (ops.sample.Limits), found without an order of its logits.

The token drawn among all is the one drawn among the allowed, if it is one of them, and what is likelier tells whether it is: how
many those are, and what chances they have together. If it is not, nothing as unlikely is, and the draw is repeated among what is
likelier.

The pass that drew left the largest logit of each run of the vocabulary and the run's chances. These bound both from below and
above, which mostly decides; else a look reads the runs with something above the logit in question: few, unless all tokens are about
as likely. Chances are counted in whole parts, so that their sums are the same for any type of the logits, in any order.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.triton.noise import score

RUN = tl.constexpr(256)
"""Logits of which the largest one is noted."""
AT_ONCE = tl.constexpr(32)
"""Runs that are read at a time."""
STAGES = tl.constexpr(1)
"""Reads of them that are under way."""
LOG2_E = tl.constexpr(1.4426950408889634)
COLDEST = tl.constexpr(1e-5)
"""As ops.sample: temperature below which chances would overflow."""
NOBODY = tl.constexpr(0x7FFFFFFF)
PARTS = tl.constexpr(1 << 27)
"""Parts of the likeliest token's chance, so few that eight tokens' fit into 32 bits."""
_NOTHING = tl.constexpr(40.0)
"""So far below the largest, over temperature, a whole vocabulary has no mass: 2^-40 of the likeliest token's."""
_HALVINGS = tl.constexpr(10)
"""Of the range in which the runs' largest logits look for a bound."""


@triton.jit
def parts(logit, largest, rate):
    """The chance of `logit` in parts of that of `largest`, int32. rate: log2(e) over the temperature."""
    return (tl.exp2((logit - largest) * rate) * PARTS + 0.5).to(tl.int32)


@triton.jit
def eights(numbers):
    """int32 [M, N] -> sums of eight neighbours, [M, N / 8]."""
    return tl.sum(tl.reshape(numbers, [numbers.shape[0], numbers.shape[1] // 8, 8]), 2)


@triton.jit
def _list(wanted, list_ptr):
    """Note the numbers of the wanted runs where all threads of the program see them -> how many these are."""
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
    """How many logits are above `bound`, int32, and the parts that they have, rounded to float32."""
    many = _list(tops > bound, list_ptr)
    count, mass = tl.zeros([AT_ONCE, RUN // 8], tl.int32), tl.zeros([AT_ONCE, RUN // 8], tl.int64)
    for at in tl.range(0, many, AT_ONCE, num_stages=STAGES):
        logit, _ = _listed(logits_ptr, list_ptr, at, many, vocab)
        above = logit > bound
        count += eights(above.to(tl.int32))
        mass += eights(tl.where(above, parts(logit, largest, rate), 0)).to(tl.int64)
    return tl.sum(tl.sum(count, 1), 0), tl.sum(tl.sum(mass, 1), 0).to(tl.float32)


@triton.jit
def _among(
    logits_ptr,
    list_ptr,
    tops,
    best,
    drawn,
    of_drawn,
    bound,
    floor,
    first,
    second,
    temperature,
    vocab,
    PLAIN: tl.constexpr,
):
    """What is drawn among the tokens above `bound` and not below `floor`. What a block of runs drew stands where it is one."""
    stands = (of_drawn > bound) & (of_drawn >= floor)
    top = tl.max(tl.where(stands, best, float("-inf")), 0)
    token = tl.min(tl.where(stands & (best == top), drawn, NOBODY), 0)
    blocks: tl.constexpr = [best.shape[0], tops.shape[0] // best.shape[0]]
    fallen = tl.reshape(tl.broadcast_to((stands == 0)[:, None], blocks), [tops.shape[0]])
    many = _list(fallen & (tops > bound) & (tops >= floor), list_ptr)
    highest, its = tl.full([AT_ONCE, RUN], float("-inf"), tl.float32), tl.full([AT_ONCE, RUN], NOBODY, tl.int32)
    for at in tl.range(0, many, AT_ONCE, num_stages=STAGES):
        logit, others = _listed(logits_ptr, list_ptr, at, many, vocab)
        one = score(logit, others, first, second, temperature, PLAIN)
        better = (logit > bound) & (logit >= floor) & (one > highest)  # runs are in order, so the first of equals stays
        highest, its = tl.where(better, one, highest), tl.where(better, others, its)
    other = tl.max(tl.max(highest, 1), 0)
    its_first = tl.min(tl.min(tl.where(highest == other, its, NOBODY), 1), 0)
    return tl.where((other > top) | ((other == top) & (its_first < token)), its_first, token)


@triton.jit
def _reach(tops, weights, target, low, high):
    """Between these by halving: where `low` has risen, the runs that reach it weigh at least `target`, those that reach `high`
    less."""
    for _ in range(_HALVINGS):
        middle = low + (high - low) * 0.5
        enough = tl.sum(tl.where(tops >= middle, weights, 0.0), 0) >= target
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low, high


@triton.jit
def _mass_of(k, top_p, logits_ptr, list_ptr, tops, tallest, logit, count, mass, least, most, largest, heat, vocab):
    """Bounds of the mass of the k largest, one of which is `logit`, closer than `least` and `most`: so close that they agree on
    whether `mass`, that of the `count` ones above it, is less than top_p of it. Where nothing is left between, `most` counts."""
    rate = LOG2_E / heat
    share = parts(logit, largest, rate).to(tl.float32)
    least, most = tl.maximum(least, mass + share), tl.minimum(most, mass + (k - count) * share)
    if (mass >= top_p * least) & (mass < top_p * most):
        low, above = _reach(tops, tl.full(tops.shape, 1.0, tl.float32), k, largest - _NOTHING * heat, logit)
        least = tl.maximum(least, tl.sum(tl.where(tops > above, tallest, 0.0), 0))
        at, high = low, logit
        while (mass >= top_p * least) & (mass < top_p * most) & (at < high):
            n_above, total = _above(logits_ptr, list_ptr, tops, at, largest, rate, vocab)
            if n_above <= k:
                high = at
                least = tl.maximum(least, total)
                most = tl.minimum(most, total + (k - n_above) * parts(at, largest, rate).to(tl.float32))
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
    sums float32 [runs]: where top_p limits, their chances in parts of the largest one's. list_ptr: room for a number for each run.
    first, second: key words of the draw.
    """
    of_drawn = tl.load(logits_ptr + drawn).to(tl.float32)
    logit = tl.max(tl.where(drawn == token, of_drawn, float("-inf")), 0)
    largest, heat = tl.max(tops, 0), tl.maximum(temperature, COLDEST)
    rate, floor = LOG2_E / heat, tl.minimum(largest + heat * tl.log(min_p), largest)
    top_k = tl.where(top_k < vocab, top_k, 0)
    shares = tl.exp2((tops - largest) * rate)
    tallest, sums = shares * PARTS, sums * shares
    # Between these is the mass of what top_k leaves, of which top_p is a part.
    most = tl.sum(sums, 0)
    least = tl.where(top_k > 0, 0.0, most)
    looking = logit < largest  # which is always allowed
    while looking:
        hot = tops > logit
        refused = (logit < floor) | ((top_k > 0) & (tl.sum(hot.to(tl.int32), 0) >= top_k))
        sure = (top_k <= 0) & (top_p >= 1.0)
        if top_p < 1.0:
            refused |= tl.sum(tl.where(hot, tallest, 0.0), 0) >= top_p * most
            sure |= (top_k <= 0) & (tl.sum(tl.where(hot, sums, 0.0), 0) < top_p * most)
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
                        heat,
                        vocab,
                    )
                refused = mass >= top_p * most
        looking = refused
        if refused:
            if top_k > 0:
                low, _ = _reach(tops, tl.full(tops.shape, 1.0, tl.float32), top_k, logit, largest)
                floor = tl.maximum(floor, low)
            if top_p < 1.0:
                low, _ = _reach(tops, tallest, top_p * most, logit, largest)
                floor = tl.maximum(floor, low)
            token = _among(
                logits_ptr,
                list_ptr,
                tops,
                best,
                drawn,
                of_drawn,
                logit,
                floor,
                first,
                second,
                temperature,
                vocab,
                PLAIN,
            )
            token = tl.minimum(token, vocab - 1)
            last = logit
            logit = tl.load(logits_ptr + token).to(tl.float32)
            looking = (logit > last) & (logit < largest)
    return token
