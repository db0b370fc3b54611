"""What each technique is predicted to gain on a recorded workload, and in which order remedies are named."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.calibration import cost_values, read_cost
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel, step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.fit import Risk
from ridgeline.core.gpu_blocks import expanded_bytes
from ridgeline.core.quantization import quantized
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope, kv_layout
from ridgeline.core.workload import RequestSpec, Workload, prefix_hashes, synthetic
from ridgeline.engine.policy import Limits
from ridgeline.hardware.serving import PRODUCT_TIMES, cost_model, in_format
from ridgeline.hardware.table import find
from ridgeline.planner.remedies import OBJECTIVES, Outlook, predict
from ridgeline.planner.simulate import Server, simulate
from ridgeline.planner.situation import Situation, figures_of, measured_cost, newest, read_situation, workload_of
from ridgeline.planner.techniques import TECHNIQUES, Effort

LAYER = LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128))
SPEC = ModelSpec("LlamaForCausalLM", 128_256, 4096, (LAYER,) * 32, 131_072)
SERVER = Server(CostModel(SPEC, 989e12, 4.8e12), kv_layout(SPEC, 64), 10_000, Limits(256, 8448, 16_384))
H200 = find("NVIDIA H200")


def situation(workload: Workload, engine: EngineConfig = EngineConfig(), **server: Any) -> Situation:
    """An 8B on an H200. server: what differs from SERVER."""
    served = replace(SERVER, **server)
    return Situation(ModelConfig(), engine, SPEC, served, workload, simulate(served, workload), row=H200)


def steady(count: int, input_len: int, output_len: int, rate: float, prefix: int = 0) -> Workload:
    made = synthetic(count, (str(input_len), str(output_len)), prefix, 0)
    return made.at([index / rate for index in range(count)])


def gains(outlook: Outlook) -> dict[str, float]:
    return {remedy.name: remedy.gain for remedy in outlook.remedies}


def test_smaller_weights_speed_up_decoding_and_slow_down_prompts() -> None:
    decoding = gains(predict(situation(steady(8, 64, 128, 4)), "e2e"))
    assert 0.2 < decoding["weight format: fp8"] < 0.4 and 0.25 < decoding["weight format: int4"] < 0.5
    prompts = predict(situation(steady(16, 8000, 2, 2)), "e2e")
    assert gains(prompts)["weight format: fp8"] > 0.3 and "weight format: int4" in prompts.useless


def test_the_first_remedy_of_a_planted_bottleneck_is_its_cure() -> None:
    shared, streams, few = steady(6, 4096, 8, 8, prefix=4032), steady(20, 128, 32, 60), steady(8, 128, 32, 30)
    long = Workload(
        "long prompts",
        (*(RequestSpec(0.0, 64, 150) for _ in range(4)), *(RequestSpec(0.2 + 0.4 * at, 16_000, 2) for at in range(2))),
        timed=True,
    )
    slow = replace(SERVER.cost, overhead_s=5e-3)
    planted = {
        "prefix cache: on": (situation(shared, EngineConfig(enable_prefix_caching=False), prefix_cache=False), "e2e"),
        "batching policy: continuous": (situation(streams, EngineConfig(batching="static:4"), batching="static:4"), "e2e"),
        "requests at once: 16": (situation(streams, limits=Limits(4, 8448, 16_384)), "e2e"),
        "memory for the KV cache: 4 times as much": (
            situation(streams, EngineConfig(kv_cache_memory=16 * SERVER.layout.page_bytes), pages=16), "e2e",
        ),
        "prompt chunk: 2112 tokens": (situation(long, limits=Limits(256, 16_896, 16_896)), "stall"),
        "CUDA graphs or compiled operations: on": (situation(few, EngineConfig(enforce_eager=True), cost=slow), "e2e"),
        "plan while the device runs: 1 step ahead": (
            situation(few, EngineConfig(steps_in_flight=0), steps_in_flight=0, host_s=4e-3), "e2e",
        ),
        "speculation: off": (replace(situation(few, EngineConfig(speculate="reference"), cost=slow), saved=-0.5), "e2e"),
    }  # fmt: skip
    first = {name: predict(*arguments).remedies[0].name for name, arguments in planted.items()}
    assert first == {name: name for name in planted}


@pytest.mark.long
def test_a_pace_of_readers_is_a_remedy_for_late_first_tokens_under_load() -> None:
    busy = situation(
        steady(200, 1500, 200, 24), EngineConfig(max_num_batched_tokens=512), limits=Limits(256, 512, 16_384)
    )
    name = "pace of readers: 120ms"
    remedies = {remedy.name: remedy for remedy in predict(busy, "ttft").remedies}
    assert remedies[name].gain > 0.3
    after = remedies[name].change.after
    assert after.flags()[-2:] == ["--reader-pace", "120ms"] and after.server.limits.pace_s == pytest.approx(0.12)
    assert name in predict(busy, "e2e").useless, "answers end later"
    assert name in predict(situation(steady(8, 64, 128, 4)), "ttft").useless, "nobody else gains without a load"
    back = predict(after, "tpot")
    off = next(remedy for remedy in back.remedies if remedy.name == "pace of readers: off")
    assert off.change.after.server == busy.server and off.change.after.options() == busy.options()
    others = [remedy.change.after.server.limits.pace_s for remedy in back.offered if remedy is not off]
    assert others and set(others) == {after.server.limits.pace_s}, "other techniques keep the pace"


def test_host_memory_is_a_remedy_where_shared_prefixes_are_evicted() -> None:
    """Six contexts of 4,096 tokens come in turn, and the cache holds two of them."""
    requests = (
        RequestSpec(2.0 * index, 4104, 4, tuple(range(100 * (index % 6), 100 * (index % 6) + 32)), 128)
        for index in range(18)
    )
    now = situation(Workload("contexts", tuple(requests), timed=True), pages=150)
    remedies = {remedy.name: remedy for remedy in predict(now, "ttft").offered}
    remedy = remedies["host memory for cached prefixes: 4.69 GiB"]
    assert remedy.gain > 0.5
    after = remedy.change.after
    assert after.flags() == ["--kv-offload-gb", "4.69"] and after.server.tier_pages == 600
    slow = replace(now, row=replace(H200, host_link=1e9))
    names = {remedy.name: remedy.gain for remedy in predict(slow, "ttft").offered}
    assert names.get("host memory for cached prefixes: 4.69 GiB", 0.0) < 0.05, (
        "copies take longer than the prompt steps"
    )
    assert not any("host memory" in remedy.name for remedy in predict(replace(now, row=None), "ttft").offered)
    assert not any("host memory" in remedy.name for remedy in predict(after, "ttft").offered), "it is there"


@pytest.mark.long
def test_fewer_kept_tokens_are_a_remedy_where_long_answers_fill_the_cache() -> None:
    now = situation(steady(16, 512, 1000, 100), pages=40)
    remedies = {remedy.name: remedy for remedy in predict(now, "e2e").offered}
    text = f"window:sinks=4,keep={max(spec.input + spec.output for spec in now.workload.requests) // 2}"
    remedy = remedies[f"KV retention: {text}"]
    assert remedy.gain > 0.15 and remedy.change.risk is Risk.MEDIUM
    after = remedy.change.after
    assert after.flags() == ["--kv-retention", text]
    (back,) = remedy.technique.propose(after)
    assert back.after.server == now.server and "KV retention: all" in predict(after, "e2e").useless
    short = predict(situation(steady(8, 64, 128, 4)), "e2e").offered
    assert not [remedy for remedy in short if remedy.technique.name == "KV retention"], "what is short is kept"


@pytest.mark.parametrize(
    "options", [pytest.param({"speculate": "draft:FOLDER"}, marks=pytest.mark.long), {"deterministic": True}]
)
def test_what_the_server_would_refuse_is_not_proposed(options: dict[str, Any]) -> None:
    now = situation(steady(4, 512, 1000, 100), EngineConfig(**options), pages=40)
    names = {remedy.technique.name for remedy in predict(now, "e2e").offered}
    assert "weight format" in names and "KV retention" not in names


def test_what_a_restart_does_comes_before_a_change_of_clients() -> None:
    outlook = predict(situation(steady(16, 64, 128, 20), outside_s=5.0), "e2e")
    efforts = [remedy.technique.effort for remedy in outlook.remedies]
    assert efforts == sorted(efforts) and gains(outlook)["client: nearer, or a faster reader"] > 0.8


def test_every_remedy_says_what_it_costs_and_can_be_applied() -> None:
    now = situation(steady(16, 512, 64, 8), EngineConfig(enforce_eager=True, deterministic=True, steps_in_flight=0))
    outlook = predict(now, "e2e")
    assert outlook.offered and all(remedy.technique.price for remedy in outlook.offered)
    for remedy in outlook.offered:
        by_options = bool(remedy.change.after.changes(now))
        assert by_options == (remedy.technique.effort is Effort.RESTART), remedy.name
        assert by_options or remedy.technique.command
    unknown = {remedy.technique.name for remedy in outlook.unknown}
    assert "deterministic mode" in unknown and all(math.isnan(remedy.gain) for remedy in outlook.unknown)
    assert {technique.name for technique in TECHNIQUES} >= unknown


def test_the_order_weighs_risk_and_effort() -> None:
    outlook = predict(situation(steady(128, 64, 128, 200)), "tpot")
    places = {remedy.name: place for place, remedy in enumerate(outlook.remedies)}
    assert places["weight format: fp8"] < places["weight format: int4"], "the gains are alike, the risk is not"
    assert places["replicas: 2"] > places["weight format: fp8"], "what a restart does comes first"
    assert [remedy.rank for remedy in outlook.remedies] == sorted(remedy.rank for remedy in outlook.remedies)


@pytest.mark.long
def test_a_prediction_is_of_the_objective() -> None:
    now = situation(steady(64, 512, 64, 40), limits=Limits(8, 8448, 16_384))
    for name, (_, value) in OBJECTIVES.items():
        for remedy in predict(now, name).remedies:
            assert remedy.figures is not None
            assert remedy.gain == pytest.approx(1 - value(remedy.figures) / value(now.recorded)), (name, remedy.name)


def test_freed_weights_are_memory_for_the_cache() -> None:
    now = situation(steady(4, 64, 8, 4))
    smaller = now.served_as(replace(SPEC, quantization="int4"))
    freed = (SPEC.weight_bytes - replace(SPEC, quantization="int4").weight_bytes) // SERVER.layout.page_bytes
    freed -= expanded_bytes(smaller.spec) // SERVER.layout.page_bytes
    assert smaller.spec.both_forms and smaller.server.pages == pytest.approx(SERVER.pages + freed, abs=2)
    fixed = replace(now, engine=EngineConfig(kv_cache_memory=1 << 30))
    assert fixed.served_as(replace(SPEC, quantization="int4")).server.pages == SERVER.pages
    other = replace(smaller.spec, kv_format="int8")
    pages = smaller.served_as(other).server.pages
    assert pages == pytest.approx(2 * smaller.server.pages, rel=0.05), "the same weights in both forms"


def test_measured_times_scale_the_cost_model() -> None:
    figures = {
        "decode_step_seconds": 0.012, "decode_step_predicted_seconds": 0.006,
        "prompt_step_seconds": 0.3, "prompt_step_predicted_seconds": 0.1,
    }  # fmt: skip
    slow = measured_cost(SERVER.cost, figures)
    assert slow.decode_s([100]) == pytest.approx(2 * SERVER.cost.decode_s([100]))
    prompt = steady(1, 8000, 1, 1)
    ratio = simulate(replace(SERVER, cost=slow), prompt).ttft_s / simulate(SERVER, prompt).ttft_s
    assert ratio == pytest.approx(3, rel=0.02)
    eager = measured_cost(SERVER.cost, figures, eager=True)
    assert (
        eager.overhead_s == pytest.approx(SERVER.cost.overhead_s + 0.006)
        and eager.flops_per_s == SERVER.cost.flops_per_s
    )


def test_slow_steps_with_short_prompts_leave_decode_steps_as_they_were_measured() -> None:
    """Few prompt tokens in a long step are no rate of arithmetic: with it, decode steps would take many times the measured time."""
    decode_s = SERVER.cost.decode_s([100])
    figures = {
        "decode_step_seconds": decode_s, "decode_step_predicted_seconds": decode_s, "mean_running": 1.0,
        "prompt_step_seconds": 2.0, "prompt_step_predicted_seconds": decode_s,
    }  # fmt: skip
    cost = measured_cost(SERVER.cost, figures)
    assert cost.decode_s([100]) == pytest.approx(decode_s, rel=0.01)
    assert cost.step_s(step_work(SPEC, [(0, 8)])) == pytest.approx(2.0, rel=0.02)


def test_times_that_the_model_does_not_explain_are_doubted() -> None:
    """By more than a factor of two, in either direction: of steps before the model is scaled, or of requests."""
    recorded = situation(steady(4, 100, 4, 1.0))
    assert recorded.doubts({"TTFT": (0.19, 0.1), "TPOT": (0.051, 0.1), "e2e": (math.nan, 1.0)}) == []
    for times in ({"TTFT": (0.21, 0.1)}, {"TTFT": (0.1, 0.21)}):
        (line,) = recorded.doubts(times)
        assert "TTFT: " in line and "factor of 2" in line and "--calibration" in line
    (line,) = replace(recorded, step_ratio=5.0).doubts({})
    assert "decode steps: 5 times the modelled time" in line


def row(at: float, prompt: list[int], output: int, choices: int = 1) -> dict[str, Any]:
    return {
        "arrived_at": at, "prompt_tokens": len(prompt), "cached_tokens": 0, "output_tokens": output, "ttft_s": 0.1, "tpot_s": 0.01,
        "finish_reasons": ["stop"] * choices, "e2e_s": 1.0, "prefix_hashes": prefix_hashes(prompt),
        "decoding": {"mixed_s": 0.0, "device_s": 0.0},
    }  # fmt: skip


def test_recorded_requests_become_a_workload_that_shares_what_they_shared() -> None:
    common = list(range(200))
    rows = [row(12.0, [*common, 7, 8], 20), row(10.0, [*common, 9], 30, choices=2), row(11.0, list(range(500, 900)), 4)]
    ended = newest([*rows, {**rows[0], "ttft_s": None}])
    workload, figures = workload_of(ended), figures_of(ended)
    assert [spec.at_s for spec in workload.requests] == [0.0, 0.0, 1.0, 2.0]
    assert [spec.output for spec in workload.requests] == [15, 15, 4, 20]
    first, second, other, last = (spec.blocks for spec in workload.requests)
    assert first == second == last and len(last) == 3 and not set(other) & set(last)
    assert figures.e2e_s == 1.0 and figures.tokens_s == pytest.approx(54 / 3)
    del rows[0]["prefix_hashes"]  # of an older server
    assert workload_of(newest(rows)).requests[-1].blocks == ()


def test_what_cannot_be_predicted_says_why() -> None:
    facts = {"model_options": {}, "options": {}, "device": "cpu", "page_tokens": 16, "max_num_seqs": 4, "max_len": 512}
    with pytest.raises(ConfigError, match="does not report its cost, max_num_batched_tokens"):
        read_situation({"facts": facts, "figures": {}}, [], SPEC)
    facts |= {"cost": cost_values(SERVER.cost), "max_num_batched_tokens": 64}
    failed = {**row(0.0, [1], 0), "ttft_s": None}
    with pytest.raises(ConfigError, match="No request has ended lately"):
        read_situation({"facts": facts, "figures": {}}, [failed], SPEC)


def test_pace_and_forms_of_weights_are_those_of_the_server() -> None:
    facts = {
        "model_options": {}, "options": {"reader_pace": "90ms"}, "device": "cpu", "page_tokens": 16, "max_num_seqs": 4, "blocks": 9,
        "max_len": 512, "cost": cost_values(SERVER.cost), "max_num_batched_tokens": 64, "steps_in_flight": 0,
    }  # fmt: skip
    read = read_situation({"facts": facts, "figures": {}, "latencies": {}}, [row(0.0, [1, 2], 4)], SPEC)
    assert read.server.limits == Limits(4, 64, 512, pytest.approx(0.09))
    assert not read.server.cost.spec.both_forms
    read = read_situation(
        {"facts": facts | {"expanded_bytes": 9}, "figures": {}, "latencies": {}}, [row(0.0, [1, 2], 4)], SPEC
    )
    assert read.server.cost.spec.both_forms and read.spec.both_forms, "steps of many rows read the dtype"


def test_a_cost_model_is_read_as_it_was_written() -> None:
    assert read_cost(SPEC, json.loads(json.dumps(cost_values(SERVER.cost)))) == SERVER.cost


def test_samples_and_prompts_are_remedies_of_the_clients() -> None:
    twice = Workload(
        "n=2", tuple(RequestSpec(at / 4, 2000, 100, (at,), 64) for at in range(12) for _ in range(2)), timed=True
    )
    outlook = predict(situation(twice, limits=Limits(4, 8448, 16_384)), "e2e")
    remedies = {remedy.technique.name: remedy for remedy in outlook.remedies}
    assert remedies["samples per request"].gain > 0.3
    assert remedies["samples per request"].change.risk is remedies["prompt length"].change.risk is Risk.MEDIUM


def results(name: str, key: str) -> dict[str, float]:
    rows = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / name).read_text())
    return {row["row"]: row[key] for row in rows if key in row}


def test_measured_times_of_products_are_those_of_the_result_files() -> None:
    layers, steps, times = results("products_w8a8.json", "value"), results("h200.json", "value"), PRODUCT_TIMES["cuda"]
    for name in ("fp8", "int8", "w8a8", "llm-int8"):
        expected = layers[f"w8a8-layer-{name}-m8192-us"] / layers["w8a8-layer-bf16-m8192-us"]
        assert times[name][1] == pytest.approx(expected, abs=0.006), name
    speeds, shape = results("cpu_formats.json", "ratio"), "smollm135m"
    for name in ("int8", "fp8", "w8a8", "llm-int8", "int4"):
        expected = [1 / speeds[f"{shape}-{name}-{run}"] for run in ("b1", "prefill512")]
        assert PRODUCT_TIMES["cpu"][name] == pytest.approx(expected, abs=0.006), name
    plain, halved = (steps[f"8b-{name}-single128-tpot-ms"] for name in ("bf16", "fp8"))
    head = plain * SPEC.vocab_size * SPEC.d_model * 2 / SPEC.step_weight_bytes
    assert times["fp8"][0] == pytest.approx((halved - head / 2) / (plain - head), abs=0.006), "its head is in 8 bits"


EIGHT = replace(SPEC, layers=SPEC.layers[:8])
"""The model of shapes.json."""


def share_of_bf16(name: str, step: str, *, both: bool) -> tuple[float, float]:
    """(measured, predicted) time of a step of tokens without a cache on an H200, in that of bf16."""
    steps, row = results("shapes.json", "us"), H200
    assert row is not None
    spec = replace(quantized(EIGHT, name), both_forms=both)
    plain = replace(cost_model(row, EIGHT), overhead_s=0.0)
    kind, _, amount = step.partition(":")
    rows, _, length = amount.partition("x")
    shares = [(int(length), 1)] * int(rows) if kind == "decode" else [(0, int(rows))]
    times = [cost.step_s(step_work(cost.spec, shares)) for cost in (in_format(plain, spec, "cuda"), plain)]
    suffix = "-both" if both else ""
    return steps[f"llama-3.1-8b{suffix}:{name}-{step}"] / steps[f"llama-3.1-8b-{step}"], times[0] / times[1]


@pytest.mark.parametrize("name", ["int4", "int8"])
@pytest.mark.parametrize(
    "step", ["decode:128x256", "decode:256x256", "decode:448x256", "prefill:512", "prefill:2048", "prefill:8192"]
)
def test_integers_in_both_forms_take_the_time_that_was_measured(name: str, step: str) -> None:
    measured, predicted = share_of_bf16(name, step, both=True)
    assert predicted == pytest.approx(measured, abs=0.08)
    one_form = share_of_bf16(name, step, both=False)[1]
    assert one_form == pytest.approx(predicted) if step == "decode:128x256" else one_form > predicted + 0.05


def test_both_forms_are_proposed_where_the_memory_allows_them() -> None:
    prompts = situation(steady(16, 8000, 2, 2))
    assert prompts.served_as(quantized(SPEC, "int4")).spec.both_forms
    for other in (
        replace(prompts, row=None),
        replace(prompts, row=find("NVIDIA L4")),
        replace(prompts, engine=EngineConfig(deterministic=True)),
    ):
        after = other.served_as(quantized(SPEC, "int4"))
        assert not after.spec.both_forms
        assert after.server.cost.step_s(step_work(after.spec, [(0, 8000)])) > 1.1 * SERVER.cost.step_s(
            step_work(SPEC, [(0, 8000)])
        )
