"""How far a candidate's distributions are from a reference's, token by token on the same sequences, with intervals.

Only the most probable alternatives of each side are known, so the divergence is that of a coarser question: which of the
tokens known to both, or any other? By the data-processing inequality (Cover and Thomas 2006, section 2.8) it is a lower
bound of KL(reference || candidate) over the whole vocabulary, and grows towards it with the number of alternatives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.quality.scores import NOBODY, Scores

RESAMPLES = 2000
CONFIDENCE = 0.95
_TINY = 1e-9
"""Probability below which the rest of a distribution counts as none: float32 cannot tell it from rounding."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenDrift:
    """n scored tokens of one document, float64 [n] each.

    kl: nats, from the reference's distribution to the candidate's. same: 1 where both think the same token most probable.
    reference, candidate: log-probability each gives to the token that is there, in nats.
    """

    kl: Floats
    same: Floats
    reference: Floats
    candidate: Floats


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval. None: one document alone says nothing about others."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True)
class Drift:
    """Means over all scored tokens, by name; see `measure`."""

    tokens: int
    documents: int
    figures: Mapping[str, Estimate]


def token_drift(reference: Scores, candidate: Scores) -> TokenDrift:
    """Both models' scores of the same tokens compared."""
    ours_ids, ours = _known(reference)
    theirs_ids, theirs = _known(candidate)
    # Alternatives that both sides told, [n, k + 1] of the reference's, and the candidate's values for them.
    equal = (ours_ids[:, :, None] == theirs_ids[:, None, :]) & (ours_ids != NOBODY)[:, :, None]
    shared = equal.any(2)
    matched = np.where(equal, theirs[:, None, :], -np.inf).max(2, initial=-np.inf)
    p, q = np.where(shared, np.exp(ours), 0.0), np.where(shared, np.exp(matched), 0.0)
    kl = np.where(shared, p * (np.where(shared, ours, 0.0) - np.where(shared, matched, 0.0)), 0.0).sum(1)
    rest_p, rest_q = np.maximum(1 - p.sum(1), 0.0), np.maximum(1 - q.sum(1), _TINY)
    kl += np.where(rest_p > _TINY, rest_p * np.log(np.maximum(rest_p, _TINY) / rest_q), 0.0)
    same = reference.top_ids[:, 0] == candidate.top_ids[:, 0]
    return TokenDrift(
        np.maximum(kl, 0.0),
        same.astype(np.float64),
        reference.logprob.astype(np.float64),
        candidate.logprob.astype(np.float64),
    )


def _known(scores: Scores) -> tuple[NDArray[np.int64], Floats]:
    """Ids [n, k + 1] and log-probabilities known at each place: the alternatives, and the token itself where it is none
    of them."""
    ids, values = scores.top_ids.astype(np.int64), scores.top_logprobs.astype(np.float64)
    own = np.where((ids == scores.token[:, None]).any(1), NOBODY, scores.token)
    ids = np.concatenate((ids, own[:, None]), axis=1)
    values = np.concatenate((values, scores.logprob[:, None]), axis=1)
    return ids, np.where(ids == NOBODY, -np.inf, values)


def by_document(parts: Sequence[TokenDrift], documents: Sequence[int]) -> list[TokenDrift]:
    """The parts of each document as one."""
    grouped: dict[int, list[TokenDrift]] = {}
    for part, document in zip(parts, documents, strict=True):
        grouped.setdefault(document, []).append(part)
    return [
        TokenDrift(*(np.concatenate([getattr(one, name) for one in mine]) for name in TokenDrift.__slots__))
        for mine in grouped.values()
    ]


def measure(documents: Sequence[TokenDrift], resamples: int = RESAMPLES, seed: int = 0) -> Drift:
    """The figures of a comparison: kl, kl_p99, top1 (share), logprob_change (candidate minus reference, nats per token),
    perplexity and perplexity_reference, perplexity_change (relative: 0.01 is one per cent worse).

    Intervals are percentiles of a bootstrap over whole documents (Efron and Tibshirani 1993, chapter 13), whose tokens
    are not independent. kl_p99 is the divergence that one token in a hundred exceeds; it has no interval.
    """
    sums = np.array(
        [[len(d.kl), d.kl.sum(), d.same.sum(), d.reference.sum(), d.candidate.sum()] for d in documents], np.float64
    )
    found = _figures(sums.sum(0))
    spread: dict[str, tuple[float | None, float | None]] = dict.fromkeys(found, (None, None))
    if len(documents) > 1:
        chance = np.random.default_rng(seed)
        drawn = chance.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=resamples) @ sums
        tail = 50 * (1 - CONFIDENCE)
        for name, values in _figures(drawn.T).items():
            low, high = np.percentile(values, [tail, 100 - tail])
            spread[name] = float(low), float(high)
    figures = {name: Estimate(float(value), *spread[name]) for name, value in found.items()}
    figures["kl_p99"] = Estimate(float(np.percentile(np.concatenate([d.kl for d in documents]), 99)), None, None)
    return Drift(int(sums[:, 0].sum()), len(documents), figures)


def _figures(sums: Floats) -> dict[str, Floats]:
    """Means of sums [5] or [5, resamples]: tokens, kl, same, log-probabilities of reference and candidate."""
    tokens, kl, same, reference, candidate = sums
    change = (candidate - reference) / tokens
    return {
        "kl": kl / tokens,
        "top1": same / tokens,
        "logprob_change": change,
        "perplexity": _perplexity(candidate / tokens),
        "perplexity_reference": _perplexity(reference / tokens),
        "perplexity_change": np.expm1(np.minimum(-change, _MOST)),
    }


_MOST = math.log(1e30)
"""A model that gives a token no chance at all has an infinite perplexity, which JSON cannot say."""


def _perplexity(mean: Floats) -> Floats:
    return np.exp(np.minimum(-mean, _MOST))
