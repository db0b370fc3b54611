"""What a row may draw by its limits (ops.sample.Limits), found without an order of its logits.

The token drawn among all is the one drawn among the allowed, if it is one of them, and what is likelier tells whether it is: how
many those are, and what chances they have together. If it is not, nothing as unlikely is, and the draw is repeated among what is
likelier.

The pass that drew left the largest logit of each run of the vocabulary, so a look reads only the runs with something above its
bound: few, unless all tokens are about as likely. Chances are counted in whole parts, so that their sums are the same for any type
of the logits, in any order.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.ops.triton.noise import score

RUN = tl.constexpr(256)
"""Logits of which the largest one is noted."""
AT_ONCE = tl.constexpr(16)
"""Runs that are read at a time."""
LOG2_E = tl.constexpr(1.4426950408889634)
COLDEST = tl.constexpr(1e-5)
"""As ops.sample: temperature below which chances would overflow."""
NOBODY = tl.constexpr(0x7FFFFFFF)
_PARTS = tl.constexpr(1 << 30)
"""Parts of the likeliest token's chance."""
_NOTHING = tl.constexpr(40.0)
"""So far below the largest, over temperature, a whole vocabulary has no mass: 2^-40 of the likeliest token's."""
_HALVINGS = tl.constexpr(12)
"""Of the range in which the runs' largest logits look for the k-th largest of all."""


@triton.jit
def parts(logit, largest, rate):
    """The chance of `logit` in parts of that of `largest`, int32. rate: log2(e) over the temperature."""
    return (tl.exp2((logit - largest) * rate) * _PARTS + 0.5).to(tl.int32)


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
    count, mass = tl.zeros([AT_ONCE, RUN], tl.int32), tl.zeros([AT_ONCE, RUN], tl.int64)
    for at in range(0, many, AT_ONCE):
        logit, _ = _listed(logits_ptr, list_ptr, at, many, vocab)
        count += (logit > bound).to(tl.int32)
        mass += tl.where(logit > bound, parts(logit, largest, rate), 0)
    return tl.sum(tl.sum(count, 1), 0), tl.sum(tl.sum(mass, 1), 0).to(tl.float32)


@triton.jit
def _among(logits_ptr, list_ptr, tops, bound, floor, first, second, temperature, vocab, PLAIN: tl.constexpr):
    """What is drawn among the tokens above `bound` and not below `floor`."""
    many = _list((tops > bound) & (tops >= floor), list_ptr)
    best, drawn = tl.full([AT_ONCE, RUN], float("-inf"), tl.float32), tl.full([AT_ONCE, RUN], NOBODY, tl.int32)
    for at in range(0, many, AT_ONCE):
        logit, token = _listed(logits_ptr, list_ptr, at, many, vocab)
        one = score(logit, token, first, second, temperature, PLAIN)
        better = (logit > bound) & (logit >= floor) & (one > best)  # runs are in order, so the first of equals stays
        best, drawn = tl.where(better, one, best), tl.where(better, token, drawn)
    top = tl.max(tl.max(best, 1), 0)
    return tl.min(tl.min(tl.where(best == top, drawn, NOBODY), 1), 0)


@triton.jit
def _kth(tops, k, low, high):
    """Bounds of the k-th largest logit between these by halving: k runs reach `low` where it has risen, and fewer `high`."""
    for _ in range(_HALVINGS):
        middle = low + (high - low) * 0.5
        enough = tl.sum((tops >= middle).to(tl.int32), 0) >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low, high


@triton.jit
def _mass_of(k, top_p, logits_ptr, list_ptr, tops, logit, count, mass, least, most, largest, heat, vocab):
    """Bounds of the mass of the k largest, one of which is `logit`, closer than `least` and `most`: so close that they agree on
    whether `mass`, that of the `count` ones above it, is less than top_p of it. Where nothing is left between, `most` counts."""
    rate = LOG2_E / heat
    share = parts(logit, largest, rate).to(tl.float32)
    least, most = tl.maximum(least, mass + share), tl.minimum(most, mass + (k - count) * share)
    if (mass >= top_p * least) & (mass < top_p * most):
        low, above = _kth(tops, k, largest - _NOTHING * heat, logit)
        tallest = tl.sum(tl.where(tops > above, parts(tops, largest, rate), 0).to(tl.int64), 0)
        least = tl.maximum(least, tallest.to(tl.float32))
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
    logits_ptr,
    list_ptr,
    tops,
    sums,
    first,
    second,
    temperature,
    top_k,
    top_p,
    min_p,
    vocab,
    PLAIN: tl.constexpr,
):
    """`token`, drawn among a row's logits [vocab], or what is drawn among those that its limits leave. tops float32: the largest
    logit of each run, -inf beyond; sums float32 [blocks]: where top_p limits, of the chances of a block of runs, in parts of its
    largest one; list_ptr: room for a number for each run. first, second: key words of the draw."""
    logit = tl.load(logits_ptr + token).to(tl.float32)
    largest, heat = tl.max(tops, 0), tl.maximum(temperature, COLDEST)
    rate, floor = LOG2_E / heat, tl.minimum(largest + heat * tl.log(min_p), largest)
    top_k = tl.where(top_k < vocab, top_k, 0)
    # Between these is the mass of what top_k leaves, of which top_p is a part.
    of_block = tl.max(tl.reshape(tops, [sums.shape[0], tops.shape[0] // sums.shape[0]]), 1)
    most = tl.sum((sums * tl.exp2((of_block - largest) * rate) + 0.5).to(tl.int64), 0).to(tl.float32)
    least = tl.where(top_k > 0, 0.0, most)
    looking = logit < largest  # which is always allowed
    while looking:
        refused = logit < floor
        if (refused == 0) & ((top_k > 0) | (top_p < 1.0)):
            count, mass = _above(logits_ptr, list_ptr, tops, logit, largest, rate, vocab)
            refused = (top_k > 0) & (count >= top_k)
            if (refused == 0) & (top_p < 1.0):
                if top_k > 0:
                    least, most = _mass_of(
                        top_k, top_p, logits_ptr, list_ptr, tops, logit, count, mass, least, most, largest, heat, vocab
                    )
                refused = mass >= top_p * most
        looking = refused
        if refused:
            if top_k > 0:
                low, _ = _kth(tops, top_k, logit, largest)
                floor = tl.maximum(floor, low)
            token = _among(logits_ptr, list_ptr, tops, logit, floor, first, second, temperature, vocab, PLAIN)
            token = tl.minimum(token, vocab - 1)
            last = logit
            logit = tl.load(logits_ptr + token).to(tl.float32)
            looking = (logit > last) & (logit < largest)
    return token
