"""Looking for limits with one run after the other: a sweep until the server saturates, a search for the highest rate
that meets an SLO. What a run is, the caller says; nothing here knows of a network or a clock."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass

from ridgeline.bench.figures import kept_up, throughput, trouble
from ridgeline.bench.record import Run

KEPT_UP = 0.9
"""A server is saturated when it completes less than this share of what arrives."""
MUCH_MORE, LEVEL = 1.5, 1.1
"""Throughput has levelled out when so many times the rate brings less than so many times as much."""

Measure = Callable[[float], Awaitable[Run]]
"""A run at a rate in requests per second."""
Told = Callable[[Run], None]


@dataclass(frozen=True, slots=True)
class Found:
    """rate: highest one that met the objective, 0 if none did. best: its run. runs: all, in the order they were made.

    bounded: a rate that missed it was seen, so that the limit lies between the two. stopped: why the search ended early.
    """

    rate: float
    best: Run | None
    runs: tuple[Run, ...]
    bounded: bool
    stopped: str = ""


async def sweep(measure: Measure, rates: Iterable[float], told: Told | None = None) -> list[Run]:
    """One run per rate, in order, until one saturates the server (that one included) or the client, or a higher rate brings no
    more: few requests at a high rate are one burst, whose queue has no time to grow."""
    runs = []
    for rate in rates:
        run = await measure(rate)
        runs.append(run)
        if told is not None:
            told(run)
        if saturated(run) or trouble(run) or levelled(runs):
            break
    return runs


def levelled(runs: Sequence[Run]) -> bool:
    """Whether the last two runs completed about as much per second, though the last one was offered much more."""
    if len(runs) < 2 or not runs[-1].facts["rate"] >= MUCH_MORE * runs[-2].facts["rate"]:
        return False
    before, last = (throughput(run)["requests_per_s"] for run in runs[-2:])
    return bool(last < LEVEL * before)


def saturated(run: Run) -> bool:
    """Whether the queue only grew: fewer than KEPT_UP of the arrivals were completed per second."""
    share = kept_up(run)
    return not math.isnan(share) and share < KEPT_UP


def meets(run: Run, attain: float) -> bool:
    """Whether a run meets its SLO: what that says of a window, or, where it says nothing of windows, a share `attain` of all
    offered requests."""
    return not run.broken if run.slo.of_windows else run.attainment >= attain


def doubling(start: float) -> list[float]:
    """start, 2 start, 4 start, ... 2048 start."""
    return [start * 2.0**power for power in range(12)]


async def search(
    measure: Measure, start: float, attain: float, precision: float = 0.05, told: Told | None = None, most: int = 16
) -> Found:
    """The highest rate that `meets` the SLO and does not saturate the server.

    Doubles (or halves) until the limit is between two rates, then halves the gap until it is within `precision` of the
    rate. At most `most` runs. A run that was bound by the client says nothing of the server: it is made again, and a
    second one ends the search.
    """
    runs: list[Run] = []
    low, high, best = 0.0, math.inf, None
    rate, invalid = start, False
    while len(runs) < most and (math.isinf(high) or low == 0.0 or high - low > precision * low):
        run = await measure(rate)
        runs.append(run)
        if told is not None:
            told(run)
        why, before = trouble(run), invalid
        invalid = bool(why)
        if invalid and before:
            return Found(low, best, tuple(runs), not math.isinf(high), f"at {rate:g} requests/s {why}")
        if invalid:
            continue
        if meets(run, attain) and not saturated(run):
            low, best = rate, run
        else:
            high = rate
        rate = 2 * low if math.isinf(high) else high / 2 if low == 0.0 else (low + high) / 2
    return Found(low, best, tuple(runs), not math.isinf(high))
