"""The last minutes: quantiles, goodput, distance to the limit, and why a request was slow."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ridgeline.core.events import LateWork
from ridgeline.core.slo import Slo
from ridgeline.metrics import Arrival, Ceilings, Live, Metrics, RequestRecord, Spent, Totals
from ridgeline.metrics.history import KEPT_READINGS, MIN_REQUESTS, READING_S, History, Minute
from ridgeline.metrics.records import DISCONNECTED
from ridgeline.metrics.request_index import RequestIndex
from ridgeline.metrics.why import Typical, blame, verdict, why
from ridgeline.metrics.window import GROWTH, Sums, Window
from ridgeline.wire.messages import StepStats

STEP = StepStats(
    step=1, running=4, waiting=0, prompt_tokens=0, output_tokens=4, drafted=0, accepted=0, preempted=0,
    prefix_queries=0, prefix_hits=0, blocks_used=25, blocks_cached=50, blocks_total=100, waste_inside=0.0,
    waste_between=0.0, host_s=0.001, device_s=0.01, flops=4e9, bytes=2e8, predicted_s=0.009, idle_s=0.0, joules=0.0,
    useful_flops=4e9,
)  # fmt: skip
GOOD = RequestRecord(
    id="cmpl-1", arrived_at=1000.0, prompt_tokens=100, cached_tokens=60, output_tokens=11, finish_reasons=("stop",),
    e2e_s=1.2, ttft_s=0.15, spent=Spent(queue_s=0.05, prefill_s=0.1, decode_s=1.0, device_s=0.4),
)  # fmt: skip
SLO = Slo.parse("ttft=200ms,tpot=100ms")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def within(values: Any) -> Any:
    """As near as a Window is."""
    return pytest.approx(values, rel=GROWTH / 2 - 0.5)


def step(**changes: float) -> StepStats:
    return StepStats(**({name: getattr(STEP, name) for name in STEP.__struct_fields__} | changes))


def test_window_weighs_and_forgets() -> None:
    window = Window(10.0)
    for second in range(1, 101):
        window.add(0.0, float(second))
    assert window.quantiles(5.0) == within((50.0, 90.0, 95.0, 99.0))
    window.add(5.0, 1000.0, weight=900)
    assert window.quantiles(5.0, (0.05, 0.5)) == within((50.0, 1000.0))
    assert window.count(12.0) == 900 and window.quantiles(12.0, (0.01,)) == within((1000.0,))
    assert all(value != value for value in window.quantiles(30.0))


def test_a_window_knows_every_size_within_one_percent() -> None:
    for value in (1e-6, 3.3e-4, 0.02, 0.9999, 1.0, 1.0001, 7.0, 123456.0):
        window = Window(10.0)
        window.add(0.0, value)
        assert window.quantiles(0.0, (0.5,)) == within((value,))
    window.extend(1.0, [(0.0, 3)])
    assert window.quantiles(1.0, (0.5,))[0] < 1e-8 and window.count(1.0) == 4


def test_sums_cover_what_has_passed() -> None:
    sums = Sums(60.0)
    sums.add(10.0, {"tokens": 5})
    sums.add(30.0, {"tokens": 7})
    assert sums.totals(30.0) == {"tokens": 12.0} and sums.seconds(30.0) == 20.0
    assert sums.totals(75.0) == {"tokens": 7.0} and sums.seconds(75.0) == 60.0


def test_goodput_counts_failed_requests_as_offered() -> None:
    clock = Clock()
    live = Live(SLO, clock)
    live.on_step(STEP, None)
    live.on_request(GOOD)
    live.on_request(replace(GOOD, ttft_s=0.3))
    live.on_request(replace(GOOD, spent=replace(GOOD.spent, decode_s=2.0)))
    live.on_request(replace(GOOD, cut="error", finish_reasons=()))
    clock.now += 10
    figures = live.figures()
    assert figures["slo_attainment"] == 0.25
    assert figures["goodput_requests_per_second"] == pytest.approx(0.1)
    assert live.blamed() == {"prefill": 1, "decode": 1, "error": 1}
    assert "slo_attainment" not in Live(Slo(), clock).figures()


def test_a_disconnect_is_no_miss_and_hides_none() -> None:
    """A client that leaves is left out of goodput, unless a limit had been missed before."""
    clock = Clock()
    live = Live(SLO, clock)
    live.on_request(GOOD)
    for _ in range(3):
        live.on_request(replace(GOOD, cut=DISCONNECTED, finish_reasons=()))
    clock.now += 10
    assert live.figures()["slo_attainment"] == 1.0 and live.figures()["goodput_requests_per_second"] == 0.1
    assert live.blamed() == {} and live.cut() == {DISCONNECTED: 3} and live.broken() == ()
    live.on_request(replace(GOOD, cut=DISCONNECTED, finish_reasons=(), ttft_s=None, e2e_s=9.0))
    assert live.figures()["slo_attainment"] == 0.5 and live.blamed() == {"prefill": 1}
    clock.now += 60
    live.tick()
    (minute,) = live.history.minutes
    assert (minute.requests, minute.judged, minute.good) == (5, 2, 1)


def test_without_an_slo_nothing_is_judged_and_nothing_alerts() -> None:
    clock = Clock()
    live = Live(Slo(), clock)
    live.on_request(GOOD)
    for _ in range(3 * MIN_REQUESTS):
        live.on_request(replace(GOOD, cut="error", finish_reasons=()))
        live.on_request(replace(GOOD, cut=DISCONNECTED, finish_reasons=()))
    clock.now += 61
    live.tick()
    assert live.history.alerts() == [] and live.blamed() == {} and "slo_attainment" not in live.figures()
    assert live.cut() == {"error": 3 * MIN_REQUESTS, DISCONNECTED: 3 * MIN_REQUESTS}


def test_verdicts() -> None:
    assert verdict(GOOD, SLO) == verdict(GOOD, Slo()) == "good"
    assert verdict(replace(GOOD, cut="error"), SLO) == "error"
    gone = replace(GOOD, cut=DISCONNECTED, ttft_s=None, finish_reasons=())
    assert verdict(gone, Slo()) == DISCONNECTED
    assert verdict(gone, SLO) == "ttft 1200 ms > 200 ms"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"cut": "refused", "cut_reason": "invalid grammar"}, "Rejected after 9.05 s (invalid grammar)."),
        ({"cut": DISCONNECTED}, "Disconnected by the client after 9.05 s, with 1 token of output."),
        (
            {"cut": DISCONNECTED, "output_tokens": 0},
            "Disconnected by the client after 9.05 s, before any output.",
        ),
        (
            {"cut": "drain", "output_tokens": 3},
            "Ended by the server's shutdown after 9.05 s, with 3 tokens of output.",
        ),
        ({"cut": "error"}, "Failed after 9.05 s, with 1 token of output."),
    ],
)
def test_why_says_how_a_request_was_cut_off(changes: dict[str, Any], words: str) -> None:
    record = replace(GOOD, e2e_s=9.05, finish_reasons=(), **({"output_tokens": 1} | changes))
    explained = why(record, Slo(), Typical(0.05, 0.1, 0.1))
    assert explained["reasons"][0] == words
    assert explained["verdict"] == changes["cut"]
    assert explained["summary"].startswith("9.05 s for 100 prompt and ")


def test_readings_are_taken_while_nothing_runs_and_are_bounded() -> None:
    clock = Clock()
    live = Live(Slo(), clock, wall=lambda: 1000.0 + clock.now)
    live.on_step(STEP, 0.01)
    live.on_request(GOOD)
    for _ in range(KEPT_READINGS + 5):
        clock.now += READING_S
        live.tick()
    readings = list(live.history.readings)
    assert len(readings) == KEPT_READINGS and readings[-1].at == 1000.0 + clock.now
    assert readings[-1].now["running"] == 4 and readings[-1].latencies == {}, "five minutes have passed"
    assert [reading.at for reading in live.history.readings_since(readings[-3].at)] == [
        readings[-2].at,
        readings[-1].at,
    ]
    early = Live(Slo(), clock)
    early.on_step(STEP, 0.01)
    early.on_request(GOOD)
    clock.now += READING_S
    early.tick()
    reading = early.history.readings[-1]
    assert reading.latencies["ttft"]["p50"] == within(0.15) and reading.figures["output_tokens_per_second"] > 0
    assert reading.now["kv_used"] == 0.25 and reading.point is not None


def test_rows_are_found_by_both_ids_and_the_newest_wins() -> None:
    rows = RequestIndex(3)
    for index in range(3):
        rows.add(replace(GOOD, id=f"cmpl-{index}", request_id="mine"))
    rows.add(replace(GOOD, id="cmpl-3", request_id="cmpl-1"))
    assert rows.find("cmpl-0") is None, "the oldest has left"
    assert rows.find("mine").id == "cmpl-2"  # type: ignore[union-attr]
    assert rows.find("cmpl-1").id == "cmpl-1", "a client's id does not hide a body's"  # type: ignore[union-attr]
    for index in range(4, 7):
        rows.add(replace(GOOD, id=f"cmpl-{index}"))
    assert rows.find("mine") is None and rows.find("cmpl-1") is None and len(rows) == 3
    assert [rows.find(f"cmpl-{index}") is None for index in range(7)] == [True] * 4 + [False] * 3


def test_percentiles_of_the_slo_are_judged_over_all_offered_requests() -> None:
    clock = Clock()
    live = Live(Slo.parse("p75(ttft)<=200ms,attain>=0.6"), clock)
    assert live.broken() == () and "slo_met" not in live.figures()
    for _ in range(3):
        live.on_request(GOOD)
    live.on_request(replace(GOOD, ttft_s=0.3))
    assert live.broken() == () and live.figures()["slo_met"] == 1
    live.on_request(replace(GOOD, cut="error", finish_reasons=()))
    assert live.broken() == ("p75(ttft)<=200ms: a share of 0.6 of requests meets the limit; 0.75 is required",)
    assert live.figures()["slo_met"] == 0 and live.figures()["slo_attainment"] == 0.6
    assert "slo_met" not in Live(SLO, clock).figures()


def test_distance_to_the_limits() -> None:
    clock = Clock()
    live = Live(Slo(), clock)
    live.ceilings = Ceilings("toy", flops=1e12, bytes=1e11, measured_bytes=4e10, price=3.6)
    for _ in range(100):
        work = {"useful_flops": 3e9, "draft_flops": 1e9, "draft_bytes": 1e8}
        energy = {"joules": 2.0, "prompt_joules": 0.4, "output_joules": 0.6, "metered_s": 0.01}
        live.on_step(step(idle_s=0.0025, **work, **energy), 0.01)
    clock.now += 10
    figures = live.figures()
    assert figures["mfu"] == pytest.approx(0.3) and figures["mbu"] == pytest.approx(0.2)
    assert figures["mfu_wall_clock"] == pytest.approx(0.03) and figures["mbu_wall_clock"] == pytest.approx(0.02)
    assert figures["mfu_executed"] == pytest.approx(0.5) and figures["mbu_executed"] == pytest.approx(0.3)
    shares = [name for name in figures if name.startswith(("mfu", "mbu"))]
    assert shares[:4] == ["mfu_wall_clock", "mbu_wall_clock", "mfu", "mbu"], "that of the system stands first"
    assert figures["mbu_measured"] == pytest.approx(0.5) and "mfu_measured" not in figures
    live.ceilings = replace(live.ceilings, measured_bytes=1e10)
    assert live.figures()["mbu_measured"] == pytest.approx(1.0), "measured on a busy machine: steps exceed it"
    assert figures["device_busy"] == pytest.approx(0.1) and figures["bubble"] == pytest.approx(0.2)
    assert figures["step_prediction_error"] == within(0.1)
    assert figures["decode_step_predicted_seconds"] == pytest.approx(0.009)
    assert figures["watts"] == pytest.approx(20.0) and figures["joules_per_token"] == pytest.approx(0.5)
    assert figures["cost_per_million_tokens"] == pytest.approx(0.001 * 10 / 400 * 1e6)
    assert figures["busy_watts"] == pytest.approx(100.0) and figures["joules_per_output_token"] == pytest.approx(0.15)
    assert "joules_per_prompt_token" not in figures, "no prompt token"
    intensity, rate = live.point() or (0.0, 0.0)
    assert intensity == pytest.approx(5e9 / 3e8) and rate == pytest.approx(5e11)


def test_drafts_save_what_they_gain_less_the_drafter_s_part_of_prompts() -> None:
    clock = Clock()
    live = Live(Slo(), clock)
    assert "draft_saved_share" not in live.figures()
    live.on_step(step(device_s=0.01, saved_s=0.004), 0.0)
    live.on_step(step(device_s=0.03, prompt_tokens=9, flops=3e9, draft_flops=1e9), 0.0)
    flops = step().flops
    figures = live.figures()
    drafter = 1e9 / (flops + 3e9 + 1e9)
    assert figures["draft_saved_share"] == pytest.approx((0.004 - drafter * 0.03) / 0.04)
    assert figures["prompt_step_seconds"] == pytest.approx(0.03)
    assert figures["mean_kv_used"] == pytest.approx(step().blocks_used / step().blocks_total)
    assert figures["prompt_step_predicted_seconds"] == pytest.approx(step().predicted_s)


def test_joules_of_a_request_are_those_of_its_steps() -> None:
    """Steps took 100 W lately. The request's decoding took 300 W; its prefill was too short for a reading. The idle device does not
    make it cheaper."""
    clock = Clock()
    live = Live(Slo(), clock)
    live.ceilings = Ceilings("toy", price=3.6)
    live.on_step(step(joules=50.0, prompt_joules=0.4, output_joules=0.6, metered_s=0.01), 0.01)
    record = replace(
        GOOD, spent=replace(GOOD.spent, prompt_device_s=0.1), decoding=Totals(step_joules=60.0, metered_s=0.2)
    )
    clock.now += 10
    for joules in (live.shares(record), live.why(record)):
        assert joules["prompt_joules"] == pytest.approx(0.1 * 100) and joules["output_joules"] == pytest.approx(
            0.3 * 300
        )
        assert joules["joules"] == pytest.approx(100.0) and joules["cost"] == pytest.approx(0.0004)
    clock.now += 100
    assert live.shares(record)["joules"] == pytest.approx(100.0)
    assert live.totals.watts == pytest.approx(100.0)


def test_new_counters_of_work_and_energy() -> None:
    metrics = Metrics("m", clock=Clock())
    metrics.on_step(
        step(draft_flops=1e9, draft_bytes=1e8, joules=3.0, prompt_joules=0.5, output_joules=1.5, metered_s=0.01)
    )
    text = metrics.render().decode()
    expected = {"estimated_flops": 4e9, "useful_flops": 4e9, "draft_flops": 1e9, "draft_moved_bytes": 1e8}
    values = {f"{name}_per_gpu": value for name, value in expected.items()}
    values |= {"energy_joules": 3.0, "prompt_energy_joules": 0.5, "output_energy_joules": 1.5}
    for name, value in values.items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"ridgeline:{name}_total{{")]
        assert float(line.rsplit(" ", 1)[1]) == value


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"ttft_s": 0.5, "spent": Spent(0.4, 0.1, 0.5)}, "queue"),
        ({"ttft_s": 0.5, "spent": Spent(0.1, 0.4, 0.5)}, "prefill"),
        ({"spent": Spent(0.05, 0.1, 5.0)}, "decode"),
        ({"cut": "error"}, "error"),
        ({"cut": "refused"}, "error"),
        ({"cut": DISCONNECTED}, ""),
        ({"cut": DISCONNECTED, "ttft_s": None, "e2e_s": 0.1}, ""),
        ({"cut": DISCONNECTED, "ttft_s": None, "e2e_s": 0.3}, "prefill"),
        ({"cut": DISCONNECTED, "ttft_s": None, "e2e_s": 0.3, "arrival": Arrival(waiting=1)}, "queue"),
        ({"cut": DISCONNECTED, "ttft_s": 0.5, "spent": Spent(0.1, 0.4, 0.5)}, "prefill"),
    ],
)
def test_blame(changes: dict[str, object], fault: str) -> None:
    assert blame(replace(GOOD, **changes), SLO) == fault  # type: ignore[arg-type]
    slow_reader = replace(GOOD, e2e_s=9.0)
    assert blame(slow_reader, Slo(e2e_s=5.0)) == "client"


def test_why_names_what_happened() -> None:
    record = replace(
        GOOD,
        e2e_s=8.25,
        ttft_s=3.2,
        hidden_tokens=4,
        spent=Spent(queue_s=3.0, prefill_s=0.2, decode_s=5.0, preempted=2),
        arrival=Arrival(waiting=7, running=16, kv_used=0.97),
        decoding=Totals(steps=100, device_s=4.0, mixed_s=3.0, row_s=60.0),
    )
    explained = why(record, SLO, Typical(queue_s=0.01, prefill_s=0.2, tpot_s=0.05))
    assert explained["verdict"] == "ttft 3200 ms > 200 ms" and explained["blame"] == "queue"
    decode, queue, prefill = explained["reasons"]
    assert "5.00 s" in decode and "preempted 2 times" in decode and "75%" in decode and "15.0 requests" in decode
    assert "usually 50 ms" in decode and "4 tokens of the output were hidden reasoning" in decode
    assert "7 requests waited and 16 ran" in queue and "97% full" in queue and "usually 10 ms" in queue
    assert "computed: 40, taken from the prefix cache: 60" in prefill and "usually" not in prefill
    assert explained["numbers"]["arrival"]["running"] == 16


def test_why_names_what_start_up_should_have_done() -> None:
    late = (LateWork("compile", "split_kernel", 0.7), LateWork("capture", "mixed graph", 0.3))
    explained = why(replace(GOOD, late=late), SLO, Typical(0.05, 0.1, 0.1))
    named = [reason for reason in explained["reasons"] if "compile of split_kernel, capture of mixed graph" in reason]
    assert len(named) == 1 and named[0].startswith("No step ran for 1.00 s")
    assert explained["numbers"]["late"][0] == {"kind": "compile", "name": "split_kernel", "seconds": 0.7}


def test_late_work_is_counted_and_belongs_to_those_who_were_there() -> None:
    metrics = Metrics("m", clock=Clock())
    metrics.on_step(STEP)
    metrics.on_step(step(late=[LateWork("compile", "a", 0.5), LateWork("compile", "b", 0.25)]))
    metrics.on_step(step(late=[LateWork("capture", "decode graph", 2.0)]))
    text = metrics.render().decode()
    for line in (
        "late_compiles_total{%s} 2",
        "late_captures_total{%s} 1",
        'late_seconds_total{%s,kind="compile"} 0.75',
    ):
        assert "ridgeline:" + line % 'engine="0",model_name="m"' in text
    assert 'ridgeline:estimated_flops_per_gpu_total{engine="0",model_name="m"} 12000000000' in text
    assert [work.name for work in metrics.live.late] == ["a", "b", "decode graph"]


def test_a_request_is_judged_by_its_own_limits_before_the_servers() -> None:
    clock = Clock()
    live = Live(SLO, clock)
    live.on_request(replace(GOOD, declared=Slo(ttft_s=0.1)))
    live.on_request(replace(GOOD, ttft_s=0.3, declared=Slo(ttft_s=0.4)))
    clock.now += 1.0
    assert live.figures()["slo_attainment"] == 0.5
    assert live.why(live.rows()[1])["verdict"].startswith("ttft 150 ms > 100 ms")


def test_what_an_output_token_costs_in_prompt_tokens() -> None:
    live = Live(Slo(), Clock())
    live.on_request(GOOD)  # 40 prompt tokens in 0.1 s, 0.1 s per output token
    assert live.figures()["input_tokens_per_output_token"] == pytest.approx(40, rel=2 * (GROWTH / 2 - 0.5))


def test_the_ledger_finds_and_orders() -> None:
    live = Live(Slo(), Clock(), wall=lambda: 1010.0)
    for index in range(30):
        live.on_request(replace(GOOD, id=f"r{index}", e2e_s=float(index % 7)))
    assert live.find("r3") is not None and live.find("r99") is None
    assert [row.id for row in live.rows("recent", 3)] == ["r29", "r28", "r27"]
    assert [row.e2e_s for row in live.rows("slowest", 5)] == [6.0, 6.0, 6.0, 6.0, 5.0]


def minute(**changes: object) -> Minute:
    some = MIN_REQUESTS
    base = Minute(0.0, {"ttft_p95": 0.1, "tpot_p99": 0.05}, some, some, some, 0, 0)
    return replace(base, **changes)  # type: ignore[arg-type]


def test_alerts_on_a_regressed_percentile_and_a_missed_slo() -> None:
    history = History()
    history.minutes.extend([minute()] * 20)
    assert history.alerts() == []
    history.minutes.extend([minute(quantiles={"ttft_p95": 0.3, "tpot_p99": 0.06})] * 3)
    (alert,) = history.alerts()
    assert alert.rule == "ttft_p95_regression" and "300 ms; the usual value is 100 ms" in alert.text
    history.minutes.extend([minute(good=MIN_REQUESTS // 2)] * 3)
    assert [alert.rule for alert in history.alerts()] == ["slo_attainment"]
    assert "30 of the last 60 requests met the SLO (50%)" in history.alerts()[0].text
    history.minutes.extend([minute(requests=1, judged=1, good=0)] * 3)
    assert history.alerts() == [], "too few requests say nothing"
    history.minutes.extend([minute(judged=0, good=0)] * 3)
    assert history.alerts() == [], "no request is judged without an SLO"


def test_minutes_are_closed_by_the_clock() -> None:
    clock = Clock()
    live = Live(SLO, clock, wall=lambda: 60.0)
    live.on_step(STEP, 0.01)
    live.on_request(GOOD)
    clock.now += 61
    live.on_step(STEP, 0.01)
    (closed,) = live.history.minutes
    assert closed.requests == closed.judged == closed.good == 1 and closed.output_tokens == 4
    assert closed.quantiles["ttft_p95"] == within(0.15) and closed.quantiles["itl_p50"] == within(0.01)


def test_records_count_in_their_own_second_whenever_they_are_added_up() -> None:
    clock = Clock()
    live = Live(Slo(), clock)
    for second in (0.0, 0.4, 299.0, 300.5):
        clock.now = 100.0 + second
        live.on_step(step(prompt_tokens=2 if second == 0.4 else 0, joules=second), None)
    assert live.totals == Totals(4, 0.04, 0.01, 0.004, 0.16), "at once, without anybody asking for figures"
    clock.now = 401.5  # the first two have left the window
    assert live.figures()["output_tokens_per_second"] == pytest.approx(8 / 300)
    assert live.figures()["watts"] == pytest.approx(599.5 / 300) and live.figures()["prompt_share"] == 0


def test_a_record_without_a_step_adds_no_time() -> None:
    live = Live(Slo(), Clock())
    live.on_step(STEP, None)
    live.on_step(step(steps=0, running=0, output_tokens=0), None)
    assert live.totals == Totals(1, 0.01, 0.0, 0.001, 0.04)
    assert live.last is not None and live.last.running == 0


def test_publish_is_a_latency_and_a_cause_of_misses() -> None:
    clock = Clock()
    slo = Slo.parse("ttft=200ms,publish=500ms")
    live = Live(slo, clock)
    live.on_request(replace(GOOD, publish_s=0.15))
    live.on_request(replace(GOOD, publish_s=0.9, hidden_tokens=8))
    assert live.latencies()["publish"]["p99"] == within(0.9) and live.latencies()["ttft"]["p99"] == within(0.15)
    assert live.figures()["slo_attainment"] == 0.5 and live.blamed() == {"decode": 1}
    late = replace(GOOD, publish_s=0.9, hidden_tokens=8)
    assert verdict(late, slo) == "publish 900 ms > 500 ms" and blame(late, slo) == "decode"
    queued = replace(late, ttft_s=0.6, spent=Spent(queue_s=0.5, prefill_s=0.1, decode_s=1.0))
    assert blame(queued, Slo.parse("publish=500ms")) == "queue"
    hidden = replace(late, publish_s=None)
    assert verdict(hidden, slo) == "publish never reached (limit 500 ms)" and blame(hidden, slo) == "decode"
    gone = replace(hidden, cut=DISCONNECTED, finish_reasons=())
    assert verdict(gone, slo) == "publish 1200 ms > 500 ms", "its lifetime had passed the limit"
    reasons = " ".join(why(late, slo, Typical(0.05, 0.1, 0.1))["reasons"])
    assert (
        "8 tokens of the output were hidden reasoning, and the first visible content came 900 ms after arrival"
        in reasons
    )
    assert "and no visible content came" in " ".join(why(hidden, slo, Typical(0.05, 0.1, 0.1))["reasons"])


def test_an_objective_on_publish_is_judged_over_the_window() -> None:
    live = Live(Slo.parse("p50(publish)<=500ms"), Clock())
    live.on_request(replace(GOOD, publish_s=0.15))
    live.on_request(replace(GOOD, publish_s=0.9))
    assert live.broken() == ()
    live.on_request(replace(GOOD, publish_s=0.9))
    (message,) = live.broken()
    assert message.startswith("p50(publish)<=500ms: a share of 0.3333 ")


def test_speed_of_one_user_by_quantile() -> None:
    metrics = Metrics("tiny", clock=Clock())
    assert metrics.live.speeds() == {}
    for decode_s in (1.0, 2.0, 4.0):  # ten tokens after the first
        metrics.on_request(replace(GOOD, spent=replace(GOOD.spent, decode_s=decode_s)))
    metrics.on_request(replace(GOOD, output_tokens=1))
    speeds = metrics.live.speeds()
    assert (speeds[0.01], speeds[0.5], speeds[0.95]) == within((2.5, 5.0, 10.0))
    assert 'user_tokens_per_second{engine="0",model_name="tiny",quantile="0.05"}' in metrics.render().decode()


def test_requests_per_minute_arriving_and_completed() -> None:
    clock = Clock()
    live = Live(Slo(), clock)
    for _ in range(6):
        live.on_arrival()
    live.on_request(GOOD)
    live.on_request(replace(GOOD, cut="error", finish_reasons=()))
    clock.now += 120.0
    figures = live.figures()
    assert figures["arriving_requests_per_minute"] == 3.0 and figures["completed_requests_per_minute"] == 0.5
