"""Energy: what a counter says between readings, and what stands in for one."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ridgeline.hardware import power
from ridgeline.hardware.power import BackgroundReading, Counter, Meter, power_counter


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_joules_between_readings_and_over_a_wrap() -> None:
    clock, shown = Clock(), [100.0]
    meter = Meter(Counter("rapl", lambda seconds, busy: shown[0], wraps=1000.0), clock)
    shown[0] = 160.0
    assert meter.take(0.1) == 0.0, "a moment after the last reading"
    clock.now += 1
    assert meter.take(0.1) == 60.0
    clock.now += 1
    shown[0] = 10.0
    assert meter.take(0.1) == 850.0


def test_an_estimate_gives_an_idle_device_less(tmp_path: Path) -> None:
    clock = Clock()
    counter = power_counter("cpu", watts=100.0, rapl=tmp_path)
    assert counter.kind == "estimate"
    meter = Meter(counter, clock)
    clock.now += 10
    assert meter.take(4.0) == pytest.approx(100 * (4 + power.IDLE_SHARE * 6))
    clock.now += 10
    assert meter.take(0.0) == pytest.approx(100 * power.IDLE_SHARE * 10)


def test_unknown_power_is_no_estimate(tmp_path: Path) -> None:
    counter = power_counter("cpu", watts=0.0, rapl=tmp_path)
    assert (counter.kind, counter.read(10, 4)) == ("", 0.0)


def test_rapl_sums_its_packages(tmp_path: Path) -> None:
    for index in range(2):
        package = tmp_path / f"intel-rapl:{index}"
        package.mkdir()
        (package / "energy_uj").write_text("2500000\n")
        (package / "max_energy_range_uj").write_text("8000000\n")
    counter = power_counter("cpu", watts=100.0, rapl=tmp_path)
    assert (counter.kind, counter.read(0, 0), counter.wraps) == ("rapl", 5.0, 16.0)


def test_a_slow_counter_holds_nobody_up_and_its_joules_come_later() -> None:
    shown, there = iter([100.0, 160.0, 190.0]), threading.Semaphore(1)

    def read() -> float:
        assert there.acquire(timeout=10)
        return next(shown)

    clock = Clock()
    reading = BackgroundReading(read)
    meter = Meter(Counter("nvml", lambda seconds, busy: reading()), clock)
    clock.now += 1
    assert meter.take(0.1) == 0.0, "the reading is not there yet"
    for joules, taken in ((160.0, 60.0), (190.0, 30.0)):
        there.release()
        end = time.monotonic() + 10
        while reading() != joules:
            assert time.monotonic() < end
        clock.now += 1
        assert meter.take(0.1) == taken
    there.release()
