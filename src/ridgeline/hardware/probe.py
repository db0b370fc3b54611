"""What this machine is: asked of the kernel and of NVIDIA's management library, without loading torch."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.hardware.table import ACCELERATORS, Accelerator, cpu, find, lookup

_NAME_BYTES = 96


@dataclass(frozen=True, slots=True)
class Device:
    """One device that can hold a model. memory_bytes: all of it (CPU: of the machine); free_bytes: not in use now.
    features: instruction sets of a processor."""

    kind: str
    name: str
    memory_bytes: int
    free_bytes: int
    features: tuple[str, ...] = ()

    @property
    def accelerator(self) -> Accelerator | None:
        """Its row in the table; None for a GPU that the table does not know. A processor that is not named as the table
        names it is a plain one: how many of its cores are ours is not in its name."""
        named = next((one for one in ACCELERATORS if one.name == self.name), None)
        if named is not None:
            return named
        return cpu(self.features) if self.kind == "cpu" else find(self.name)


@dataclass(frozen=True, slots=True)
class Machine:
    """processor: its name. cores: those this process may use. features: instruction sets that matter to us."""

    processor: str
    cores: int
    features: tuple[str, ...]
    host: Device
    gpus: tuple[Device, ...]

    def device(self, wanted: str = "auto") -> Device:
        """The device that `--device` names: the first GPU, or the processor."""
        return self.gpus[0] if self.gpus and wanted != "cpu" else self.host


def probe() -> Machine:
    """Ask this machine. What cannot be found out is 0 or empty; nothing is raised."""
    processor, features = _processor(_lines("/proc/cpuinfo"))
    host = Device("cpu", processor, *host_memory(), features)
    cores = len(os.sched_getaffinity(0))
    return Machine(processor, cores, features, host, visible(nvidia_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")))


def meant(name: str, ask: Callable[[], Machine] = probe) -> Accelerator:
    """The row of the table that a user means, "cpu" the one that stands for the processor of the machine that `ask` finds.
    Raises ConfigError."""
    own = ask().host.accelerator if name.lower() == "cpu" else None
    return own or lookup(name)


def host_memory() -> tuple[int, int]:
    """(all, free) bytes of memory this process may use: what the kernel could give out, and the container allows."""
    memory = _memory(_lines("/proc/meminfo"))
    total, free = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    limit = _cgroup_limit()
    if limit is None:
        return total, free
    return min(total, limit[0]), min(free, max(0, limit[0] - limit[1]))


def process_age_s(stat: Path = Path("/proc/self/stat")) -> float:
    """Seconds since this process was started, to a hundredth; 0 where the kernel does not tell."""
    try:
        # The name in parentheses may hold anything; of the fields behind it the 20th is the start, in ticks since boot.
        started = int(stat.read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0.0
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK"))


def visible(gpus: tuple[Device, ...], listed: str | None) -> tuple[Device, ...]:
    """GPUs in the order of CUDA_VISIBLE_DEVICES (numbers; a list that breaks off at the first bad one, as CUDA reads
    it). A list of UUIDs is taken to mean as many as it has."""
    if listed is None:
        return gpus
    found = []
    for position, word in enumerate(word.strip() for word in listed.split(",")):
        index = int(word) if word.isdigit() else position if word.startswith(("GPU-", "MIG-")) else -1
        if not 0 <= index < len(gpus):
            break
        found.append(gpus[index])
    return tuple(found)


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _processor(lines: Iterable[str]) -> tuple[str, tuple[str, ...]]:
    """(name, instruction sets) from /proc/cpuinfo."""
    fields = dict(_pair(line) for line in lines if ":" in line)
    flags = fields.get("flags", "").split()
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
    return fields.get("model name") or platform.machine(), tuple(flag for flag in wanted if flag in flags)


def _memory(lines: Iterable[str]) -> Mapping[str, int]:
    """Bytes by name from /proc/meminfo."""
    found = {}
    for line in lines:
        match = re.fullmatch(r"(\w+):\s+(\d+) kB", line.strip())
        if match:
            found[match[1]] = int(match[2]) * 1024
    return found


def _cgroup_limit(root: Path = Path("/sys/fs/cgroup")) -> tuple[int, int] | None:
    """(limit, use) in bytes of this container's memory, when it has a limit; cache that can be dropped is no use."""
    for limit, use, stat, key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
    ):
        try:
            most, held = int((root / limit).read_text()), int((root / use).read_text())
            stats = dict(line.split() for line in (root / stat).read_text().splitlines())
            return most, max(0, held - int(stats.get(key, 0)))
        except (OSError, ValueError):  # no such file, or the word "max"
            continue
    return None


def _pair(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def nvidia_gpus() -> tuple[Device, ...]:
    """GPUs as NVIDIA's driver lists them; empty where there is no driver."""
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
        found = [_nvidia_gpu(library, index) for index in range(count.value)]
        return tuple(one for one in found if one is not None)
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
