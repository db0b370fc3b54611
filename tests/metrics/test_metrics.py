"""What operators scrape: names, labels, edges and sums."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.metrics import Ceilings, Metrics, RequestRecord, Spent
from ridgeline.metrics.aliases import ALIASES, DERIVED
from ridgeline.metrics.catalogue import COUNTERS, GAUGES, HISTOGRAMS, REQUEST_SECONDS
from ridgeline.metrics.metrics import MAX_PENDING_RECORDS, Histogram
from ridgeline.wire.messages import StepStats

STEP = StepStats(
    step=1, running=3, waiting=2, prompt_tokens=100, output_tokens=3, drafted=8, accepted=5, preempted=1,
    prefix_queries=64, prefix_hits=48, blocks_used=25, blocks_cached=50, blocks_total=100, waste_inside=0.125,
    waste_between=0.0625, host_s=0.0004, device_s=0.02, plan_s=0.0002, commit_s=0.000125, reply_s=0.000075, dropped=4,
)  # fmt: skip
REQUEST = RequestRecord(
    id="cmpl-1", arrived_at=1000.0, prompt_tokens=70, cached_tokens=48, output_tokens=22,
    finish_reasons=("stop", "length"), e2e_s=1.25, ttft_s=0.05, spent=Spent(0.01, 0.04, 1.0), max_tokens=16,
)  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def scrape(metrics: Metrics) -> dict[str, float]:
    """name{further labels} -> value; every sample carries the two labels of its engine."""
    samples = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny" and labels.pop("engine") == "0"
            samples[sample.name + "".join(f"[{name}={value}]" for name, value in labels.items())] = sample.value
    return samples


def test_experts() -> None:
    metrics = Metrics("tiny")
    metrics.on_step(replace_step(expert_tokens=[[6, 2, 0, 0], [2, 2, 2, 2]]))
    metrics.on_step(STEP)
    metrics.on_step(replace_step(expert_tokens=[[0, 4, 0, 0], [1, 1, 2, 0]]))
    samples = scrape(metrics)
    assert samples["ridgeline:expert_tokens_total[expert=0/1]"] == 6
    assert samples["ridgeline:expert_tokens_total[expert=1/2]"] == 4
    assert samples["ridgeline:expert_imbalance"] == (4 + 2) / 2


def test_tiers_below_the_cache() -> None:
    """Records have totals since the engine's start; a new engine starts at zero."""
    metrics = Metrics("tiny")
    for totals in ((4, 0, 0), (6, 3, 1), (2, 1, 0)):
        metrics.on_step(replace_step(tiers=[("host", *totals), ("disk", 1, 1, 1)]))
    samples = scrape(metrics)
    assert samples["ridgeline:kv_tier_stored_blocks_total[tier=host]"] == 6 + 2
    assert samples["ridgeline:kv_tier_loaded_blocks_total[tier=host]"] == 3 + 1
    assert samples["ridgeline:kv_tier_dropped_blocks_total[tier=host]"] == 1
    assert samples["ridgeline:kv_tier_loaded_blocks_total[tier=disk]"] == 1


def test_events_of_pinned_prefixes() -> None:
    """Records have totals since the engine's start. A lost engine takes its pins with it, and a new one starts at zero."""
    metrics = Metrics("tiny")
    now = [("blocks", "", 5), ("prefixes", "", 2)]
    metrics.on_step(replace_step(pins=[*now, ("written", "", 3), ("lost", "pressure", 1)]))
    metrics.on_step(replace_step(pins=[*now, ("written", "", 4), ("lost", "pressure", 2)]))
    samples = scrape(metrics)
    assert samples["ridgeline:prompt_cache_pinned_blocks"] == 5
    assert samples["ridgeline:prompt_cache_pins_written_total"] == 4
    assert samples["ridgeline:prompt_cache_pins_lost_total[reason=pressure]"] == 2
    metrics.engine_restarted()
    metrics.on_step(replace_step(pins=[*now, ("written", "", 1)]))
    samples = scrape(metrics)
    assert samples["ridgeline:prompt_cache_pins_lost_total[reason=restart]"] == 2
    assert samples["ridgeline:prompt_cache_pins_written_total"] == 5


def replace_step(**changes: object) -> StepStats:
    return msgspec.structs.replace(STEP, **changes)


def test_step() -> None:
    metrics = Metrics("tiny")
    metrics.on_step(STEP)
    metrics.on_step(STEP)
    seen = scrape(metrics)
    assert seen["ridgeline:num_requests_running"] == 3 and seen["ridgeline:num_requests_waiting"] == 2
    assert seen["ridgeline:kv_cache_usage_perc"] == 0.25 and seen["ridgeline:kv_cache_cached_perc"] == 0.5
    assert seen["ridgeline:kv_waste_inside_perc"] == 0.125 and seen["ridgeline:kv_waste_between_perc"] == 0.0625
    assert seen["ridgeline:prompt_tokens_total"] == 200 and seen["ridgeline:generation_tokens_total"] == 6
    assert seen["ridgeline:prefix_cache_queries_total"] == 128 and seen["ridgeline:prefix_cache_hits_total"] == 96
    assert seen["ridgeline:num_preemptions_total"] == 2 and seen["ridgeline:steps_total"] == 2
    assert seen["ridgeline:spec_decode_num_accepted_tokens_total"] == 10
    assert seen["ridgeline:iteration_tokens_total_bucket[le=64.0]"] == 0
    assert seen["ridgeline:iteration_tokens_total_bucket[le=128.0]"] == 2
    assert seen["ridgeline:scheduler_host_seconds_count"] == 2
    parts = {
        part: seen[f"ridgeline:scheduler_host_part_seconds_total[part={part}]"] for part in ("plan", "commit", "reply")
    }
    assert parts == {"plan": 0.0004, "commit": 0.00025, "reply": 0.00015}
    assert seen["ridgeline:generation_tokens_dropped_total"] == 8


def test_a_record_without_a_step_moves_the_gauges_alone() -> None:
    metrics = Metrics("tiny")
    metrics.on_step(STEP)
    gone = StepStats(**{name: getattr(STEP, name) for name in STEP.__struct_fields__})
    gone.running = gone.waiting = gone.prompt_tokens = gone.output_tokens = gone.steps = 0
    metrics.on_step(gone)
    failed = StepStats(**{name: getattr(gone, name) for name in STEP.__struct_fields__})
    failed.steps = failed.failed = 1
    metrics.on_step(failed)
    seen = scrape(metrics)
    assert seen["ridgeline:num_requests_running"] == 0
    assert seen["ridgeline:steps_total"] == 2 and seen["ridgeline:failed_steps_total"] == 1
    assert seen["ridgeline:scheduler_host_seconds_count"] == 2
    assert seen["ridgeline:step_device_seconds_total"] == 0.04


def test_request() -> None:
    metrics = Metrics("tiny")
    metrics.on_request(REQUEST)
    metrics.on_request(replace(REQUEST, ttft_s=None, output_tokens=0, max_tokens=None, finish_reasons=("length",)))
    seen = scrape(metrics)
    assert seen["ridgeline:request_success_total[finished_reason=stop]"] == 1
    assert seen["ridgeline:request_success_total[finished_reason=length]"] == 2
    assert seen["ridgeline:prompt_tokens_cached_total"] == 96
    assert seen["ridgeline:time_to_first_token_seconds_count"] == 1
    assert seen["ridgeline:e2e_request_latency_seconds_sum"] == 2.5
    assert seen["ridgeline:request_inference_time_seconds_sum"] == pytest.approx(2.08)
    # 11 tokens per choice: ten gaps in one second of decoding.
    assert seen["ridgeline:request_time_per_output_token_seconds_sum"] == pytest.approx(0.1)
    assert seen["ridgeline:request_params_max_tokens_count"] == 1


def test_gathered_records_are_added_up_without_a_reader() -> None:
    metrics, one_by_one = Metrics("tiny"), Metrics("tiny")
    for turn in range(MAX_PENDING_RECORDS + 3):
        step = StepStats(**{name: getattr(STEP, name) for name in STEP.__struct_fields__})
        step.host_s, step.prompt_tokens = 1e-5 * turn, turn
        metrics.on_step(step)
        one_by_one.on_step(step)
        if turn % 50 == 0:
            one_by_one.render()
    seen, expected = scrape(metrics), scrape(one_by_one)
    counts = [name for name in expected if "latency" not in name and "per_second" not in name and "busy" not in name]
    assert {name: seen[name] for name in counts} == pytest.approx({name: expected[name] for name in counts})
    assert seen["ridgeline:steps_total"] == MAX_PENDING_RECORDS + 3


def test_aborted() -> None:
    metrics = Metrics("tiny")
    for reason in ("cancelled", "cancelled", "overloaded"):
        metrics.aborted(reason)
    seen = scrape(metrics)
    assert seen["ridgeline:aborted_requests_total[reason=cancelled]"] == 2
    assert seen["ridgeline:aborted_requests_total[reason=overloaded]"] == 1


def test_inter_token_latency_counts_tokens_and_no_idle_time() -> None:
    clock = Clock()
    metrics = Metrics("tiny", clock=clock)
    for now, running, tokens in ((1.0, 4, 4), (1.02, 4, 4), (1.05, 0, 4), (9.0, 4, 4), (9.02, 4, 0), (9.04, 4, 4)):
        clock.now = now
        step = StepStats(**{name: getattr(STEP, name) for name in STEP.__struct_fields__})
        step.running, step.output_tokens = running, tokens
        metrics.on_step(step)
    seen = scrape(metrics)
    assert seen["ridgeline:inter_token_latency_seconds_count"] == 12
    assert seen["ridgeline:inter_token_latency_seconds_sum"] == pytest.approx(4 * (0.02 + 0.03 + 0.02))


def test_alias_shows_what_vllm_has_under_both_prefixes() -> None:
    metrics = Metrics("tiny", "vllm")
    metrics.on_step(STEP)
    seen = scrape(metrics)
    shared = {name.removeprefix("vllm:") for name in seen if name.startswith("vllm:")}
    assert {"num_requests_running", "generation_tokens_total", "prefix_cache_hits_total"} <= shared
    assert not any(name.startswith(("kv_waste", "aborted", "scheduler_host", "steps")) for name in shared)
    assert all(seen[f"vllm:{name}"] == seen[f"ridgeline:{name}"] for name in shared)
    assert not any(name.startswith("vllm:") for name in scrape(Metrics("tiny")))


@pytest.mark.parametrize("alias", ["old", "sglang"])
def test_names_of_other_engines_tell_what_ours_do(alias: str) -> None:
    metrics = Metrics("tiny", alias)
    metrics.on_ready(max_len=4096, page_tokens=16, blocks=100)
    metrics.on_step(STEP)
    seen, (given,) = scrape(metrics), [ALIASES[alias]]
    for name, ours in (given.gauges | given.counters).items():
        total = "_total" if name in given.counters else ""
        values = [value for key, value in seen.items() if key.split("[")[0] == f"{given.prefix}:{name}{total}"]
        if ours not in DERIVED and f"ridgeline:{ours}{total}" in seen:
            assert values == [seen[f"ridgeline:{ours}{total}"]]
    for name, ours in given.histograms.items():
        assert seen[f"{given.prefix}:{name}_count"] == seen[f"ridgeline:{ours}_count"]
    if alias == "sglang":
        assert seen["sglang:num_used_tokens"] == pytest.approx(seen["ridgeline:kv_cache_usage_perc"] * 1600)
        assert "sglang:cached_tokens_total[cache_source=device]" in seen
        assert "sglang:spec_accept_length" not in seen, "nothing was drafted"
    else:
        assert seen["vllm:gpu_cache_usage_perc"] == seen["vllm:kv_cache_usage_perc"]


def test_edges_end_at_the_context() -> None:
    metrics = Metrics("tiny")
    metrics.on_ready(max_len=4096, page_tokens=16, blocks=99)
    seen = scrape(metrics)
    edges = [name for name in seen if name.startswith("ridgeline:request_prompt_tokens_bucket")]
    assert edges[0].endswith("[le=1.0]") and edges[-2].endswith("[le=2000.0]") and edges[-1].endswith("[le=+Inf]")
    assert seen["ridgeline:cache_config_info[block_size=16][num_gpu_blocks=99]"] == 1


def test_a_restarted_engine_keeps_what_was_counted() -> None:
    metrics = Metrics("tiny")
    metrics.on_ready(max_len=4096, page_tokens=16, blocks=99)
    metrics.on_step(STEP)
    metrics.on_request(REQUEST)
    assert scrape(metrics)["ridgeline:engine_restarts_total"] == 0
    metrics.engine_restarted()
    metrics.on_ready(max_len=4096, page_tokens=16, blocks=80)
    seen = scrape(metrics)
    assert seen["ridgeline:engine_restarts_total"] == 1
    assert seen["ridgeline:request_prompt_tokens_count"] == seen["ridgeline:steps_total"] == 1
    assert seen["ridgeline:cache_config_info[block_size=16][num_gpu_blocks=80]"] == 1
    metrics.on_ready(max_len=2048, page_tokens=16, blocks=80)
    assert scrape(metrics)["ridgeline:request_prompt_tokens_count"] == 0, "other buckets cannot be added to these"


def test_edges_are_inclusive() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (1.0, 1.5, 2.0, 3.0):
        histogram.add(value)
    together = Histogram((1.0, 2.0))
    together.extend((3.0, 1.0, 2.0, 1.5))
    assert histogram.buckets() == together.buckets() == [(1.0, 1), (2.0, 3), (math.inf, 4)]
    assert histogram.total == together.total


def test_catalogue() -> None:
    assert not set(GAUGES) & set(COUNTERS) and list(REQUEST_SECONDS) == sorted(REQUEST_SECONDS)
    assert not any(name.endswith("_total") for name in COUNTERS)  # the export adds it
    assert all(list(entry.edges) == sorted(entry.edges) for entry in HISTOGRAMS.values())


def test_two_engines_do_not_share_anything() -> None:
    first, second = Metrics("tiny"), Metrics("tiny")
    first.on_step(STEP)
    assert scrape(second)["ridgeline:prompt_tokens_total"] == 0


def test_labels_may_hold_any_text() -> None:
    metrics = Metrics('a "b"\\c\nd')
    metrics.aborted('say "no"\n')
    samples = [
        sample for family in text_string_to_metric_families(metrics.render().decode()) for sample in family.samples
    ]
    assert {sample.labels["model_name"] for sample in samples} == {'a "b"\\c\nd'}
    assert 'say "no"\n' in {sample.labels.get("reason") for sample in samples}


def test_predictions_say_what_they_rest_on() -> None:
    metrics = Metrics("tiny")
    metrics.on_ready(max_len=64, page_tokens=16, blocks=9)
    assert scrape(metrics)["ridgeline:step_prediction_info[calibration=uncalibrated]"] == 1
    metrics.live.ceilings = Ceilings(calibration="2026-11-21, 90 steps")
    assert scrape(metrics)["ridgeline:step_prediction_info[calibration=2026-11-21, 90 steps]"] == 1
