"""How many replicas a fleet needs. No clock, no asyncio: every time is an argument, so that simulation runs the same code.

    needed = prompt tokens per second / (prefill rate * share_ttft)
           + requests in flight / (limit * share_tpot)
           + backlog / (prefill rate * T)

share_ttft is the utilization at which the prefill queue still meets the SLO. With random arrivals the time to a first token
has the mean S / (1 - utilization) for a mean prompt that takes S (M/M/1), and its quantile q is -ln(1 - q) times that, so the
limit L allows 1 - S * -ln(1 - q) / L. limit is the number of requests at which a replica still meets the TPOT of the SLO. The
backlog, prompt tokens that wait in the router, is to be gone after T, the time of a cold start.

The load is taken as it will be when a replica that starts now is ready: the recent load, plus its trend for the time of a
cold start. The fleet grows at once and shrinks to the highest number that was needed in the last calm_s. Without any request
for idle_s it goes to its minimum, which may be zero; from zero the first request starts a replica.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any

from ridgeline.service.routing import Totals

_SMOOTH_S = 30.0
"""Time constant of the mean load."""
_TREND_S = 120.0
"""Time constant of the trend."""
_LEAST_SHARE = 0.1
"""Lowest utilization that an SLO can demand: below it more replicas do not help a long prompt."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """Limits of a fleet and rates of one replica. ttft_s: limit of the SLO on the first token of `quantile` of the requests."""

    least: int = 1
    most: int = 1
    prefill_tokens_s: float = 10_000.0
    limit: int = 256
    ttft_s: float = 1.0
    quantile: float = 0.95
    share_tpot: float = 0.85
    cold_start_s: float = 60.0
    calm_s: float = 300.0
    idle_s: float = 600.0
    off_peak_least: int | None = None
    off_peak_most: int | None = None

    def bounds(self, off_peak: bool) -> tuple[int, int]:
        """Fewest and most replicas now."""
        least = self.off_peak_least if off_peak and self.off_peak_least is not None else self.least
        most = self.off_peak_most if off_peak and self.off_peak_most is not None else self.most
        return min(least, most), most


@dataclass(frozen=True, slots=True)
class Load:
    """What the router measured since the last decision.

    requests_s, prompt_tokens_s: arrivals per second, without prompt tokens that replicas are expected to have. running: requests at
    replicas. waiting: requests in the router; waiting_tokens: of their prompts. replicas: those that run or start. speed: measured
    over assumed prefill rate. rows: of batches, waiting or running, which keep a replica.
    """

    now: float
    requests_s: float
    prompt_tokens_s: float
    running: float
    waiting: int
    waiting_tokens: int
    replicas: int
    off_peak: bool = False
    speed: float = 1.0
    rows: int = 0


class Arrivals:
    """Rates of what arrives at a router with these totals, from one reading to the next."""

    def __init__(self, totals: Totals) -> None:
        self._totals, self._last = totals, replace(totals)
        self._computed = 1.0
        """Share of the prompt tokens sent that no replica had."""

    def rates(self, passed: float) -> tuple[float, float]:
        """Requests, and prompt tokens that replicas have to compute, per second of the `passed` seconds since the last reading."""
        now, last = replace(self._totals), self._last
        if sent := now.prompt_tokens - last.prompt_tokens:
            self._computed = 1 - (now.cached_tokens - last.cached_tokens) / sent
        self._last = now
        offered = now.offered_tokens - last.offered_tokens
        return (now.requests - last.requests) / passed, offered * self._computed / passed


@dataclass(frozen=True, slots=True)
class Decision:
    """wanted: replicas from now on. inputs: all that it follows from."""

    wanted: int
    reason: str
    inputs: dict[str, Any]


class Autoscaler:
    """Decides from one load after the other, whose times grow. cold_start_s may be set to what was measured."""

    def __init__(self, scaling: Scaling) -> None:
        self.scaling = scaling
        self.cold_start_s = scaling.cold_start_s
        self._at: float | None = None
        self._mean = _Trend()
        self._flight = _Trend()
        self._prompt_tokens = 0.0
        """Mean tokens of a prompt."""
        self._needs: deque[tuple[float, int]] = deque()
        """(time, replicas needed) of the last calm_s; the numbers fall."""
        self._busy_at: float | None = None

    def decide(self, load: Load) -> Decision:
        scaling, now = self.scaling, load.now
        if self._at is None:
            self._needs.append((now, load.replicas))  # without a past, the fleet that runs counts as needed
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        self._mean.add(load.prompt_tokens_s, passed)
        self._flight.add(load.running + load.waiting, passed)
        if load.requests_s:
            weight = 1.0 if not self._prompt_tokens else 1 - math.exp(-passed / _TREND_S)
            self._prompt_tokens += (load.prompt_tokens_s / load.requests_s - self._prompt_tokens) * weight
        if load.requests_s or load.running or load.waiting or load.rows or self._busy_at is None:
            self._busy_at = now
        least, most = scaling.bounds(load.off_peak)
        needed, figures = self._needed(load)
        steady = self._highest(now, math.ceil(needed - 1e-9))
        idle_s = now - self._busy_at
        if not steady and load.replicas:
            steady = 1  # only idle_s leads to zero
        if idle_s >= scaling.idle_s:
            wanted, reason = least, f"no request for {idle_s:.0f} s"
        elif steady > load.replicas:
            wanted, reason = steady, "the load needs more"
        elif steady < load.replicas:
            wanted, reason = steady, f"the load of the last {scaling.calm_s:g} s needs fewer"
        else:
            wanted, reason = steady, "the load needs as many as there are"
        if not least <= wanted <= most:
            wanted = min(max(wanted, least), most)
            reason += f"; the limits are {least} and {most}"
        if not wanted and (load.waiting or load.requests_s or load.rows) and most:
            wanted, reason = 1, "requests wait and no replica runs"
        inputs = asdict(load) | figures | {"cold_start_s": self.cold_start_s, "least": least, "most": most}
        return Decision(wanted, reason, inputs)

    def _needed(self, load: Load) -> tuple[float, dict[str, float]]:
        scaling = self.scaling
        rate = scaling.prefill_tokens_s * load.speed
        share = share_ttft(self._prompt_tokens / rate, scaling.ttft_s, scaling.quantile)
        offered, flight = self._mean.ahead(self.cold_start_s), self._flight.ahead(self.cold_start_s)
        prefill = offered / (rate * share)
        decode = flight / (scaling.limit * scaling.share_tpot)
        backlog = load.waiting_tokens / (rate * max(1.0, self.cold_start_s))
        figures = {
            "offered_tokens_s": offered,
            "in_flight": flight,
            "mean_prompt_tokens": self._prompt_tokens,
            "share_ttft": share,
            "needed_prefill": prefill,
            "needed_decode": decode,
            "needed_backlog": backlog,
        }
        return prefill + decode + backlog, figures

    def _highest(self, now: float, needed: int) -> int:
        """The highest number of the last calm_s."""
        while self._needs and self._needs[-1][1] <= needed:
            self._needs.pop()
        self._needs.append((now, needed))
        while now - self._needs[0][0] > self.scaling.calm_s:
            self._needs.popleft()
        return self._needs[0][1]


class _Trend:
    """A mean with exponential weights, and its slope (Holt's linear method)."""

    __slots__ = ("_slope", "_started", "_value")

    def __init__(self) -> None:
        self._value = self._slope = 0.0
        self._started = False

    def add(self, value: float, passed: float) -> None:
        if not self._started or passed <= 0:
            self._value = value if not self._started else self._value
            self._started = True
            return
        expected = self._value + self._slope * passed
        weight = 1 - math.exp(-passed / _SMOOTH_S)
        updated = expected + (value - expected) * weight
        self._slope += ((updated - self._value) / passed - self._slope) * (1 - math.exp(-passed / _TREND_S))
        self._value = updated

    def ahead(self, seconds: float) -> float:
        """The value that is expected after so many seconds. A falling trend is not followed: calm_s decides when to shrink."""
        return max(0.0, self._value, self._value + self._slope * seconds)


def share_ttft(prompt_s: float, limit_s: float, quantile: float) -> float:
    """Utilization at which first tokens meet their limit (the module's docstring). prompt_s: time of a mean prompt."""
    return max(_LEAST_SHARE, 1 - prompt_s * -math.log(1 - quantile) / limit_s)
