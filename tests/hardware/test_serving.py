"""The formats that the search tries are those that the operations serve."""

from __future__ import annotations

import pytest

from ridgeline.core.spec import NUMBER_FORMATS, QUANTIZED_KV
from ridgeline.hardware.probe import Device
from ridgeline.hardware.serving import KV_FORMATS_SERVED, search_space, weight_formats
from ridgeline.hardware.table import lookup
from ridgeline.ops import native_cpu
from ridgeline.ops.table import Ops


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


def test_the_space_of_a_device() -> None:
    gpu = Device("cuda", "NVIDIA H100 80GB HBM3", 80 << 30, 80 << 30)
    space = search_space(gpu, "")
    assert space.cost is not None and space.weight_formats and not search_space(gpu, "int4").weight_formats
    assert search_space(Device("cuda", "unknown", 1, 1), "").cost is None
    assert space.devices is not None and "NVIDIA H200 SXM" in space.devices and "Google TPU v4" not in space.devices
