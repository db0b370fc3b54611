"""The comparison of two trees pairs neighbouring runs, and its interval holds the median."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.two_trees import compare, median_interval


class Drifting:
    """A side whose speed falls with each run of any side, as that of a machine that gets busy."""

    def __init__(self, clock: list[int], rate: float) -> None:
        self._clock, self._rate = clock, rate

    def run(self, case: str) -> float:
        self._clock[0] += 1
        return self._rate * 0.99 ** self._clock[0]


def test_a_drift_of_the_machine_is_not_taken_for_a_difference() -> None:
    clock = [0]
    old: Any = Drifting(clock, 100.0)
    new: Any = Drifting(clock, 105.0)
    figures = compare(old, new, "b1", 40)
    assert figures["ratio"] == pytest.approx(1.05, rel=0.011)
    assert figures["ratio_low"] <= figures["ratio"] <= figures["ratio_high"]


def test_the_interval_of_a_median_is_narrow_where_values_are_alike() -> None:
    low, high = median_interval([1.0] * 30 + [3.0])
    assert low == high == 1.0
    low, high = median_interval([0.9, 1.0, 1.1] * 10)
    assert 0.9 <= low <= 1.0 <= high <= 1.1
