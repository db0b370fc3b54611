"""Uncalibrated step times of models with experts, beside the measured ones of an H200."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ridgeline.core.calibration import Calibration, Errors
from ridgeline.core.config import EngineConfig
from ridgeline.core.cost import CostModel, StepWork, step_work
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.gpu_blocks import converted
from ridgeline.core.quantization import quantized
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.hardware.serving import EXPERT_LAYER_S, cost_model, in_format, transferred_cost, with_experts
from ridgeline.hardware.table import lookup
from ridgeline.planner.calibrate import Measured, calibrate
from ridgeline.planner.cluster import read_cluster
from ridgeline.planner.layout_times import Times
from ridgeline.planner.layouts import Layout, replica
from ridgeline.planner.servers import divided_cost
from ridgeline.planner.situation import slower

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
H200 = lookup("h200")
EXPERTS = ExpertSpec(128, 8, 768, normalized=True)
LAYER = LayerSpec(32, 4, 128, EXPERTS.active_width, Rope(dim=128), experts=EXPERTS)
DENSE_LAYER = replace(LAYER, experts=None)


def qwen3_30b_a3b(name: str = "", layers: int = 48) -> ModelSpec:
    spec = ModelSpec("Qwen3MoeForCausalLM", 151_936, 2048, (LAYER,) * layers, 32_768, qk_norm="head")
    return converted(quantized(spec, name), "hopper")


def rows(file: str, pattern: str) -> Iterator[tuple[tuple[str, ...], dict[str, float]]]:
    """(Groups of the pattern in the name, figures) of the rows whose names match it."""
    for row in json.loads((RESULTS / file).read_text(encoding="utf-8")):
        if match := re.fullmatch(pattern, row["row"]):
            yield tuple(group or "" for group in match.groups()), row


def predicted_s(spec: ModelSpec, batch: int, context: int) -> float:
    return cost_model(H200, spec).step_s(step_work(spec, [(context, 1)] * batch))


def test_steps_of_8_layers_are_predicted_within_10_percent() -> None:
    """1 to 64 requests, to which the constants are fitted with 256 tokens of context, and within 12 percent with more."""
    formats = set()
    for (name, batch, context), row in rows("shapes.json", r"qwen3-30b-a3b(?::([\w-]+?))?-decode:(\d+)x(\d+)"):
        if int(batch) <= 64:
            measured = row["us"] * 1e-6
            error = predicted_s(qwen3_30b_a3b(name, int(row["layers"])), int(batch), int(context)) / measured - 1
            assert abs(error) < (0.1 if context == "256" else 0.12), (name, batch, context, error)
            formats.add(name)
    assert formats == {"", "fp8", "fp8-weight", "int4"}


def test_a_whole_model_is_predicted_within_10_percent() -> None:
    """48 layers in the engine, on one GPU and on two, to which nothing is fitted."""
    spec, cluster, count = qwen3_30b_a3b(), read_cluster("2xh200"), 0
    divided = Times(replica(spec, Layout(2), cluster, 8449, EngineConfig()), cost_model(cluster.device, spec))
    for (way, batch), row in rows("multi_gpu.json", r"experts-(one|tensor)-decode-(\d+)"):
        seconds = predicted_s(spec, int(batch), 320) if way == "one" else divided.decode(int(batch), 320).total
        assert seconds * 1e3 == pytest.approx(row["ms"], rel=0.1), (way, batch)
        count += 1
    assert count == 4


def test_layers_without_experts_keep_their_part_of_an_empty_step() -> None:
    spec = qwen3_30b_a3b()
    half = replace(spec, layers=(LAYER, DENSE_LAYER) * 24)
    dense = replace(spec, layers=(DENSE_LAYER,) * 48)
    empty = CostModel(spec, 1e15, 1e12).overhead_s
    for model, layers, overhead in ((spec, 48, 0.0), (half, 24, empty / 2), (dense, 0, empty)):
        cost = cost_model(H200, model)
        work = step_work(model, [(100, 1)])
        assert work.expert_layers == layers
        without = cost.step_s(work._replace(expert_layers=0))
        assert cost.step_s(work) - without == pytest.approx(layers * EXPERT_LAYER_S)
        assert cost.step_s(StepWork(0, 0, 0)) == overhead
    assert with_experts(CostModel(spec, 1e12, 1e11), "cpu") == CostModel(spec, 1e12, 1e11)
    assert cost_model(lookup("epyc"), spec).expert_s == 0


def test_a_format_is_as_fast_whichever_model_it_is_predicted_from() -> None:
    for name in ("", "fp8", "int8-g32", "int4-g64-zp", "fp8-weight"):
        spec = qwen3_30b_a3b(name)
        work, there = step_work(spec, [(300, 1)] * 8), cost_model(H200, spec)
        for other in ("", "int4"):
            cost = in_format(cost_model(H200, qwen3_30b_a3b(other)), spec, "cuda")
            assert cost.step_s(work) == pytest.approx(there.step_s(work))
    unknown = qwen3_30b_a3b("mxfp4")
    assert cost_model(H200, unknown).memory_share == CostModel(unknown, 1e15, 1e12).memory_share


def test_a_stage_counts_its_own_layers() -> None:
    """One request passes both stages of a pipeline, which has as many layers as the model."""
    spec, cluster = qwen3_30b_a3b(), read_cluster("2xh200")
    cost = cost_model(cluster.device, spec)
    made = replica(spec, Layout(pipeline=2), cluster, 8449, EngineConfig())
    free = replace(cost, expert_s=0.0)
    with_layers, without = (Times(made, each).decode(1, 256) for each in (cost, free))
    assert with_layers.total - without.total == pytest.approx(48 * EXPERT_LAYER_S)
    work = step_work(spec, [(256, 1)])
    times = [divided_cost(made, each).step_s(work) for each in (cost, free)]
    assert times[0] - times[1] == pytest.approx(48 * EXPERT_LAYER_S)


def test_a_calibration_keeps_the_time_of_layers(tmp_path: Path) -> None:
    spec = qwen3_30b_a3b()
    guess = cost_model(H200, spec)
    machine = replace(guess, memory_share=0.6, overhead_s=2e-4)
    steps = [
        replace(step, seconds=machine.step_s(step.work(spec)))
        for batch in (1, 2, 4, 8, 16, 64)
        for step in (Measured((context,) * batch, (), batch, 1.0) for context in (100, 1000, 8000))
    ]
    fitted = calibrate(guess, steps, "NVIDIA H200", "2026-11-30")
    assert fitted.cost.expert_s == EXPERT_LAYER_S
    assert all(fitted.cost.step_s(step.work(spec)) == pytest.approx(step.seconds, rel=0.02) for step in steps)
    path = tmp_path / "calibration.json"
    path.write_text(Calibration(machine, "NVIDIA H200", "2026-11-30", 18, Errors(0, 0), Errors(0, 0)).to_json())
    for name in ("", "int4"):
        cost = transferred_cost(path, qwen3_30b_a3b(name), H200)
        assert cost is not None and cost.expert_s == EXPERT_LAYER_S
        share = cost_model(H200, qwen3_30b_a3b(name)).memory_share / guess.memory_share
        assert cost.memory_share == pytest.approx(machine.memory_share * share)


def test_a_slower_machine_takes_longer_for_layers() -> None:
    spec = qwen3_30b_a3b()
    cost, work = cost_model(H200, spec), step_work(spec, [(100, 1)])
    assert slower(cost, 2.0).step_s(work) == pytest.approx(2 * cost.step_s(work))
