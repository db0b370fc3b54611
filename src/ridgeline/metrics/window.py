"""The last seconds alone: quantiles of what was observed, sums of what was counted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

QUANTILES = (0.5, 0.9, 0.95, 0.99)
GROWTH = 1.02
"""Ratio of two neighbouring bounds of a Window: an observation is known within 1 %."""
_SMALLEST = 1e-9
_PER_BUCKET = 1 / math.log(GROWTH)
_MIDDLE = 2 / (1 + GROWTH)
"""Of a bucket's upper bound: the value that is off by the same share at both of its ends."""


class Window:
    """Observations of the last span_s seconds, to the second; an observation may weigh more than one.

    Buckets whose bounds grow by GROWTH (Masson, Rim, Lee 2019, DDSketch) keep each value within 1 %, whatever the values
    are. What a quantile costs depends on how many buckets are in use, not on how much was observed. Values below a
    billionth count as that.
    """

    __slots__ = ("_buckets", "_held", "_span_s")

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._buckets: dict[int, int] = {}
        """Weight by bucket of all that is held."""
        self._held: deque[tuple[int, dict[int, int]]] = deque()
        """The same by second, so that it can be taken away again."""

    def add(self, now: float, value: float, weight: int = 1) -> None:
        """now: seconds on a clock that only grows."""
        self.extend(now, ((value, weight),))

    def extend(self, now: float, observed: Iterable[tuple[float, int]]) -> None:
        """Add (value, weight) pairs of one second."""
        second = int(now)
        if not self._held or self._held[-1][0] != second:
            self._held.append((second, {}))
        held, log, ceil = self._held[-1][1], math.log, math.ceil
        more: dict[int, int] = {}
        for value, weight in observed:
            bucket = ceil(log(max(value, _SMALLEST)) * _PER_BUCKET)
            more[bucket] = more.get(bucket, 0) + weight
        for bucket, weight in more.items():
            held[bucket] = held.get(bucket, 0) + weight
            self._buckets[bucket] = self._buckets.get(bucket, 0) + weight

    def count(self, now: float) -> int:
        """Weight of what is held."""
        self._forget(now)
        return sum(self._buckets.values())

    def quantiles(self, now: float, shares: Sequence[float] = QUANTILES) -> tuple[float, ...]:
        """For each share, in rising order, the smallest observation that so much of the weight does not exceed; NaN without
        any."""
        self._forget(now)
        ordered = sorted(self._buckets.items())
        total = sum(self._buckets.values())
        found, below, place = [], 0, 0
        for share in shares:
            while place < len(ordered) and below + ordered[place][1] < share * total:
                below += ordered[place][1]
                place += 1
            found.append(GROWTH ** ordered[place][0] * _MIDDLE if ordered else math.nan)
        return tuple(found)

    def _forget(self, now: float) -> None:
        buckets = self._buckets
        while self._held and self._held[0][0] < now - self._span_s:
            for bucket, weight in self._held.popleft()[1].items():
                buckets[bucket] -= weight
                if not buckets[bucket]:
                    del buckets[bucket]


class Sums:
    """Amounts by name over the last span_s seconds, kept by the second."""

    __slots__ = ("_held", "_span_s", "_started")

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._held: deque[tuple[int, dict[str, float]]] = deque()
        self._started: float | None = None

    def add(self, now: float, amounts: Mapping[str, float]) -> None:
        """now: seconds on a clock that only grows."""
        if self._started is None:
            self._started = now
        second = int(now)
        if not self._held or self._held[-1][0] != second:
            self._held.append((second, {}))
        held = self._held[-1][1]
        for name, amount in amounts.items():
            held[name] = held.get(name, 0.0) + amount

    def totals(self, now: float) -> dict[str, float]:
        """Sums by name of what is held."""
        while self._held and self._held[0][0] < now - self._span_s:
            self._held.popleft()
        found: dict[str, float] = {}
        for _, amounts in self._held:
            for name, amount in amounts.items():
                found[name] = found.get(name, 0.0) + amount
        return found

    def seconds(self, now: float) -> float:
        """Seconds that `totals` covers: the span, or what has passed since the first amount; at least one."""
        return self._span_s if self._started is None else max(1.0, min(self._span_s, now - self._started))
