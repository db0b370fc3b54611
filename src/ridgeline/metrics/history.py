"""History of live figures (a day by minutes, an hour by readings) and the alert rules that compare the present with it."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KEPT_MINUTES = 24 * 60
READING_S = 10.0
"""Seconds between two readings."""
KEPT_READINGS = 360
RECENT_MINUTES = 3
"""Minutes that alert rules compare with the baseline."""
BASELINE_MINUTES = 60
"""Minutes before the recent ones. Their median is the usual value."""
MIN_BASELINE_MINUTES = 10
MIN_REQUESTS = 20
"""Fewest recent requests for an alert."""
REGRESSION_FACTOR = 1.5
"""A percentile regresses above this factor times the usual value."""
MIN_ATTAINMENT = 0.9
"""Share of good requests among judged requests. Below it the SLO is missed."""


@dataclass(frozen=True, slots=True)
class Minute:
    """Counts and latency percentiles of one minute."""

    at: float
    """Unix seconds of its end."""
    quantiles: dict[str, float]
    """Seconds by "ttft_p95" and so on, over the live span that ends with this minute. Latencies without data are left out."""
    requests: int
    """Requests that ended."""
    judged: int
    """Of these, requests that goodput counts."""
    good: int
    """Of these, requests within the SLO."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Reading:
    """Values of the dashboard's charts at one moment."""

    at: float
    """Unix seconds."""
    latencies: dict[str, dict[str, float]]
    """Seconds by latency and percentile."""
    figures: dict[str, float]
    """See Live.figures."""
    now: dict[str, float]
    """See Live.now."""
    point: tuple[float, float] | None
    """See Live.point."""


@dataclass(frozen=True, slots=True)
class Alert:
    """A violated alert rule."""

    rule: str
    """Name of the rule, as in the metric's label."""
    text: str
    """The violation with its numbers."""


class History:
    """The last day as minutes and the last hour as readings."""

    def __init__(self) -> None:
        self.minutes: deque[Minute] = deque(maxlen=KEPT_MINUTES)
        self.readings: deque[Reading] = deque(maxlen=KEPT_READINGS)

    def readings_since(self, at: float) -> list[Reading]:
        """Return the readings newer than `at` (unix seconds), the oldest first."""
        return [reading for reading in self.readings if reading.at > at]

    def alerts(self) -> list[Alert]:
        """Return the violated rules: percentiles against their usual value, and the share of good requests."""
        minutes = list(self.minutes)
        recent, baseline = minutes[-RECENT_MINUTES:], minutes[-RECENT_MINUTES - BASELINE_MINUTES : -RECENT_MINUTES]
        if sum(minute.requests for minute in recent) < MIN_REQUESTS:
            return []
        return [*_regressions(recent, baseline), *_attainment_alert(recent)]


def _regressions(recent_minutes: Sequence[Minute], baseline_minutes: Sequence[Minute]) -> Iterator[Alert]:
    for latency in ("ttft", "tpot", "e2e"):
        for share in ("p95", "p99"):
            name = f"{latency}_{share}"
            recent_values, usual_values = _values(recent_minutes, name), _values(baseline_minutes, name)
            if not recent_values or len(usual_values) < MIN_BASELINE_MINUTES:
                continue
            recent, usual = statistics.median(recent_values), statistics.median(usual_values)
            if recent > REGRESSION_FACTOR * usual:
                text = f"{share} of {latency} is {recent * 1e3:.4g} ms; the usual value is {usual * 1e3:.4g} ms"
                yield Alert(f"{name}_regression", f"{text} ({recent / usual:.1f} times).")


def _attainment_alert(recent: Sequence[Minute]) -> Iterator[Alert]:
    """Yield an alert if too few judged requests are good. Without an SLO no request is judged."""
    judged, good = sum(minute.judged for minute in recent), sum(minute.good for minute in recent)
    if judged >= MIN_REQUESTS and good < MIN_ATTAINMENT * judged:
        yield Alert("slo_attainment", f"{good} of the last {judged} requests met the SLO ({good / judged:.0%}).")


def _values(minutes: Sequence[Minute], name: str) -> list[float]:
    return [minute.quantiles[name] for minute in minutes if name in minute.quantiles]
