"""Energy: what a counter says between readings, whose energy it is, and what stands in for a counter."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ridgeline.hardware import power
from ridgeline.hardware.power import BackgroundReading, Counter, Energy, Meter, Moment, at_once, power_counter


class Clock:
    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_joules_between_readings_and_over_a_wrap() -> None:
    clock, shown = Clock(), [100.0]
    meter = Meter(Counter("rapl", at_once(lambda: shown[0]), wraps=1000.0), clock)
    shown[0] = 160.0
    assert meter.take(0.1, 0.0) == Energy(), "a moment after the last reading"
    clock.now += 1
    assert meter.take(0.1, 0.0).joules == 60.0
    clock.now += 1
    shown[0] = 10.0
    assert meter.take(0.1, 0.0).joules == 850.0


def test_steps_get_the_energy_above_idle_time() -> None:
    """700 W while busy, 100 W while idle: steps get 700 W times their seconds, also where pauses lie between them."""
    clock, joules = Clock(), [0.0]

    def pass_time(seconds: float, watts: float) -> None:
        clock.now += seconds
        joules[0] += seconds * watts

    meter = Meter(Counter("rapl", at_once(lambda: joules[0])), clock)
    pass_time(60.0, 100.0)
    assert meter.take(0.0, 0.0) == Energy(6000.0), "nothing ran"
    pass_time(3.0, 100.0)
    pass_time(1.0, 700.0)
    used = meter.take(0.25, 0.75)
    assert used.joules == pytest.approx(1000.0) and used.busy_s == pytest.approx(1.0)
    assert used.prompt_joules == pytest.approx(175.0) and used.output_joules == pytest.approx(525.0)
    pass_time(1.0, 700.0)
    assert meter.take(1.0, 0.0) == pytest.approx((700.0, 700.0, 0.0, 1.0))


def test_an_estimate_gives_an_idle_device_less(tmp_path: Path) -> None:
    clock = Clock()
    counter = power_counter("cpu", watts=100.0, rapl=tmp_path)
    assert counter.kind == "estimate"
    meter = Meter(counter, clock)
    clock.now += 10
    used = meter.take(1.0, 3.0)
    assert used.joules == pytest.approx(100 * (4 + power.IDLE_SHARE * 6))
    assert (used.prompt_joules, used.output_joules) == pytest.approx((100.0, 300.0)), "busy seconds at full power"
    clock.now += 10
    assert meter.take(0.0, 0.0) == pytest.approx((100 * power.IDLE_SHARE * 10, 0.0, 0.0, 0.0))


def test_unknown_power_is_no_estimate(tmp_path: Path) -> None:
    counter = power_counter("cpu", watts=0.0, rapl=tmp_path)
    clock = Clock()
    meter = Meter(counter, clock)
    clock.now += 10
    assert counter.kind == "" and meter.take(1.0, 3.0) == Energy(), "no power, instead of 0 W"


def test_rapl_sums_its_packages(tmp_path: Path) -> None:
    for index in range(2):
        package = tmp_path / f"intel-rapl:{index}"
        package.mkdir()
        (package / "energy_uj").write_text("2500000\n")
        (package / "max_energy_range_uj").write_text("8000000\n")
    counter = power_counter("cpu", watts=100.0, rapl=tmp_path)
    assert (counter.kind, counter.read(Moment()), counter.wraps) == ("rapl", (5.0, Moment()), 16.0)


def test_a_slow_counter_holds_nobody_up_and_states_its_moment() -> None:
    shown, there = iter([100.0, 110.0, 160.0, 190.0]), threading.Semaphore(1)

    def read() -> float:
        assert there.acquire(timeout=10)
        return next(shown)

    reading = BackgroundReading(read)
    early, late = Moment(1.0, 0.5, 0.0), Moment(3.0, 0.5, 0.2)
    assert reading(early) == (100.0, Moment()), "the reading is not there yet"
    for value, begun, moment in ((110.0, Moment(), early), (160.0, early, late)):
        there.release()
        end = time.monotonic() + 10
        while (latest := reading(moment)) != (value, begun):
            assert time.monotonic() < end and latest[0] < value
    there.release()


def test_joules_that_come_later_belong_to_the_moment_of_their_reading() -> None:
    """Each call returns the reading that the call before has started."""
    pending = [(100.0, Moment())]
    joules = iter([100.0, 160.0, 190.0])

    def read(moment: Moment) -> tuple[float, Moment]:
        pending.append((next(joules), moment))
        return pending.pop(0)

    clock = Clock()
    meter = Meter(Counter("nvml", read), clock)
    clock.now += 3
    assert meter.take(0.5, 0.2) == Energy(), "a reading of the start"
    clock.now += 4
    used = meter.take(0.0, 0.3)
    assert used.joules == 60.0 and used.busy_s == pytest.approx(0.7), "what had run three seconds after the start"
    assert used.prompt_joules == pytest.approx(used.output_joules * 2.5)
