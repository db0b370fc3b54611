"""The table finds a device by its driver's name, and its figures are of one kind, sourced, and dense where they say so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.hardware.probe import Device
from ridgeline.hardware.table import ACCELERATORS, Accelerator, find, lookup

FIELDS = frozenset({"memory", "on_chip", "dense", "sparse", "link_gb_s", "host_gb_s", "links", "watts", "rent", "buy"})


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("NVIDIA H200", "NVIDIA H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 SXM"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 SXM 80GB"),
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100 SXM 40GB"),
        ("NVIDIA A100-PCIE-40GB", None),
        ("Tesla V100-SXM2-32GB", "NVIDIA V100 SXM2 32GB"),
        ("NVIDIA L40S", "NVIDIA L40S"),
        ("NVIDIA L40", None),
        ("NVIDIA L4", "NVIDIA L4"),
        ("NVIDIA A10", "NVIDIA A10"),
        ("NVIDIA A10G", None),
        ("NVIDIA GeForce RTX 4090", "NVIDIA RTX 4090"),
        ("NVIDIA B200", "NVIDIA B200 SXM"),
        ("NVIDIA GB200", None),
        ("AMD Instinct MI300X", "AMD Instinct MI300X"),
        ("h200", "NVIDIA H200 SXM"),
        ("Tesla T4", None),
    ],
)
def test_find(name: str, wanted: str | None) -> None:
    match = find(name)
    assert (match.name if match else None) == wanted


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("4090", "NVIDIA RTX 4090"),
        ("v100", "NVIDIA V100 SXM2 32GB"),
        ("a100 40gb", "NVIDIA A100 SXM 40GB"),
        ("tpu v5e", "Google TPU v5e"),
        ("gaudi 3", "Intel Gaudi 3"),
        ("m4 max", "Apple M4 Max"),
        ("orin", "NVIDIA Jetson AGX Orin 64GB"),
        ("thor", "NVIDIA Jetson AGX Thor (T5000)"),
        ("trn2", "AWS Trainium2"),
        ("trainium 1", "AWS Trainium1"),
        ("mtia 2i", "Meta MTIA 2i"),
        ("mtia v1", "Meta MTIA 1"),
        ("neural engine", "Apple Neural Engine (M4)"),
        ("edge tpu", "Google Edge TPU (Coral)"),
        ("8480+", "CPU, server, Intel Xeon Platinum 8480+"),
        ("epyc", "CPU, server, AMD EPYC 9654"),
    ],
)
def test_lookup_takes_words(name: str, wanted: str) -> None:
    assert lookup(name).name == wanted


@pytest.mark.parametrize("name", ["abacus", "", " "])
def test_an_unknown_name_gets_the_list(name: str) -> None:
    with pytest.raises(ConfigError, match="NVIDIA H200 SXM; "):
        lookup(name)


def test_everything_that_was_asked_for_is_in_it() -> None:
    wanted = ("V100", "A100 SXM 40", "A100 SXM 80", "H100 SXM", "H100 PCIe", "H200", "B200", "L4", "L40S", "A10", "RTX 4090",
              "MI300X", "TPU v3", "TPU v4", "TPU v5e", "Gaudi 2", "Gaudi 3", "Inferentia2", "Trainium1", "Trainium2", "MTIA",
              "Groq", "Cerebras", "Graphcore", "AGX Orin", "AGX Thor", "Apple M", "Neural Engine", "Edge TPU", "CPU")  # fmt: skip
    names = [row.name for row in ACCELERATORS]
    assert all(any(word in name for name in names) for word in wanted)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("row", ACCELERATORS, ids=lambda row: row.name)
def test_figures_are_of_one_kind(row: Accelerator) -> None:
    assert row.source and row.unit and row.software and row.memory.kind
    assert all(1e11 < rate < 2e17 for rate in row.flops.values())
    assert set(row.sparse) <= set(row.flops)
    assert all(row.sparse[name] >= 1.9 * row.flops[name] for name in row.sparse)
    assert row.watts >= 0 and row.link >= 0 and (row.host_link < row.bandwidth or "is not published" in row.source)
    assert row.on_chip is None or row.on_chip.bytes < row.memory_bytes
    assert row.on_chip is None or not row.on_chip.bandwidth or row.on_chip.bandwidth > row.bandwidth
    if row.links is not None:
        assert (
            row.links.topology in ("switch", "pairs", "pcie")
            and row.links.devices > 1
            and row.links.date
            and row.links.source
        )
        assert row.link > 0 or row.links.topology == "pcie"
    for price in (row.rent, row.buy):
        assert price is None or (price.usd > 0 and price.date >= "2022" and price.source)
    for field in row.unverified:  # what is called unverified is there
        assert field.split(".")[0] in FIELDS


def test_the_engine_serves_on_cuda_and_processors_only() -> None:
    assert all(lookup(name).serves for name in ("h200", "orin", "epyc"))
    assert not any(lookup(name).serves for name in ("mi300x", "tpu v5e", "gaudi 3", "m4 max", "inferentia2"))


def test_mission_headlines_of_the_h100_are_sparse() -> None:
    """MISSION 3: TF32 989, BF16/FP16 1,979, FP8 3,958 TFLOP/s are with sparsity; dense is half."""
    match = lookup("H100 SXM")
    for name, headline in {"tf32": 989e12, "bfloat16": 1979e12, "float16": 1979e12, "float8_e4m3": 3958e12}.items():
        assert match.sparse[name] == pytest.approx(headline, rel=0.001)
        assert match.flops[name] == pytest.approx(headline / 2, rel=0.001)


def test_mission_bandwidth_at_each_level() -> None:
    """MISSION 3: CPU DRAM 25-50 GB/s on desktops, several hundred on servers, HBM 256 GB/s-8 TB/s, SRAM above 10 TB/s."""
    assert 25e9 <= lookup("cpu desktop").bandwidth <= 52e9
    assert 200e9 <= lookup("epyc").bandwidth <= 900e9
    levels = [
        level
        for accelerator in ACCELERATORS
        for level in (accelerator.memory, accelerator.on_chip)
        if level is not None
    ]
    assert all(256e9 <= level.bandwidth <= 8e12 for level in levels if level.kind.startswith("HBM"))
    main_memory = [row.memory for row in ACCELERATORS if row.kind in ("lpu", "wse", "ipu")]
    assert all(level.kind == "SRAM" and level.bandwidth > 10e12 for level in main_memory)


def test_the_level_on_the_chip_is_known_where_it_is_published() -> None:
    """Apple publishes none for its GPUs. For chips without other memory, SRAM is the memory."""
    unknown = {row.name for row in ACCELERATORS if row.on_chip is None}
    assert unknown == {
        "Groq LPU", "Cerebras WSE-3", "Graphcore GC200 IPU", "Google Edge TPU (Coral)", "Apple M2 Ultra", "Apple M4 Max",
    }  # fmt: skip
    a100, mi300x = lookup("a100").on_chip, lookup("mi300x").on_chip
    assert a100 is not None and mi300x is not None
    assert a100.bandwidth == pytest.approx(5120 * 1.41e9, rel=1e-3)
    assert (mi300x.kind, mi300x.bytes) == ("Infinity Cache", 256 << 20)


def test_a_missing_precision_is_widened_or_refused() -> None:
    assert lookup("a100").peak("float8_e4m3") == lookup("a100").peak("bfloat16")
    assert lookup("v100").peak("bfloat16") == 15.7e12  # no unit for it: float32
    assert lookup("groq").peak("bfloat16") == 188e12  # nothing wider: its 16 bits
    with pytest.raises(ConfigError, match="does not compute in float32: use one of bfloat16"):
        lookup("tpu v3").peak("float32")


def test_unknown_figures_are_named() -> None:
    with pytest.raises(ConfigError, match="its peak FLOP/s are unknown"):
        replace(lookup("epyc"), flops={}).peak("bfloat16")
    edge = lookup("edge tpu")
    assert edge.bandwidth == 0
    with pytest.raises(ConfigError, match="does not compute in bfloat16: use one of int8"):
        edge.peak("bfloat16")


def test_a_row_of_its_own_stands_before_the_name() -> None:
    assert Device("cpu", "AMD EPYC 9654 96-Core Processor", 1, 1).accelerator is None
    assert Device("cpu", "any", 1, 1, lookup("epyc")).accelerator == lookup("epyc")
    assert Device("cuda", "NVIDIA H200", 1, 1).accelerator == lookup("h200")
    assert Device("cuda", "Tesla T4", 1, 1).accelerator is None
