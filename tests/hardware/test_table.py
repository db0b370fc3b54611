"""The table finds a device by its driver's name, and its figures are of one kind."""

from __future__ import annotations

import pytest

from ridgeline.hardware.table import ACCELERATORS, Accelerator, cpu, find


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", "NVIDIA H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM 80GB"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA L40", None),
        ("NVIDIA L4", "NVIDIA L4"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", "NVIDIA RTX 4090"),
        ("NVIDIA B200", "NVIDIA B200 SXM"),
        ("NVIDIA GB200", None),
        ("h200", "NVIDIA H200 SXM"),
        ("Tesla T4", None),
    ],
)
def test_find(name: str, found: str | None) -> None:
    one = find(name)
    assert (one.name if one else None) == found


@pytest.mark.parametrize("one", ACCELERATORS, ids=lambda one: one.name)
def test_figures_are_plausible(one: Accelerator) -> None:
    assert one.flops["bfloat16"] > one.flops["float32"] > 0 and one.source
    assert 1 < one.ridge("bfloat16") < 1000
    assert one.peak("float8_e4m3") >= one.peak("bfloat16") == one.peak("float16")
    assert one.memory_bytes > 20 << 30


def test_a_plain_processor_is_in_it() -> None:
    assert cpu().kind == "cpu"
