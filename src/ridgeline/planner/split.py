"""Prefill apart from decode, simulated: how many engines for prompts and how many for the other tokens serve a workload best.

An engine of prompts draws the first token, another engine pulls the full blocks of the prompt over a link and goes on
(docs/prefill-decode.md). Both run the real scheduler on a virtual clock. Goodput per device and its dependence on workload and
objective: DistServe (arXiv:2401.09670, section 2.3).

Not simulated: pages that an engine of prompts keeps until they are pulled, a transfer while the prompt is being computed, and a
choice of the engine by its load: requests go to the engines of a kind in turn.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.fit import Deployment
from ridgeline.core.sizing import Memory
from ridgeline.core.slo import Latencies, Slo
from ridgeline.core.workload import RequestSpec, Workload, arrivals, synthetic
from ridgeline.engine.policy import Limits
from ridgeline.kv.prefix import Source, extend_chain
from ridgeline.planner.cluster import Cluster
from ridgeline.planner.links import LINE_SHARES
from ridgeline.planner.ranking import Demand, Variant
from ridgeline.planner.simulate import Begun, Figures, Outcome, Run, Served, Server, request_of, serve

ATTAIN = 0.9
"""Share of requests that must be good at the highest rate, as in DistServe."""
PRECISION = 0.05
"""The highest rate is searched to this ratio."""
MOST_STEPS = 24
"""Rates that a search tries at most."""
SPAN_S, LEAST = 12.0, 60
"""Seconds of arrivals that are simulated at a rate, and requests at least: a queue that grows must be seen to grow."""


class Ratio(NamedTuple):
    """Numbers of engines, each of one device. decode 0: the engines do both."""

    prefill: int
    decode: int

    @property
    def devices(self) -> int:
        return self.prefill + self.decode

    def __str__(self) -> str:
        return f"{self.prefill}:{self.decode}" if self.decode else "joint"


RATIOS = (Ratio(1, 0), Ratio(1, 2), Ratio(1, 1), Ratio(2, 1), Ratio(3, 1), Ratio(4, 1))


class Elsewhere(Source):
    """The blocks of prompts that other engines have computed."""

    origin = "hand-over"

    def __init__(self, groups: int) -> None:
        self._place, self._keys = [1] * groups, set[bytes]()
        self.pulled = 0
        """Pages pulled so far."""

    def expect(self, number: int, spec: RequestSpec, page_tokens: int) -> None:
        """An engine has computed the prompt of a request."""
        request, chain = request_of(number, spec, 0.0), list[bytes]()
        extend_chain(chain, array("i", request.tokens), page_tokens, request.root)
        self._keys.update(chain)

    def find(self, chain: Sequence[bytes], first: int) -> list[list[int]]:
        nothing = [0] * len(self._place)
        return [self._place if key in self._keys else nothing for key in chain[first:]]

    def begins(self, ticket: int, places: Sequence[int]) -> None:
        self.pulled += len(places)


def serve_split(server: Server, workload: Workload, ratio: Ratio) -> Served:
    """Serve the workload at its times. server: an engine of either kind, whose link is that between devices. With a ratio without
    decode, equal servers that do both."""
    if not ratio.decode:
        return serve(replace(server, replicas=ratio.prefill), workload)
    numbered = list(enumerate(workload.requests))
    firsts = [
        Run(server, [(number, replace(spec, output=1)) for number, spec in numbered[place :: ratio.prefill]])
        for place in range(ratio.prefill)
    ]
    for run in firsts:
        run.complete()
    drawn = {number: outcome for run in firsts for number, outcome in run.outcomes.items()}
    begun = {number: Begun(spec.at_s, spec.at_s + drawn[number].ttft_s) for number, spec in numbered}
    later = sorted((begun[number].first, number, spec) for number, spec in numbered if spec.output > 1)
    others = [_decoding(server, later[place :: ratio.decode], begun) for place in range(ratio.decode)]
    outcomes = {number: outcome for number, outcome in drawn.items() if workload.requests[number].output == 1}
    for run in others:
        run.complete()
        outcomes |= run.outcomes
    runs = [*firsts, *others]
    end, start = max(run.server.now for run in runs), workload.requests[0].at_s
    ordered = [outcomes[number] for number, _ in numbered]
    return Served(ordered, end - start, sum(run.server.busy_s for run in runs))


def _decoding(server: Server, later: Sequence[tuple[float, int, RequestSpec]], begun: dict[int, Begun]) -> Run:
    """A run of an engine that goes on with prompts."""
    source = Elsewhere(len(server.layout.groups))
    for _, number, spec in later:
        source.expect(number, spec, server.layout.page_tokens)
    requests = [(number, replace(spec, at_s=first)) for first, number, spec in later]
    return Run(server, requests, source=source, begun=begun)


@dataclass(frozen=True, slots=True)
class Goodput:
    """The highest rate at which a share ATTAIN of the requests is good. rate: requests per second of all devices; 0: even a low
    rate misses the limits. figures: at that rate."""

    ratio: Ratio
    rate: float
    figures: Figures

    @property
    def per_device(self) -> float:
        return self.rate / self.ratio.devices


def good_share(slo: Slo, outcomes: Sequence[Outcome]) -> float:
    """Share of outcomes within the limits."""
    good = sum(
        not slo.verdict(
            Latencies(outcome.ttft_s, None, None if math.isnan(outcome.tpot_s) else outcome.tpot_s, outcome.e2e_s)
        )
        for outcome in outcomes
    )
    return good / len(outcomes) if outcomes else 0.0


def goodput(server: Server, workload: Workload, slo: Slo, ratio: Ratio) -> Goodput:
    """The highest rate that meets the objective. The workload's times are scaled, so that its burstiness stays. It should have
    SPAN_S times that rate of requests: with fewer, the rate is too high."""
    low, high, rate = 0.0, math.inf, 0.5 * ratio.devices
    best = Figures.of([], 0.0)
    for _ in range(MOST_STEPS):
        arriving = workload.first(max(LEAST, round(rate * SPAN_S))).at_rate(rate)
        served = serve_split(server, arriving, ratio)
        if good_share(slo, served.outcomes) >= ATTAIN:
            low, best = rate, Figures.of(*served)
        else:
            high = rate
        if high < low * (1 + PRECISION) or high < 0.01:
            break
        rate = 2 * rate if high == math.inf else rate / 2 if not low else math.sqrt(low * high)
    return Goodput(ratio, low, best)


def compare_ratios(server: Server, workload: Workload, slo: Slo, ratios: Sequence[Ratio] = RATIOS) -> list[Goodput]:
    """The goodput of each ratio, the best per device first."""
    return sorted(
        (goodput(server, workload, slo, ratio) for ratio in ratios),
        key=lambda result: result.per_device,
        reverse=True,
    )


MOST_REQUESTS = 2000
"""Requests of a planned workload."""
CHUNKS = (512, 2048)
"""Further query tokens of a step with which engines that do both are simulated: smaller chunks shorten the waits of running
answers."""


def plan_split(variant: Variant, cluster: Cluster, demand: Demand, engine: EngineConfig) -> list[Goodput]:
    """The goodput of the ratios that the devices allow, each engine on one device, the best per device first; engines that do both
    have their best chunk. Arrivals are random. Raises ConfigError that names the option and the remedy."""
    if not demand.slo:
        raise ConfigError(
            "--split compares goodput, which --slo defines: add it, as in ttft=500ms,tpot=50ms.", param="split"
        )
    if cluster.count < 2 or not cluster.fabric.reaches(2):
        reason = "engines hand over from device to device over a known link"
        raise ConfigError(
            f"--split, and {cluster} have none: {reason}. Give 2 or more, and --link-gb-s.", param="split"
        )
    kind = "cpu" if cluster.device.kind == "cpu" else "cuda"
    deployment = Deployment(variant.spec, engine, Memory(kind, cluster.device.memory_bytes))
    plan, missing = deployment.planner(variant.spec, {}).plan(max(demand.length, 1))
    if missing > 0:
        raise ConfigError(
            f"--split simulates engines of one device, and the model does not fit on one {cluster.device.name}: give a smaller "
            "--quantization or larger devices.",
            param="split",
        )
    limits = Limits(plan.max_rows, plan.max_step_tokens, plan.max_len)
    nearest = cluster.fabric.levels[0].link
    link = nearest.bytes_per_s * LINE_SHARES[nearest.kind]
    server = Server(variant.cost, plan.layout, plan.n_pages, limits, steps_in_flight=plan.steps_in_flight, link=link)
    lengths = str(demand.input), str(demand.output)
    workload = synthetic(MOST_REQUESTS, lengths, 0, 0).at(arrivals(MOST_REQUESTS, 1.0, 1.0, 0))
    chunks = [limits.step_tokens, *(size for size in CHUNKS if size < limits.step_tokens)]
    joint = (replace(server, limits=replace(limits, step_tokens=size)) for size in chunks)
    best = max((goodput(each, workload, demand.slo, RATIOS[0]) for each in joint), key=lambda result: result.rate)
    ratios = [ratio for ratio in RATIOS[1:] if ratio.devices <= cluster.count]
    return sorted([best, *compare_ratios(server, workload, demand.slo, ratios)], key=lambda result: -result.per_device)
