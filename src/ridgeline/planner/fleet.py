"""Simulates a fleet: the service's router and autoscaler over replicas, each with the real scheduler, on one virtual clock.

Events are handled in the order of their times: arrivals, turns of replicas, losses, starts, and looks of the autoscaler. So the
router decides with what it would know at that moment, and no replica runs ahead of it.

Not simulated: the router's own time, its health checks (a lost replica is known at once), and clients that send a refused request
again.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from ridgeline.core.cost import step_work
from ridgeline.core.errors import ConfigError, Overloaded, Unavailable
from ridgeline.core.slo import Slo
from ridgeline.core.workload import RequestSpec, Workload
from ridgeline.planner.simulate import Event, Figures, Outcome, Server, VirtualServer
from ridgeline.planner.surrogate import StepTimes, Surrogate
from ridgeline.service.autoscale import Arrivals, Autoscaler, Decision, Load, Scaling
from ridgeline.service.prefix_index import PrefixIndex
from ridgeline.service.routing import POLICIES, Capacity, Demand, Router, State, Ticket

LOOK_S = 10.0
"""Seconds between two decisions of the autoscaler."""
_TYPICAL_CONTEXT = 1024
"""Tokens that a request is taken to hold in `Fleet.capacity`."""
_PAUSE_S = 1e-6
"""Shortest wait of a replica whose batching policy waits, so that the clock moves."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A replica is lost `at_s` after the first request, and another one serves `down_s` later. place: among those that serve."""

    at_s: float
    place: int = 0
    down_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Fleet:
    """Equal replicas behind a router.

    server: each of them. replicas: at the start. policy: a name of routing.POLICIES. limit: most requests in flight at a replica;
    further ones wait in the router, at most max_waiting. scaling: limits of the autoscaler; None: the number stays. seed: of the
    router's choice between equal replicas. surrogate: replicas are those of planner.surrogate, for fleets of hundreds.
    index_bytes: memory of the router's index of prefixes.
    """

    server: Server
    replicas: int = 1
    policy: str = "prefix"
    limit: int = 256
    max_waiting: int = 1 << 20
    scaling: Scaling | None = None
    losses: Sequence[Loss] = ()
    seed: int = 0
    surrogate: bool = False
    index_bytes: int = 64 << 20

    @property
    def capacity(self) -> Capacity:
        """A replica as its router sees it, by the cost model."""
        cost, limits = self.server.cost, self.server.limits
        chunk = min(limits.step_tokens, limits.max_len)
        rows = min(self.limit, limits.rows)
        step_s = cost.decode_s([min(limits.max_len, _TYPICAL_CONTEXT)] * rows)
        held = float(self.server.pages * self.server.layout.page_tokens)
        return Capacity(self.limit, chunk / cost.step_s(step_work(cost.spec, [(0, chunk)])), step_s / rows, held)


@dataclass(slots=True)
class FleetFigures:
    """What a fleet did with a workload.

    figures: of the answered requests; outcomes: by number of the request. refused: requests without a place. failed: streams that a
    loss cut. retried: requests sent again. prompt_tokens, cached_tokens: looked up and found in the replicas' prefix caches.
    expected_hit_rate: share of prompt tokens that the router's index expected there.
    replica_s: seconds of all replicas from start to end, loading included. most: replicas at a time. decisions: of the autoscaler
    that changed the number, by time.
    """

    requests: int
    figures: Figures = field(default_factory=lambda: Figures.of([], 0.0))
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    refused: int = 0
    failed: int = 0
    retried: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    expected_hit_rate: float = 0.0
    seconds: float = 0.0
    busy_s: float = 0.0
    replica_s: float = 0.0
    most: int = 0
    decisions: list[tuple[float, Decision]] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in a prefix cache."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def attainment(self, slo: Slo) -> float:
        """Share of all offered requests that were answered within every limit."""
        limits = slo.limits()
        good = sum(_meets(outcome, limits) for outcome in self.outcomes.values())
        return good / self.requests if self.requests else math.nan


def _meets(outcome: Outcome, limits: Mapping[str, float | None]) -> bool:
    values = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s, "e2e": outcome.e2e_s}
    return all((limit := limits.get(name)) is None or not value > limit for name, value in values.items())


def simulate_fleet(fleet: Fleet, workload: Workload) -> FleetFigures:
    """Serve the workload at its times. Raises ConfigError for an unknown policy, for options of a server that its surrogate does
    not have, or if a request can never run."""
    if fleet.policy not in POLICIES:
        raise ConfigError(f"--route is {fleet.policy!r}: use {', '.join(POLICIES)}.", param="route")
    if fleet.surrogate and not Surrogate.stands_for(fleet.server):
        raise ConfigError(
            "--surrogate has no --batching but continuous, no --kv-retention and no tiers below the cache: leave one of them out.",
            param="surrogate",
        )
    return Simulation(fleet, workload).run()


class _Replica:
    """A virtual server, or its surrogate, under its name in the router."""

    def __init__(self, name: str, server: VirtualServer | Surrogate, began: float) -> None:
        self.name, self.server, self.began = name, server, began
        self.tickets: dict[int, Ticket] = {}
        """Requests that it runs, by number."""
        self.begun: set[int] = set()
        """Those whose clients have a token."""
        self.turning = False
        """A turn of the virtual server is under way, or due."""
        self.wakes_s = math.inf
        """Time at which the surrogate is turned next."""
        self.gone = False


class Simulation:
    """One run. Events are (time, number, act); the number keeps events of one time in the order in which they were made."""

    def __init__(self, fleet: Fleet, workload: Workload) -> None:
        self._fleet, self._requests = fleet, workload.requests
        index = PrefixIndex(fleet.index_bytes, workload.requests[0].block if workload.requests else 512)
        self.router = Router(POLICIES[fleet.policy], index, seed=fleet.seed, max_waiting=fleet.max_waiting)
        self._autoscaler = Autoscaler(fleet.scaling) if fleet.scaling is not None else None
        self.capacity, self._result = fleet.capacity, FleetFigures(len(workload.requests))
        self.replicas: dict[str, _Replica] = {}
        self._times = StepTimes(fleet.server)
        self._numbers: dict[Ticket, int] = {}
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._made, self._names = count(), count()
        self._arrivals = Arrivals(self.router.totals)

    def run(self) -> FleetFigures:
        begin = self._requests[0].at_s if self._requests else 0.0
        for _ in range(self._fleet.replicas):
            self._join(begin, begin)
        if self._requests:
            self._at(begin, partial(self._arrive, 0))
        for loss in self._fleet.losses:
            self._at(begin + loss.at_s, partial(self._lose, loss))
        if self._autoscaler is not None:
            self._at(begin + LOOK_S, self._look)
        now, result = begin, self._result
        while self._events and len(result.outcomes) + result.refused + result.failed < result.requests:
            now, _, act = heapq.heappop(self._events)
            act(now)
        for replica in list(self.replicas.values()):
            self._leave(replica, now)
        totals = self.router.totals
        result.seconds, result.retried = now - begin, totals.retried
        result.expected_hit_rate = totals.cached_tokens / totals.prompt_tokens if totals.prompt_tokens else 0.0
        result.figures = Figures.of(list(result.outcomes.values()), result.seconds, result.busy_s)
        return result

    def _at(self, time: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._made), act))

    # --- requests ---------------------------------------------------------------------------------------------------

    def _arrive(self, number: int, now: float) -> None:
        spec = self._requests[number]
        if number + 1 < len(self._requests):
            self._at(self._requests[number + 1].at_s, partial(self._arrive, number + 1))
        demand = Demand(spec.input, chunks_of(spec), session=str(spec.session) if spec.session >= 0 else "")
        try:
            ticket = self.router.arrive(demand, now)
        except (Overloaded, Unavailable):
            self._result.refused += 1
            return
        self._numbers[ticket] = number
        if ticket.replica is not None:
            self._start(ticket, now)

    def _start(self, ticket: Ticket, now: float) -> None:
        """The router has sent a request to a replica."""
        assert ticket.replica is not None
        replica, number = self.replicas[ticket.replica.name], self._numbers[ticket]
        server, spec = replica.server, self._requests[number]
        replica.tickets[number] = ticket
        if isinstance(server, Surrogate):
            server.add(number, spec, spec.at_s, now)
            self._wake_at(replica, server)
            return
        if not replica.turning:
            server.advance(now)
            replica.turning = True
            self._at(now, partial(self._turn, replica))
        server.add(number, spec, spec.at_s)

    def _wake_at(self, replica: _Replica, server: Surrogate) -> None:
        if server.next_s != replica.wakes_s:
            replica.wakes_s = server.next_s
            if server.next_s < math.inf:
                self._at(server.next_s, partial(self._wake, replica))

    def _wake(self, replica: _Replica, now: float) -> None:
        """End the step of a surrogate, unless it ends at another time by now."""
        server = replica.server
        assert isinstance(server, Surrogate)
        if not replica.gone and replica.wakes_s == now:
            self._handle(replica, server.turn(), now)
            self._wake_at(replica, server)

    def _turn(self, replica: _Replica, now: float) -> None:
        """Begin a turn. What it did happens at its end, when the next one begins."""
        server = replica.server
        if replica.gone or isinstance(server, Surrogate):
            return
        server.advance(now)
        before = server.calls
        events = server.turn()
        if events or server.calls != before:
            self._at(server.now, partial(self._turned, replica, events))
        elif not server.idle and (pause := server.wait_seconds()) < math.inf:
            self._at(now + max(pause, _PAUSE_S), partial(self._turn, replica))
        else:
            replica.turning = False

    def _turned(self, replica: _Replica, events: Sequence[Event], now: float) -> None:
        if not replica.gone:
            self._handle(replica, events, now)
            self._turn(replica, now)

    def _handle(self, replica: _Replica, events: Sequence[Event], now: float) -> None:
        """Tell the router what a replica did."""
        for event in events:
            ticket = replica.tickets[event.number]
            if event.first:
                replica.begun.add(event.number)
                self.router.first_token(ticket, now)
            if event.outcome is not None:
                del replica.tickets[event.number], self._numbers[ticket]
                self._result.outcomes[event.number] = event.outcome
                self._send(self.router.finish(ticket, now), now)
        if not replica.tickets and self.router.replicas[replica.name].draining:
            self._leave(replica, now)

    def _send(self, tickets: Sequence[Ticket], now: float) -> None:
        for ticket in tickets:
            self._start(ticket, now)

    # --- replicas ---------------------------------------------------------------------------------------------------

    def _join(self, began: float, now: float) -> None:
        """A replica that was started at `began` serves."""
        server = self._fleet.server
        made = Surrogate(server, self._times, now) if self._fleet.surrogate else VirtualServer(server, now=now)
        replica = _Replica(f"replica {next(self._names)}", made, began)
        self.replicas[replica.name] = replica
        self._result.most = max(self._result.most, len(self.replicas))
        self.router.add(replica.name, self.capacity)
        self._send(self.router.set_state(replica.name, State.UP, now), now)

    def _begin(self, cold_start_s: float, now: float) -> None:
        """Start a replica."""
        self.router.expected += 1

        def ready(later: float) -> None:
            self.router.expected -= 1
            self._join(now, later)

        self._at(now + cold_start_s, ready)

    def _leave(self, replica: _Replica, now: float) -> None:
        """A replica ends."""
        replica.gone = True
        del self.replicas[replica.name]
        self.router.remove(replica.name)
        result, (cached, asked) = self._result, replica.server.prefix_tokens
        result.cached_tokens += cached
        result.prompt_tokens += asked
        result.replica_s += now - replica.began
        result.busy_s += replica.server.busy_s

    def _lose(self, loss: Loss, now: float) -> None:
        """A replica is gone. Requests without a token go to another one, answers that had begun are cut."""
        if not self.replicas:
            return
        replica = list(self.replicas.values())[loss.place % len(self.replicas)]
        self._leave(replica, now)
        self._begin(loss.down_s, now)
        for number, ticket in replica.tickets.items():
            self._send(self.router.finish(ticket, now, failed=True), now)
            if number in replica.begun or not self.router.retry(ticket, now):
                self._result.failed += 1
                del self._numbers[ticket]
            elif ticket.replica is not None:
                self._start(ticket, now)

    def _look(self, now: float) -> None:
        """Let the autoscaler decide."""
        assert self._autoscaler is not None
        self._at(now + LOOK_S, self._look)
        router = self.router
        requests_s, tokens_s = self._arrivals.rates(LOOK_S)
        serving = [replica for replica in router.replicas.values() if not replica.draining]
        have = len(serving) + router.expected
        running = sum(replica.running for replica in router.replicas.values())
        load = Load(
            now,
            requests_s,
            tokens_s,
            running,
            len(router.queue),
            router.waiting_tokens,
            have,
            speed=router.speed,
        )
        decision = self._autoscaler.decide(load)
        if decision.wanted != have:
            self._result.decisions.append((now, decision))
        for _ in range(have, decision.wanted):
            self._begin(self._autoscaler.cold_start_s, now)
        for spare in sorted(serving, key=lambda replica: replica.running)[: max(0, len(serving) - decision.wanted)]:
            spare.draining = True
            if not (replica := self.replicas[spare.name]).tickets:
                self._leave(replica, now)


def chunks_of(spec: RequestSpec) -> tuple[int, ...]:
    """Hashes of the full blocks of a prompt, each over all blocks before it."""
    value, chunks = 0, []
    for block in spec.blocks[: spec.input // spec.block]:
        value = zlib.crc32(block.to_bytes(16, "little", signed=True), value)
        chunks.append(value)
    return tuple(chunks)
