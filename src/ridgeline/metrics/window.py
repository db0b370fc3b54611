"""Sliding windows over the last seconds: quantiles of observations and sums of amounts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

QUANTILES = (0.5, 0.9, 0.95, 0.99)
GROWTH = 1.02
"""Ratio of two neighbouring bucket bounds of a Window. Values are accurate to 1 %."""
_SMALLEST = 1e-9
_PER_BUCKET = 1 / math.log(GROWTH)
_MIDDLE = 2 / (1 + GROWTH)
"""A bucket's representative value as a share of its upper bound. Its relative error is the same at both ends of the bucket."""


class Window:
    """Weighted observations of the last span_s seconds, with a resolution of one second.

    Bucket bounds grow by the factor GROWTH, so each value is accurate to 1 %. The cost of a quantile depends on the number of
    used buckets, not on the number of observations. Values below 1e-9 count as 1e-9.

    Source: DDSketch (Masson, Rim, Lee 2019).
    """

    __slots__ = ("_buckets", "_by_second", "_span_s")

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._buckets: dict[int, int] = {}
        """Bucket -> weight, over the span."""
        self._by_second: deque[tuple[int, dict[int, int]]] = deque()
        """The same for each second, to subtract it when it leaves the span."""

    def add(self, now: float, value: float, weight: int = 1) -> None:
        """Add an observation. now: monotonic seconds."""
        self.extend(now, ((value, weight),))

    def extend(self, now: float, observations: Iterable[tuple[float, int]]) -> None:
        """Add (value, weight) pairs that belong to the second of `now`."""
        second = int(now)
        if not self._by_second or self._by_second[-1][0] != second:
            self._by_second.append((second, {}))
        second_counts, log, ceil = self._by_second[-1][1], math.log, math.ceil
        new_counts: dict[int, int] = {}
        for value, weight in observations:
            bucket = ceil(log(max(value, _SMALLEST)) * _PER_BUCKET)
            new_counts[bucket] = new_counts.get(bucket, 0) + weight
        for bucket, weight in new_counts.items():
            second_counts[bucket] = second_counts.get(bucket, 0) + weight
            self._buckets[bucket] = self._buckets.get(bucket, 0) + weight

    def count(self, now: float) -> int:
        """Return the total weight in the span."""
        self._forget(now)
        return sum(self._buckets.values())

    def quantiles(self, now: float, shares: Sequence[float] = QUANTILES) -> tuple[float, ...]:
        """Return the quantile of each share. `shares` must ascend. NaN without observations."""
        self._forget(now)
        ordered = sorted(self._buckets.items())
        total = sum(self._buckets.values())
        values, cumulative, index = [], 0, 0
        for share in shares:
            while index < len(ordered) and cumulative + ordered[index][1] < share * total:
                cumulative += ordered[index][1]
                index += 1
            values.append(GROWTH ** ordered[index][0] * _MIDDLE if ordered else math.nan)
        return tuple(values)

    def _forget(self, now: float) -> None:
        buckets = self._buckets
        while self._by_second and self._by_second[0][0] < now - self._span_s:
            for bucket, weight in self._by_second.popleft()[1].items():
                buckets[bucket] -= weight
                if not buckets[bucket]:
                    del buckets[bucket]


class Sums:
    """Sums of amounts by name over the last span_s seconds, with a resolution of one second."""

    __slots__ = ("_by_second", "_span_s", "_started")

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._by_second: deque[tuple[int, dict[str, float]]] = deque()
        self._started: float | None = None

    def add(self, now: float, amounts: Mapping[str, float]) -> None:
        """Add amounts by name. now: monotonic seconds."""
        if self._started is None:
            self._started = now
        second = int(now)
        if not self._by_second or self._by_second[-1][0] != second:
            self._by_second.append((second, {}))
        second_sums = self._by_second[-1][1]
        for name, amount in amounts.items():
            second_sums[name] = second_sums.get(name, 0.0) + amount

    def totals(self, now: float) -> dict[str, float]:
        """Return the sums by name over the span."""
        while self._by_second and self._by_second[0][0] < now - self._span_s:
            self._by_second.popleft()
        totals: dict[str, float] = {}
        for _, amounts in self._by_second:
            for name, amount in amounts.items():
                totals[name] = totals.get(name, 0.0) + amount
        return totals

    def seconds(self, now: float) -> float:
        """Return the seconds that `totals` covers: the span or the time since the first amount, at least 1."""
        return self._span_s if self._started is None else max(1.0, min(self._span_s, now - self._started))
