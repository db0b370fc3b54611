"""The page of a plan: its charts, what binds, and what is best when an assumption changes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.slo import Slo
from ridgeline.planner.plan_page import Assumption, assumptions, best_under, cost_chart, pareto, plan_page
from ridgeline.planner.proposals import Offer, Proposal, Task
from ridgeline.planner.ranking import Demand, Variant
from ridgeline.planner.search import Scope, search
from ridgeline.planner.svg import Line, Points

from .test_proposals import CLUSTER, COST, REQUESTS
from .test_simulate import SPEC

TASK = Task(Demand(200, 8, 300.0, Slo.parse("ttft=1s")), REQUESTS, EngineConfig(), sample=60)
OFFER = Offer(CLUSTER, 2.0, "2026-11-27", owned=True)
SCOPE = Scope(lambda _: [Variant(SPEC, COST)], lambda layout: layout.pipeline == layout.context == 1, finalists=2)


@pytest.fixture(scope="module")
def proposals() -> Sequence[Proposal]:
    return search(TASK, [OFFER], SCOPE).proposals


def test_the_front_of_what_nothing_beats() -> None:
    points = [(1.0, 9.0), (2.0, 5.0), (3.0, 6.0), (4.0, 1.0), (4.0, 2.0)]
    assert pareto(points) == [(1.0, 9.0), (2.0, 5.0), (4.0, 1.0)]
    assert pareto(points, most_y=True) == [(1.0, 9.0)]
    assert pareto([(1.0, 2.0), (2.0, 5.0), (3.0, 4.0)], most_y=True) == [(1.0, 2.0), (2.0, 5.0)]


def test_charts_have_every_proposal(proposals: Sequence[Proposal]) -> None:
    chart = cost_chart(proposals)
    drawn = sum(len(mark.points) for mark in chart.marks if isinstance(mark, Points))
    assert drawn == len(proposals) == 2 and all(isinstance(mark, Points | Line) for mark in chart.marks)
    free = [replace(each, unit=replace(each.unit, offer=replace(OFFER, usd_hour=float("nan")))) for each in proposals]
    assert cost_chart(free).x.label == "devices"


def test_assumptions_change_the_answer_as_far_as_they_matter(proposals: Sequence[Proposal]) -> None:
    made = {assumption.words: best_under(TASK, proposals, assumption) for assumption in assumptions(TASK, proposals)}
    base = best_under(TASK, proposals, Assumption("as planned"))
    assert base is not None and base.usd == proposals[0].usd_hour
    dearer, cheaper = (made[f"price of NVIDIA H100 SXM {sign}20%"] for sign in "+-")
    assert dearer is not None and cheaper is not None
    assert (dearer.usd, cheaper.usd) == (1.2 * base.usd, 0.8 * base.usd)
    for part in ("requests per second", "tokens of a prompt", "tokens of an answer"):
        more, fewer = made[f"{part} +20%"], made[f"{part} -20%"]
        assert more is not None and fewer is not None and fewer.usd <= base.usd <= more.usd, part
    faster = made["FLOP/s that are reached +20%"]
    assert len(made) == 12 and faster is not None and faster.usd <= base.usd


def test_an_assumption_under_which_nothing_suffices(proposals: Sequence[Proposal]) -> None:
    huge = Assumption("a hundred times as many", demand=lambda demand: replace(demand, rate=30_000.0))
    assert best_under(TASK, proposals, huge) is None


def test_the_page_is_self_contained(proposals: Sequence[Proposal]) -> None:
    page = plan_page(TASK, proposals, ["ridgeline serve <model>", ""], ["A note."])
    assert page.count("<svg") == 2 and "What binds" in page and "How the answer depends" in page
    assert "cost against p99" in page and "energy against goodput" in page and "ridgeline serve &lt;model&gt;" in page
    assert not re.search(r"""(src|href)=["']""", page) and "uncalibrated" in page and "A note." in page
