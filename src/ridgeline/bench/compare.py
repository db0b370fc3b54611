"""Two runs side by side: differences with intervals, per request, per token and per character.

Tokens of two models are not the same amount of text; characters are. Runs that asked the same requests are compared pair
by pair, which leaves out what differs between requests and finds smaller differences.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.bench.record import Row, Run
from ridgeline.bench.sample import Array, Figure, Statistic, difference, mean, percentile

Value = Callable[[Row], float | None]


@dataclass(frozen=True, slots=True)
class Measure:
    """One comparable figure. factor: from the rows' unit to the shown one. more: a larger value is the better one; None:
    neither is better."""

    name: str
    unit: str
    value: Value
    statistic: Statistic
    factor: float = 1.0
    more: bool | None = False


@dataclass(frozen=True, slots=True)
class Difference:
    """second - first of a measure, in its unit; the interval is at 95 %."""

    measure: Measure
    first: float
    second: float
    change: Figure

    @property
    def verdict(self) -> str:
        """ "better", "worse" or just "other" (of the second), or "same" when the interval holds 0."""
        if math.isnan(self.change.low) or self.change.low <= 0 <= self.change.high:
            return "same"
        if self.measure.more is None:
            return "other"
        return "better" if (self.change.value > 0) == self.measure.more else "worse"


def _per_character(row: Row) -> float | None:
    return row.e2e_s / row.characters if row.e2e_s is not None and row.characters else None


def _characters_per_s(row: Row) -> float | None:
    if row.first_s is None or row.last_s is None or row.last_s <= row.first_s:
        return None
    return row.characters / (row.last_s - row.first_s)


def _speed(row: Row) -> float | None:
    return 1 / row.tpot_s if row.tpot_s else None


MEASURES: tuple[Measure, ...] = (
    Measure("TTFT median", "ms", lambda row: row.ttft_s, percentile(50), 1e3),
    Measure("TTFT p95", "ms", lambda row: row.ttft_s, percentile(95), 1e3),
    Measure("TPOT median", "ms", lambda row: row.tpot_s, percentile(50), 1e3),
    Measure("TPOT p95", "ms", lambda row: row.tpot_s, percentile(95), 1e3),
    Measure("end to end median", "ms", lambda row: row.e2e_s, percentile(50), 1e3),
    Measure("end to end p95", "ms", lambda row: row.e2e_s, percentile(95), 1e3),
    Measure("tokens/s per user", "", _speed, mean, more=True),
    Measure("end to end per character", "ms", _per_character, percentile(50), 1e3),
    Measure("characters/s per user", "", _characters_per_s, mean, more=True),
    Measure("output tokens per request", "", lambda row: float(row.output_tokens), mean, more=None),
    Measure("characters per request", "", lambda row: float(row.characters), mean, more=None),
)


def paired(first: Run, second: Run) -> bool:
    """Whether both asked the same requests, in the same order."""
    asked = first.facts.get("fingerprint")
    return asked is not None and asked == second.facts.get("fingerprint") and len(first.rows) == len(second.rows)


def compare(first: Run, second: Run) -> list[Difference]:
    """Every measure of both. Only requests without an error count; pairs need both."""
    together = paired(first, second)
    found = []
    for measure in MEASURES:
        one, other = (_values(run, measure) for run in (first, second))
        if together:
            both = sorted(set(one) & set(other))
            before, after = (np.array([values[index] for index in both]) for values in (one, other))
        else:
            before, after = (np.array(list(values.values())) for values in (one, other))
        change = difference(before, after, measure.statistic, paired=together)
        found.append(Difference(measure, _value(before, measure), _value(after, measure), change))
    good = _good(first, second, together)
    return [*found, *([good] if good is not None else [])]


def _values(run: Run, measure: Measure) -> Mapping[int, float]:
    """Request -> its value in the measure's unit."""
    found = ((row.index, measure.value(row)) for row in run.rows if not row.error)
    return {index: value * measure.factor for index, value in found if value is not None}


def _value(values: Array, measure: Measure) -> float:
    return float(measure.statistic(values)) if len(values) else math.nan


def _good(first: Run, second: Run, together: bool) -> Difference | None:
    """Share of good requests, where an SLO was declared for both: errors are not good."""
    if not first.slo or not second.slo:
        return None
    measure = Measure("good requests", "%", lambda row: None, mean, more=True)
    before, after = (np.array([100.0 * (not row.missed(run.slo)) for row in run.rows]) for run in (first, second))
    change = difference(before, after, mean, paired=together)
    return Difference(measure, _value(before, measure), _value(after, measure), change)
