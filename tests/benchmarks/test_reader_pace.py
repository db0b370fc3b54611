"""The simulated part of the benchmark of --reader-pace: its rows, its search for a limit, and the published figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from common import lens, read_rows
from reader_pace import GOOD, Trial, server_of, two_kinds

from ridgeline.core.slo import Slo

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SLO = Slo.parse("ttft=200ms,tpot=120ms")


def trial(pace_s: float, requests: int = 150) -> Trial:
    server = server_of(BENCHMARKS / "models" / "llama-3.1-8b", "NVIDIA H200")
    small_steps = replace(server, limits=replace(server.limits, step_tokens=1024))
    return Trial(small_steps, pace_s, lens("azure_conv_1000")[:requests], SLO, seeds=1)


def test_under_load_first_tokens_come_earlier_and_no_stream_is_slower_than_the_pace() -> None:
    plain, paced = (trial(pace_s).figures(30.0) for pace_s in (0.0, 0.12))
    assert paced["ttft_p50_ms"] < plain["ttft_p50_ms"] and paced["goodput"] >= plain["goodput"]
    assert plain["tpot_p50_ms"] < paced["tpot_p50_ms"] < paced["tpot_p99_ms"] < 120
    assert paced["device_s"] == pytest.approx(plain["device_s"], rel=0.1)


def test_the_limit_is_the_last_rate_with_enough_good_requests() -> None:
    small = trial(0.0, requests=60)
    limit = small.limit(8.0, 64.0, step=4.0)
    assert small.figures(limit)["goodput"] >= GOOD > small.figures(limit + 4.0)["goodput"]


def test_both_kinds_of_clients_come() -> None:
    requests = two_kinds().requests
    assert [spec.at_s for spec in requests] == sorted(spec.at_s for spec in requests)
    assert {spec.output for spec in requests if spec.input > 500} == {4}


def test_the_published_rows_come_in_pairs_from_equal_servers() -> None:
    rows = {row["row"]: row for row in read_rows(BENCHMARKS / "results" / "reader_pace.json")}
    plain = [name for name in rows if name.endswith("-plain")]
    assert len(plain) * 2 == len(rows)
    for name in plain:
        other = rows[name.removesuffix("plain") + "paced"]
        assert (rows[name]["pace_s"], other["pace_s"]) == (0.0, 0.12)
        for field in ("pages", "step_tokens", "machine", "commit"):
            assert rows[name].get(field) == other.get(field), (name, field)
