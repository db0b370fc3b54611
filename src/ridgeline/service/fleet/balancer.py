"""Connects the pure `Router` with time and replicas: requests wait for their turn here, and health checks report here."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import aiohttp
from aiohttp import AddrInfoType

from ridgeline.core.errors import ConfigError, Overloaded
from ridgeline.core.loop_time import loop_clock
from ridgeline.metrics.catalogue import FIRST_TOKEN_SECONDS
from ridgeline.metrics.metrics import Histogram
from ridgeline.service.batches.rows import LaneCounts, NoRoom
from ridgeline.service.fleet.demand import CHUNK_TOKENS
from ridgeline.service.fleet.follower import Follower
from ridgeline.service.fleet.options import RouterConfig
from ridgeline.service.fleet.upstream import KEYS_MISSING, Connector, Upstream
from ridgeline.service.listen import Probes
from ridgeline.service.prefix_index import PrefixIndex
from ridgeline.service.routing import POLICIES, Demand, Router, State, Ticket

_KEEP_ALIVE_S = 30.0
"""Seconds for which an idle connection is kept, less than a server keeps it (75)."""
_READ_BUFFER = 1 << 16
_PROBES = Probes(10, 5, 4)
"""A connection to a host that is gone, or that a firewall forgot, ends after 30 s. Health checks do not see it, because they have
connections of their own."""
LATE_S = 0.5
"""Mean lateness of the event loop from which on new requests are refused. Rows of batches pause from half of it on, so that online
requests are not refused because of them."""
_LATE_RETRY_S = 5.0
REMOVED = "removed"
"""Label of all replicas that were removed."""


def probed_socket(address: AddrInfoType) -> socket.socket:
    """A socket for a connection to a replica, which the system probes while nothing comes."""
    made = socket.socket(*address[:3])
    _PROBES.set(made)
    return made


@dataclass(slots=True)
class Counts:
    """Counts since the start, by replica and result where a dictionary."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(FIRST_TOKEN_SECONDS))
    lane: LaneCounts = field(default_factory=LaneCounts)


class Balancer:
    """The replicas of a router, and the requests that wait for them. Use it as an async context manager.

    key: that of operators at the replicas; None: the router has no API key.
    """

    def __init__(self, config: RouterConfig, max_queue: int, key: str | None) -> None:
        self.config = config
        self._key = key
        index = PrefixIndex(int(config.index_mb * (1 << 20)), CHUNK_TOKENS)
        self.router = Router(POLICIES[config.policy], index, max_waiting=max_queue)
        self.upstreams: dict[str, Upstream] = {}
        self.counts = Counts()
        self.asleep = False
        """The fleet has no replica because none is needed: the next request starts one."""
        self._turns: dict[Ticket, asyncio.Future[None]] = {}
        self._watches: dict[str, list[asyncio.Task[None]]] = {}

    async def __aenter__(self) -> Balancer:
        self._session = aiohttp.ClientSession(
            connector=Connector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, socket_factory=probed_socket),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            read_bufsize=_READ_BUFFER,
        )
        self._clock = asyncio.get_running_loop().time
        self._loop_clock = loop_clock()
        return self

    async def __aexit__(self, *_: object) -> None:
        for name in tuple(self.upstreams):
            self.remove(name)
        await self._session.close()

    def add(self, name: str, url: str) -> Upstream:
        """Add a replica. It gets requests after its first good health check."""
        upstream = Upstream(url, self._session, self.config, keyless=self._key is None)
        self.upstreams[name] = upstream
        self.router.add(name, self.config.capacity)

        def checked(state: State) -> None:
            replica = self.router.replicas[name]
            replica.row_limit = upstream.row_limit
            if upstream.cache_tokens is not None:
                self.router.index.resize(replica.id, upstream.cache_tokens)
            self._wake(self.router.set_state(name, state, self._clock()))

        def sent(chunks: Sequence[int] | None) -> None:
            self.router.sent_elsewhere(name, chunks)

        headers = [] if self._key is None else [("authorization", f"Bearer {self._key}")]
        follower = Follower(url, self._session, headers, sent)
        loop = asyncio.get_running_loop()
        self._watches[name] = [loop.create_task(upstream.watch(checked)), loop.create_task(follower.run())]
        return upstream

    def remove(self, name: str) -> None:
        """Remove a replica. Answers that have begun go on."""
        for watch in self._watches.pop(name):
            watch.cancel()
        del self.upstreams[name]
        self.router.remove(name)
        for replica, result in [key for key in self.counts.answers if key[0] == name]:
            self.counts.answers[REMOVED, result] += self.counts.answers.pop((replica, result))

    async def drain(self, name: str, patience_s: float) -> None:
        """Send a replica no more requests, and wait for those it has, at most patience_s."""
        replica = self.router.replicas[name]
        replica.draining = True
        deadline = self._clock() + patience_s
        while replica.running and self._clock() < deadline:
            await asyncio.sleep(0.02)

    async def check_keys(self) -> None:
        """Raises ConfigError for a replica that requires an API key while the router has none. Health checks find those that do
        not answer yet.
        """
        upstreams = tuple(self.upstreams.values())
        answers = await asyncio.gather(*(each.refuses_router() for each in upstreams), return_exceptions=True)
        for upstream, refuses in zip(upstreams, answers, strict=True):
            if refuses is True:
                raise ConfigError(f"The replica {upstream.url} is not used: {KEYS_MISSING}.", param="api_key")

    async def until_up(self, name: str) -> None:
        """Wait until a replica is up."""
        while self.upstreams[name].state is not State.UP:
            await asyncio.sleep(0.02)

    @property
    def late_s(self) -> float:
        """By how many seconds the event loop is late because of what it has to do (`LoopClock`)."""
        return self._loop_clock.late_s

    def admit(self) -> None:
        """Refuse a new request, before its body is read, while the event loop is late: it would make all others later.

        Raises Overloaded.
        """
        if self.late_s > LATE_S:
            self.router.totals.refused += 1
            raise Overloaded(
                "The router has more to do than its core can: send the request again after the seconds in the header retry-after, "
                "or start more routers.",
                retry_after_s=_LATE_RETRY_S,
            )

    async def place(self, demand: Demand) -> Ticket:
        """A replica for a request, when one has room. Every ticket must end in `finish`.

        Raises Unavailable or Overloaded.
        """
        ticket = self.router.arrive(demand, self._clock())
        await self._turn(ticket)
        return ticket

    @property
    def row_limit(self) -> int:
        """Choices of rows of batches that may be in flight."""
        return 0 if self.late_s > LATE_S / 2 else self.router.row_limit(self._clock())

    def place_row(self, demand: Demand, choices: int) -> Ticket:
        """A replica for a row of a batch. Every ticket must end in `finish`. Raises NoRoom."""
        ticket = self.router.send_row(demand, choices, self._clock())
        if ticket is None:
            raise NoRoom
        return ticket

    def limit_rows(self, ticket: Ticket, *, lost: bool) -> None:
        """The replica of a row has refused it, or is lost: until its next health check it has room for the others, or for none."""
        if (replica := ticket.replica) is not None:
            replica.row_limit = 0 if lost else min(replica.row_limit, replica.rows - ticket.choices)

    def count(self, name: str, result: str) -> None:
        """Count an answer. Replicas that were removed are counted together, so that the number of series stays bounded."""
        self.counts.answers[name if name in self.upstreams else REMOVED, result] += 1

    def first_byte(self, ticket: Ticket) -> None:
        self.router.first_token(ticket, self._clock())

    def finish(self, ticket: Ticket, *, failed: bool | None) -> None:
        """The request has ended at its replica (`Router.finish`)."""
        self._wake(self.router.finish(ticket, self._clock(), failed=failed))

    async def retry(self, ticket: Ticket, *, failed: bool | None) -> bool:
        """The replica did not begin an answer: place the request again. False if it cannot be.

        Raises Overloaded.
        """
        self.finish(ticket, failed=failed)
        if not self.router.retry(ticket, self._clock()):
            return False
        await self._turn(ticket)
        return True

    def pause(self, ticket: Ticket, seconds: float) -> None:
        """The replica refuses requests for now."""
        if ticket.replica is not None:
            ticket.replica.closed_until = self._clock() + seconds

    def down(self, ticket: Ticket, trouble: str, *, starting: bool = False) -> None:
        """The replica cannot serve, or not before its engine has started. The next health check may say otherwise."""
        if ticket.replica is not None and (upstream := self.upstreams.get(ticket.replica.name)) is not None:
            ticket.replica.state = upstream.state = State.STARTING if starting else State.DOWN
            upstream.trouble = trouble

    async def _turn(self, ticket: Ticket) -> None:
        """Wait until a replica is chosen. Raises Overloaded, or Unavailable if none is up, after queue_s."""
        if ticket.replica is not None:
            self.counts.queue_seconds.add(0.0)
            return
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        began = self._clock()
        try:
            async with asyncio.timeout(self.config.queue_s):
                await turn
        except BaseException as error:
            self.finish(ticket, failed=None)
            if isinstance(error, TimeoutError):
                raise self.router.refusal(self._clock()) from None
            raise
        finally:
            del self._turns[ticket]
        self.counts.queue_seconds.add(self._clock() - began)

    def _wake(self, tickets: Iterable[Ticket]) -> None:
        for ticket in tickets:
            if not (turn := self._turns[ticket]).done():
                turn.set_result(None)
