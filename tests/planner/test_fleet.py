"""Fleets in virtual time: the router and the autoscaler over replicas with the real scheduler."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import ConfigError
from ridgeline.core.slo import Slo
from ridgeline.core.workload import RequestSpec, Workload, arrivals, synthetic
from ridgeline.planner.fleet import Fleet, Loss, simulate_fleet
from ridgeline.planner.simulate import serve
from ridgeline.service.autoscale import Scaling

from .test_simulate import SERVER


def random_times(count: int, rate: float, input_len: int = 512, output_len: int = 64) -> Workload:
    made = synthetic(count, (str(input_len), str(output_len)), 0, 0)
    return made.at(arrivals(count, rate, 1.0, 3))


def conversations(count: int, turns: int, apart_s: float) -> Workload:
    """Conversations that take turns: each turn has the blocks of the one before, and one more."""
    requests = [
        RequestSpec(
            at_s=apart_s * (turn * count + talk),
            input=64 * (turn + 4),
            output=8,
            blocks=tuple(1000 * talk + block for block in range(turn + 4)),
            block=64,
        )
        for turn in range(turns)
        for talk in range(count)
    ]
    return Workload("conversations", tuple(requests), timed=True)


def test_a_fleet_of_one_is_a_server() -> None:
    load = random_times(40, 20.0)
    fleet = simulate_fleet(Fleet(SERVER), load)
    alone = serve(SERVER, load)
    assert sorted(fleet.outcomes.values()) == sorted(alone.outcomes)
    assert fleet.busy_s == alone.device_s and fleet.seconds == pytest.approx(alone.seconds)
    assert fleet.replica_s == pytest.approx(fleet.seconds) and fleet.attainment(Slo.parse("e2e=100s")) == 1.0


def test_more_replicas_are_faster() -> None:
    load = random_times(60, 200.0, 2048)
    single, four = (simulate_fleet(Fleet(SERVER, replicas, "least-work"), load).figures for replicas in (1, 4))
    assert four.slow_ttft_s < single.slow_ttft_s / 2 and four.tokens_s > 1.5 * single.tokens_s


def test_conversations_return_to_their_prefixes() -> None:
    load = conversations(13, 6, 0.5)
    hits = {policy: simulate_fleet(Fleet(SERVER, 4, policy), load).hit_rate for policy in ("prefix", "round-robin")}
    repeated = 1 - sum(request.input for request in load.requests[:13]) / sum(r.input for r in load.requests)
    assert hits["prefix"] > 0.75 * repeated > 2 * hits["round-robin"]


def test_requests_wait_in_the_router_and_are_refused_beyond_its_queue() -> None:
    load = random_times(30, 1000.0)
    waiting = simulate_fleet(Fleet(SERVER, limit=2), load)
    assert len(waiting.outcomes) == 30 and not waiting.refused
    bounded = simulate_fleet(Fleet(SERVER, limit=2, max_waiting=5), load)
    assert len(bounded.outcomes) + bounded.refused == 30 and bounded.refused > 10


def test_a_lost_replica_cuts_answers_and_its_other_requests_go_elsewhere() -> None:
    load = random_times(60, 60.0, 2048, 256)
    whole = simulate_fleet(Fleet(SERVER, 2), load)
    lossy = simulate_fleet(Fleet(SERVER, 2, losses=[Loss(0.5, down_s=5.0)]), load)
    assert lossy.failed and lossy.retried and len(lossy.outcomes) + lossy.failed == 60
    assert lossy.most == 2 and lossy.figures.e2e_s > whole.figures.e2e_s


def test_the_only_replica_is_lost_and_requests_wait_for_the_next() -> None:
    load = random_times(20, 10.0)
    lossy = simulate_fleet(Fleet(SERVER, losses=[Loss(0.5, down_s=10.0)]), load)
    assert not lossy.refused and len(lossy.outcomes) + lossy.failed == 20
    assert lossy.figures.slow_ttft_s > 8.0


def test_the_autoscaler_follows_a_burst() -> None:
    """Quiet, a burst, quiet again: replicas come after their cold start and leave when they are not needed."""
    quiet, burst = random_times(30, 0.5, 512, 16), random_times(400, 20.0, 4096, 16)
    times = [request.at_s for request in quiet.requests]
    middle = [times[-1] + request.at_s for request in burst.requests]
    late = [middle[-1] + 40 * number for number in range(1, 12)]
    requests = [*quiet.requests, *burst.requests, *quiet.requests[:11]]
    load = Workload("burst", tuple(requests), timed=True).at([*times, *middle, *late])
    fixed = Fleet(SERVER)
    capacity = fixed.capacity
    scaling = Scaling(1, 6, capacity.prefill_tokens_s / 8, 64, ttft_s=1.0, cold_start_s=5.0, calm_s=60.0, idle_s=1e9)
    scaled = simulate_fleet(replace(fixed, scaling=scaling), load)
    assert len(scaled.outcomes) == len(requests) and scaled.most > 1
    grown, shrunk = scaled.decisions[0], scaled.decisions[-1]
    assert grown[1].wanted > 1 and times[-1] < grown[0] < middle[-1]
    assert shrunk[1].wanted == 1 and shrunk[0] > middle[-1]
    assert scaled.seconds < scaled.replica_s < 6 * scaled.seconds


@settings(deadline=None, max_examples=20)
@given(
    times=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=20).map(sorted),
    shapes=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 40)), min_size=20, max_size=20),
    replicas=st.integers(1, 3),
    limit=st.integers(1, 8),
    losses=st.lists(st.tuples(st.floats(0.0, 4.0), st.integers(0, 2), st.floats(0.0, 3.0)), max_size=3).map(sorted),
    policy=st.sampled_from(("prefix", "least-work", "round-robin")),
)
def test_every_request_ends_once(
    times: list[float],
    shapes: list[tuple[int, int]],
    replicas: int,
    limit: int,
    losses: list[tuple[float, int, float]],
    policy: str,
) -> None:
    requests = [RequestSpec(at, *shape) for at, shape in zip(times, shapes, strict=False)]
    fleet = Fleet(SERVER, replicas, policy, limit, losses=[Loss(*loss) for loss in losses])
    figures = simulate_fleet(fleet, Workload("random", tuple(requests), timed=True))
    assert len(figures.outcomes) + figures.refused + figures.failed == len(requests)
    for number, outcome in figures.outcomes.items():
        assert outcome.output == requests[number].output and 0 < outcome.ttft_s <= outcome.e2e_s
    assert simulate_fleet(fleet, Workload("random", tuple(requests), timed=True)).outcomes == figures.outcomes


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(ConfigError, match="--route is 'best': use prefix"):
        simulate_fleet(Fleet(SERVER, policy="best"), random_times(1, 1.0))
    with pytest.raises(ConfigError, match="does not fit into"):
        simulate_fleet(Fleet(SERVER), random_times(1, 1.0, 100_000))


def test_a_fleet_is_not_shrunk_before_its_load_was_seen() -> None:
    """The first looks have no past: what runs is kept until `calm_s` has shown that fewer are enough."""
    load = random_times(300, 2.0, 512, 16)
    scaling = Scaling(1, 6, Fleet(SERVER).capacity.prefill_tokens_s, 64, calm_s=60.0, idle_s=1e9)
    figures = simulate_fleet(Fleet(SERVER, 4, scaling=scaling), load)
    (at, decision), *_ = figures.decisions
    assert decision.wanted == 1 and at >= load.requests[0].at_s + 60.0
