"""The HTML page of a plan: what it costs, Pareto charts, what binds, and how the answer depends on each assumption."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape

from ridgeline.core.errors import ConfigError
from ridgeline.planner.cost import HOURS_PER_YEAR
from ridgeline.planner.plan_text import HEAD, cells, money, name
from ridgeline.planner.proposals import Proposal, Task
from ridgeline.planner.ranking import NAMES, Demand, Variant, evaluate, seconds_text
from ridgeline.planner.svg import Axis, Chart, Line, Points, figure, page, table

CHANGE = 0.2
"""By how much each assumption changes in the table."""


# --- what is best when an assumption changes -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assumption:
    """A changed assumption. demand, variant: with the change. price: factor of the prices of `kind`, or of all kinds if that is
    ""."""

    words: str
    demand: Callable[[Demand], Demand] = lambda demand: demand
    variant: Callable[[Variant], Variant] = lambda variant: variant
    price: float = 1.0
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """The best proposal under an assumption. usd: dollars per hour at a rate, or per thousand requests without one; copies of the
    proposal's unit."""

    proposal: Proposal
    copies: int
    usd: float


def assumptions(task: Task, proposals: Sequence[Proposal]) -> Iterator[Assumption]:
    """Each assumption smaller and larger by CHANGE."""
    for factor in (1 - CHANGE, 1 + CHANGE):
        words = f"{factor - 1:+.0%}"
        if task.demand.rate is not None:
            yield Assumption(f"requests per second {words}", demand=partial(_more, "rate", factor))
        yield Assumption(f"tokens of a prompt {words}", demand=partial(_more, "input", factor))
        yield Assumption(f"tokens of an answer {words}", demand=partial(_more, "output", factor))
        yield Assumption(
            f"memory bandwidth that is reached {words}", variant=partial(_faster, "memory_share", "kv_share", factor)
        )
        yield Assumption(
            f"FLOP/s that are reached {words}", variant=partial(_faster, "compute_share", "attention_share", factor)
        )
        for kind in dict.fromkeys(proposal.unit.offer.cluster.device.name for proposal in proposals):
            yield Assumption(f"price of {kind} {words}", price=factor, kind=kind)


def _more(part: str, factor: float, demand: Demand) -> Demand:
    value = getattr(demand, part) * factor
    return replace(demand, **{part: value if part == "rate" else max(1, round(value))})


def _faster(products: str, attention: str, factor: float, variant: Variant) -> Variant:
    """Other shares of a peak, for products and for attention."""
    separate = getattr(variant.cost, attention)
    shares = {
        products: getattr(variant.cost, products) * factor,
        attention: None if separate is None else separate * factor,
    }
    return replace(variant, cost=replace(variant.cost, **shares))


def best_under(task: Task, proposals: Sequence[Proposal], assumption: Assumption) -> Answer | None:
    """The cheapest proposal under an assumption; None if none serves the rate. The highest rates of the simulation are scaled as
    the arithmetic of means scales."""
    demand = assumption.demand(task.demand)
    answers = list[Answer]()
    for proposal in proposals:
        unit, capacity = proposal.unit, proposal.capacity / proposal.copies * _scale(proposal, assumption, demand)
        fixed = task.limits.copies
        copies = fixed or (
            proposal.copies if demand.rate is None else math.ceil(demand.rate / capacity) if capacity else 0
        )
        enough = demand.rate is None or copies * capacity >= demand.rate
        if not 0 < copies <= unit.most or not capacity or not enough:
            continue
        dearer = assumption.price if assumption.kind in ("", unit.offer.cluster.device.name) else 1.0
        usd = unit.usd_hour * copies * dearer
        if usd <= task.limits.usd_hour or math.isnan(usd):
            answers.append(
                Answer(proposal, copies, usd if demand.rate is not None else usd / 3.6 / (capacity * copies))
            )
    known = [answer for answer in answers if not math.isnan(answer.usd)]
    return min(known, key=lambda answer: answer.usd, default=answers[0] if answers else None)


def _scale(proposal: Proposal, assumption: Assumption, demand: Demand) -> float:
    """How much faster or slower a replica is under an assumption."""
    unit = proposal.unit
    cluster = replace(unit.offer.cluster, count=unit.coarse.layout.replica)
    alone = replace(demand, rate=None)
    try:
        changed = evaluate(assumption.variant(unit.coarse.variant), unit.coarse.layout, cluster, alone, unit.engine)
    except ConfigError:  # it no longer fits
        return 0.0
    same = evaluate(
        unit.coarse.variant, unit.coarse.layout, cluster, replace(proposal.task.demand, rate=None), unit.engine
    )
    return changed.capacity / same.capacity


# --- the page ------------------------------------------------------------------------------------------------------------


def plan_page(task: Task, proposals: Sequence[Proposal], starts: Sequence[str], notes: Sequence[str]) -> str:
    """A self-contained page. starts: what starts each proposal, "" where nothing does yet."""
    parts = [
        _summary(task, proposals),
        figure(cost_chart(proposals)),
        figure(energy_chart(proposals)),
        "<h2>Proposals</h2>",
        table(("", *HEAD), ((str(place), *cells(proposal)) for place, proposal in enumerate(proposals, 1))),
        "<h2>What binds</h2>",
        table(("layout", *NAMES.values(), "requests at once"), map(_binding, proposals)),
        "<h2>How the answer depends on the assumptions</h2>",
        table(
            ("assumption", "best", "$/hour" if task.demand.rate else "$/1K requests", "change"),
            _changes(task, proposals),
        ),
        "<h2>What starts it</h2>",
        *(f"<p>{place}: <code>{escape(text)}</code></p>" for place, text in enumerate(starts, 1) if text),
    ]
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    return page(f"Plan: {task.workload.name}", "\n".join(parts), "code{overflow-wrap:anywhere}")


def _summary(task: Task, proposals: Sequence[Proposal]) -> str:
    best, demand = proposals[0], task.demand
    most = "" if demand.rate else " (the most that it serves)"
    slo = f", {demand.slo}" if demand.slo else ""
    load = f"{best.rate:.4g} requests per second{most} of {demand.input:,} + {demand.output:,} tokens on average{slo}"
    month = money(best.usd_hour * HOURS_PER_YEAR / 12)
    cost = f"{month} per month; {money(best.usd_thousand)} per 1,000 requests"
    energy = f"{best.joules_token:.3g} J per token, {best.carbon_g_request:.3g} g of CO2 per request"
    bases = ", ".join(sorted({proposal.unit.coarse.variant.basis for proposal in proposals}))
    return (
        f"<p>{escape(load)}: <b>{escape(name(best))}</b> at <b>{money(best.usd_hour)} per hour</b>, {cost}, {energy}. "
        f"{escape(best.verdict or 'Objectives and limits are met')}. Figures are predictions: {bases}.</p>"
    )


def _binding(proposal: Proposal) -> tuple[str, ...]:
    coarse = proposal.unit.coarse
    shares = (f"{coarse.share(part):.0%}" for part in NAMES)
    return name(proposal), *shares, f"{coarse.batch:,} of {coarse.memory.requests:,}"


def _changes(task: Task, proposals: Sequence[Proposal]) -> Iterator[tuple[str, ...]]:
    base = best_under(task, proposals, Assumption("as planned"))
    for assumption in (Assumption("as planned"), *assumptions(task, proposals)):
        answer = best_under(task, proposals, assumption)
        if answer is None or base is None:
            yield assumption.words, "none of these", "", ""
            continue
        change = f"{answer.usd / base.usd - 1:+.0%}" if base.usd == base.usd else ""
        yield assumption.words, name(replace(answer.proposal, copies=answer.copies)), money(answer.usd), change


def pareto(points: Sequence[tuple[float, float]], *, most_y: bool = False) -> list[tuple[float, float]]:
    """The points that no other one beats in both, by x, less being better. most_y: more y is better."""
    front = list[tuple[float, float]]()
    for x, y in sorted(points, key=lambda point: (point[0], -point[1] if most_y else point[1])):
        if not front or (y > front[-1][1] if most_y else y < front[-1][1]):
            front.append((x, y))
    return front


def cost_chart(proposals: Sequence[Proposal]) -> Chart:
    """Dollars per thousand requests against the 99th percentile of the time to first token. Without prices: devices."""
    priced = all(proposal.usd_thousand == proposal.usd_thousand for proposal in proposals)
    points = [
        (proposal.usd_thousand if priced else float(proposal.devices), proposal.ttft.p99 * 1e3, _label(place, proposal))
        for place, proposal in enumerate(proposals, 1)
    ]
    return _chart(
        "cost against p99", points, "$ per 1,000 requests" if priced else "devices", "TTFT p99, ms", proposals
    )


def energy_chart(proposals: Sequence[Proposal]) -> Chart:
    """Joules per token against goodput per device-hour."""
    points = [
        (proposal.joules_token, proposal.goodput / proposal.devices, _label(place, proposal))
        for place, proposal in enumerate(proposals, 1)
    ]
    return _chart(
        "energy against goodput",
        points,
        "J per output token",
        "goodput of a device, requests/s",
        proposals,
        most_y=True,
    )


def _label(place: int, proposal: Proposal) -> str:
    return f"{place}: {name(proposal)}, TTFT p99 {seconds_text(proposal.ttft.p99)}"


def _chart(
    title: str,
    points: Sequence[tuple[float, float, str]],
    x: str,
    y: str,
    proposals: Sequence[Proposal],
    most_y: bool = False,
) -> Chart:
    """Proposals that meet objectives and limits, those that do not, and the Pareto front of the former."""
    met = [point for point, proposal in zip(points, proposals, strict=True) if not proposal.verdict]
    missed = [point for point, proposal in zip(points, proposals, strict=True) if proposal.verdict]
    front = Line("Pareto front", tuple(pareto([(px, py) for px, py, _ in met], most_y=most_y)), color=1, dashed=True)
    groups = [Points("meets objectives", tuple(met)), Points("misses them", tuple(missed), color=3)]
    marks = tuple(group for group in groups if group.points)
    across, up = Axis.around([point[0] for point in points], x), Axis.around([point[1] for point in points], y)
    return Chart(title, across, up, (front, *marks) if len(front.points) > 1 else marks)
