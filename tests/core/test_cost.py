"""The cost model is the roofline of the spec's own formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.cost import CostModel, WorkMeter, step_work
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope


@pytest.fixture
def spec() -> ModelSpec:
    layer = LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128))
    return ModelSpec("LlamaForCausalLM", 128_256, 4096, (layer,) * 32, 131_072)


@pytest.fixture
def model(spec: ModelSpec) -> CostModel:
    return CostModel(spec, 989e12, 4.8e12, compute_share=1.0, memory_share=1.0, overhead_s=0.0)


def test_single_decode_is_bound_by_the_weights(spec: ModelSpec, model: CostModel) -> None:
    work = step_work(spec, [(128, 1)])
    assert work.flops / model.flops_per_s < work.bytes / model.bytes_per_s
    assert work.bytes == spec.step_weight_bytes + 129 * 131_072 + 131_072
    assert model.decode_s([128]) == pytest.approx(3.13e-3, rel=0.02)  # 15.0 GB at 4.8 TB/s


def test_long_prompts_are_bound_by_arithmetic(spec: ModelSpec, model: CostModel) -> None:
    work = step_work(spec, [(0, 8192)])
    assert work.flops / model.flops_per_s > work.bytes / model.bytes_per_s
    assert work.flops == spec.linear_flops(8192, 1) + spec.attention([(0, 8192)], 1)[0]
    assert model.step_s(work) == pytest.approx(work.flops / 989e12)


def test_chunks_add_up_to_the_whole_and_take_longer(spec: ModelSpec, model: CostModel) -> None:
    parts = [step_work(spec, [(start, 512)], logits=0) for start in range(0, 4096, 512)]
    whole = step_work(spec, [(0, 4096)], logits=0)
    assert sum(part.flops for part in parts) == whole.flops
    chunks = [step_work(spec, [(start, 512)]) for start in range(0, 4096, 512)]
    assert sum(map(model.step_s, chunks)) > model.step_s(step_work(spec, [(0, 4096)]))


def test_factors_and_overhead(model: CostModel, spec: ModelSpec) -> None:
    slow = replace(model, memory_share=0.5, overhead_s=0.001)
    assert slow.decode_s([128]) == pytest.approx(2 * model.decode_s([128]) + 0.001)
    assert not slow.calibrated
    assert step_work(spec, []).bytes == 0


@pytest.mark.parametrize("windows", [(None,), (None, 64), (64, 64, 512)])
def test_a_meter_counts_every_step_as_step_work_does(spec: ModelSpec, windows: tuple[int | None, ...]) -> None:
    layers = tuple(replace(spec.layers[0], window=windows[index % len(windows)]) for index in range(6))
    model = replace(spec, layers=layers)
    meter = WorkMeter(model)
    for shares in ([(128, 1)] * 3, [(0, 100), (40, 1), (700, 33)], [(63, 1), (64, 1), (511, 1)], [(0, 1)], []):
        ends = [start + count for start, count in shares]
        for logits in (len(shares), 0, *((2, 9) if shares else ())):
            assert meter.work(ends, [count for _, count in shares], logits) == step_work(model, shares, logits)
