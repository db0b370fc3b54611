"""Detects processor, memory and GPUs of this machine from the kernel and NVML, without importing torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ridgeline.hardware.processor import specification
from ridgeline.hardware.table import Accelerator, find, lookup

_NAME_BYTES = 96


@dataclass(frozen=True, slots=True)
class Device:
    """A device that can run a model."""

    kind: str
    """Either "cpu" or "cuda"."""
    name: str
    memory_bytes: int
    """Total memory (for a CPU: memory of the machine)."""
    free_bytes: int
    row: Accelerator | None = field(default=None, compare=False)
    """Row of the hardware table, if it is not that of the device's name: `hardware.processor` derives that of a processor."""

    @property
    def accelerator(self) -> Accelerator | None:
        """Row of the device in the hardware table; None for an unknown device."""
        return self.row or find(self.name)


@dataclass(frozen=True, slots=True)
class Machine:
    """Processor, memory and GPUs of this machine."""

    processor: str
    """Name of the processor."""
    cores: int
    """Cores that this process may use."""
    features: tuple[str, ...]
    """Instruction sets that the kernels use."""
    host: Device
    gpus: tuple[Device, ...]

    def device(self, name: str = "auto") -> Device:
        """The device that `--device` names: the first GPU, or the processor."""
        return self.gpus[0] if self.gpus and name != "cpu" else self.host


def probe() -> Machine:
    """Detect this machine. Unknown figures are 0 or empty; raises nothing."""
    fields = dict(_name_and_value(line) for line in _lines("/proc/cpuinfo") if ":" in line)
    processor, features = _processor(fields)
    cpus, (total, free) = os.sched_getaffinity(0), host_memory()
    host = Device("cpu", processor, total, free, specification({"model name": processor, **fields}, cpus, total))
    gpus = visible_gpus(nvidia_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    return Machine(processor, len(cpus), features, host, gpus)


def resolve_accelerator(name: str, detect: Callable[[], Machine] = probe) -> Accelerator:
    """Row of the hardware table for a name from the user. Raises ConfigError.

    "cpu" is the processor of the machine that `detect` returns.
    """
    processor = detect().host.accelerator if name.lower() == "cpu" else None
    return processor or lookup(name)


def host_memory() -> tuple[int, int]:
    """(total, free) bytes of memory that this process may use, within the limit of its container."""
    memory = _memory(_lines("/proc/meminfo"))
    total, free = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    limit = _cgroup_limit()
    if limit is None:
        return total, free
    return min(total, limit[0]), min(free, max(0, limit[0] - limit[1]))


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float:
    """Seconds since this process started, with a resolution of 10 ms; 0 if unknown."""
    try:
        # The process name in parentheses may contain spaces. The 20th field after it is the start time in ticks since boot.
        started = int(stat.read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))


def visible_gpus(gpus: tuple[Device, ...], listed: str | None) -> tuple[Device, ...]:
    """Select the GPUs that CUDA_VISIBLE_DEVICES lists, in its order.

    As in CUDA, the list ends at the first invalid index. A list of UUIDs selects the first GPUs, as many as it has entries.
    """
    if listed is None:
        return gpus
    selected = []
    for position, word in enumerate(word.strip() for word in listed.split(",")):
        index = int(word) if word.isdigit() else position if word.startswith(("GPU-", "MIG-")) else -1
        if not 0 <= index < len(gpus):
            break
        selected.append(gpus[index])
    return tuple(selected)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _processor(fields: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """(name, instruction sets) from the fields of /proc/cpuinfo."""
    flags = fields.get("flags", "").split()
    known_features = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    return fields.get("model name") or platform.machine(), tuple(flag for flag in known_features if flag in flags)


def _memory(lines: Iterable[str]) -> Mapping[str, int]:
    """Sizes in bytes by name, from /proc/meminfo."""
    sizes = {}
    for line in lines:
        match = re.fullmatch(r"(\w+):\s+(\d+) kB", line.strip())
        if match:
            sizes[match[1]] = int(match[2]) * 1024
    return sizes


def _cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """(limit, used) bytes of memory of this container (cgroup v2 or v1); None without a limit.

    Inactive file cache does not count as used.
    """
    for limit, use, stat, key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            limit_bytes, used_bytes = int((root / limit).read_text()), int((root / use).read_text())
            stats = dict(line.split() for line in (root / stat).read_text().splitlines())
            return limit_bytes, max(0, used_bytes - int(stats.get(key, 0)))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return None


def _name_and_value(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def nvidia_gpus() -> tuple[Device, ...]:
    """GPUs in the order of the NVIDIA driver; empty without a driver."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if library.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        gpus = [_nvidia_gpu(library, index) for index in range(count.value)]
        return tuple(gpu for gpu in gpus if gpu is not None)
    finally:
        library.nvmlShutdown()


def _nvidia_gpu(library: ctypes.CDLL, index: int) -> Device | None:
    handle, memory, name = ctypes.c_void_p(), _Memory(), ctypes.create_string_buffer(_NAME_BYTES)
    if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    if library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    library.nvmlDeviceGetName(handle, name, _NAME_BYTES)
    return Device("cuda", name.value.decode(errors="replace"), int(memory.total), int(memory.free))
