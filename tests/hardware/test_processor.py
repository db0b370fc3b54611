"""Peak rates of a processor follow from cores, clock and instruction sets; what the machine hides stays unknown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ridgeline.hardware.processor import core_of, max_hertz, memory_bandwidth, per_cycle, specification
from ridgeline.hardware.table import lookup

AVX2 = "fma avx2"
AVX512 = f"{AVX2} avx512f avx512_vnni avx512_bf16"
AMX = f"{AVX512} avx512_fp16 amx_bf16 amx_int8"
NEON = "asimd asimdhp asimddp"


def x86(vendor: str, family: int, model: int, flags: str, **more: str) -> dict[str, str]:
    return {"vendor_id": vendor, "cpu family": str(family), "model": str(model), "flags": flags, **more}


def arm(part: str, features: str) -> dict[str, str]:
    return {"CPU implementer": "0x41", "CPU part": part, "Features": features}


@pytest.mark.parametrize(
    ("fields", "name", "rates"),
    [
        (x86("AuthenticAMD", 23, 0x01, AVX2), "Zen", {"float32": 16, "int8": 32}),
        (x86("AuthenticAMD", 23, 0x31, AVX2), "Zen 2", {"float32": 32, "int8": 64}),
        (x86("AuthenticAMD", 25, 0x01, AVX2), "Zen 3", {"float32": 32, "int8": 64}),
        (x86("AuthenticAMD", 25, 0x11, AVX512), "Zen 4", {"float32": 32, "bfloat16": 64, "int8": 128}),
        (x86("AuthenticAMD", 26, 0x02, AVX512), "Zen 5", {"float32": 64, "bfloat16": 128, "int8": 256}),
        (x86("GenuineIntel", 6, 0x3F, AVX2), "Haswell", {"float32": 32, "int8": 64}),
        (x86("GenuineIntel", 6, 0x55, f"{AVX2} avx512f"), "Skylake-SP", {"float32": 64, "int8": 128}),
        (
            x86("GenuineIntel", 6, 0x8F, AMX),
            "Sapphire Rapids and later",
            {"float32": 64, "float16": 128, "bfloat16": 1024, "int8": 2048},
        ),
        (
            x86("GenuineIntel", 6, 0x8F, AVX2),
            "Sapphire Rapids and later",
            {"float32": 32, "int8": 64},
        ),  # AVX-512 hidden
        (arm("0xd0c", NEON), "Neoverse N1", {"float32": 16, "float16": 32, "int8": 64}),
        (
            arm("0xd40", f"{NEON} sve bf16 i8mm"),
            "Neoverse V1",
            {"float32": 32, "float16": 64, "bfloat16": 128, "int8": 256},
        ),
    ],
)
def test_operations_per_cycle(fields: Mapping[str, str], name: str, rates: Mapping[str, float]) -> None:
    core = core_of(fields)
    assert core is not None and core.name == name
    assert per_cycle(core, fields) == rates


@pytest.mark.parametrize(
    "fields",
    [
        {},
        x86("AuthenticAMD", 99, 1, AVX512),
        x86("GenuineIntel", 6, 0xFF, AVX2),
        arm("0xfff", NEON),
        {"model": "IBM,9009-42A", "cpu": "POWER9"},
    ],
)
def test_an_unknown_core_has_no_rates(fields: Mapping[str, str]) -> None:
    assert core_of(fields) is None and per_cycle(None, fields) == {}


def machine(root: Path, siblings: Mapping[int, str], khz: int | None = None) -> Path:
    """A /sys with these logical CPUs (thread_siblings_list by CPU) and this maximum clock."""
    for cpu, threads in siblings.items():
        folder = root / f"devices/system/cpu/cpu{cpu}"
        (folder / "topology").mkdir(parents=True)
        (folder / "topology/thread_siblings_list").write_text(f"{threads}\n")
        if khz:
            (folder / "cpufreq").mkdir()
            (folder / "cpufreq/cpuinfo_max_freq").write_text(f"{khz}\n")
    cache = root / "devices/system/cpu/cpu0/cache/index3"
    cache.mkdir(parents=True)
    (cache / "size").write_text("32768K\n")
    return root


def test_the_peak_is_cores_times_clock_times_rate(tmp_path: Path) -> None:
    """Two threads of a core share its units: four logical CPUs on two cores count as two."""
    root = machine(tmp_path, {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, 3_700_000)
    fields = x86("AuthenticAMD", 25, 0x11, AVX512, **{"model name": "AMD EPYC 9654", "cpu MHz": "2400.000"})
    row = specification(fields, range(4), 1 << 34, root)
    assert row.name == "AMD EPYC 9654, 2 cores" and row.kind == "cpu" and row.serves
    assert row.flops == {"float32": 2 * 3.7e9 * 32, "bfloat16": 2 * 3.7e9 * 64, "int8": 2 * 3.7e9 * 128}
    assert row.source == "2 cores, Zen 4, at most 3.70 GHz, memory channels not shown"
    assert (row.memory.bytes, row.bandwidth, row.watts) == (1 << 34, 0.0, 0.0)
    assert row.on_chip is not None and (row.on_chip.bytes, row.on_chip.bandwidth) == (32 << 20, 0.0)
    single = specification(fields, [0], 1 << 34, root)
    assert single.name == "AMD EPYC 9654, 1 core" and single.flops["float32"] == row.flops["float32"] / 2


def test_rows_for_plans_follow_the_same_formula(tmp_path: Path) -> None:
    for name, cores, khz, fields in (
        ("epyc", 96, 3_700_000, x86("AuthenticAMD", 25, 0x11, AVX512)),
        ("8480+", 56, 3_800_000, x86("GenuineIntel", 6, 0x8F, AMX)),
        ("5800x", 8, 4_700_000, x86("AuthenticAMD", 25, 0x21, AVX2)),
    ):
        root = machine(tmp_path / name, {cpu: str(cpu) for cpu in range(cores)}, khz)
        assert specification(fields, range(cores), 1, root).flops == pytest.approx(lookup(name).flops, rel=0.01)


def test_a_hidden_clock_leaves_the_peak_unknown(tmp_path: Path) -> None:
    """A virtual machine shows the base clock as `cpu MHz`; its cores run faster, so a peak at that clock would be exceeded."""
    root = machine(tmp_path, {0: "0", 1: "1"})
    row = specification(x86("AuthenticAMD", 25, 0x01, AVX2, **{"cpu MHz": "2445.410"}), range(2), 1 << 34, root)
    assert row.flops == {} and row.source == "2 cores, Zen 3, maximum clock not shown, memory channels not shown"


def test_a_maximum_without_boost_is_no_bound(tmp_path: Path) -> None:
    root = machine(tmp_path, {0: "0"}, 2_450_000)
    assert max_hertz({"cpu MHz": "2450.000"}, [0], root) == 2.45e9
    assert max_hertz({"cpu MHz": "3400.000"}, [0], root) == 0.0
    assert max_hertz({}, [7], root) == 0.0


def dimm(locator: str, bank: str, *, mib: int = 16384, bits: int = 64, speed: int = 4800) -> bytes:
    """A memory device of an SMBIOS table (type 17, 0x28 bytes)."""
    body = bytearray(0x28)
    body[0], body[1] = 17, len(body)
    for at, value in ((0x0A, bits), (0x0C, mib), (0x20, speed)):
        body[at : at + 2] = value.to_bytes(2, "little")
    body[0x10], body[0x11] = 1, 2
    return bytes(body) + locator.encode() + b"\0" + bank.encode() + b"\0\0"


BIOS, END = b"\0\x05\0\0\x01vendor\0\0", b"\x7f\x04\0\0\0\0"


def test_bandwidth_of_the_memory_channels(tmp_path: Path) -> None:
    """DDR5-4800: 38.4 GB/s a channel. Two modules of a channel share it, an empty slot adds nothing."""
    channels = [dimm(f"DIMM {slot}", f"P0 CHANNEL {name}") for name in "AB" for slot in range(2)]
    table = BIOS + b"".join(channels) + dimm("DIMM 0", "P0 CHANNEL C", mib=0) + END
    assert memory_bandwidth(table) == 2 * 38.4e9
    assert memory_bandwidth(dimm("Controller0-ChannelA-DIMM0", "BANK 0", speed=3200)) == 25.6e9
    firmware = machine(tmp_path, {0: "0"}) / "firmware/dmi/tables"
    firmware.mkdir(parents=True)
    (firmware / "DMI").write_bytes(table)
    assert specification(x86("", 0, 0, AVX2), [0], 1, tmp_path).bandwidth == 2 * 38.4e9
    assert specification(x86("", 0, 0, "hypervisor"), [0], 1, tmp_path).bandwidth == 0.0


@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"\x11",
        BIOS + END,
        BIOS[:-1],
        dimm("DIMM_A1", "not specified"),
        dimm("DIMM 0", "P0 CHANNEL A", speed=0),
        dimm("DIMM 0", "P0 CHANNEL A", speed=0xFFFF),
        dimm("DIMM 0", "P0 CHANNEL A") + dimm("A2", ""),
    ],
)
def test_memory_that_is_not_described_is_unknown(table: bytes) -> None:
    assert memory_bandwidth(table) == 0.0
