"""The curve over concurrency: its rows, and what relaxed latencies buy."""

from __future__ import annotations

import pytest
from curves import relaxed, rows

from ridgeline.bench.efficiency import Point


def at(level: int, tokens_s: float, ttft_s: float, tpot_s: float) -> Point:
    return Point(level, tokens_s, ttft_s, tpot_s, 0.1 * level, 0.5, "")


def test_relaxed_latencies_buy_throughput() -> None:
    points = [at(1, 100.0, 0.1, 0.01), at(4, 300.0, 0.15, 0.011), at(16, 900.0, 0.3, 0.012), at(64, 2000.0, 2.0, 0.02)]
    chosen = [relaxed(points, factor) for factor in (1.0, 1.5, 3.0, 20.0)]
    assert [point and point.concurrency for point in chosen] == [1, 4, 16, 64]
    made = {row["row"]: row for row in rows(points, "model")}
    assert made["model-relaxed-3"]["gain"] == pytest.approx(9.0) and made["model-concurrency-4"][
        "mfu"
    ] == pytest.approx(0.4)
