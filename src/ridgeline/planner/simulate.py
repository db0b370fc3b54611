"""Simulates a server under a workload: the real scheduler and loop on a virtual clock, with step times from the cost model.

A prediction is a simulation of another server under the same workload. So every technique is judged by the decisions that the
scheduler would really make: admission, chunks, preemption and prefix hits.

Not simulated: time in the service and on the network (`Server.outside_s` stands for it), logits processors, and ends by a stop
token: each request draws as many tokens as it was recorded with.
"""

from __future__ import annotations

import math
import statistics
from array import array
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.cost import CostModel
from ridgeline.core.errors import ConfigError
from ridgeline.core.plan import StepPlan, StepResult
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.slo import NO_SLO, Slo
from ridgeline.core.spec import KvLayout
from ridgeline.core.workload import RequestSpec, Workload
from ridgeline.engine.deadlines import Deadlines
from ridgeline.engine.leases import Leases
from ridgeline.engine.loop import Loop
from ridgeline.engine.policy import Limits, admission
from ridgeline.engine.request import Request
from ridgeline.engine.scheduler import Scheduler
from ridgeline.engine.virtual import VirtualRunner
from ridgeline.kv.offload import CopyCost, Offload
from ridgeline.kv.prefix import Source
from ridgeline.kv.retention import KEEP_ALL, Retention


@dataclass(frozen=True, slots=True)
class Server:
    """What determines the speed of a server. Options as in EngineConfig.

    cost: step times of the model as served. layout, pages: the KV cache. host_s: seconds of the host per step (plan, commit,
    launch), which steps in flight hide. outside_s: seconds of a request outside the engine. replicas: equal servers; requests go to
    them in turn. tier_pages: pages of host memory below the cache. link: bytes per second between host memory and the device, or
    between devices (planner.split). slo: limits that each request brings.
    """

    cost: CostModel
    layout: KvLayout
    pages: int
    limits: Limits
    prefix_cache: bool = True
    retention: Retention = KEEP_ALL
    batching: str = "continuous"
    steps_in_flight: int = 1
    host_s: float = 0.0
    outside_s: float = 0.0
    replicas: int = 1
    tier_pages: int = 0
    link: float = 0.0
    slo: Slo = NO_SLO

    @property
    def page_s(self) -> float:
        """Seconds in which a page comes over the link."""
        return self.layout.page_bytes / self.link if self.link else 0.0

    def source(self) -> Source:
        """The tier below the cache; empty if there is none."""
        if not self.tier_pages:
            return Source()
        pays = CopyCost(self.cost, self.layout.page_bytes, self.link).pays
        return Offload(self.layout, self.tier_pages, pays)


class Outcome(NamedTuple):
    """Latencies of one request in seconds, as its client sees them. tpot_s: NaN for a single token. stall_s: its longest wait
    between two tokens."""

    ttft_s: float
    tpot_s: float
    e2e_s: float
    stall_s: float
    output: int


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of a workload on a server, simulated or measured. Times in seconds; NaN: unknown.

    ttft_s, tpot_s: medians. slow_ttft_s, stall_s: 99th percentiles of the time to first token and of the longest wait between two
    tokens. e2e_s: mean. tokens_s: output tokens per second. device_s: busy seconds of all devices per output token.
    """

    ttft_s: float
    slow_ttft_s: float
    tpot_s: float
    stall_s: float
    e2e_s: float
    tokens_s: float
    device_s: float = math.nan

    @classmethod
    def of(cls, outcomes: Sequence[Outcome], seconds: float, device_s: float = math.nan) -> Figures:
        """Figures of requests that took `seconds` together."""
        tokens = sum(outcome.output for outcome in outcomes)
        ttft, tpot, stall = (
            sorted(value for outcome in outcomes if (value := getattr(outcome, name)) == value)
            for name in ("ttft_s", "tpot_s", "stall_s")
        )
        return cls(
            quantile(ttft, 0.5),
            quantile(ttft, 0.99),
            quantile(tpot, 0.5),
            quantile(stall, 0.99),
            statistics.fmean(outcome.e2e_s for outcome in outcomes) if outcomes else math.nan,
            tokens / seconds if seconds else math.nan,
            device_s / tokens if tokens else math.nan,
        )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest of the sorted values that at least `share` of them do not exceed. NaN without values."""
    return values[min(len(values) - 1, math.ceil(share * len(values)) - 1)] if values else math.nan


class Served(NamedTuple):
    """A served workload: the outcome of each request, the seconds that all took together, and busy seconds of all devices."""

    outcomes: list[Outcome]
    seconds: float
    device_s: float


def simulate(server: Server, workload: Workload, concurrency: int | None = None) -> Figures:
    """Figures of the workload on the server. Arguments and errors as of `serve`."""
    return Figures.of(*serve(server, workload, concurrency))


def serve(server: Server, workload: Workload, concurrency: int | None = None) -> Served:
    """Serve the workload in virtual time.

    concurrency: requests in a closed loop, in which the end of an answer sends the next request; None: the workload's times.
    Raises ConfigError if a request can never run.
    """
    replicas = server.replicas if concurrency is None else min(server.replicas, concurrency)
    parts = [list(enumerate(workload.requests[first::replicas])) for first in range(replicas)]
    shares = [None if concurrency is None else math.ceil((concurrency - first) / replicas) for first in range(replicas)]
    runs = [Run(server, part, share) for part, share in zip(parts, shares, strict=True) if part]
    for run in runs:
        run.complete()
    begin = workload.requests[0].at_s if workload.requests and concurrency is None else 0.0
    outcomes = [outcome for run in runs for outcome in run.outcomes.values()]
    seconds = max((run.server.now for run in runs), default=begin) - begin
    return Served(outcomes, seconds, sum(run.server.busy_s for run in runs))


class _Device:
    """A virtual runner behind a host that takes `host_s` seconds before each launch."""

    def __init__(self, server: Server) -> None:
        self.runner, self.busy_s = VirtualRunner(server.cost, page_s=server.page_s), 0.0
        self._host_s = server.host_s
        self.calls = 0
        """Calls of launch and collect so far."""

    def launch(self, plan: StepPlan) -> None:
        self.calls += 1
        self.runner.advance(self.runner.now + self._host_s)
        self.runner.launch(plan)

    def collect(self) -> StepResult:
        self.calls += 1
        result = self.runner.collect()
        self.busy_s += result.device_s
        return result

    def close(self) -> None:
        self.runner.close()


class _Progress:
    """When the tokens of a request came."""

    __slots__ = ("due", "first", "last", "stall_s", "tokens")

    def __init__(self, due: float) -> None:
        self.due, self.first, self.last, self.stall_s, self.tokens = due, 0.0, 0.0, 0.0, 0

    def observe(self, tokens: int, now: float) -> None:
        if not self.tokens:
            self.first = now
        else:
            self.stall_s = max(self.stall_s, now - self.last)
        self.tokens, self.last = self.tokens + tokens, now

    def outcome(self, outside_s: float) -> Outcome:
        later = self.tokens - 1
        tpot = (self.last - self.first) / later if later > 0 else math.nan
        stall = self.stall_s if later > 0 else math.nan
        return Outcome(self.first - self.due + outside_s, tpot, self.last - self.due + outside_s, stall, self.tokens)


class Event(NamedTuple):
    """What a turn of a virtual server did for a request. first: it got its first token. outcome: it has ended."""

    number: int
    first: bool
    outcome: Outcome | None


class Begun(NamedTuple):
    """A request that another engine has begun: when it arrived there, and when its first token was drawn."""

    due: float
    first: float


class VirtualServer:
    """One server in virtual time: requests go in, and each turn of its loop moves its clock. source: of pages outside the pool;
    None: the server's. now: time at which it begins."""

    def __init__(self, server: Server, source: Source | None = None, now: float = 0.0) -> None:
        leases = Leases(
            server.layout,
            server.pages,
            prefix_cache=server.prefix_cache,
            source=server.source() if source is None else source,
            retention=server.retention,
        )
        self._device, self._server = _Device(server), server
        self._scheduler = Scheduler(
            server.layout,
            leases,
            server.limits,
            admission(server.batching),
            deadlines=Deadlines(server.cost),
        )
        self._loop = Loop(
            self._scheduler, self._device, steps_in_flight=server.steps_in_flight, clock=lambda: self._device.runner.now
        )
        self._progress: dict[str, _Progress] = {}
        self.advance(now)

    @property
    def now(self) -> float:
        return self._device.runner.now

    @property
    def busy_s(self) -> float:
        """Seconds in which its device has worked."""
        return self._device.busy_s

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return len(self._progress)

    @property
    def prefix_tokens(self) -> tuple[int, int]:
        """Prompt tokens that were found in the prefix cache, and those that were looked up."""
        counts = self._scheduler.counts
        return counts.prefix_hits, counts.prefix_queries

    def advance(self, to: float) -> None:
        """Move the clock of an idle server forward."""
        self._device.runner.advance(to)

    def add(self, number: int, spec: RequestSpec, due: float, begun: Begun | None = None) -> None:
        """A request that was sent at `due`. begun: its first token is drawn. Raises ConfigError if it can never run."""
        request = request_of(number, spec, due, self._server.slo)
        if not self._scheduler.fits(request) or request.limit > self._server.limits.max_len:
            raise ConfigError(
                f"A request of {spec.input} prompt and {spec.output} output tokens does not fit into {self._server.pages} "
                f"blocks of {self._server.layout.page_tokens} tokens: it cannot be simulated on this server."
            )
        self._progress[request.id] = progress = _Progress(due)
        if begun is not None:
            progress.due = begun.due
            progress.observe(1, begun.first)
            request.tokens.append(0)
        self._scheduler.add(request)

    def turn(self) -> list[Event]:
        """One turn of the loop, after which `now` is the time of its events."""
        events = []
        for update in self._loop.turn().each():
            progress = self._progress[update.id]
            first = bool(update.tokens) and not progress.tokens
            if update.tokens:
                progress.observe(len(update.tokens), self.now)
            if update.finish:
                del self._progress[update.id]
            if first or update.finish:
                outcome = progress.outcome(self._server.outside_s) if update.finish else None
                events.append(Event(int(update.id), first, outcome))
        return events

    @property
    def calls(self) -> int:
        """Steps launched and collected so far: a turn that changes nothing waits."""
        return self._device.calls

    @property
    def idle(self) -> bool:
        return self._scheduler.idle

    def wait_seconds(self) -> float:
        """Seconds until the batching policy has to look again; infinite without anything to do."""
        return self._loop.wait_seconds()


class Run:
    """One server that works through its requests, which are numbered. outcomes: of each number. source: as of VirtualServer.
    begun: numbers of requests whose first token is drawn."""

    def __init__(
        self,
        server: Server,
        requests: Iterable[tuple[int, RequestSpec]],
        concurrency: int | None = None,
        source: Source | None = None,
        begun: Mapping[int, Begun] | None = None,
    ) -> None:
        self.server, self.outcomes = VirtualServer(server, source), dict[int, Outcome]()
        self._waiting, self._concurrency, self._begun = deque(requests), concurrency, begun or {}

    def complete(self) -> None:
        """Run until all requests have ended."""
        server = self.server
        while self._waiting or not server.idle:
            self._send()
            before = server.calls
            self.outcomes |= {event.number: event.outcome for event in server.turn() if event.outcome is not None}
            if server.calls == before and (pause := server.wait_seconds()) > 0:
                due = self._waiting[0][1].at_s if self._waiting and self._concurrency is None else math.inf
                until = min(due, server.now + pause)
                server.advance(until if until < math.inf else server.now)  # idle: the closed loop sends at once

    def _send(self) -> None:
        """Hand over the requests that are due."""
        server = self.server
        while self._waiting and (
            self._waiting[0][1].at_s <= server.now if self._concurrency is None else server.open < self._concurrency
        ):
            number, spec = self._waiting.popleft()
            due = spec.at_s if self._concurrency is None else server.now
            server.add(number, spec, due, self._begun.get(number))


def request_of(number: int, spec: RequestSpec, due: float, slo: Slo = NO_SLO) -> Request:
    tokens = array("i", _tokens(number, spec))
    return Request(
        id=str(number),
        choice=0,
        tokens=tokens,
        prompt_len=len(tokens),
        sampling=SamplingParams(max_tokens=spec.output, ignore_eos=True),
        limit=len(tokens) + spec.output,
        stop_ids=(),
        seed=number,
        order=(0, number),
        arrival=due,
        root=b"",
        cache=True,
        has_reader=True,
        deadline=slo.deadline,
        client=spec.client,
    )


def _tokens(number: int, spec: RequestSpec) -> Iterable[int]:
    """Token ids of a prompt: equal blocks have equal ids, and nothing else of the prompt is equal to another one. Only equality
    matters, so they may exceed the vocabulary."""
    tokens: list[int] = []
    for block in spec.blocks:
        first = (block * 40_503) % (1 << 29)
        tokens += range(first, first + spec.block)
    del tokens[spec.input :]
    first = (1 << 30) + number * 4_099 % (1 << 29)
    return [*tokens, *range(first, first + max(1, spec.input) - len(tokens))]
