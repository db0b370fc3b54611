"""The charts of trade-offs: those in docs/ are drawn from today's result files."""

from __future__ import annotations

import pytest
from tradeoffs import DOCS, charts, cost

from ridgeline.planner.svg import Line, document


def test_the_charts_in_docs_are_those_of_the_result_files() -> None:
    for name, chart in charts().items():
        assert (DOCS / name).read_text(encoding="utf-8") == document(chart), f"run benchmarks/tradeoffs.py for {name}"


def test_a_limit_costs_what_the_cheapest_level_within_it_costs() -> None:
    machine = "NVIDIA H100 80GB HBM3"
    rows = [
        {"row": f"m-concurrency-{level}", "tpot_ms": tpot, "tok_s": rate, "machine": machine}
        for level, tpot, rate in ((1, 5.0, 100.0), (8, 6.0, 700.0), (16, 7.0, 600.0))
    ]
    line = cost(rows).marks[0]
    assert isinstance(line, Line)
    prices = [price for _, price in line.points]
    assert prices[0] == pytest.approx(7 * prices[1]) and prices[2] == prices[1]
