"""Proposals of a plan: what is replicated, how often, and its predicted figures from a simulation of a sample of the workload."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from ridgeline.core.config import EngineConfig
from ridgeline.core.cost import WorkMeter
from ridgeline.core.slo import Slo
from ridgeline.core.workload import Workload
from ridgeline.planner.cluster import Cluster
from ridgeline.planner.cost import usd_per_unit
from ridgeline.planner.energy import JOULES_PER_KWH
from ridgeline.planner.fleet import Fleet, simulate_fleet
from ridgeline.planner.links import LINE_SHARES
from ridgeline.planner.power import Use, watts
from ridgeline.planner.ranking import Demand, Ranked
from ridgeline.planner.simulate import Outcome, Server, quantile
from ridgeline.planner.split import (
    ATTAIN,
    LOWEST_RATE,
    PRECISION,
    Ratio,
    good_share,
    highest_rate,
    latencies,
    serve_split,
)
from ridgeline.planner.surrogate import Surrogate

JOINT = Ratio(1, 0)
LEAST, MOST = 120, 1000
"""Requests of a trial."""
SPAN_S, SPANS = 6.0, 4.0
"""A trial has so many seconds of arrivals at least, and so many times the duration of a request: the number of requests at a server
must have settled."""
WARM_UP = 0.25
"""Share of the first requests that is not counted: the servers begin empty."""
GROWTH, RATIO = 0.05, 1.25
"""If times to first token grow by more seconds in a second of arrivals, and by more than this ratio, the queue grows without
end."""
TRIALS = 4
"""Rates that the scheduler tries below the one that surrogates found."""
FACTOR = 1.3
"""Between the first rates that are tried, because the arithmetic is about right."""
SIMULATED = 2
"""Copies that are simulated at most; with their part of the rate they stand for all."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Devices of one kind that a plan may use: at most cluster.count. usd_hour: of one device; NaN: unknown. priced: where the
    price comes from, with its date. owned: they are there already."""

    cluster: Cluster
    usd_hour: float
    priced: str = ""
    owned: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a plan. copies: exactly so many replicas; None: as few as the rate needs."""

    usd_hour: float = math.inf
    watts: float = math.inf
    copies: int | None = None


@dataclass(frozen=True, slots=True)
class Site:
    """Assumptions on power. pue: power of the site / power of its machines. carbon_g_kwh: grams of CO2 per kWh of the grid."""

    pue: float = 1.2
    carbon_g_kwh: float = 450.0


@dataclass(frozen=True, slots=True)
class Task:
    """What to plan for. demand: mean lengths, rate and objectives. workload: requests with times, which are scaled to rates.
    sample: requests of a simulation at most."""

    demand: Demand
    workload: Workload
    engine: EngineConfig
    limits: Limits = Limits()
    site: Site = Site()
    sample: int = MOST


@dataclass(frozen=True, slots=True)
class Unit:
    """What a plan copies: a replica, or engines for prompts and engines for the other tokens.

    coarse: the arithmetic of one replica, whose layout and number format it has. engine: with its chunk and batch sizes. server: of
    each engine.
    """

    offer: Offer
    coarse: Ranked
    engine: EngineConfig
    server: Server
    ratio: Ratio = JOINT

    @property
    def devices(self) -> int:
        return self.coarse.layout.replica * self.ratio.devices

    @property
    def usd_hour(self) -> float:
        return self.offer.usd_hour * self.devices

    @property
    def most(self) -> int:
        """Copies that the offered devices allow."""
        return self.offer.cluster.count // self.devices

    def served(self, workload: Workload, copies: int = 1, fast: bool = False) -> list[Outcome]:
        """Outcomes in the order of arrival, without the first ones. fast: of surrogates, if there are any for this unit."""
        if self.ratio.decode:
            outcomes = serve_split(self.server, workload, self.ratio).outcomes
        else:
            surrogate = fast and Surrogate.stands_for(self.server)
            fleet = Fleet(self.server, copies, limit=self.server.limits.rows, surrogate=surrogate)
            by_number = simulate_fleet(fleet, workload).outcomes
            outcomes = [by_number[number] for number in sorted(by_number)]
        return outcomes[int(WARM_UP * len(outcomes)) :]


def apart(unit: Unit, ratio: Ratio) -> Unit:
    """The unit with prefill apart from decode, over the link between neighbouring devices."""
    link = unit.offer.cluster.fabric.levels[0].link
    server = replace(unit.server, link=link.bytes_per_s * LINE_SHARES[link.kind])
    return replace(unit, server=server, ratio=ratio)


def missed(slo: Slo, outcomes: Sequence[Outcome]) -> str:
    """The objective that outcomes miss; "" if none. Without requirements on a window a share ATTAIN must be good."""
    good = good_share(slo, outcomes)
    if not slo.of_windows:
        return "" if good >= ATTAIN else f"{good:.0%} within {slo}, {ATTAIN:.0%} required"
    within = [slo.within(latencies(outcome)) for outcome in outcomes]
    broken = slo.broken([fmean(column) for column in zip(*within, strict=True)], good)
    return broken[0] if broken else ""


def grows(outcomes: Sequence[Outcome], span_s: float) -> bool:
    """Whether times to first token grow throughout the arrivals, because requests come faster than they are served."""
    third = len(outcomes) // 3
    early, late = (fmean(outcome.ttft_s for outcome in part) for part in (outcomes[:third], outcomes[-third:]))
    return late > RATIO * early and late - early > GROWTH * span_s * 2 / 3


def arriving(task: Task, unit: Unit, rate: float, copies: int = 1) -> Workload:
    """The requests of a trial at a rate."""
    span = max(SPAN_S, SPANS * unit.coarse.e2e_s)
    count = min(task.sample, max(LEAST * min(copies, 2), round(rate * span)))
    return task.workload.first(count).at_rate(rate)


def highest(task: Task, unit: Unit, fast: bool = True) -> float:
    """The highest rate of one copy that keeps the objectives, in requests per second. fast: see Unit.served."""
    first = max(LOWEST_RATE, unit.coarse.capacity * unit.ratio.devices)
    return highest_rate(lambda rate: keeps(task, unit, rate, fast), first, FACTOR)


def keeps(task: Task, unit: Unit, rate: float, fast: bool = False) -> bool:
    """Whether one copy keeps the objectives at a rate. Above the rate of arithmetic, only if the sample is long enough to show it:
    a server that answers a burst does not answer as many requests all the time."""
    shown = task.sample / (SPANS * unit.coarse.e2e_s)
    if rate > max(shown, unit.coarse.capacity * unit.ratio.devices, LOWEST_RATE):
        return False
    load = arriving(task, unit, rate)
    outcomes = unit.served(load, fast=fast)
    return not missed(task.demand.slo, outcomes) and not grows(outcomes, load.span_s * (1 - WARM_UP))


def confirmed(task: Task, unit: Unit, rate: float) -> float:
    """The rate that surrogates found, or the next lower one that the scheduler keeps, too."""
    for _ in range(TRIALS):
        if not rate or keeps(task, unit, rate):
            return rate
        rate /= 1 + PRECISION
    return highest(task, unit, fast=False)


@dataclass(frozen=True, slots=True)
class Tail:
    """Percentiles of a latency in seconds."""

    p50: float
    p90: float
    p99: float

    @staticmethod
    def of(values: Sequence[float]) -> Tail:
        ordered = sorted(value for value in values if value == value)
        return Tail(*(quantile(ordered, share) for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class Proposal:
    """A layout with its predicted figures.

    rate: requests per second. capacity: the highest rate of all copies that keeps the objectives. good: share of requests within
    the limits. watts: mean power of all devices at the rate, without cooling. verdict: the limit or objective that is missed, or
    "".
    """

    unit: Unit
    copies: int
    rate: float
    capacity: float
    ttft: Tail
    tpot: Tail
    e2e: Tail
    good: float
    watts: float
    verdict: str
    task: Task = field(repr=False, compare=False)

    @property
    def devices(self) -> int:
        return self.unit.devices * self.copies

    @property
    def usd_hour(self) -> float:
        return self.unit.usd_hour * self.copies

    @property
    def goodput(self) -> float:
        """Requests per second within the objectives."""
        return self.good * self.rate

    @property
    def usd_million(self) -> float:
        """Dollars per million output tokens."""
        return usd_per_unit(self.usd_hour, self.rate * self.task.demand.output) * 1e6

    @property
    def usd_thousand(self) -> float:
        """Dollars per thousand requests."""
        return usd_per_unit(self.usd_hour, self.rate) * 1e3

    @property
    def joules_token(self) -> float:
        """Energy of the devices per output token, without cooling."""
        return self.watts / (self.rate * self.task.demand.output)

    @property
    def carbon_g_request(self) -> float:
        """Grams of CO2 per request, with cooling."""
        return self.watts * self.task.site.pue / self.rate / JOULES_PER_KWH * self.task.site.carbon_g_kwh

    @property
    def headroom(self) -> float:
        """By how much the rate may grow: 0.5 is by half."""
        return self.capacity / self.rate - 1

    @property
    def lane_share(self) -> float:
        """Share of what the devices could serve within the objectives that is left for batch work."""
        return max(0.0, 1 - self.rate / self.capacity) if self.capacity else 0.0

    @property
    def lane_tokens_s(self) -> float:
        """Output tokens per second of batch work in that share, if its requests have the same lengths."""
        return max(0.0, self.capacity - self.rate) * self.task.demand.output


def use_of(unit: Unit, demand: Demand, rate: float, batch: float) -> Use:
    """Shares of the peaks that a device uses. rate: requests per second of a copy. batch: requests that decode in it on average."""
    spec, row = unit.server.cost.spec, unit.offer.cluster.device
    meter, devices = WorkMeter(spec), unit.devices
    rows, context = max(1, round(batch)), demand.input + demand.output // 2
    step = meter.work([context] * rows, [1] * rows, rows)
    prompt = meter.work([demand.input], [demand.input], 1)
    steps = rate * demand.output / rows
    flops = rate * prompt.flops + steps * step.flops
    moved = rate * prompt.kv_bytes + steps * step.bytes  # prompts share the steps that read the weights
    return Use(flops / devices / row.peak(spec.matrix_dtype), moved / devices / row.bandwidth)


def propose(task: Task, unit: Unit, capacity: float, fast: bool = False) -> Proposal:
    """The proposal of a unit. capacity: of one copy, as `highest` finds it. The number of copies is that which the rate needs, or
    without a rate all that devices and limits allow. fast: see Unit.served."""
    first = _copies(task, unit, capacity)
    proposal = _simulated(task, unit, first, capacity, fast)
    for copies in (first + 1, first + 2):  # the sample of several copies differs from that of one
        if not proposal.verdict or not capacity or task.demand.rate is None or task.limits.copies or copies > unit.most:
            break
        more = _simulated(task, unit, copies, capacity, fast)
        proposal = more if not more.verdict else proposal
    return proposal


def _copies(task: Task, unit: Unit, capacity: float) -> int:
    limits, rate = task.limits, task.demand.rate
    if limits.copies is not None:
        return limits.copies
    if rate is not None:
        return max(1, min(unit.most, math.ceil(rate / capacity - 1e-9) if capacity else unit.most))
    most = unit.most if unit.offer.owned or limits.usd_hour < math.inf or limits.watts < math.inf else 1
    design = unit.offer.cluster.device.watts * unit.devices
    for limit, each in ((limits.usd_hour, unit.usd_hour), (limits.watts, design)):
        if limit < math.inf and each > 0:
            most = min(most, int(limit / each))
    return max(1, most)


def _simulated(task: Task, unit: Unit, copies: int, capacity: float, fast: bool) -> Proposal:
    demand = task.demand
    rate = demand.rate if demand.rate is not None else copies * (capacity or 0.1 * unit.coarse.capacity)
    together = 1 if unit.ratio.decode or demand.rate is None else min(copies, SIMULATED)
    load = arriving(task, unit, rate * together / copies, together)
    outcomes = unit.served(load, together, fast)
    decoding = sum(outcome.e2e_s - outcome.ttft_s for outcome in outcomes)
    batch = decoding / (load.span_s * (1 - WARM_UP)) / together if load.span_s else 1.0
    use = use_of(unit, demand, rate / copies, batch)
    drawn = watts(unit.offer.cluster.device.watts, use) * unit.devices * copies
    latest = grows(outcomes, load.span_s * (1 - WARM_UP))
    ttft, tpot, e2e = (Tail.of([getattr(each, f"{name}_s") for each in outcomes]) for name in ("ttft", "tpot", "e2e"))
    good = good_share(demand.slo, outcomes)
    proposal = Proposal(unit, copies, rate, copies * capacity, ttft, tpot, e2e, good, drawn, "", task)
    late = missed(demand.slo, outcomes) or ("the queue grows" if latest else "")
    if late and capacity and rate > proposal.capacity:
        late = f"{proposal.capacity:.3g} requests/s < {rate:g}: {late}"
    return replace(proposal, verdict=_over(proposal) or late)


def _over(proposal: Proposal) -> str:
    """The limit that a proposal breaks."""
    unit, limits = proposal.unit, proposal.task.limits
    design = unit.offer.cluster.device.watts * proposal.devices
    if proposal.copies > unit.most:
        return f"needs {proposal.devices} devices of {unit.offer.cluster.count}"
    if proposal.usd_hour > limits.usd_hour:
        return f"${proposal.usd_hour:,.4g} an hour > ${limits.usd_hour:,.4g}"
    if design > limits.watts:
        return f"{design:,.0f} W of design power > {limits.watts:,.0f} W"
    return ""
