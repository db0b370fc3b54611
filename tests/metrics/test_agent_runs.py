"""Agent runs: sums over calls, their end after a silence, percentiles, and the bounds of their memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.slo import Slo
from ridgeline.metrics import Ceilings, Live, Metrics, RequestRecord
from ridgeline.metrics.agent_runs import KEPT_CALLS, KEPT_RUNS, MAX_OPEN_RUNS, MEASURES, SILENCE_S, AgentRuns, run_row
from ridgeline.metrics.records import DISCONNECTED
from ridgeline.metrics.window import GROWTH
from ridgeline.service.declared import RUN_ID, RUN_ID_LENGTH

from .test_live import GOOD, Clock

SHARES = {"joules": 2.0, "prompt_joules": 0.5, "output_joules": 1.5, "cost": 0.01}


def call(run_id: str, arrived_at: float, publish_s: float | None = 0.5, **changes: object) -> RequestRecord:
    return replace(
        GOOD, id=f"{run_id}@{arrived_at:g}", run_id=run_id, arrived_at=arrived_at, publish_s=publish_s, **changes
    )


def ended(runs: AgentRuns, now: float, *records: RequestRecord) -> None:
    for record in records:
        runs.begin_call(now, record.run_id, record.arrived_at)
        runs.end_call(now, record, SHARES)


def test_a_run_is_published_by_its_last_call() -> None:
    runs = AgentRuns(300.0)
    ended(
        runs,
        10.0,
        call("a", 1000.0, hidden_tokens=4),
        call("a", 1005.0, None, cut=DISCONNECTED),
        call("a", 1009.0, 0.7),
    )
    row = run_row(runs.find("a"))
    assert (row["calls"], row["cut_calls"], row["hidden_tokens"], row["ended"]) == (3, 1, 4, False)
    assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (300, 180, 33)
    assert row["publish_s"] == pytest.approx(9.7) and row["e2e_s"] == pytest.approx(9.0 + GOOD.e2e_s)
    assert (row["joules"], row["cost"], row["device_s"]) == pytest.approx((6.0, 0.03, 3 * GOOD.spent.device_s))
    assert (row["prompt_joules"], row["output_joules"]) == (1.5, 4.5)
    assert row["requests"] == ["a@1000", "a@1005", "a@1009"]
    ended(runs, 11.0, call("a", 1010.0, None))
    assert runs.find("a").publish_s is None, "its last call shows nothing"


def test_a_call_that_arrives_first_and_ends_last_does_not_publish_the_run() -> None:
    runs = AgentRuns(300.0)
    first, second = call("a", 1000.0, 8.0), call("a", 1002.0, 1.0)
    runs.begin_call(10.0, "a", 1000.0)
    ended(runs, 13.0, second)
    assert runs.find("a").open_calls == 1
    runs.end_call(18.0, first, SHARES)
    run = runs.find("a")
    assert (run.calls, run.open_calls, run.publish_s) == (2, 0, 3.0)


def test_a_run_ends_after_a_silence_and_not_while_a_call_is_answered() -> None:
    ends: list[str] = []
    runs = AgentRuns(300.0, lambda: ends.append("end"))
    ended(runs, 10.0, call("quiet", 1000.0), call("busy", 1000.0))
    runs.begin_call(20.0, "busy", 1010.0)
    runs.tick(10.0 + SILENCE_S - 0.1)
    assert runs.count_open() == 2 and runs.percentiles(100.0) == {}
    runs.tick(20.0 + 2 * SILENCE_S)
    assert runs.find("quiet").ended and not runs.find("busy").ended and ends == ["end"]
    assert runs.percentiles(20.0 + 2 * SILENCE_S)["publish_seconds"]["p50"] == pytest.approx(0.5, rel=GROWTH - 1)
    ended(runs, 300.0, call("quiet", 1300.0))
    assert (runs.find("quiet").calls, runs.find("quiet").ended) == (1, False), "another run with the same id"


def test_memory_is_bounded() -> None:
    runs = AgentRuns(300.0)
    kept = MAX_OPEN_RUNS + KEPT_RUNS
    for number in range(kept + 3):
        ended(runs, 10.0, call(f"r{number}", 1000.0))
    ended(runs, 10.0, *(call("last", 1000.0 + turn) for turn in range(KEPT_CALLS + 5)))
    assert runs.count_open() == MAX_OPEN_RUNS and len(runs.find("last").requests) == KEPT_CALLS
    kept_ids = [runs.find(f"r{number}") is not None for number in range(kept + 3)]
    assert kept_ids == [False] * 4 + [True] * (kept - 1), "of the ended ones the last are kept"
    runs.tick(10.0 + SILENCE_S)
    assert (
        runs.count_open() == 0
        and sum(runs.find(f"r{number}") is not None for number in range(kept + 3)) == KEPT_RUNS - 1
    )


def test_live_adds_cost_and_ends_runs_with_its_seconds() -> None:
    clock = Clock()
    live = Live(Slo(), clock)
    live.ceilings = Ceilings(price=36.0)
    assert "open_agent_runs" not in live.figures()
    for arrived_at in (1000.0, 1002.0):
        live.on_call("trip", arrived_at)
        live.on_request(call("trip", arrived_at))
    live.on_call("", 1003.0)
    live.on_request(GOOD)
    assert live.agent_runs.find("trip").cost == pytest.approx(2 * GOOD.spent.device_s * 36.0 / 3600)
    assert live.figures()["open_agent_runs"] == 1 and live.runs() == {}
    clock.now += SILENCE_S + 1.0
    live.tick()
    assert live.figures()["open_agent_runs"] == 0 and live.figures()["agent_runs_per_minute"] > 0
    assert live.runs()["calls"]["p50"] == pytest.approx(2, rel=GROWTH - 1) and "joules" not in live.runs()


def test_series_have_one_label_for_all_runs() -> None:
    clock = Clock()
    metrics = Metrics("tiny", clock=clock)
    for number in range(50):
        metrics.live.on_call(f"secret-{number}", 1000.0)
        metrics.on_request(call(f"secret-{number}", 1000.0))
    clock.now += SILENCE_S + 1.0
    metrics.live.tick()
    text = metrics.render().decode()
    assert text.count("ridgeline:agent_run_publish_seconds{") == 4 and "secret" not in text


def test_the_documentation_names_the_limits_and_the_series() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs/measures.md").read_text(encoding="utf-8").split())
    for words in (
        f"none has come for {SILENCE_S:g} s",
        f"`{RUN_ID}` (1 to {RUN_ID_LENGTH} printable ASCII characters",
        f"ids of the last {KEPT_CALLS} calls",
        f"At most {MAX_OPEN_RUNS:,} runs are open",
        f"The last {KEPT_RUNS:,} ended runs are kept",
        *(f"`agent_run_{name}`" for name in MEASURES),
    ):
        assert words in text, words
