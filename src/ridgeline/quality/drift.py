"""Divergence of a candidate's token distributions from a reference's on the same sequences, with confidence intervals.

Only the most probable alternatives of each model are known. The divergence is computed over the tokens that both models
report, and one bucket for all other tokens. It is a lower bound of KL(reference || candidate) over the whole vocabulary
and approaches it with the number of alternatives.
Source: data-processing inequality (Cover and Thomas 2006, section 2.8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.quality.scores import NO_TOKEN, Scores

RESAMPLES = 2000
CONFIDENCE = 0.95
_MIN_REMAINDER = 1e-9
"""A remaining probability below this counts as 0, because float32 cannot distinguish it from rounding."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TokenDrift:
    """Drift on the n scored tokens of one document, float64 [n] each."""

    kl: Floats
    """KL(reference || candidate), nats."""
    same: Floats
    """1 where the most probable token of both models is the same, else 0."""
    reference: Floats
    """Log-probability of the scored token under the reference, nats."""
    candidate: Floats
    """Log-probability of the scored token under the candidate, nats."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95 % interval. The bounds are None if there is only one document."""

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
    """Compare the scores of two models on the same tokens."""
    reference_ids, reference_logprobs = _known_logprobs(reference)
    candidate_ids, candidate_logprobs = _known_logprobs(candidate)
    # shared [n, k + 1]: which alternatives of the reference the candidate reports too. matched: the candidate's values.
    matches = (reference_ids[:, :, None] == candidate_ids[:, None, :]) & (reference_ids != NO_TOKEN)[:, :, None]
    shared = matches.any(2)
    matched = np.where(matches, candidate_logprobs[:, None, :], -np.inf).max(2, initial=-np.inf)
    p, q = np.where(shared, np.exp(reference_logprobs), 0.0), np.where(shared, np.exp(matched), 0.0)
    kl = np.where(shared, p * (np.where(shared, reference_logprobs, 0.0) - np.where(shared, matched, 0.0)), 0.0).sum(1)
    remainder_p, remainder_q = np.maximum(1 - p.sum(1), 0.0), np.maximum(1 - q.sum(1), _MIN_REMAINDER)
    kl += np.where(
        remainder_p > _MIN_REMAINDER, remainder_p * np.log(np.maximum(remainder_p, _MIN_REMAINDER) / remainder_q), 0.0
    )
    same = reference.top_ids[:, 0] == candidate.top_ids[:, 0]
    return TokenDrift(
        np.maximum(kl, 0.0),
        same.astype(np.float64),
        reference.logprob.astype(np.float64),
        candidate.logprob.astype(np.float64),
    )


def _known_logprobs(scores: Scores) -> tuple[NDArray[np.int64], Floats]:
    """Return the known ids and log-probabilities, [n, k + 1] each: the alternatives, and the scored token if it is not one."""
    ids, values = scores.top_ids.astype(np.int64), scores.top_logprobs.astype(np.float64)
    token = np.where((ids == scores.token[:, None]).any(1), NO_TOKEN, scores.token)
    ids = np.concatenate((ids, token[:, None]), axis=1)
    values = np.concatenate((values, scores.logprob[:, None]), axis=1)
    return ids, np.where(ids == NO_TOKEN, -np.inf, values)


def by_document(parts: Sequence[TokenDrift], documents: Sequence[int]) -> list[TokenDrift]:
    """Concatenate the parts of each document."""
    grouped: dict[int, list[TokenDrift]] = {}
    for part, document in zip(parts, documents, strict=True):
        grouped.setdefault(document, []).append(part)
    return [
        TokenDrift(*(np.concatenate([getattr(part, name) for part in document_parts]) for name in TokenDrift.__slots__))
        for document_parts in grouped.values()
    ]


def measure(documents: Sequence[TokenDrift], resamples: int = RESAMPLES, seed: int = 0) -> Drift:
    """Compute the figures of a comparison.

    The figures are kl, kl_p99, top1 (share), logprob_change (candidate minus reference, nats per token), perplexity,
    perplexity_reference and perplexity_change (relative: 0.01 is 1 % worse). kl_p99 is the 99th percentile and has no interval.

    Intervals are percentiles of a bootstrap over documents, because tokens of one document are not independent.
    Source: Efron and Tibshirani 1993, chapter 13.
    """
    sums = np.array(
        [[len(d.kl), d.kl.sum(), d.same.sum(), d.reference.sum(), d.candidate.sum()] for d in documents], np.float64
    )
    means = _figures(sums.sum(0))
    intervals: dict[str, tuple[float | None, float | None]] = dict.fromkeys(means, (None, None))
    if len(documents) > 1:
        generator = np.random.default_rng(seed)
        resampled = generator.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=resamples) @ sums
        tail = 50 * (1 - CONFIDENCE)
        for name, values in _figures(resampled.T).items():
            low, high = np.percentile(values, [tail, 100 - tail])
            intervals[name] = float(low), float(high)
    figures = {name: Estimate(float(value), *intervals[name]) for name, value in means.items()}
    figures["kl_p99"] = Estimate(float(np.percentile(np.concatenate([d.kl for d in documents]), 99)), None, None)
    return Drift(int(sums[:, 0].sum()), len(documents), figures)


def bootstrap_mean(values: Floats, resamples: int = RESAMPLES, seed: int = 0) -> Estimate:
    """Return the mean of independent values [n] with the percentile interval of a bootstrap."""
    chosen = np.random.default_rng(seed).integers(len(values), size=(resamples, len(values)))
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(values[chosen].mean(1), [tail, 100 - tail])
    return Estimate(float(values.mean()), float(low), float(high))


def _figures(sums: Floats) -> dict[str, Floats]:
    """Compute means from sums [5] or [5, resamples] of tokens, kl, same, and reference and candidate log-probabilities."""
    tokens, kl, same, reference, candidate = sums
    change = (candidate - reference) / tokens
    return {
        "kl": kl / tokens,
        "top1": same / tokens,
        "logprob_change": change,
        "perplexity": _perplexity(candidate / tokens),
        "perplexity_reference": _perplexity(reference / tokens),
        "perplexity_change": np.expm1(np.minimum(-change, _MAX_PERPLEXITY_LOG)),
    }


_MAX_PERPLEXITY_LOG = math.log(1e30)
"""Log of the largest perplexity reported. A token of probability 0 makes it infinite, which JSON cannot represent."""


def _perplexity(mean: Floats) -> Floats:
    return np.exp(np.minimum(-mean, _MAX_PERPLEXITY_LOG))
