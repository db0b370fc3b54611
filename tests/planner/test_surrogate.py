"""The surrogate of a replica against the real scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import ConfigError
from ridgeline.core.workload import RequestSpec, Workload
from ridgeline.engine.policy import Limits
from ridgeline.planner.fleet import Fleet, FleetFigures, Loss, simulate_fleet
from ridgeline.planner.simulate import Server

from .test_fleet import conversations, random_times
from .test_simulate import SERVER


def both(fleet: Fleet, load: Workload) -> tuple[FleetFigures, FleetFigures]:
    return simulate_fleet(fleet, load), simulate_fleet(replace(fleet, surrogate=True), load)


@pytest.mark.parametrize("flying", [0, 1])
def test_a_lone_request_takes_the_same_time(flying: int) -> None:
    server = replace(SERVER, steps_in_flight=flying, host_s=0.002)
    for shape in ((100, 1), (100, 50), (12_000, 20)):
        real, fast = both(Fleet(server), Workload("single", (RequestSpec(0.0, *shape),), timed=True))
        expected, got = real.outcomes[0], fast.outcomes[0]
        assert got.ttft_s == pytest.approx(expected.ttft_s, rel=0.01)
        if shape[1] > 1 and flying:  # without a step in flight each step waits for the host, which a jump leaves out
            assert got.tpot_s == pytest.approx(expected.tpot_s, rel=0.01)


def test_a_busy_replica_has_the_same_percentiles() -> None:
    load = random_times(300, 20.0, 1500, 120)
    real, fast = both(Fleet(SERVER), load)
    for name in ("ttft_s", "slow_ttft_s", "tpot_s", "e2e_s", "tokens_s"):
        assert getattr(fast.figures, name) == pytest.approx(getattr(real.figures, name), rel=0.05), name
    assert fast.busy_s == pytest.approx(real.busy_s, rel=0.02)


def test_a_fleet_returns_to_prefixes_as_the_real_ones_do() -> None:
    real, fast = both(Fleet(SERVER, 4), conversations(13, 6, 0.5))
    assert fast.hit_rate == pytest.approx(real.hit_rate, abs=0.03) and fast.hit_rate > 0.4


def test_rows_and_cache_bound_what_runs() -> None:
    load = random_times(40, 1000.0, 900, 100)
    for server in (replace(SERVER, limits=Limits(8, 8448, 16_384)), replace(SERVER, pages=200)):
        real, fast = both(Fleet(server), load)
        assert fast.seconds == pytest.approx(real.seconds, rel=0.1)
        assert fast.seconds > 1.5 * simulate_fleet(Fleet(SERVER, surrogate=True), load).seconds


@settings(deadline=None, max_examples=30)
@given(
    times=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=20).map(sorted),
    shapes=st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 40)), min_size=20, max_size=20),
    replicas=st.integers(1, 3),
    losses=st.lists(st.tuples(st.floats(0.0, 4.0), st.integers(0, 2), st.floats(0.0, 3.0)), max_size=3).map(sorted),
    flying=st.integers(0, 1),
)
def test_every_request_ends_once(
    times: list[float],
    shapes: list[tuple[int, int]],
    replicas: int,
    losses: list[tuple[float, int, float]],
    flying: int,
) -> None:
    requests = tuple(RequestSpec(at, *shape) for at, shape in zip(times, shapes, strict=False))
    server: Server = replace(SERVER, steps_in_flight=flying)
    fleet = Fleet(server, replicas, losses=[Loss(*loss) for loss in losses], surrogate=True)
    figures = simulate_fleet(fleet, Workload("random", requests, timed=True))
    assert len(figures.outcomes) + figures.refused + figures.failed == len(requests)
    for number, outcome in figures.outcomes.items():
        assert outcome.output == requests[number].output and 0 < outcome.ttft_s <= outcome.e2e_s


def test_what_can_never_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit a replica"):
        simulate_fleet(Fleet(SERVER, surrogate=True), random_times(1, 1.0, 100_000))
