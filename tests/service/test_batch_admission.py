"""The batch lane's admission against a model of an engine: no clock, no server."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import Slo
from ridgeline.service.batches.admission import MARGIN, LaneAdmission, Load, StepTimes
from ridgeline.service.batches.settings import DayWindow, batch_folder, read_impact

ROWS = 64
LOOK_S = 0.05


@dataclass
class Engine:
    """A step takes base + slope n seconds. The lane looks every 50 ms."""

    admission: LaneAdmission
    base: float = 0.004
    slope: float = 0.0005
    now: float = 1000.0
    batch: int = 0

    def step_s(self, online: int) -> float:
        return self.base + self.slope * (online + self.batch)

    def run(self, online: int, seconds: float) -> list[int]:
        """Rows in flight at every look."""
        history = []
        for _ in range(round(seconds / LOOK_S)):
            running = online + self.batch
            if running:
                step_s = self.step_s(online)
                self.admission.on_steps(running, step_s, max(1, round(LOOK_S / step_s)))
            self.now += LOOK_S
            self.batch = self.admission.allowed(Load(self.now, online, self.batch, ROWS))
            history.append(self.batch)
        return history


def test_all_rows_may_run_while_nobody_else_does():
    engine = Engine(LaneAdmission(Slo.parse("tpot=10ms")))
    assert engine.run(0, 0.1)[-1] == ROWS


@given(st.floats(0.001, 0.02), st.floats(0.0002, 0.002), st.integers(1, 20), st.floats(1.2, 4.0))
def test_steps_stay_within_the_slo_and_the_slack_is_used(base: float, slope: float, online: int, room: float):
    limit = (base + slope * online) * room / MARGIN
    engine = Engine(LaneAdmission(Slo.parse(f"tpot={limit * 1e3}ms")), base, slope)
    engine.run(0, 2.0)
    history = engine.run(online, 20.0)
    settled = history[100:]
    for batch in settled:
        assert base + slope * (online + batch) <= limit
    fitting = min((MARGIN * limit - base) / slope, ROWS) - online
    assert max(settled) >= 0.7 * fitting - 2


@given(st.floats(0.001, 0.02), st.floats(0.0002, 0.002), st.integers(1, 20), st.floats(0.05, 1.0))
def test_an_impact_caps_the_rise_of_step_times(base: float, slope: float, online: int, impact: float):
    engine = Engine(LaneAdmission(Slo(), impact), base, slope)
    engine.run(0, 2.0)
    engine.batch = 0
    engine.run(online, 5.0)
    alone = base + slope * online
    for batch in engine.run(online, 10.0):
        assert base + slope * (online + batch) <= alone * (1 + impact) * 1.02


def test_the_lane_leaves_when_online_requests_fill_the_engine():
    engine = Engine(LaneAdmission(Slo.parse("tpot=100ms")))
    engine.run(4, 5.0)
    assert engine.batch > 8
    assert engine.run(ROWS, 0.1)[-1] == 0


def test_it_comes_back_when_they_have_gone():
    engine = Engine(LaneAdmission(Slo.parse("tpot=8ms")))
    engine.run(0, 2.0)
    engine.run(8, 5.0)
    assert engine.batch <= 1
    assert engine.run(0, 3.0)[-1] == ROWS


def test_misses_shrink_the_lane_and_it_recovers_slowly():
    admission = LaneAdmission(Slo.parse("ttft=200ms,tpot=30ms"))
    engine = Engine(admission)
    engine.run(4, 10.0)
    full = engine.batch
    admission.on_requests(engine.now, 20, 5)
    assert engine.run(4, 0.05)[-1] <= full // 2
    admission.on_requests(engine.now, 20, 0)
    assert engine.run(4, 2.0)[-1] < full
    assert engine.run(4, 60.0)[-1] >= full


def test_misses_without_rows_do_not_count():
    admission = LaneAdmission(Slo.parse("ttft=200ms,tpot=30ms"))
    engine = Engine(admission)
    engine.run(ROWS, 2.0)
    admission.on_requests(engine.now, 0, 50)
    assert engine.run(ROWS, 1.0)[-1] == 0
    assert engine.run(4, 10.0)[-1] > 30


def test_one_slow_moment_shrinks_it_once():
    admission = LaneAdmission(Slo.parse("tpot=30ms"))
    engine = Engine(admission)
    engine.run(4, 10.0)
    full = engine.batch
    admission.on_steps(full, 0.06, 100)
    for _ in range(20):  # looks within a few milliseconds
        engine.now += 0.0005
        engine.batch = admission.allowed(Load(engine.now, 4, engine.batch, ROWS))
    assert full // 3 < engine.batch < full


def test_one_miss_among_many_changes_nothing():
    admission = LaneAdmission(Slo.parse("ttft=200ms,tpot=30ms"))
    engine = Engine(admission)
    engine.run(4, 10.0)
    full = engine.batch
    admission.on_requests(engine.now, 99, 1)
    assert engine.run(4, 1.0)[-1] == full


def test_slow_steps_shrink_it_before_the_line_knows():
    engine = Engine(LaneAdmission(Slo.parse("tpot=20ms")))
    engine.run(4, 20.0)
    full = engine.batch
    engine.slope *= 4  # the machine became busy
    assert engine.run(4, 1.0)[-1] <= full // 2


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 64), st.floats(0.0, 1.0), st.integers(0, 5)), max_size=50)
)
def test_any_history_gives_a_number_of_rows(history: list[tuple[int, int, float, int]]):
    admission = LaneAdmission(Slo.parse("tpot=20ms"), 0.1)
    now = 0.0
    for online, batch, seconds, missed in history:
        now += seconds
        admission.on_steps(online + batch, seconds)
        admission.on_requests(now, online, missed)
        allowed = admission.allowed(Load(now, online, batch, ROWS))
        assert 0 <= allowed <= max(0, ROWS - online)


def test_step_times_fit_a_line():
    times = StepTimes()
    for running in (1, 5, 9, 30) * 20:
        times.observe(running, 0.003 + 0.0004 * running)
    assert times.line() == pytest.approx((0.003, 0.0004))


def test_options():
    night = DayWindow.parse("22:00-06:00")
    assert [night.open(60 * hour) for hour in (21, 22, 23, 0, 5, 6)] == [False, True, True, True, True, False]
    day = DayWindow.parse("9:30-17:00")
    assert [day.open(minute) for minute in (569, 570, 1019, 1020)] == [False, True, True, False]
    assert all(DayWindow.parse("").open(minute) for minute in range(1440))
    assert read_impact("") is None and read_impact("10%") == 0.1
    for text in ("22-6", "25:00-06:00", "06:00-06:00", "x"):
        with pytest.raises(ConfigError) as wrong:
            DayWindow.parse(text)
        assert wrong.value.param == "batch_window"
    for text in ("10", "-5%", "x%", "9999%"):
        with pytest.raises(ConfigError) as bad:
            read_impact(text)
        assert bad.value.param == "batch_impact"
    assert batch_folder(ServiceConfig(batch_dir="off")) is None and batch_folder(ServiceConfig(port=0)) is None
    folder = batch_folder(ServiceConfig(port=8001), {"XDG_STATE_HOME": "/state"})
    assert str(folder) == "/state/ridgeline/batches-8001"
