"""Percentiles and how sure they are: the bootstrap (Efron 1979), by request, since the tokens of one request are no
independent draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Statistic = Callable[[Array], Any]
"""From samples (draws, n) to one figure per draw."""

DRAWS = 400
LEVEL = 0.95
SHARES = (50, 90, 95, 99)
_BINS = 512
_CHUNK = 1 << 22


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure with its interval at LEVEL; low and high are NaN where too few requests tell."""

    value: float
    low: float
    high: float


def percentile(share: float) -> Statistic:
    """The `share`-th percentile, interpolated linearly."""
    return lambda samples: np.percentile(samples, share, axis=-1)


def mean(samples: Array) -> Any:
    return samples.mean(axis=-1)


def figure(values: Array, statistic: Statistic, seed: int = 0) -> Figure:
    """A statistic of one value per request, with its percentile interval over resampled requests."""
    if not len(values):
        return Figure(np.nan, np.nan, np.nan)
    return _figure(float(statistic(values)), resampled(values, statistic, seed), len(values))


def resampled(values: Array, statistic: Statistic, seed: int) -> Array:
    """The statistic of DRAWS samples drawn from `values` with replacement, of its size each."""
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
    """Percentiles over tokens, of (values, weights) given by request; whole requests are drawn again.

    Draws are made on counts in _BINS bins of equal content, which is exact to a bin's width.
    """
    pooled, heavy = _pooled(values), _pooled(weights)
    if not len(pooled) or not heavy.sum():
        return [Figure(np.nan, np.nan, np.nan) for _ in shares]
    order = np.argsort(pooled)
    below = np.cumsum(heavy[order]) / heavy.sum()
    exact = [float(pooled[order][min(len(pooled) - 1, int(np.searchsorted(below, share / 100)))]) for share in shares]
    edges = np.unique(np.quantile(pooled, np.linspace(0, 1, _BINS)))
    counts = np.zeros((len(values), len(edges)))
    for row, (one, weight) in enumerate(zip(values, weights, strict=True)):
        np.add.at(counts[row], np.searchsorted(edges, one), weight)
    source = np.random.Generator(np.random.PCG64(seed))
    picked = source.multinomial(len(values), np.full(len(values), 1 / len(values)), DRAWS).astype(float)
    sums = np.cumsum(picked @ counts, axis=1)
    sums /= np.maximum(sums[:, -1:], 1e-300)
    found = []
    for share, value in zip(shares, exact, strict=True):
        at = np.minimum((sums < share / 100).sum(axis=1), len(edges) - 1)
        found.append(_figure(value, edges[at], len(values)))
    return found


def difference(first: Array, second: Array, statistic: Statistic, *, paired: bool) -> Figure:
    """statistic(second) - statistic(first) with its interval. paired: entry i of both is the same request, and the two are
    drawn together, which leaves out what differs between requests."""
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


def _pooled(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if len(parts) else np.empty(0)
