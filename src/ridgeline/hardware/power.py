"""Energy of the device: read from its counter if it has one, otherwise estimated."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

MIN_INTERVAL_S = 0.25
"""Minimum seconds between two readings."""
IDLE_SHARE = 0.3
"""Estimated power of an idle device, as a share of its board power."""
RAPL = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class Counter:
    """An energy counter."""

    kind: str
    """One of "nvml", "rapl", "estimate", or "" for a counter that always reads 0."""
    read: Callable[[float, float], float]
    """Returns joules so far. Arguments: seconds and busy seconds so far, for the estimate."""
    wraps: float = 0.0
    """Joules at which the counter wraps to 0; 0: never."""


class BackgroundReading:
    """Non-blocking access to a slow counter. NVML can take 20 ms in a virtual machine.

    Each call returns the latest value and starts the next reading in a thread, so the value lags by one reading.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self._read, self._latest = read, read()
        self._executor = ThreadPoolExecutor(1, "power")
        self._pending = self._executor.submit(read)

    def __call__(self) -> float:
        if self._pending.done():
            self._latest, self._pending = self._pending.result(), self._executor.submit(self._read)
        return self._latest


class Meter:
    """Measures joules between readings. clock: monotonic seconds."""

    def __init__(self, counter: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        self.kind = counter.kind
        self._counter, self._clock = counter, clock
        self._start = self._last_reading = clock()
        self._busy_s = 0.0
        self._last_joules = counter.read(0.0, 0.0)

    def take(self, busy_s: float) -> float:
        """Joules since the last reading; 0 within MIN_INTERVAL_S after it. busy_s: busy seconds since the last call."""
        self._busy_s += busy_s
        now = self._clock()
        if now - self._last_reading < MIN_INTERVAL_S:
            return 0.0
        self._last_reading = now
        joules = self._counter.read(now - self._start, self._busy_s)
        delta, self._last_joules = joules - self._last_joules, joules
        return delta if delta >= 0 else delta + self._counter.wraps


def power_counter(kind: str, watts: float, index: int = 0, rapl: Path = RAPL) -> Counter:
    """The best available counter of a device.

    Args:
        kind: "cuda" or "cpu".
        watts: board power, for the estimate; 0: unknown, the power is not estimated.
        index: index of the GPU.
        rapl: folder with the counters of the processor packages.
    """
    counter = _nvml(index) if kind == "cuda" else _rapl(sorted(rapl.glob("intel-rapl:[0-9]")))
    return counter or Counter("estimate" if watts else "", lambda seconds, busy: watts * _full_power_s(seconds, busy))


def _full_power_s(seconds: float, busy: float) -> float:
    """Seconds at full power that take the same energy as `busy` seconds of work and idling for the remainder."""
    busy = min(busy, seconds)
    return busy + IDLE_SHARE * (seconds - busy)


def board_joules(index: int) -> Callable[[], float] | None:
    """Function that reads the energy counter of an NVIDIA GPU in joules (NVML, Volta and later); None if it has no counter.

    A reading can take 20 ms.
    """
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
    reading = BackgroundReading(read)
    return Counter("nvml", lambda seconds, busy: reading())


def _rapl(packages: Sequence[Path]) -> Counter | None:
    """Energy counters of the processor packages (RAPL). Most systems allow only root to read them."""

    def read(name: str) -> float:
        return sum(int((package / name).read_text()) for package in packages) / 1e6

    try:
        wraps = read("max_energy_range_uj")
        read("energy_uj")
    except (OSError, ValueError):
        return None
    return Counter("rapl", lambda seconds, busy: read("energy_uj"), wraps) if packages else None
