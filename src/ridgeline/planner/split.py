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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.core.slo import Latencies, Slo
from ridgeline.core.workload import RequestSpec, Workload
from ridgeline.kv.prefix import Source, extend_chain
from ridgeline.planner.simulate import Begun, Figures, Outcome, Run, Served, Server, request_of, serve

ATTAIN = 0.9
"""Share of requests that must be good at the highest rate, as in DistServe."""
PRECISION = 0.05
"""The highest rate is searched to this ratio."""
MOST_STEPS = 24
"""Rates that a search tries at most."""
LOWEST_RATE = 0.01
"""Requests per second below which no rate is tried."""
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


def latencies(outcome: Outcome) -> Latencies:
    """As an SLO reads them. The first content that the user sees is the first token."""
    tpot = None if math.isnan(outcome.tpot_s) else outcome.tpot_s
    return Latencies(outcome.ttft_s, outcome.ttft_s, tpot, outcome.e2e_s)


def good_share(slo: Slo, outcomes: Sequence[Outcome]) -> float:
    """Share of outcomes within the limits."""
    good = sum(not slo.verdict(latencies(outcome)) for outcome in outcomes)
    return good / len(outcomes) if outcomes else 0.0


def highest_rate(keeps: Callable[[float], bool], first: float, factor: float = 2.0) -> float:
    """The highest rate that keeps the objectives, to PRECISION; 0: even a low one does not. first: the rate to try first. factor:
    between rates until one keeps them and another one does not."""
    low, high, rate = 0.0, math.inf, first
    for _ in range(MOST_STEPS):
        if keeps(rate):
            low = rate
        else:
            high = rate
        if high < low * (1 + PRECISION) or high < LOWEST_RATE:
            break
        rate = factor * rate if high == math.inf else rate / factor if not low else math.sqrt(low * high)
    return low


def goodput(server: Server, workload: Workload, slo: Slo, ratio: Ratio) -> Goodput:
    """The highest rate that meets the objective. The workload's times are scaled, so that its burstiness stays. It should have
    SPAN_S times that rate of requests: with fewer, the rate is too high."""
    best = Figures.of([], 0.0)

    def keeps(rate: float) -> bool:
        nonlocal best
        arriving = workload.first(max(LEAST, round(rate * SPAN_S))).at_rate(rate)
        served = serve_split(server, arriving, ratio)
        if good := good_share(slo, served.outcomes) >= ATTAIN:
            best = Figures.of(*served)
        return good

    rate = highest_rate(keeps, 0.5 * ratio.devices)
    return Goodput(ratio, rate, best)


def compare_ratios(server: Server, workload: Workload, slo: Slo, ratios: Sequence[Ratio] = RATIOS) -> list[Goodput]:
    """The goodput of each ratio, the best per device first."""
    return sorted(
        (goodput(server, workload, slo, ratio) for ratio in ratios),
        key=lambda result: result.per_device,
        reverse=True,
    )
