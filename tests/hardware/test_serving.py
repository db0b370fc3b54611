"""The formats that the search tries are those that the operations serve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.cost import step_work
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.quantization import quantized
from ridgeline.core.spec import NUMBER_FORMATS, QUANTIZED_KV, LayerSpec, ModelSpec, Rope
from ridgeline.hardware.probe import Device
from ridgeline.hardware.serving import KV_FORMATS_SERVED, cost_model, in_format, search_space, weight_formats
from ridgeline.hardware.table import lookup
from ridgeline.ops import native_cpu
from ridgeline.ops.table import Ops

DENSE = ModelSpec("LlamaForCausalLM", 32_000, 4096, (LayerSpec(32, 8, 128, 14336, Rope(10_000.0, 128)),) * 2, 8192)


def operations(kind: str) -> Ops:
    if kind == "cuda":
        pytest.importorskip("triton")
        from ridgeline.ops.triton.table import TRITON

        return TRITON
    ops, detail = native_cpu.load()
    if ops is None:
        pytest.skip(detail)
    return ops


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_tables_are_those_of_the_operations(kind: str) -> None:
    ops = operations(kind)
    assert all(ops.matmul.has_kernel(name) for name in NUMBER_FORMATS)
    assert {*KV_FORMATS_SERVED[kind]} <= ops.attention.kv_formats == {*QUANTIZED_KV}


def test_fp8_needs_a_unit_for_it() -> None:
    assert "fp8" not in weight_formats("cuda", lookup("a100"))
    assert "fp8" not in weight_formats("cuda", None)
    assert weight_formats("cuda", lookup("l4"))[0] == "fp8"
    assert weight_formats("cpu", None)[:2] == ("int8", "fp8")


def test_every_format_is_tried_once() -> None:
    for kind in ("cpu", "cuda"):
        names = weight_formats(kind, lookup("h100"))
        served = [NUMBER_FORMATS[name] for name in names]
        assert len({*served}) == len(served)
        assert {stored for stored in NUMBER_FORMATS.values() if not stored.published} == {*served}


def test_speed_of_products_where_it_was_measured() -> None:
    """By one rule for all planners, in every direction between formats; other formats differ by their bytes."""
    row = lookup("h200")
    plain = cost_model(row, DENSE)
    int4 = in_format(plain, quantized(DENSE, "int4-g64"), "cuda")
    assert int4 == replace(cost_model(row, int4.spec), host=int4.host) and int4.wide == plain and int4.wide_rows == 128
    back = in_format(int4, DENSE, "cuda")
    assert back.decode_s([100]) == pytest.approx(plain.decode_s([100]), rel=1e-3) and back.wide is None
    assert back.step_s(step_work(DENSE, [(0, 4000)])) == pytest.approx(plain.step_s(step_work(DENSE, [(0, 4000)])))
    blocks = replace(DENSE, quantization="q4_k")
    assert in_format(plain, blocks, "cuda") == replace(plain, spec=blocks)


def test_the_space_of_a_device() -> None:
    gpu = Device("cuda", "NVIDIA H100 80GB HBM3", 80 << 30, 80 << 30)
    space = search_space(gpu, DENSE)
    assert (
        space.cost is not None
        and space.weight_formats
        and not search_space(gpu, quantized(DENSE, "int4")).weight_formats
    )
    assert search_space(Device("cuda", "unknown", 1, 1), DENSE).cost is None
    assert space.devices is not None and "NVIDIA H200 SXM" in space.devices and "Google TPU v4" not in space.devices


def test_formats_that_a_gpu_refuses_for_experts_are_not_tried() -> None:
    mixture = replace(DENSE, layers=(replace(DENSE.layers[0], experts=ExpertSpec(8, 2, 1024, True)),) * 2)
    gpu = Device("cuda", "NVIDIA H100 80GB HBM3", 80 << 30, 80 << 30)
    tried, dense = (set(search_space(gpu, spec).weight_formats) for spec in (mixture, DENSE))
    assert dense - tried == {"w8a8", "llm-int8"} and {"fp8", "int4"} <= tried
    assert "w8a8" in search_space(Device("cpu", "EPYC", 1 << 36, 1 << 36), mixture).weight_formats
