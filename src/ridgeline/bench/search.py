"""Rate sweeps: a sweep until the server saturates, and a search for the highest rate that meets an SLO.

The caller provides the function that makes a run.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from ridgeline.bench.figures import invalid_reason, kept_up, throughput
from ridgeline.bench.record import Run

KEPT_UP = 0.9
"""A server is saturated if it completes less than this share of the arriving requests."""
RATE_FACTOR, THROUGHPUT_FACTOR = 1.5, 1.1
"""Throughput has levelled out if RATE_FACTOR times the rate gives less than THROUGHPUT_FACTOR times the throughput."""

RunAtRate = Callable[[float], Awaitable[Run]]
"""Makes a run at a rate in requests per second."""
RunCallback = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Result of a search for the highest rate that meets an SLO."""

    rate: float
    """Highest rate that met the SLO, 0 if none did."""
    best: Run | None
    """The run at `rate`."""
    runs: tuple[Run, ...]
    """All runs in order."""
    bounded: bool
    """A higher rate missed the SLO, so the limit lies between the two."""
    stopped: str = ""
    """Why the search ended early, or ""."""


async def sweep(measure: RunAtRate, rates: Iterable[float], on_run: RunCallback | None = None) -> list[Run]:
    """Make one run per rate until the server or the client saturates, or throughput levels out. The last run is included.

    Levelling out is checked because few requests at a high rate form a single burst, which does not saturate the server.
    """
    runs = []
    for rate in rates:
        run = await measure(rate)
        runs.append(run)
        if on_run is not None:
            on_run(run)
        if run.interrupted or saturated(run) or invalid_reason(run) or levelled(runs):
            break
    return runs


def levelled(runs: Sequence[Run]) -> bool:
    """Whether the last two runs completed about the same rate although the last one was offered a much higher rate."""
    if len(runs) < 2 or not runs[-1].facts["rate"] >= RATE_FACTOR * runs[-2].facts["rate"]:
        return False
    previous, last = (throughput(run)["requests_per_s"] for run in runs[-2:])
    return bool(last < THROUGHPUT_FACTOR * previous)


def saturated(run: Run) -> bool:
    """Whether the queue grew: the server completed less than KEPT_UP of the arrival rate."""
    share = kept_up(run)
    return not math.isnan(share) and share < KEPT_UP


def meets(run: Run, attain: float) -> bool:
    """Whether a run meets its SLO.

    If the SLO has percentiles or a share, the run must meet them. Otherwise the share `attain` of offered requests must be good.
    """
    return not run.broken if run.slo.of_windows else run.attainment >= attain


def doubling(start: float) -> list[float]:
    """Return start, 2 start, 4 start, ... 2048 start."""
    return [start * 2.0**power for power in range(12)]


async def search(
    measure: RunAtRate,
    start: float,
    attain: float,
    precision: float = 0.05,
    on_run: RunCallback | None = None,
    max_runs: int = 16,
) -> SearchResult:
    """Find the highest rate that `meets` the SLO and does not saturate the server.

    The search doubles (or halves) the rate until the limit lies between two rates. Then it bisects until the interval is at most
    `precision` of the rate. It makes at most `max_runs` runs. An invalid run (the client was the bottleneck) is repeated; two
    invalid runs in sequence end the search.
    """
    runs: list[Run] = []
    low, high, best = 0.0, math.inf, None
    rate, invalid = start, False
    while len(runs) < max_runs and (math.isinf(high) or low == 0.0 or high - low > precision * low):
        run = await measure(rate)
        runs.append(run)
        if on_run is not None:
            on_run(run)
        if run.interrupted:
            return SearchResult(low, best, tuple(runs), not math.isinf(high), "interrupted")
        reason, was_invalid = invalid_reason(run), invalid
        invalid = bool(reason)
        if invalid and was_invalid:
            return SearchResult(low, best, tuple(runs), not math.isinf(high), f"at {rate:g} requests/s {reason}")
        if invalid:
            continue
        if meets(run, attain) and not saturated(run):
            low, best = rate, run
        else:
            high = rate
        rate = 2 * low if math.isinf(high) else high / 2 if low == 0.0 else (low + high) / 2
    return SearchResult(low, best, tuple(runs), not math.isinf(high))
