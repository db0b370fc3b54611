"""The last seconds alone: quantiles of what was observed, sums of what was counted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

QUANTILES = (0.5, 0.9, 0.95, 0.99)


class Window:
    """Observations of the last span_s seconds, the newest `most` of them; an observation may weigh more than one."""

    __slots__ = ("_held", "_span_s")

    def __init__(self, span_s: float, most: int = 20_000) -> None:
        self._span_s = span_s
        self._held: deque[tuple[float, float, int]] = deque(maxlen=most)

    def add(self, now: float, value: float, weight: int = 1) -> None:
        """now: seconds on a clock that only grows."""
        self._held.append((now, value, weight))

    def count(self, now: float) -> int:
        """Weight of what is held."""
        self._forget(now)
        return sum(weight for _, _, weight in self._held)

    def quantiles(self, now: float, shares: Sequence[float] = QUANTILES) -> tuple[float, ...]:
        """For each share the smallest observation that so much of the weight does not exceed; NaN without any."""
        self._forget(now)
        ordered = sorted((value, weight) for _, value, weight in self._held)
        total = sum(weight for _, weight in ordered)
        found, below, place = [], 0, 0
        for share in shares:
            while place < len(ordered) and below + ordered[place][1] < share * total:
                below += ordered[place][1]
                place += 1
            found.append(ordered[place][0] if ordered else math.nan)
        return tuple(found)

    def _forget(self, now: float) -> None:
        while self._held and self._held[0][0] < now - self._span_s:
            self._held.popleft()


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
