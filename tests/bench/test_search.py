"""Sweep and search against a queue in virtual time, whose limit is known."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

import pytest

from ridgeline.bench.compare import compare, paired
from ridgeline.bench.load import Plan, Writer, send_all
from ridgeline.bench.record import Run
from ridgeline.bench.search import doubling, meets, saturated, search, sweep
from ridgeline.core.slo import Slo
from ridgeline.core.workload import RequestSpec, Workload

from .rows import failed, make_run, row
from .virtual import FakeServer, FakeWriter, LoopClock, run


async def measure(rate: float) -> Run:
    """Constant arrivals at a server of ten slots that needs half a second per request: 20 requests/s."""
    workload = Workload("w", tuple(RequestSpec(at / rate, 5, 5) for at in range(int(rate * 5))), timed=True)
    server = FakeServer(ttft=0.1, itl=0.1, slots=10)
    sent = await send_all(Plan(workload), server, cast(Writer, FakeWriter()), LoopClock())
    facts = {"rate": rate, "model": "fake"}
    return Run(facts, sent.rows, sent.seconds, 0, (), 0.0, Slo.parse("ttft=200ms"))


def test_sweep_ends_with_the_rate_that_saturates() -> None:
    runs = run(sweep(measure, doubling(5.0)))
    assert [run.facts["rate"] for run in runs] == [5.0, 10.0, 20.0, 40.0]
    assert [saturated(run) for run in runs] == [False, False, False, True]


def test_sweep_ends_where_more_requests_bring_no_more() -> None:
    """Twenty requests at once are answered together: no queue grows, and yet there is nothing behind it."""

    async def burst(rate: float) -> Run:
        took = 20 / min(rate, 50.0)
        return make_run([row(at, at=at / rate, ttft=took - at / rate) for at in range(20)], "", rate=rate)

    rates = [measured.facts["rate"] for measured in run(sweep(burst, doubling(20.0)))]
    assert rates == [20.0, 40.0, 80.0, 160.0]


def test_search_finds_the_capacity() -> None:
    result = run(search(measure, 3.0, 0.9, precision=0.05))
    assert result.bounded and result.best is not None
    assert result.rate == pytest.approx(20.0, rel=0.08)
    assert result.best.attainment >= 0.9
    # From above it comes down to the same.
    assert run(search(measure, 60.0, 0.9, precision=0.05)).rate == pytest.approx(20.0, rel=0.08)


def test_search_holds_to_what_the_slo_says_of_percentiles() -> None:
    """With a tenth of the answers slow, p80 is met at every rate and p95 at none, whatever share is asked for."""

    async def tenth(rate: float, slo: str) -> Run:
        slow = [0.5 if at % 10 == 0 else 0.1 for at in range(50)]
        return make_run([row(at, at=at / rate, ttft=ttft) for at, ttft in enumerate(slow)], slo, rate=rate)

    met = run(search(lambda rate: tenth(rate, "p80(ttft)<=200ms"), 1.0, 0.99, max_runs=3))
    assert met.rate == 4.0 and met.best is not None and met.best.broken == ()
    missed = run(search(lambda rate: tenth(rate, "p95(ttft)<=200ms"), 1.0, 0.1, max_runs=3))
    assert missed.best is None and missed.runs[0].broken == (
        "p95(ttft)<=200ms: a share of 0.9 of requests meets the limit; 0.95 is required",
    )
    assert meets(missed.runs[0], 0.1) is False


def test_failed_requests_are_within_nothing() -> None:
    rows = [*(row(at) for at in range(9)), failed(9)]
    assert make_run(rows, "p90(ttft)<=200ms").broken == ()
    assert make_run(rows, "p95(ttft)<=200ms,attain>=0.95").broken == (
        "p95(ttft)<=200ms: a share of 0.9 of requests meets the limit; 0.95 is required",
        "attain>=0.95: a share of 0.9 of requests is good",
    )  # fmt: skip
    assert make_run([], "p95(ttft)<=200ms").broken != ()


def test_search_says_when_nothing_or_everything_meets_it() -> None:
    async def always(rate: float) -> Run:
        return make_run([row(at, at=at / rate) for at in range(50)], "ttft=200ms", rate=rate)

    async def never(rate: float) -> Run:
        return make_run([failed(at, at=at / rate) for at in range(50)], "ttft=200ms", rate=rate)

    result = run(search(always, 1.0, 0.9, max_runs=5))
    assert (result.rate, result.bounded, len(result.runs)) == (16.0, False, 5)
    result = run(search(never, 1.0, 0.9, max_runs=5))
    assert (result.rate, result.best, result.bounded) == (0.0, None, True)


def test_search_stops_at_a_client_that_is_too_slow_twice() -> None:
    calls = 0

    async def late(rate: float) -> Run:
        nonlocal calls
        calls += 1
        rows = [row(at, at=at / rate) for at in range(50)]
        if calls in (2, 4, 5):
            rows = [replace(on_time, issued_s=on_time.scheduled_s + 1.0) for on_time in rows]
        return make_run(rows, "ttft=200ms", rate=rate)

    result = run(search(late, 1.0, 0.9))
    assert calls == 5 and result.rate == 2.0
    assert "at 4 requests/s requests were sent 1000.0 ms late" in result.stopped


def test_compare_finds_what_differs_and_only_that() -> None:
    first = make_run([row(at, tpot=0.01 + 0.0001 * (at % 7)) for at in range(60)], "ttft=200ms")
    second = make_run([row(at, tpot=0.02 + 0.0001 * (at % 7), characters=88) for at in range(60)], "ttft=200ms")
    assert paired(first, second)
    by_name = {difference.measure.name: difference for difference in compare(first, second)}
    assert by_name["TPOT median"].verdict == "worse"
    assert by_name["TPOT median"].change.value == pytest.approx(10.0)
    assert by_name["TTFT median"].verdict == "same"
    assert by_name["tokens/s per user"].verdict == "worse"
    # Half as many tokens per second, but twice as many characters in each: as fast for a reader.
    assert by_name["characters/s per user"].change.value == pytest.approx(0.0, abs=15.0)
    assert by_name["characters per request"].verdict == "other"
    assert by_name["good requests"].verdict == "same"


def test_compare_leaves_errors_out_of_latencies_but_not_of_good_ones() -> None:
    first = make_run([row(at) for at in range(40)], "ttft=200ms")
    second = make_run([row(at) if at % 2 else failed(at) for at in range(40)], "ttft=200ms", fingerprint="other")
    assert not paired(first, second)
    by_name = {difference.measure.name: difference for difference in compare(first, second)}
    assert by_name["TTFT median"].verdict == "same"
    assert (by_name["good requests"].second, by_name["good requests"].verdict) == (50.0, "worse")
    assert math.isnan(compare(first, make_run([failed(0)]))[0].second)
