"""How much energy the device takes: counted by the device where it counts, else estimated, and said which."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 0.25
"""Seconds between two readings."""
IDLE_SHARE = 0.3
"""Part of the board power that an estimate gives an idle device."""
RAPL = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Counter:
    """kind: "nvml", "rapl" or "estimate". read: joules so far, from (seconds, busy seconds) so far. wraps: joules at which
    it starts again, 0 for never."""

    kind: str
    read: Callable[[float, float], float]
    wraps: float = 0.0


class DraftRows:
    """A reading that may take 20 ms, as NVIDIA's library does in a virtual machine, for whoever cannot wait: each call gives the
    last that has come, and has another thread take the next. So what is told lags by a reading."""

    def __init__(self, read: Callable[[], float]) -> None:
        self._read, self._known = read, read()
        self._thread = ThreadPoolExecutor(1, "power")
        self._asked = self._thread.submit(read)

    def __call__(self) -> float:
        if self._asked.done():
            self._known, self._asked = self._asked.result(), self._thread.submit(self._read)
        return self._known


class Meter:
    """Joules between readings. clock: seconds that only grow."""

    def __init__(self, counter: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        self.kind = counter.kind
        self._counter, self._clock = counter, clock
        self._begun = self._at = clock()
        self._busy = 0.0
        self._before = counter.read(0.0, 0.0)

    def take(self, busy_s: float) -> float:
        """Joules since the last reading, 0 when that was a moment ago. busy_s: what the device has worked since the last
        call."""
        self._busy += busy_s
        now = self._clock()
        if now - self._at < EVERY_S:
            return 0.0
        self._at = now
        joules = self._counter.read(now - self._begun, self._busy)
        more, self._before = joules - self._before, joules
        return more if more >= 0 else more + self._counter.wraps


def power_counter(kind: str, watts: float, index: int = 0, rapl: Path = RAPL) -> Counter:
    """The best counter for a device. kind: "cuda" or "cpu"; watts: its board power, for an estimate; index: of the GPU; rapl: the
    folder of the processor packages' counters."""
    counter = _nvml(index) if kind == "cuda" else _rapl(sorted(rapl.glob("intel-rapl:[0-9]")))
    return counter or Counter("estimate", lambda seconds, busy: watts * _weighted(seconds, busy))


def _weighted(seconds: float, busy: float) -> float:
    busy = min(busy, seconds)
    return busy + IDLE_SHARE * (seconds - busy)


def board_joules(index: int) -> Callable[[], float] | None:
    """Joules that an NVIDIA GPU has taken so far, by its own counter in NVIDIA's management library (Volta and later, in
    millijoules); None where there is none. A reading may take 20 ms."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, energy = ctypes.c_void_p(), ctypes.c_ulonglong()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
        return None

    def read() -> float:
        library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy))
        return energy.value / 1e3

    return None if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(energy)) else read


def _nvml(index: int) -> Counter | None:
    read = board_joules(index)
    if read is None:
        return None
    behind = DraftRows(read)
    return Counter("nvml", lambda seconds, busy: behind())


def _rapl(packages: Sequence[Path]) -> Counter | None:
    """Running average power limit: the processor packages' counters (readable by root on most systems)."""

    def read(name: str) -> float:
        return sum(int((package / name).read_text()) for package in packages) / 1e6

    try:
        wraps = read("max_energy_range_uj")
        read("energy_uj")
    except (OSError, ValueError):
        return None
    return Counter("rapl", lambda seconds, busy: read("energy_uj"), wraps) if packages else None
