"""Chooses a replica for each request. No clock, no asyncio: every time is an argument, so that simulation runs the same code.

The router sends a request to the replica with the lowest predicted wait for its first token:

    (prompt tokens that the replica has not cached + prompt tokens that wait there) / prefill rate + decode_s * requests in flight

With the policy `prefix` the cached tokens come from an index of prefixes, with `least-work` none are assumed, and `round-robin`
takes the replica that was sent a request longest ago. Equal replicas are chosen at random. Prefill rates are those of `Capacity`
times a factor that the router learns for the whole fleet: rates of their own would draw an idle fleet's requests to the replica
that was measured last, and a slow replica is avoided anyway, because its backlog stays. In fleets with more than `SAMPLED`
replicas the router compares so many of them, drawn at random, and those that have a prefix of the request: the least loaded of
a few random replicas is nearly as good as that of all (Mitzenmacher, "The power of two choices", 2001).

A request waits in the router when all replicas are at their limits. The queue is fair between tenants (`fair_queue.py`).

Rows of batches are apart: each replica says how many it has room for, they never wait here, and they count in no limit and no
wait of online requests.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ridgeline.core.errors import Overloaded, Unavailable
from ridgeline.service.fair_queue import FairQueue
from ridgeline.service.prefix_index import PrefixIndex

SAMPLED = 32
"""Replicas that are compared at random."""
MAX_SESSIONS = 1 << 16
_LEARNED_TOKENS = 512
"""Fewest prompt tokens from which the fleet's speed is learned: the time of fewer is mostly overhead."""
_FORGET = 0.95
_RATE_MEMORY_S = 10.0
_RETRY_S = (0.05, 60.0)
"""Shortest and longest time after which a refused client is sent back."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a replica can do. The prefill rates of replicas count relative to each other: measured first tokens scale them."""

    limit: int = 256
    """Most requests in flight. Further ones wait in the router."""
    prefill_tokens_s: float = 10_000.0
    decode_s: float = 0.005
    """Seconds by which each request in flight is thought to delay a new one."""
    cache_tokens: float = 1e6
    """Tokens that its prefix cache holds."""


class State(Enum):
    """What a replica's health checks say."""

    UP = "up"
    STALLED = "stalled"
    """It answers, but its requests make no progress. It gets new ones only if no replica is up."""
    STARTING = "starting"
    """It answers, and its engine is being started. Requests wait for it if no replica is up."""
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a replica.

    tokens: of its prompt, at least 1, by estimate. chunks: hashes of its prompt's chunks (`prefix_index.py`). priority: lower is
    served first. session: requests of one session go to one replica while that has a free place; "" for none.
    """

    tokens: int
    chunks: Sequence[int] = ()
    tenant: str = ""
    priority: int = 0
    session: str = ""


class Breaker:
    """Keeps requests from a replica that fails them.

    It opens after `failures` in succession, lets one request try after `cooldown_s`, and closes when that succeeds. The time
    doubles with each failed trial, up to `longest_s`.
    """

    __slots__ = ("_cooldown_s", "_failed", "_limit", "_longest_s", "_reopens", "_trial")

    def __init__(self, failures: int = 3, cooldown_s: float = 1.0, longest_s: float = 30.0) -> None:
        self._limit, self._cooldown_s, self._longest_s = failures, cooldown_s, longest_s
        self._failed = 0
        self._reopens = 0.0
        self._trial = False

    @property
    def closed(self) -> bool:
        return self._failed < self._limit

    def allows(self, now: float) -> bool:
        return self.closed or (now >= self._reopens and not self._trial)

    def sent(self) -> None:
        """A request is sent to the replica."""
        self._trial = not self.closed

    def ended(self, now: float, failed: bool | None) -> None:
        """A request has ended. failed: None if it says nothing about the replica."""
        self._trial = False
        if failed is None:
            return
        self._failed = self._failed + 1 if failed else 0
        if not self.closed:
            trials = min(self._failed - self._limit, 16)
            self._reopens = now + min(self._longest_s, self._cooldown_s * 2.0**trials)


class Speed:
    """How fast the fleet computes prompts, relative to the rates of its capacities: from recent first tokens."""

    __slots__ = ("_measured", "_predicted")

    def __init__(self) -> None:
        self._predicted = self._measured = 1.0

    @property
    def factor(self) -> float:
        return self._predicted / self._measured

    def learn(self, predicted_s: float, measured_s: float) -> None:
        """A first token that the capacity's rate predicted after predicted_s came after measured_s."""
        self._predicted = self._predicted * _FORGET + predicted_s
        self._measured = self._measured * _FORGET + measured_s


class Replica:
    """A replica as the router sees it. id: of this incarnation; a replica that returns has another one."""

    __slots__ = (
        "_speed", "backlog", "breaker", "capacity", "closed_until", "draining", "id", "name", "row_limit", "rows", "running",
        "sent", "state",
    )  # fmt: skip

    def __init__(self, id: int, name: str, capacity: Capacity, speed: Speed) -> None:
        self.id, self.name, self.capacity = id, name, capacity
        self._speed = speed
        self.state = State.DOWN
        self.draining = False
        self.breaker = Breaker()
        self.closed_until = 0.0
        """Time until which the replica itself has asked for no requests."""
        self.running = 0
        self.backlog = 0
        """Prompt tokens of requests that were sent and have no first token yet."""
        self.sent = 0
        """Number of the last request that was sent here."""
        self.rows = self.row_limit = 0
        """Rows of batches in flight, and those that the replica has said it runs, in choices."""

    @property
    def prefill_tokens_s(self) -> float:
        return self.capacity.prefill_tokens_s * self._speed.factor

    @property
    def serves(self) -> bool:
        """Whether requests may be sent here, now or when a place is free."""
        return self.state in (State.UP, State.STALLED) and not self.draining

    def can_take(self, now: float) -> bool:
        return (
            self.serves and self.running < self.capacity.limit and now >= self.closed_until and self.breaker.allows(now)
        )

    def runs_rows(self, now: float) -> bool:
        """Whether its rows may run, and more be sent within row_limit."""
        if self.state is not State.UP or self.draining or now < self.closed_until:
            return False
        return self.row_limit > 0 and self.breaker.allows(now)

    def predicted_wait(self, tokens: int) -> float:
        """Seconds until the first token of a request with so many prompt tokens to compute."""
        return (tokens + self.backlog) / self.prefill_tokens_s + self.capacity.decode_s * self.running


Policy: TypeAlias = Callable[[Replica, int, int], float]
"""The cost of a replica for a request with (replica, prompt tokens, cached prompt tokens). The lowest cost wins."""


def round_robin(replica: Replica, tokens: int, cached: int) -> float:
    return replica.sent


def least_work(replica: Replica, tokens: int, cached: int) -> float:
    return replica.predicted_wait(tokens)


def prefix_aware(replica: Replica, tokens: int, cached: int) -> float:
    return replica.predicted_wait(tokens - cached)


POLICIES: Mapping[str, Policy] = {"prefix": prefix_aware, "least-work": least_work, "round-robin": round_robin}


@dataclass(slots=True, eq=False)
class Ticket:
    """A request in the router, from its arrival to its end. replica: None while it waits."""

    demand: Demand
    arrived: float
    replica: Replica | None = None
    sent_at: float = 0.0
    cached: int = 0
    """Prompt tokens that the index expected the replica to have."""
    ahead: int = 0
    """Prompt tokens to compute before its first token, its own included."""
    attempts: int = 0
    choices: int = 0
    """Of a row of a batch; 0: an online request."""
    tried: set[int] = field(default_factory=set)
    _pending: int = 0
    """Its tokens in the backlog of its replica."""


@dataclass(slots=True)
class Totals:
    """Counts since the start."""

    requests: int = 0
    queued: int = 0
    refused: int = 0
    retried: int = 0
    offered_tokens: int = 0
    """Prompt tokens of all requests that arrived."""
    prompt_tokens: int = 0
    """Prompt tokens of those that were sent."""
    cached_tokens: int = 0
    """Those of `prompt_tokens` that the index expected at their replica."""


class Router:
    """Chooses replicas, counts what they do, and keeps the requests that wait.

    seed: of the choice between equal replicas. max_waiting: requests that may wait; further ones are refused.
    """

    def __init__(
        self, policy: Policy = prefix_aware, index: PrefixIndex | None = None, *, seed: int = 0, max_waiting: int = 1024
    ) -> None:
        self.policy = policy
        self.index = PrefixIndex() if index is None else index  # an empty index is false
        self.max_waiting = max_waiting
        self.replicas: dict[str, Replica] = {}
        self.queue: FairQueue[Ticket] = FairQueue()
        self.totals = Totals()
        self.expected = 0
        """Replicas that are being started. While there are some, requests wait although no replica is up."""
        self.rows_waiting = 0
        """Rows of batches that wait for room at a replica."""
        self._random = random.Random(seed)
        self._speed = Speed()
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._by_id: dict[int, Replica] = {}
        self._next_id = self._sent = 0
        self._end_rate, self._last_end = 0.0, -1.0

    @property
    def speed(self) -> float:
        """Measured over assumed prefill rates."""
        return self._speed.factor

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests that wait."""
        return sum(ticket.demand.tokens for ticket in self.queue)

    def add(self, name: str, capacity: Capacity = Capacity()) -> Replica:
        """Add a replica, which gets requests once its state is UP. Replaces one of the same name."""
        if name in self.replicas:
            self.remove(name)
        replica = self.replicas[name] = self._by_id[self._next_id] = Replica(self._next_id, name, capacity, self._speed)
        self.index.add_replica(replica.id, capacity.cache_tokens)
        self._next_id += 1
        return replica

    def remove(self, name: str) -> None:
        """Remove a replica. Its requests may still end."""
        replica = self.replicas.pop(name)
        replica.draining = True
        del self._by_id[replica.id]
        self.index.remove_replica(replica.id)

    def arrive(self, demand: Demand, now: float) -> Ticket:
        """A request: sent to `ticket.replica`, or waiting if that is None.

        Raises Unavailable if no replica is up or expected, Overloaded if too many requests wait.
        """
        self.totals.requests += 1
        self.totals.offered_tokens += demand.tokens
        ticket = Ticket(demand, now)
        if not self._serves and not self._awaits:
            self.totals.refused += 1
            raise self.refusal(now)
        if not self.queue and self._send(ticket, now):
            return ticket
        if len(self.queue) >= self.max_waiting:
            self.totals.refused += 1
            raise self.refusal(now)
        self.totals.queued += 1
        self.queue.push(ticket, demand.tenant, demand.priority, demand.tokens)
        return ticket

    def row_limit(self, now: float) -> int:
        """Choices of rows that may be in flight at all replicas together; 0 while online requests wait."""
        if self.queue:
            return 0
        return sum(replica.row_limit for replica in self.replicas.values() if replica.runs_rows(now))

    def send_row(self, demand: Demand, choices: int, now: float) -> Ticket | None:
        """A row of a batch, sent to the replica with room that answers it first; None if no replica has room.

        One with more choices than a replica has room for runs there alone.
        """
        hits, best, lowest = self.index.hits(demand.chunks), None, float("inf")
        for replica in self.replicas.values():
            if not replica.runs_rows(now) or (replica.rows and replica.rows + choices > replica.row_limit):
                continue
            cached = min(hits.get(replica.id, 0), demand.tokens - 1)
            cost = self.policy(replica, demand.tokens, cached) + replica.capacity.decode_s * replica.rows
            if cost < lowest:
                best, lowest = replica, cost
        if best is None:
            return None
        best.rows += choices
        self._sent += 1
        best.sent = self._sent
        best.breaker.sent()
        self.index.add(best.id, demand.chunks)
        return Ticket(demand, now, best, now, choices=choices)

    def first_token(self, ticket: Ticket, now: float) -> None:
        """The first token of a stream has come: its prompt is computed."""
        replica = ticket.replica
        if replica is not None and ticket._pending:
            if ticket.ahead >= _LEARNED_TOKENS and now > ticket.sent_at:
                self._speed.learn(ticket.ahead / replica.capacity.prefill_tokens_s, now - ticket.sent_at)
            self._release_prompt(ticket)

    def finish(self, ticket: Ticket, now: float, *, failed: bool | None = False) -> list[Ticket]:
        """A request has ended at its replica. failed: the replica failed it; None: the end says nothing about the replica.

        Returns the waiting requests that are sent now.
        """
        replica = ticket.replica
        if replica is None:
            self.queue.remove(ticket)
            return []
        self._release_prompt(ticket)
        replica.breaker.ended(now, failed)
        ticket.replica = None
        if ticket.choices:
            replica.rows -= ticket.choices
        else:
            replica.running -= 1
            if not failed:
                self._count_end(now)
        return self.dispatch(now)

    def retry(self, ticket: Ticket, now: float, *, most: int = 3) -> bool:
        """After `finish`: send a request without any byte of an answer again, to another replica if one has room, or let it wait at
        the head of the queue. False if it was sent `most` times, or if no replica serves.
        """
        if ticket.attempts >= most or not (self._serves or self._awaits):
            return False
        self.totals.retried += 1
        if not self._send(ticket, now):
            self.queue.give_back(ticket)
        return True

    def sent_elsewhere(self, name: str, chunks: Sequence[int] | None) -> None:
        """A replica was sent a prompt, by this router or another one. None: it has lost its cache."""
        replica = self.replicas[name]
        if chunks is None:
            self.index.clear_replica(replica.id)
        else:
            self.index.add(replica.id, chunks)

    def set_state(self, name: str, state: State, now: float) -> list[Ticket]:
        """The result of a health check. Returns the waiting requests that are sent now."""
        replica = self.replicas[name]
        served, replica.state = replica.serves, state
        if replica.serves and not served:
            replica.breaker = Breaker()
        return self.dispatch(now)

    def dispatch(self, now: float) -> list[Ticket]:
        """Send waiting requests while replicas have room. Call it regularly, too: time alone reopens replicas."""
        sent = []
        while (ticket := self.queue.head()) is not None and self._send(ticket, now):
            self.queue.pop()
            sent.append(ticket)
        return sent

    def refusal(self, now: float) -> Overloaded | Unavailable:
        """The error for a request that finds no place. It says when one is expected."""
        if not self._serves:
            return Unavailable("No replica is up: send the request again later.")
        ahead = len(self.queue)
        rate = self._end_rate if now - self._last_end < _RATE_MEMORY_S else 0.0
        wait = min(_RETRY_S[1], max(_RETRY_S[0], ahead / rate)) if rate else 1.0
        message = f"All replicas are busy and {ahead} requests wait. Retry after the seconds in the header retry-after."
        return Overloaded(message, retry_after_s=wait)

    @property
    def _serves(self) -> bool:
        return any(replica.serves for replica in self.replicas.values())

    @property
    def _awaits(self) -> bool:
        """Whether a replica is being started, or the engine of one."""
        return self.expected > 0 or any(
            replica.state is State.STARTING and not replica.draining for replica in self.replicas.values()
        )

    def _send(self, ticket: Ticket, now: float) -> bool:
        """Choose a replica and count the request there. False if no replica has room."""
        demand = ticket.demand
        hits = self.index.hits(demand.chunks)
        replica = self._sticky(ticket, now) or self._choose(ticket, hits, now)
        if replica is None:
            return False
        ticket.replica, ticket.sent_at = replica, now
        ticket.attempts += 1
        ticket.tried.add(replica.id)
        ticket.cached = min(hits.get(replica.id, 0), demand.tokens - 1)
        ticket._pending = max(1, demand.tokens - ticket.cached)
        replica.backlog += ticket._pending
        ticket.ahead = replica.backlog
        replica.running += 1
        self._sent += 1
        replica.sent = self._sent
        replica.breaker.sent()
        self.index.add(replica.id, demand.chunks)
        if ticket.attempts == 1:
            self.totals.prompt_tokens += demand.tokens
            self.totals.cached_tokens += ticket.cached
        if demand.session:
            self._sessions[demand.session] = replica.id
            self._sessions.move_to_end(demand.session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return True

    def _sticky(self, ticket: Ticket, now: float) -> Replica | None:
        """The replica of the request's session, if it has room."""
        session = ticket.demand.session
        replica = self._by_id.get(self._sessions.get(session, -1)) if session else None
        if replica is None or replica.state is not State.UP or replica.id in ticket.tried or not replica.can_take(now):
            return None
        return replica

    def _choose(self, ticket: Ticket, hits: Mapping[int, int], now: float) -> Replica | None:
        candidates = self._candidates(hits, now)
        candidates = [replica for replica in candidates if replica.id not in ticket.tried] or candidates
        tokens, policy = ticket.demand.tokens, self.policy
        best: list[Replica] = []
        lowest = float("inf")
        for replica in candidates:
            cost = policy(replica, tokens, min(hits.get(replica.id, 0), tokens - 1))
            if cost < lowest:
                best, lowest = [replica], cost
            elif cost == lowest:
                best.append(replica)
        return self._random.choice(best) if len(best) > 1 else best[0] if best else None

    def _candidates(self, hits: Mapping[int, int], now: float) -> list[Replica]:
        """Replicas that can take a request: all, or a sample of a large fleet and those with a prefix."""
        replicas = list(self.replicas.values())
        if len(replicas) > SAMPLED:
            drawn = {replica.id: replica for replica in self._random.sample(replicas, SAMPLED)}
            drawn.update((id, self._by_id[id]) for id in hits)
            if sample := [r for r in drawn.values() if r.state is State.UP and r.can_take(now)]:
                return sample
        serving = [replica for replica in replicas if replica.serves]
        up = [replica for replica in serving if replica.state is State.UP]
        return [replica for replica in up or serving if replica.can_take(now)]

    def _release_prompt(self, ticket: Ticket) -> None:
        assert ticket.replica is not None
        ticket.replica.backlog -= ticket._pending
        ticket._pending = 0

    def _count_end(self, now: float) -> None:
        """Update the rate of ended requests, which a refused client is told to wait by."""
        gap = max(now - self._last_end, 1e-6)
        if self._last_end >= 0:
            self._end_rate += (1 / gap - self._end_rate) * gap / (gap + _RATE_MEMORY_S)
        self._last_end = now
