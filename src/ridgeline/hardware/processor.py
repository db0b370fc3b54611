"""Specification of the processor of this machine, derived from what the kernel reports.

    peak FLOP/s = cores * maximum clock * FLOPs per cycle
    FLOPs per cycle = max over instruction sets (instructions per cycle * FLOPs per instruction)
    bandwidth = sum over memory channels (transfers per second * bytes per transfer)

A figure is an upper bound or unknown. Virtual machines hide the maximum clock and the memory channels: the base clock that they
show is no bound, because cores run above it.

Sources: Agner Fog, "The microarchitecture of Intel, AMD and VIA CPUs" and "Instruction tables" (units and instructions per cycle);
uops.info; Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on AMX (a tile product takes 16 cycles); Arm
Neoverse N1, N2, V1 and V2 Software Optimization Guides. Where sources or editions differ, the table has the larger rate.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ridgeline.core.plural import counted
from ridgeline.hardware.table import Accelerator, Level

SYSTEM = Path("/sys")

OPERATIONS: Mapping[str, Mapping[str, int]] = {
    "avx2": {"float32": 16, "int8": 32},
    "avx512f": {"float32": 32, "int8": 64},
    "avx512_fp16": {"float16": 64},
    "avx512_bf16": {"bfloat16": 64},
    "avx_vnni": {"int8": 64},
    "avx512_vnni": {"int8": 128},
    "amx_bf16": {"bfloat16": 16 * 16 * 64},
    "amx_fp16": {"float16": 16 * 16 * 64},
    "amx_int8": {"int8": 16 * 16 * 128},
    "asimd": {"float32": 8},
    "asimdhp": {"float16": 16},
    "asimddp": {"int8": 32},
    "bf16": {"bfloat16": 32},
    "i8mm": {"int8": 64},
}
"""Operations of one instruction by instruction set (names as in /proc/cpuinfo) and precision; a multiply-add counts as 2.

int8 without VNNI takes two instructions, VPMADDUBSW and VPMADDWD, for the products of one register. AMX multiplies tiles of 16 rows
of 64 bytes. BFMMLA and SMMLA (Arm bf16, i8mm) multiply matrices of 2 x 4 and 2 x 8.
"""


class Core(NamedTuple):
    """A micro-architecture."""

    name: str
    vendor: str
    """`vendor_id`, or `CPU implementer` of an Arm core."""
    family: int
    """`cpu family`; 0 for Arm."""
    models: tuple[range, ...]
    """`model`, or `CPU part` of an Arm core."""
    rates: Mapping[str, float]
    """Instructions per cycle by instruction set."""


def _one_of(*models: int) -> tuple[range, ...]:
    return tuple(range(model, model + 1) for model in models)


_TILE = 1 / 16
_AVX2 = {"avx2": 2, "avx_vnni": 2}
_AVX512_SHARED = _AVX2 | {"avx512f": 1, "avx512_vnni": 1, "avx512_bf16": 1}
"""One unit of 512 bits, or two of 256 bits that work together."""
_AVX512 = _AVX2 | {"avx512f": 2, "avx512_vnni": 2, "avx512_bf16": 2}
_AMX = _AVX512 | {"avx512_fp16": 2, "amx_bf16": _TILE, "amx_fp16": _TILE, "amx_int8": _TILE}


def _neon(units: int) -> Mapping[str, float]:
    """units: SIMD units of 128 bits."""
    return dict.fromkeys(("asimd", "asimdhp", "asimddp", "bf16", "i8mm"), units)


CORES = (
    Core("Zen", "AuthenticAMD", 23, (range(0x30),), {"avx2": 1}),
    Core("Zen 2", "AuthenticAMD", 23, (range(0x30, 0x100),), _AVX2),
    Core("Zen 3", "AuthenticAMD", 25, (range(0x10), range(0x20, 0x60)), _AVX2),
    Core("Zen 4", "AuthenticAMD", 25, (range(0x10, 0x20), range(0x60, 0xB0)), _AVX512_SHARED),
    Core("Zen 5", "AuthenticAMD", 26, (range(0x100),), _AVX512),
    Core("Haswell", "GenuineIntel", 6, _one_of(0x3C, 0x3F, 0x45, 0x46), _AVX2),
    Core("Broadwell", "GenuineIntel", 6, _one_of(0x3D, 0x47, 0x4F, 0x56), _AVX2),
    Core("Skylake", "GenuineIntel", 6, _one_of(0x4E, 0x5E, 0x8E, 0x9E, 0xA5, 0xA6), _AVX2),
    Core("Skylake-SP", "GenuineIntel", 6, _one_of(0x55), _AVX512),
    Core("Ice Lake, Tiger Lake", "GenuineIntel", 6, _one_of(0x7D, 0x7E, 0x8C, 0x8D, 0xA7), _AVX512_SHARED),
    Core("Ice Lake-SP", "GenuineIntel", 6, _one_of(0x6A, 0x6C), _AVX512),
    Core("Alder Lake, Raptor Lake", "GenuineIntel", 6, _one_of(0x97, 0x9A, 0xB7, 0xBA, 0xBF), _AVX2),
    Core("Sapphire Rapids and later", "GenuineIntel", 6, _one_of(0x8F, 0xCF, 0xAD, 0xAE), _AMX),
    Core("Neoverse N1", "0x41", 0, _one_of(0xD0C), _neon(2)),
    Core("Neoverse N2", "0x41", 0, _one_of(0xD49), _neon(2)),
    Core("Neoverse V1", "0x41", 0, _one_of(0xD40), _neon(4)),
    Core("Neoverse V2", "0x41", 0, _one_of(0xD4F), _neon(4)),
)
"""Cores with several kinds of cores (Alder Lake) count as the fastest kind."""


def specification(
    fields: Mapping[str, str], cpus: Iterable[int], memory_bytes: int, system: Path = SYSTEM
) -> Accelerator:
    """Row of the hardware table for the processor of this machine. Figures that are not known are absent (rates) or 0.

    Args:
        fields: /proc/cpuinfo of one logical CPU.
        cpus: logical CPUs that this process may use.
    """
    cpus = tuple(cpus)
    topology = [
        _text(system / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus
    ]
    cores = len(set(topology))
    hertz = max_hertz(fields, cpus, system)
    core = core_of(fields)
    virtual = "hypervisor" in fields.get("flags", "").split()
    channels = 0.0 if virtual else memory_bandwidth(_bytes(system / "firmware/dmi/tables/DMI"))
    cache = re.fullmatch(r"(\d+)K", _text(system / "devices/system/cpu/cpu0/cache/index3/size"))
    basis = (
        counted(cores, "core"),
        core.name if core else "unknown micro-architecture",
        f"at most {hertz / 1e9:.2f} GHz" if hertz else "maximum clock not shown",
        "memory channels of the firmware" if channels else "memory channels not shown",
    )
    return Accelerator(
        name=f"{fields.get('model name', 'processor')}, {counted(cores, 'core')}",
        kind="cpu",
        unit="vector",
        software="oneDNN, own kernels",
        memory=Level("RAM", memory_bytes, channels),
        on_chip=Level("L3", int(cache[1]) * 1024, 0.0) if cache else None,
        flops={dtype: cores * hertz * rate for dtype, rate in per_cycle(core, fields).items()} if hertz else {},
        source=", ".join(basis),
    )


def core_of(fields: Mapping[str, str]) -> Core | None:
    """Micro-architecture of a processor; None if it is not in the table."""
    vendor = fields.get("vendor_id") or fields.get("CPU implementer", "")
    try:
        family = int(fields.get("cpu family", "0"))
        model = int(fields.get("model") or fields.get("CPU part", "-1"), 0)
    except ValueError:  # architectures that give a product name here
        return None
    for core in CORES:
        if (core.vendor, core.family) == (vendor, family) and any(model in models for models in core.models):
            return core
    return None


def per_cycle(core: Core | None, fields: Mapping[str, str]) -> dict[str, float]:
    """Operations per cycle of a core by precision, with the instruction sets that the kernel reports."""
    flags = (fields.get("flags") or fields.get("Features", "")).split()
    rates: dict[str, float] = {}
    for name, instructions in core.rates.items() if core else ():
        for dtype, operations in OPERATIONS[name].items() if name in flags else ():
            rates[dtype] = max(rates.get(dtype, 0.0), instructions * operations)
    return rates


def max_hertz(fields: Mapping[str, str], cpus: Iterable[int], system: Path = SYSTEM) -> float:
    """Maximum clock of these logical CPUs; 0 if unknown.

    A maximum below the present clock excludes the boost clock (as of the driver acpi-cpufreq): it is no upper bound.
    """
    texts = (_text(system / f"devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq") for cpu in cpus)
    hertz = max((int(text) * 1e3 for text in texts if text.isdigit()), default=0.0)
    return hertz if hertz >= float(fields.get("cpu MHz", "0")) * 1e6 else 0.0


def memory_bandwidth(table: bytes) -> float:
    """Bytes per second of all populated memory channels; 0 if the table does not name each device's channel and rate.

    table: SMBIOS structures, as in /sys/firmware/dmi/tables/DMI, which only root can read.
    Source: SMBIOS reference specification (DMTF DSP0134), 7.18, memory device (type 17).
    """
    channels: dict[bytes, float] = {}
    while len(table) > 4:
        kind, length = table[0], table[1]
        end = table.find(b"\0\0", length)
        if length < 4 or end < 0:
            return 0.0
        body, strings, table = table[:length], table[length:end].split(b"\0"), table[end + 2 :]
        if kind != 17 or length < 0x22 or not int.from_bytes(body[0x0C:0x0E], "little"):
            continue
        width, speed = (int.from_bytes(body[at : at + 2], "little") for at in (0x0A, 0x20))
        locators = (strings[index - 1] for index in body[0x10:0x12] if 0 < index <= len(strings))
        names = [match[0] for text in locators if (match := re.match(rb"(?i).*channel[ _-]?[a-z0-9]+", text))]
        if not names or 0xFFFF in (width, speed):
            return 0.0
        channels[names[0]] = width / 8 * speed * 1e6
    return sum(channels.values()) if all(channels.values()) else 0.0


def _text(path: Path) -> str:
    return _bytes(path).decode(errors="replace").strip()


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
