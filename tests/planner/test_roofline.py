"""Operations under the roof: sums agree with core, bounds are where the field says they are, charts hold what they should."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from ridgeline.core.cost import step_work
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.hardware.ceilings import published
from ridgeline.hardware.table import lookup
from ridgeline.planner.chart import roofline_chart, roofline_page, rows
from ridgeline.planner.roofline import Load, phase, roofline
from ridgeline.planner.svg import Line, document

H200 = lookup("h200")


@pytest.fixture(scope="module")
def llama() -> ModelSpec:
    layer = LayerSpec(32, 8, 128, 14336, Rope(500_000.0, 128))
    return ModelSpec("LlamaForCausalLM", 128_256, 4096, (layer,) * 32, 131_072)


@pytest.mark.parametrize("shares", [[(2048, 1)] * 16, [(0, 4096)], [(100, 1), (512, 300)]])
def test_sums_are_those_of_core(llama: ModelSpec, shares: list[tuple[int, int]]) -> None:
    point, work = phase("any", llama, H200, shares), step_work(llama, shares)
    assert (point.flops, point.bytes, point.tokens) == (work.flops, work.bytes, work.tokens)
    assert point.floor_s == pytest.approx(max(work.flops / 989.4e12, work.bytes / 4.8e12))
    assert point.serial_s >= point.floor_s


def test_figures_batch_1_decode_ceiling(llama: ModelSpec) -> None:
    """FIGURES 7: 320 tokens/s in bf16 at context 0 on an H200, 298 at 8k, 149 at 128k."""
    for context, ceiling in ((0, 320), (8192, 298), (131_071, 149)):
        floor = phase("decode", llama, H200, [(context, 1)]).floor_s
        assert 1 / floor == pytest.approx(ceiling, rel=0.01)


@pytest.mark.parametrize(("prompt", "milliseconds"), [(2048, 29.3), (8192, 129), (32_768, 725), (131_072, 6212)])
def test_figures_prefill_ceiling(llama: ModelSpec, prompt: int, milliseconds: float) -> None:
    """FIGURES 7: prefill ceilings of an 8B in bf16 on one H200, less what the last layer need not do (30.0, 133, 747, 6,404)."""
    prefill = phase("prefill", llama, H200, [(0, prompt)])
    assert prefill.bound == "compute"
    assert prefill.floor_s * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_figures_ridge(llama: ModelSpec) -> None:
    """FIGURES 7: 206 FLOP/B in bf16, 412 in fp8; that many sequences saturate the linears."""
    assert roofline(llama, H200).ridge == pytest.approx(206, abs=0.5)
    eight = replace(llama, quantization="fp8")
    assert eight.matrix_dtype == "float8_e4m3"
    assert roofline(eight, H200).ridge == pytest.approx(412, abs=1)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("", "bfloat16"), ("fp8", "float8_e4m3"), ("fp8-weight", "bfloat16"), ("w8a8", "int8"), ("int8", "bfloat16"),
     ("int4", "bfloat16"), ("llm-int8", "bfloat16")],
)  # fmt: skip
def test_products_are_priced_in_their_precision(llama: ModelSpec, quantization: str, dtype: str) -> None:
    """W8A8 multiplies integers, at the rate of fp8. LLM.int8() here multiplies in the model's dtype."""
    spec = replace(llama, quantization=quantization)
    assert spec.matrix_dtype == dtype
    prefill = {point.name: point.peak for point in phase("prefill", spec, H200, [(0, 2048)]).points}
    assert prefill["gate+up"] == prefill["qkv"] == H200.flops[dtype]
    assert prefill["attention"] == prefill["head"] == H200.flops["bfloat16"]
    assert published(H200, spec)["flops"] == H200.flops[dtype]


def test_decode_reads_and_prefill_computes(llama: ModelSpec) -> None:
    result = roofline(llama, H200, Load(batch=8, context=1024, prompt=4096))
    assert (result.phase("decode").bound, result.phase("prefill").bound) == ("memory", "compute")
    bounds = {point.name: point.bound for point in result.phase("prefill").points}
    assert bounds["gate+up"] == bounds["attention"] == "compute" and bounds["norm"] == bounds["head"] == "memory"
    assert all(point.bound == "memory" for point in result.phase("decode").points)


def test_mission_mbu_of_a_7b() -> None:
    """MISSION 2: one sequence of a 7B in 16 bits at 100 tokens/s moves 1,400 GB/s, 70 % of 2 TB/s (not 700 GB/s, 35 %)."""
    layer = LayerSpec(32, 32, 128, 11008, Rope(dim=128))
    spec = ModelSpec("LlamaForCausalLM", 32_000, 4096, (layer,) * 32, 4096)
    a100 = lookup("a100")
    moved = phase("decode", spec, a100, [(1, 1)]).bytes * 100
    assert moved == pytest.approx(1.4e12, rel=0.06)  # 6.6 of its 6.74 G parameters are read in a step
    assert moved / a100.bandwidth == pytest.approx(0.70, rel=0.08)


def test_points_stand_on_the_roof(llama: ModelSpec) -> None:
    for step in roofline(llama, H200, Load(32, 2048, 2048)).phases:
        for point in step.points:
            assert point.attained <= min(point.peak, point.bandwidth * point.intensity) * (1 + 1e-9)


def test_capacity_and_what_spills(llama: ModelSpec) -> None:
    fits = roofline(llama, H200, Load(32, 2048))
    assert fits.capacity.fits and fits.decode_slowdown == 1
    small = roofline(llama, lookup("RTX 4090"), Load(64, 4096))
    assert not small.capacity.fits
    over = small.capacity.weight_bytes + small.capacity.kv_bytes - small.accelerator.memory_bytes
    assert small.capacity.spilled_bytes == over
    assert small.capacity.spill_s == pytest.approx(over / 32e9)
    assert small.decode_slowdown > 5  # 25 GB over PCIe against 1 TB/s
    decode = small.phase("decode")
    assert decode.floor_s == decode.serial_s == small.capacity.spill_s and decode.bound == "capacity"
    assert small.phase("prefill").spill_s == 0, "the weights and the cache of one prompt fit"
    assert roofline(llama, lookup("groq")).decode_slowdown == float("inf")


def test_a_precision_without_a_unit_is_refused(llama: ModelSpec) -> None:
    with pytest.raises(ConfigError, match="TPU v4 does not compute in float32"):
        roofline(replace(llama, dtype="float32"), lookup("tpu v4"))


def test_the_chart_has_the_level_on_the_chip(llama: ModelSpec) -> None:
    result = roofline(llama, lookup("a100"))
    chart = roofline_chart(result, {})
    slope = next(mark for mark in chart.marks if isinstance(mark, Line) and mark.name == "L2 7.22 TB/s")
    (low, rate), (ridge, peak) = slope.points
    assert rate / low == pytest.approx(7.219e12) and peak / ridge == pytest.approx(7.219e12) and peak == 312e12
    assert chart.x.low < ridge < result.ridge
    without = roofline_chart(roofline(llama, lookup("b200")), {})  # size known, bandwidth not
    assert not any(isinstance(mark, Line) and mark.name.startswith("L2") for mark in without.marks)


def test_chart_and_page(llama: ModelSpec) -> None:
    result = roofline(llama, H200, Load(8, 1024, 1024))
    steps = {"prefill": 0.03, "decode": 0.004}
    chart = roofline_chart(result, steps)
    assert chart.x.log and chart.y.log and chart.x.low < 1 < result.ridge < chart.x.high
    text = document(chart)
    root = ET.fromstring(text)
    circles = [element for element in root.iter() if element.tag.endswith("circle")]
    drawn = sum(1 for phase in result.phases for point in phase.points if point.flops)
    assert len(circles) == drawn + len(steps) + 3  # and three in the legend
    assert "ridge 206 FLOP/B" in text and "prefers-color-scheme:dark" in text
    page = roofline_page(result, steps, ("a < b",))
    assert page.count("<table>") == 2 and "a &lt; b" in page
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "") and "https://" not in page
    assert [row[0] for row in rows(result.phases[0])] == [point.name for point in result.phases[0].points]
