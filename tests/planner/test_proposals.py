"""Proposals of a plan: divided replicas in simulations, objectives of a sample, copies, and finalists of the search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.cost import step_work
from ridgeline.core.slo import Slo
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope
from ridgeline.core.workload import arrivals, synthetic
from ridgeline.hardware.serving import cost_model
from ridgeline.planner import search as searching
from ridgeline.planner.cluster import read_cluster
from ridgeline.planner.layout_times import Times
from ridgeline.planner.layouts import Layout, replica
from ridgeline.planner.proposals import Limits, Offer, Task, Unit, confirmed, grows, highest, keeps, missed, propose
from ridgeline.planner.ranking import Demand, Variant
from ridgeline.planner.search import Scope, SearchResult, search
from ridgeline.planner.servers import divided_cost, replica_server
from ridgeline.planner.simulate import Outcome

from .test_simulate import SPEC

CLUSTER = read_cluster("8xh100")
COST = cost_model(CLUSTER.device, SPEC)
REQUESTS = synthetic(60, ("200", "8"), 0, 0).at(arrivals(60, 1.0, 1.0, 0))


@pytest.mark.parametrize(
    "layout", [Layout(), Layout(tensor=2), Layout(tensor=8), Layout(context=2), Layout(tensor=2, context=2)]
)
def test_a_divided_replica_is_simulated_with_the_times_of_the_arithmetic(layout: Layout) -> None:
    made = replica(SPEC, layout, CLUSTER, 2304, EngineConfig())
    server, times = replica_server(made, COST, EngineConfig(), 2048), Times(made, COST)
    decode = step_work(SPEC, [(1024, 1)] * 32)
    assert server.cost.step_s(decode) == pytest.approx(times.decode(32, 1024).total, rel=1e-3)
    prompt = step_work(SPEC, [(0, 2048)])
    assert server.cost.step_s(prompt) == pytest.approx(times.prefill(2048)[0], rel=0.01) and server.outside_s == 0


def test_stages_of_a_pipeline_overlap_and_delay_the_first_token() -> None:
    made = replica(SPEC, Layout(pipeline=2), CLUSTER, 2304, EngineConfig())
    server, times = replica_server(made, COST, EngineConfig(), 2048), Times(made, COST)
    prompt = step_work(SPEC, [(0, 2048)])
    assert server.cost.step_s(prompt) + server.outside_s == pytest.approx(times.prefill(2048)[0], rel=0.01)
    assert server.cost.step_s(prompt) < 0.6 * times.prefill(2048)[0]
    assert server.cost.step_s(step_work(SPEC, [(1024, 1)] * 32)) == pytest.approx(
        times.decode(32, 1024).total, rel=1e-3
    )


@pytest.mark.parametrize(("tensor", "tokens_s"), [(2, 69), (4, 138), (8, 276)])
def test_the_ceiling_of_a_70b_on_several_h200(tensor: int, tokens_s: float) -> None:
    """One sequence at the published bandwidth, without the time of collectives."""
    layer = LayerSpec(64, 8, 128, 28_672, Rope(500_000.0, 128))
    spec = ModelSpec("LlamaForCausalLM", 128_256, 8192, (layer,) * 80, 131_072)
    cluster = read_cluster(f"{tensor}xh200")
    cost = replace(cost_model(cluster.device, spec), memory_share=1.0, kv_share=1.0, overhead_s=0.0)
    made = replica(spec, Layout(tensor=tensor), cluster, 2048, EngineConfig())
    divided = divided_cost(made, cost)
    assert divided.links is not None
    seconds = divided.decode_s([1]) - divided.links.rows(made.stages[0], 1)
    assert 1 / seconds == pytest.approx(tokens_s, rel=0.02)


def outcomes(ttfts: Sequence[float]) -> list[Outcome]:
    return [Outcome(ttft, 0.02, ttft + 0.2, 0.02, 11) for ttft in ttfts]


def test_objectives_of_a_sample() -> None:
    late = outcomes([0.1] * 94 + [0.5] * 6)
    assert missed(Slo.parse("ttft=200ms"), late) == "" and missed(Slo(), late) == ""
    assert missed(Slo.parse("ttft=200ms,attain>=0.95"), late).startswith("attain>=0.95: a share of 0.94")
    assert missed(Slo.parse("p95(ttft)<=200ms"), late).startswith("p95(ttft)<=200ms")
    assert missed(Slo.parse("p90(ttft)<=200ms & tpot<=30ms"), late) == ""
    assert missed(Slo.parse("tpot=10ms"), late) == "0% within tpot=10ms, 90% required"


def test_a_queue_that_grows() -> None:
    assert grows(outcomes([0.1 + 0.02 * number for number in range(100)]), 10.0)
    assert not grows(outcomes([0.1 + 0.05 * (number % 3) for number in range(100)]), 10.0)


@cache
def plan(rate: float | None, limits: Limits = Limits(), count: int = 8) -> SearchResult:
    """The best single devices for short requests."""
    offer = Offer(replace(CLUSTER, count=count), 2.0, owned=True)
    task = Task(Demand(200, 8, rate, Slo.parse("ttft=1s")), REQUESTS, EngineConfig(), limits, sample=60)
    single = Scope(lambda _: [Variant(SPEC, COST)], lambda layout: layout.replica == 1, finalists=1)
    return search(task, [offer], single)


def test_a_search_says_what_it_does() -> None:
    """Rates are searched for minutes before the first simulation by the scheduler."""
    said = list[str]()
    task = Task(Demand(200, 8, 1.0, Slo.parse("ttft=1s")), REQUESTS, EngineConfig(), sample=60)
    scope = Scope(lambda _: [Variant(SPEC, COST)], lambda layout: layout.replica == 1, finalists=1, say=said.append)
    search(task, [Offer(replace(CLUSTER, count=1), 2.0, owned=True)], scope)
    assert said[0].startswith("searching the highest rate of ") and CLUSTER.device.name in said[0]
    assert said[-1].startswith("simulating ") and CLUSTER.device.name in said[-1]


def test_as_few_copies_as_the_rate_needs() -> None:
    best = plan(None).proposals[0]
    assert best.copies == 8 and best.rate == best.capacity
    each = best.capacity / 8
    needed = plan(2.5 * each).proposals[0]
    assert needed.copies in (3, 4) and needed.devices == needed.copies and not needed.verdict
    assert needed.usd_hour == 2.0 * needed.copies and needed.goodput == pytest.approx(needed.good * 2.5 * each)
    assert needed.lane_tokens_s == pytest.approx((needed.capacity - needed.rate) * 8)


def test_what_a_token_and_a_request_cost() -> None:
    """$2 an hour at 100 tokens a second are $5.556 per million; answers of 200 tokens cost $1.11 per thousand."""
    best = plan(None, count=1).proposals[0]
    demand = replace(best.task.demand, output=200)
    slow = replace(best, rate=0.5, task=replace(best.task, demand=demand), watts=700.0)
    assert slow.usd_million == pytest.approx(5.556, abs=1e-3) and slow.usd_thousand == pytest.approx(1.11, abs=2e-3)
    assert slow.joules_token == 7.0 and slow.carbon_g_request == pytest.approx(1400 * 1.2 / 3.6e6 * 450)


def test_what_does_not_suffice_says_so() -> None:
    each = plan(None, count=1).proposals[0].capacity
    short = plan(20 * each).proposals[0]
    assert short.copies == 8 and "requests/s < " in short.verdict and short.headroom < 0 and short.lane_share == 0
    assert "needs 9 devices of 8" in plan(each, Limits(copies=9)).proposals[0].verdict
    assert "W of design power > 1,000 W" in plan(2.5 * each, Limits(watts=1000)).proposals[0].verdict
    assert plan(None, Limits(usd_hour=7)).proposals[0].copies == 3 and math.isinf(Limits().usd_hour)


def test_surrogates_rank_layouts_as_the_scheduler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same order, chunks, batches and highest rates as when the scheduler simulates every rate of every layout."""
    requests = synthetic(60, ("800", "20"), 0, 0).at(arrivals(60, 1.0, 1.0, 0))
    objectives = Slo.parse("p99(ttft)<=300ms,tpot=30ms")
    task = Task(Demand(800, 20, 60.0, objectives), requests, EngineConfig(), sample=60)
    offer = Offer(replace(CLUSTER, count=8), 2.0, owned=True)
    scope = Scope(lambda _: [Variant(SPEC, COST)], lambda layout: layout.replica <= 2, finalists=3)
    fast = search(task, [offer], scope).proposals
    monkeypatch.setattr(
        searching, "_estimated", lambda task, unit, say: propose(task, unit, highest(task, unit, fast=False))
    )
    monkeypatch.setattr(searching, "_simulated", lambda task, estimate, say: estimate)
    slow = search(task, [offer], scope).proposals
    chosen = [[(each.unit.coarse.layout, each.unit.engine) for each in proposals] for proposals in (fast, slow)]
    assert chosen[0] == chosen[1] and len(chosen[0]) == 3
    assert [each.capacity for each in fast] == pytest.approx([each.capacity for each in slow], rel=0.05)
    assert [each.verdict for each in fast] == [each.verdict for each in slow]


def test_few_simulations_are_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposal needs one, and one more for the rate that it confirms if none is given."""
    runs: list[bool] = []
    served = Unit.served

    def counted(unit: Unit, *given: Any, **named: Any) -> list[Outcome]:
        runs.append(bool(named.get("fast", given[2:] == (True,))))
        return served(unit, *given, **named)

    monkeypatch.setattr(Unit, "served", counted)
    plan.cache_clear()
    best = plan(None).proposals[0]
    assert runs.count(False) == 2 and runs.count(True) > 8
    runs.clear()
    plan(2.5 * best.capacity / 8)
    assert runs.count(False) <= 2 and runs.count(True) > 8
    plan.cache_clear()


def test_a_rate_that_the_scheduler_does_not_keep_is_lowered() -> None:
    best = plan(None, count=1).proposals[0]
    lowered = confirmed(best.task, best.unit, 1.1 * best.capacity)
    assert 0.9 * best.capacity < lowered <= 1.05 * best.capacity
    assert confirmed(best.task, best.unit, 3 * best.capacity) == pytest.approx(best.capacity, rel=0.1)
    unit = plan(1.0).proposals[0].unit
    task = Task(Demand(200, 8), REQUESTS, EngineConfig(), sample=60)
    assert not keeps(task, unit, 20 * unit.coarse.capacity) and keeps(task, unit, 0.5 * unit.coarse.capacity)
    assert highest(task, unit) <= max(unit.coarse.capacity, 60 / (4 * unit.coarse.e2e_s)) * 1.05
