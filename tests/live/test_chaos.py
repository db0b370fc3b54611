"""A fleet of real servers is broken for minutes while clients use it (benchmarks/chaos.py)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.chaos import COUNTS, break_and_count, order
from benchmarks.chaos_load import ANSWERED, CUT, ERROR

REQUESTS = 2000


@pytest.mark.long
def test_every_request_ends_and_nothing_leaks_while_everything_dies(tmp_path: Path) -> None:
    report = asyncio.run(break_and_count(tmp_path, order(COUNTS, 1), 1, REQUESTS, print))
    assert report.bad == [] and report.unexplained_cuts == [] and report.leaks == []
    assert set(report.ended) <= {ANSWERED, ERROR, CUT} and sum(report.ended.values()) == report.requests >= REQUESTS
    assert report.faults == COUNTS and sum(report.faults.values()) >= 100 and report.engines_killed >= 20
    assert max(report.kill_recovery_s) < 60.0
