"""Figures from rows made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ridgeline.bench.compare import compare
from ridgeline.bench.figures import (
    agent_runs,
    cpu_share,
    digits,
    errors,
    invalid_reason,
    kept_up,
    late_for_reader,
    latency,
    missed,
    per_character,
    run_json,
    spread,
    throughput,
    too_short_reason,
    warnings,
)
from ridgeline.bench.record import read_run, write_run
from ridgeline.bench.sample import difference, figure, mean, percentile, token_percentiles
from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import Slo

from .rows import failed, make_run, row

VLLM_KEYS = (
    "date backend label model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration completed failed "
    "total_input_tokens total_output_tokens request_throughput request_goodput output_throughput total_token_throughput"
).split()
"""What readers of `vllm bench serve --save-result` look for, beside its latencies."""


def test_percentiles_not_the_mean_alone() -> None:
    values = (100, 102, 100, 100, 99, 104, 110, 90, 3000, 95)
    run = make_run([row(at, ttft=value / 1e3) for at, value in enumerate(values)])
    ttft = spread(run, "ttft")
    assert ttft.mean.value == pytest.approx(0.390)
    assert ttft.percentiles[50].value == pytest.approx(0.100)
    assert ttft.percentiles[99].value == pytest.approx(np.percentile(values, 99) / 1e3)


def test_goodput_has_errors_and_late_ones_in_the_denominator() -> None:
    good = [row(at) for at in range(30)]
    late = [row(at, ttft=0.5) for at in range(30, 60)]
    slow = [row(at, tpot=0.2) for at in range(60, 80)]
    bad = [failed(at) for at in range(80, 100)]
    run = make_run([*good, *late, *slow, *bad], "ttft=200ms,tpot=100ms", seconds=60.0)
    rates = throughput(run)
    assert rates["goodput_requests_per_s"] * 60 == pytest.approx(30.0)
    assert rates["requests_per_minute"] == pytest.approx(80.0)
    assert run.attainment == pytest.approx(0.30)
    assert missed(run) == {"ttft": 30, "tpot": 20, "error": 20}
    assert errors(run) == {"HTTP 500: no": 20}
    assert rates["offered"], rates["failed"] == (100, 20)


def test_input_and_output_apart() -> None:
    run = make_run([row(at, tokens=11, input_tokens=300, cached_tokens=75) for at in range(4)], seconds=2.0)
    rates = throughput(run)
    assert (rates["input_tokens_per_s"], rates["output_tokens_per_s"]) == (600.0, 22.0)
    assert rates["cached_input_share"] == 0.25
    assert rates["tokens_per_s_per_user"] == pytest.approx(100.0)
    assert rates["characters_per_s"] == 88.0
    assert per_character(run)["characters_per_output_token"] == 4.0


def test_several_tokens_in_an_arrival() -> None:
    single = row(0, tokens=11, gaps_s=(0.04, 0.04), counts=(3, 4, 4), first_s=0.1, last_s=0.18)
    # 8 tokens came in the 80 ms after the first arrival, which had brought 3 of the 11.
    assert single.tpot_s == pytest.approx(0.01)
    run = make_run([single])
    assert spread(run, "chunk").percentiles[50].value == pytest.approx(0.04)
    assert spread(run, "itl").percentiles[50].value == pytest.approx(0.01)
    assert row(0, tokens=1, gaps_s=(), counts=(1,)).tpot_s is None


def test_itl_weighs_by_token() -> None:
    # 99 tokens one by one after 10 ms each, and 1 chunk of 1 after 1 s: p50 of tokens is 10 ms; so is p90, p99 is not.
    gaps = (*(0.01,) * 98, 1.0)
    run = make_run([row(0, tokens=100, gaps_s=gaps, counts=(1,) * 100)])
    itl = spread(run, "itl")
    assert itl.percentiles[95].value == pytest.approx(0.01)
    assert itl.mean.value == pytest.approx((98 * 0.01 + 1.0) / 99)


def test_a_late_client_makes_a_run_invalid_and_says_why() -> None:
    on_time = [row(at, at=float(at)) for at in range(50)]
    assert invalid_reason(make_run(on_time)) == ""
    late = make_run([replace(on_time_row, issued_s=on_time_row.scheduled_s + 0.05) for on_time_row in on_time])
    assert "requests were sent 50.0 ms late" in invalid_reason(late) and "10.0 ms" in invalid_reason(late)
    slow = make_run(
        [
            replace(on_time_row, issued_s=on_time_row.issued_s + 0.05, first_s=on_time_row.scheduled_s + 2.0)
            for on_time_row in on_time
        ]
    )
    assert invalid_reason(slow) == ""  # 50 ms are nothing beside a TTFT of 2 s
    assert "event loop" in invalid_reason(replace(make_run(on_time), loop_lag_s=(0.0, 0.2)))
    busy = replace(make_run(on_time), cpu_s=49.0)
    assert cpu_share(busy) > 0.9 and "busy" in invalid_reason(busy)


def test_tokens_late_for_a_reader() -> None:
    assert late_for_reader([row(0, tpot=0.119)]) == 0.0
    # Tokens 1 .. 10 are wanted after 120, 240, ... ms: the pause makes the fifth late, and what follows catches up.
    gaps = (0.1, 0.1, 0.1, 0.1, 0.2, 0.01, 0.01, 0.01, 0.01, 0.01)
    assert late_for_reader([row(0, gaps_s=gaps)]) == 0.0
    assert late_for_reader([row(0, gaps_s=(0.1, 0.5, *(0.01,) * 8))]) == pytest.approx(4 / 11)
    assert late_for_reader([row(0, tpot=0.24)]) == pytest.approx(10 / 11)
    assert late_for_reader([row(0, tokens=11, gaps_s=(0.25,), counts=(1, 10))]) == pytest.approx(2 / 11)


def test_kept_up() -> None:
    steady = make_run([row(at, at=at / 10) for at in range(100)])
    assert kept_up(steady) == pytest.approx(1.0)
    growing = make_run([row(at, at=at / 10, ttft=0.1 * at) for at in range(100)])
    assert kept_up(growing) == pytest.approx(0.5, rel=0.05)


def test_run_json_has_the_keys_that_readers_of_vllm_bench_know() -> None:
    figures = run_json(make_run([row(at) for at in range(20)], "ttft=200ms"))
    assert set(VLLM_KEYS) <= set(figures)
    for name in ("ttft", "tpot", "itl", "e2el"):
        for kind in ("mean", "median", "std", "p99"):
            assert figures[f"{kind}_{name}_ms"] >= 0.0
    assert figures["mean_ttft_ms"] == pytest.approx(100.0)
    assert figures["median_itl_ms"] == pytest.approx(10.0)
    assert figures["request_goodput"] == figures["request_throughput"]


def test_a_run_survives_its_files(tmp_path: Path) -> None:
    run = make_run([row(0), failed(1), row(2, tokens=1, gaps_s=(), counts=(1,))], "ttft=200ms,tpot=100ms", label="x")
    write_run(run, tmp_path / "run", run_json(run))
    assert read_run(tmp_path / "run") == run == read_run(tmp_path / "run" / "run.json")
    lines = [msgspec.json.decode(line) for line in (tmp_path / "run" / "requests.jsonl").read_bytes().splitlines()]
    assert [line["missed"] for line in lines] == ["", "error: HTTP 500: no", ""]
    assert lines[0]["ttft_s"] == pytest.approx(0.1)
    with pytest.raises(ConfigError, match="Cannot read the run"):
        read_run(tmp_path)


def test_a_run_in_which_all_failed_has_no_latencies_but_is_told() -> None:
    run = make_run([failed(at) for at in range(5)], "ttft=200ms")
    decoded = msgspec.json.decode(msgspec.json.encode(run_json(run)))
    assert decoded["completed"] == 0 and decoded["mean_ttft_ms"] is None and decoded["request_goodput"] == 0


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    source = np.random.Generator(np.random.PCG64(1))
    covered = {"mean": 0, "median": 0}
    for draw in range(100):
        values = source.exponential(1.0, 120)
        for name, statistic, truth in (("mean", mean, 1.0), ("median", percentile(50), math.log(2))):
            estimate = figure(values, statistic, seed=draw)
            covered[name] += estimate.low <= truth <= estimate.high
    assert all(85 <= count <= 100 for count in covered.values())


def test_token_percentiles_agree_with_weighted_ones_and_widen_with_requests_that_differ() -> None:
    source = np.random.Generator(np.random.PCG64(2))
    values = [source.exponential(scale, 50) for scale in (1.0, 1.0, 1.0, 5.0, 5.0, 5.0)]
    weights = [np.ones(50) for _ in values]
    (result,) = token_percentiles(values, weights, (50,))
    assert result.value == pytest.approx(float(np.percentile(np.concatenate(values), 50)), rel=0.05)
    pooled = figure(np.concatenate(values), percentile(50))
    assert result.high - result.low > 1.5 * (pooled.high - pooled.low)


def test_pairs_find_what_strangers_hide() -> None:
    source = np.random.Generator(np.random.PCG64(3))
    first = source.exponential(1.0, 200)
    second = first + 0.02 + source.normal(0, 0.005, 200)
    together = difference(first, second, mean, paired=True)
    apart = difference(first, second, mean, paired=False)
    assert together.low > 0 and together.low < 0.02 < together.high
    assert apart.low < 0 < apart.high


def test_digits() -> None:
    assert [digits(value) for value in (12.3456, 0.012346, 9999.4, 123456.7, math.nan)] == [
        "12.35", "0.01235", "9999", "123457", "-",
    ]  # fmt: skip


@pytest.mark.parametrize(("rate", "steady"), [(1.0, True), (40.0, False)])
def test_a_run_shorter_than_its_answers_shows_no_steady_state(rate: float, steady: bool) -> None:
    run = make_run([row(at, at=at / rate, ttft=1.0) for at in range(20)], "", rate=rate)
    assert (too_short_reason(run) == "") is steady
    if not steady:
        assert "--num-prompts" in too_short_reason(run) and "0.475 s" in too_short_reason(run)


def test_publish_has_its_own_percentiles_and_goodput() -> None:
    slow = [row(at, answered_s=0.9, hidden_characters=40) for at in range(10)]
    run = make_run(slow, "ttft=200ms,publish=500ms,p90(publish)<=1s")
    assert spread(run, "ttft").percentiles[95].value == pytest.approx(0.1)
    assert spread(run, "publish").percentiles[95].value == pytest.approx(0.9)
    assert run.attainment == 0.0 and missed(run) == {"publish": 10} and run.broken == ()
    assert run_json(run)["ridgeline"]["latency_s"]["publish"]["mean"]["value"] == pytest.approx(0.9)
    plain = make_run([row(at) for at in range(10)], "publish=500ms")
    assert plain.attainment == 1.0 and latency(plain.rows, "publish").tolist() == latency(plain.rows, "ttft").tolist()
    by_name = {change.measure.name: change for change in compare(plain, make_run(slow))}
    assert by_name["TTFT median"].verdict == "same" and by_name["publish median"].verdict == "worse"


def test_an_answer_without_text_hides_nothing_and_hidden_reasoning_alone_publishes_nothing() -> None:
    empty, hidden = row(answered_s=None, characters=0), row(answered_s=None, hidden_characters=44)
    assert empty.publish_s == empty.ttft_s == pytest.approx(0.1)
    assert hidden.publish_s is None and failed().publish_s is None
    assert hidden.missed(Slo.parse("publish=60s")) == "publish never reached (limit 60 s)"


def test_agent_runs_are_published_by_their_last_request() -> None:
    assert agent_runs(make_run([row(0)])) is None
    rows = [
        row(0, at=0.0, run_id="a"), row(1, at=2.0, run_id="a", answered_s=2.7, hidden_characters=9), row(2, at=1.0, run_id="b"),
        row(3, at=0.0, run_id="c"), failed(4, at=1.0), row(5, at=9.0),
    ]  # fmt: skip
    rows[4] = replace(rows[4], run_id="c")
    figures = agent_runs(make_run(rows))
    assert figures is not None and (figures.offered, figures.completed, figures.calls) == (3, 2, 1.5)
    assert figures.publish.percentiles[50].value == pytest.approx((2.7 + 0.1) / 2) and figures.output_tokens == 16.5
    text = msgspec.json.encode(run_json(make_run(rows))["ridgeline"]["agent_runs"]).decode()
    assert '"offered":3' in text


def test_prompts_that_the_server_knew_are_warned_of() -> None:
    """Not those of a workload with common prefixes, and not the few tokens of a template."""

    def warned(cached: int, **facts: bool) -> list[str]:
        return warnings(make_run([row(at, cached_tokens=cached) for at in range(4)], seed=3, **facts))

    assert warned(20, shared_prefixes=False) == warned(90, shared_prefixes=True) == warned(90) == []
    assert "an earlier run with --seed 3 has sent them" in warned(90, shared_prefixes=False)[0]
