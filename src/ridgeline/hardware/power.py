"""Energy of the device: read from its counter if it has one, otherwise estimated."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MIN_INTERVAL_S = 0.25
"""Minimum seconds between two readings."""
IDLE_SHARE = 0.3
"""Estimated power of an idle device, as a share of its board power."""
RAPL = Path("/sys/class/powercap")


class Moment(NamedTuple):
    """Seconds since the start, and device seconds of all steps so far, by the part of their query tokens."""

    seconds: float = 0.0
    prompt_s: float = 0.0
    output_s: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.prompt_s + self.output_s


@dataclass(frozen=True, slots=True)
class Counter:
    """An energy counter."""

    kind: str
    """One of "nvml", "rapl", "estimate", or "" for a counter that always reads 0."""
    read: Callable[[Moment], tuple[float, Moment]]
    """Returns joules so far, and the moment of this reading. Argument: the present moment."""
    wraps: float = 0.0
    """Joules at which the counter wraps to 0; 0: never."""
    idle_watts: float = math.inf
    """Power of the idle device, if known."""


def at_once(read: Callable[[], float]) -> Callable[[Moment], tuple[float, Moment]]:
    """`Counter.read` of a fast counter."""
    return lambda moment: (read(), moment)


class BackgroundReading:
    """Non-blocking access to a slow counter. NVML can take 20 ms in a virtual machine.

    Each call returns the latest value with its moment and starts the next reading in a thread, so the value lags by one reading.
    """

    def __init__(self, read: Callable[[], float]) -> None:
        self._read, self._latest = read, (read(), Moment())
        self._executor = ThreadPoolExecutor(1, "power")
        self._pending, self._moment = self._executor.submit(read), Moment()

    def __call__(self, moment: Moment) -> tuple[float, Moment]:
        if self._pending.done():
            self._latest = self._pending.result(), self._moment
            self._pending, self._moment = self._executor.submit(self._read), moment
        return self._latest


class Energy(NamedTuple):
    """What the energy counter says since its last reading. All are 0 between two readings.

    joules: all energy. prompt_joules, output_joules: the part of steps, by their query tokens; the remainder is idle power. busy_s:
    device seconds of these steps.
    """

    joules: float = 0.0
    prompt_joules: float = 0.0
    output_joules: float = 0.0
    busy_s: float = 0.0


class Meter:
    """Measures joules between readings, and attributes them to steps and to idle time. clock: monotonic seconds.

    Steps get the counter's difference without idle seconds times idle power. Idle power is that of the counter, or the lowest mean
    power between two readings so far: readings happen during steps, so a pause lies between two of them.
    """

    def __init__(self, counter: Counter, clock: Callable[[], float] = time.monotonic) -> None:
        self.kind = counter.kind
        self._counter, self._clock = counter, clock
        self._start = self._last_reading = clock()
        self._now, self._idle_watts = Moment(), counter.idle_watts
        self._last = counter.read(self._now)

    def take(self, prompt_s: float, output_s: float) -> Energy:
        """Energy since the last reading; none within MIN_INTERVAL_S after it.

        Args:
            prompt_s, output_s: device seconds of a step, by the part of its query tokens.
        """
        clock, before = self._clock(), self._now
        self._now = Moment(clock - self._start, before.prompt_s + prompt_s, before.output_s + output_s)
        if clock - self._last_reading < MIN_INTERVAL_S:
            return Energy()
        self._last_reading = clock
        (last_joules, last), (joules, moment) = self._last, self._counter.read(self._now)
        seconds, busy_s = moment.seconds - last.seconds, moment.busy_s - last.busy_s
        if seconds <= 0 or joules == last_joules:
            return Energy()
        self._last = joules, moment
        used = joules - last_joules + (self._counter.wraps if joules < last_joules else 0.0)
        self._idle_watts = min(self._idle_watts, used / seconds)
        of_steps = max(0.0, used - self._idle_watts * max(0.0, seconds - busy_s)) if busy_s else 0.0
        prompt_share = (moment.prompt_s - last.prompt_s) / busy_s if busy_s else 0.0
        return Energy(used, of_steps * prompt_share, of_steps * (1 - prompt_share), busy_s)


def power_counter(kind: str, watts: float, index: int = 0, rapl: Path = RAPL) -> Counter:
    """The best available counter of a device.

    Args:
        kind: "cuda" or "cpu".
        watts: board power, for the estimate; 0: unknown, the power is not estimated.
        index: index of the GPU.
        rapl: folder with the counters of the processor packages.
    """
    counter = _nvml(index) if kind == "cuda" else _rapl(sorted(rapl.glob("intel-rapl:[0-9]")))
    return counter or Counter(
        "estimate" if watts else "", lambda moment: (watts * _full_power_s(moment), moment), 0.0, IDLE_SHARE * watts
    )


def _full_power_s(moment: Moment) -> float:
    """Seconds at full power that take the same energy as all busy seconds so far and idling for the remainder."""
    busy = min(moment.busy_s, moment.seconds)
    return busy + IDLE_SHARE * (moment.seconds - busy)


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
    return Counter("nvml", BackgroundReading(read))


def _rapl(packages: Sequence[Path]) -> Counter | None:
    """Energy counters of the processor packages (RAPL). Most systems allow only root to read them."""

    def read(name: str) -> float:
        return sum(int((package / name).read_text()) for package in packages) / 1e6

    try:
        wraps = read("max_energy_range_uj")
        read("energy_uj")
    except (OSError, ValueError):
        return None
    return Counter("rapl", at_once(lambda: read("energy_uj")), wraps) if packages else None
