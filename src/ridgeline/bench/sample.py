"""Percentiles with bootstrap confidence intervals (Efron 1979).

Requests are resampled, not tokens, because the tokens of one request are not independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Statistic = Callable[[Array], Any]
"""Maps samples [draws, n] to one value per draw."""

DRAWS = 400
LEVEL = 0.95
SHARES = (50, 90, 95, 99)
_BINS = 512
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Figure:
    """A value with its confidence interval at LEVEL. low and high are NaN for fewer than two requests."""

    value: float
    low: float
    high: float


def percentile(share: float) -> Statistic:
    """Return the statistic that computes the `share`-th percentile with linear interpolation."""
    return lambda samples: np.percentile(samples, share, axis=-1)


def mean(samples: Array) -> Any:
    return samples.mean(axis=-1)


def figure(values: Array, statistic: Statistic, seed: int = 0) -> Figure:
    """Compute a statistic of one value per request and its bootstrap percentile interval."""
    if not len(values):
        return Figure(np.nan, np.nan, np.nan)
    return _figure(float(statistic(values)), resampled(values, statistic, seed), len(values))


def resampled(values: Array, statistic: Statistic, seed: int) -> Array:
    """Compute the statistic of DRAWS samples that are drawn from `values` with replacement, each of the same size."""
    source = np.random.Generator(np.random.PCG64(seed))
    size = len(values)
    at_once = max(1, _CHUNK // size)
    parts = []
    for first in range(0, DRAWS, at_once):
        draws = min(at_once, DRAWS - first)
        parts.append(statistic(values[source.integers(0, size, (draws, size))]))
    return np.concatenate(parts)


def token_percentiles(
    values: Sequence[Array], weights: Sequence[Array], shares: Sequence[float] = SHARES, seed: int = 0
) -> list[Figure]:
    """Compute percentiles over tokens. Intervals come from resampled requests.

    Args:
        values: Values of each request's tokens.
        weights: Weight of each value, in tokens.
    Returns:
        A figure for each share. The value is exact; the interval uses _BINS bins and is accurate to the width of a bin.
    """
    all_values, all_weights = _concatenated(values), _concatenated(weights)
    if not len(all_values) or not all_weights.sum():
        return [Figure(np.nan, np.nan, np.nan) for _ in shares]
    order = np.argsort(all_values)
    below = np.cumsum(all_weights[order]) / all_weights.sum()
    exact = [
        float(all_values[order][min(len(all_values) - 1, int(np.searchsorted(below, share / 100)))]) for share in shares
    ]
    edges = np.unique(np.quantile(all_values, np.linspace(0, 1, _BINS)))
    counts = np.zeros((len(values), len(edges)))
    for row, (request_values, weight) in enumerate(zip(values, weights, strict=True)):
        np.add.at(counts[row], np.searchsorted(edges, request_values), weight)
    source = np.random.Generator(np.random.PCG64(seed))
    picked = source.multinomial(len(values), np.full(len(values), 1 / len(values)), DRAWS).astype(float)
    sums = np.cumsum(picked @ counts, axis=1)
    sums /= np.maximum(sums[:, -1:], 1e-300)
    figures = []
    for share, value in zip(shares, exact, strict=True):
        at = np.minimum((sums < share / 100).sum(axis=1), len(edges) - 1)
        figures.append(_figure(value, edges[at], len(values)))
    return figures


def difference(first: Array, second: Array, statistic: Statistic, *, paired: bool) -> Figure:
    """Compute statistic(second) - statistic(first) with its interval.

    paired: Entry i of both is the same request. Pairs are resampled together, which removes the variance between requests.
    """
    if not len(first) or not len(second):
        return Figure(np.nan, np.nan, np.nan)
    value = float(statistic(second) - statistic(first))
    drawn = resampled(second, statistic, 0) - resampled(first, statistic, 0 if paired else 1)
    return _figure(value, drawn, min(len(first), len(second)))


def _figure(value: float, drawn: Array, size: int) -> Figure:
    if size < 2:
        return Figure(value, np.nan, np.nan)
    edge = (1 - LEVEL) / 2 * 100
    low, high = np.percentile(drawn, [edge, 100 - edge])
    return Figure(value, float(low), float(high))


def _concatenated(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if len(parts) else np.empty(0)
