"""Comparison of two runs: differences with confidence intervals, per request, per token and per character.

Tokens of two models are different amounts of text, so figures per character are compared too. Runs that sent the same requests are
compared in pairs. This removes the variance between requests, so smaller differences become significant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from ridgeline.bench.economics import ENTRIES, UNKNOWN, economics
from ridgeline.bench.record import Row, Run
from ridgeline.bench.sample import Array, Figure, Statistic, difference, mean, percentile

Value = Callable[[Row], float | None]


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure that two runs are compared by."""

    name: str
    unit: str
    value: Value
    statistic: Statistic
    factor: float = 1.0
    """From the rows' unit to `unit`."""
    higher_is_better: bool | None = False
    """None: neither direction is better."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A measure of two runs and its difference."""

    measure: Measure
    first: float
    second: float
    change: Figure
    """second - first with its 95 % interval, in the measure's unit."""

    @property
    def verdict(self) -> str:
        """The second run is "better", "worse" or "other" (neither direction is better). "same": the interval contains 0.

        "unknown": a run lacks the figure. "no interval": too few requests, or a figure of the entire run (money, energy).
        """
        if math.isnan(self.change.value):
            return "unknown"
        if math.isnan(self.change.low):
            return "no interval"
        if self.change.low <= 0 <= self.change.high:
            return "same"
        if self.measure.higher_is_better is None:
            return "other"
        return "better" if (self.change.value > 0) == self.measure.higher_is_better else "worse"

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """Measure with its unit, first, second and change as tables show them."""
        name = f"{self.measure.name} {self.measure.unit}".strip()
        change = self.change
        interval = "" if math.isnan(change.low) else f" ({change.low:+.4g} to {change.high:+.4g})"
        shown = "-" if math.isnan(change.value) else f"{change.value:+.4g}{interval}"
        values = (UNKNOWN if math.isnan(value) else f"{value:.5g}" for value in (self.first, self.second))
        return name, *values, shown  # type: ignore[return-value]


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
    Measure("publish median", "ms", lambda row: row.publish_s, percentile(50), 1e3),
    Measure("publish p95", "ms", lambda row: row.publish_s, percentile(95), 1e3),
    Measure("TPOT median", "ms", lambda row: row.tpot_s, percentile(50), 1e3),
    Measure("TPOT p95", "ms", lambda row: row.tpot_s, percentile(95), 1e3),
    Measure("end to end median", "ms", lambda row: row.e2e_s, percentile(50), 1e3),
    Measure("end to end p95", "ms", lambda row: row.e2e_s, percentile(95), 1e3),
    Measure("tokens/s per user", "", _speed, mean, higher_is_better=True),
    Measure("end to end per character", "ms", _per_character, percentile(50), 1e3),
    Measure("characters/s per user", "", _characters_per_s, mean, higher_is_better=True),
    Measure("output tokens per request", "", lambda row: float(row.output_tokens), mean, higher_is_better=None),
    Measure("characters per request", "", lambda row: float(row.characters), mean, higher_is_better=None),
)


def paired(first: Run, second: Run) -> bool:
    """Whether both runs sent the same requests in the same order."""
    fingerprint = first.facts.get("fingerprint")
    return (
        fingerprint is not None
        and fingerprint == second.facts.get("fingerprint")
        and len(first.rows) == len(second.rows)
    )


def compare(first: Run, second: Run) -> list[Difference]:
    """Compare all measures of two runs. Failed requests are left out; in a pair both requests must have completed."""
    is_paired = paired(first, second)
    differences = []
    for measure in MEASURES:
        first_values, second_values = (_values(run, measure) for run in (first, second))
        if is_paired:
            common = sorted(set(first_values) & set(second_values))
            first_sample, second_sample = (
                np.array([values[index] for index in common]) for values in (first_values, second_values)
            )
        else:
            first_sample, second_sample = (np.array(list(values.values())) for values in (first_values, second_values))
        change = difference(first_sample, second_sample, measure.statistic, paired=is_paired)
        differences.append(Difference(measure, _value(first_sample, measure), _value(second_sample, measure), change))
    goodput = _goodput_difference(first, second, is_paired)
    return [*differences, *([goodput] if goodput is not None else []), *_economic_differences(first, second)]


def _values(run: Run, measure: Measure) -> Mapping[int, float]:
    """Map request index to the request's value in the measure's unit."""
    pairs = ((row.index, measure.value(row)) for row in run.rows if not row.error)
    return {index: value * measure.factor for index, value in pairs if value is not None}


def _value(values: Array, measure: Measure) -> float:
    return float(measure.statistic(values)) if len(values) else math.nan


def _economic_differences(first: Run, second: Run) -> list[Difference]:
    """Compare money and energy, where at least one run knows them. A run has one bill and one reading, hence no interval."""
    both = economics(first), economics(second)
    differences = []
    for entry in ENTRIES:
        values = [entry.value(figures) for figures in both]
        if values == [None, None]:
            continue
        before, after = (math.nan if value is None else value for value in values)
        measure = Measure(entry.label, entry.unit, lambda row: None, mean, higher_is_better=entry.higher_is_better)
        differences.append(Difference(measure, before, after, Figure(after - before, math.nan, math.nan)))
    return differences


def _goodput_difference(first: Run, second: Run, is_paired: bool) -> Difference | None:
    """Compare the shares of good requests, if both runs have an SLO. Failed requests are not good."""
    if not first.slo or not second.slo:
        return None
    measure = Measure("good requests", "%", lambda row: None, mean, higher_is_better=True)
    first_sample, second_sample = (
        np.array([100.0 * (not row.missed(run.slo)) for row in run.rows]) for run in (first, second)
    )
    change = difference(first_sample, second_sample, mean, paired=is_paired)
    return Difference(measure, _value(first_sample, measure), _value(second_sample, measure), change)
