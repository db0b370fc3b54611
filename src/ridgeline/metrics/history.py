"""What the server keeps of the past: a day by minutes, an hour by readings; and the rules that say when the present is worse."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KEPT_MINUTES = 24 * 60
READING_S = 10.0
"""Seconds between two readings."""
KEPT_READINGS = 360
RECENT = 3
"""Minutes that count as the present."""
USUAL = 60
"""Minutes before these that count as usual."""
FEWEST_USUAL = 10
FEWEST_REQUESTS = 20
"""Requests in the present below which a percentile says nothing."""
WORSE = 1.5
"""Factor over the usual from which a percentile has regressed."""
ATTAINED = 0.9
"""Share of good requests, of those judged, below which the SLO counts as broken."""


@dataclass(frozen=True, slots=True)
class Minute:
    """One minute. at: unix seconds of its end. requests: ended in it; judged: of these, those that goodput counts;
    good: of these, within the SLO. prompt_tokens, output_tokens: computed in it. quantiles: by "ttft_p95" and the like,
    in seconds, over the live span that ends with it; what was not seen is left out."""

    at: float
    quantiles: dict[str, float]
    requests: int
    judged: int
    good: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Reading:
    """What the dashboard's charts show of one moment. at: unix seconds. latencies: seconds by name and percentile. figures,
    point: as Live has them. now: requests and shares of the cache at this moment."""

    at: float
    latencies: dict[str, dict[str, float]]
    figures: dict[str, float]
    now: dict[str, float]
    point: tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Alert:
    """rule: its name, as the metric has it. text: what is wrong, with numbers."""

    rule: str
    text: str


class History:
    """The last day by minutes and the last hour by readings."""

    def __init__(self) -> None:
        self.minutes: deque[Minute] = deque(maxlen=KEPT_MINUTES)
        self.readings: deque[Reading] = deque(maxlen=KEPT_READINGS)

    def readings_since(self, at: float) -> list[Reading]:
        """Readings that are newer than `at` (unix seconds), the oldest first."""
        return [reading for reading in self.readings if reading.at > at]

    def alerts(self) -> list[Alert]:
        """What is worse now than it was: percentiles against their usual value, and the SLO against its share."""
        held = list(self.minutes)
        now, before = held[-RECENT:], held[-RECENT - USUAL : -RECENT]
        if sum(minute.requests for minute in now) < FEWEST_REQUESTS:
            return []
        return [*_regressions(now, before), *_missed(now)]


def _regressions(now: Sequence[Minute], before: Sequence[Minute]) -> Iterator[Alert]:
    for what in ("ttft", "tpot", "e2e"):
        for share in ("p95", "p99"):
            name = f"{what}_{share}"
            recent, usual = _values(now, name), _values(before, name)
            if not recent or len(usual) < FEWEST_USUAL:
                continue
            value, base = statistics.median(recent), statistics.median(usual)
            if value > WORSE * base:
                text = f"{share} of {what} is {value * 1e3:.4g} ms; the usual value is {base * 1e3:.4g} ms"
                yield Alert(f"{name}_regression", f"{text} ({value / base:.1f} times).")


def _missed(now: Sequence[Minute]) -> Iterator[Alert]:
    """Nothing without an SLO: then no request is judged."""
    judged, good = sum(minute.judged for minute in now), sum(minute.good for minute in now)
    if judged >= FEWEST_REQUESTS and good < ATTAINED * judged:
        yield Alert("slo_attainment", f"{good} of the last {judged} requests met the SLO ({good / judged:.0%}).")


def _values(minutes: Sequence[Minute], name: str) -> list[float]:
    return [minute.quantiles[name] for minute in minutes if name in minute.quantiles]
