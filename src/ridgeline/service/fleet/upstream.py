"""The connection to one replica: requests, answers as they come, and health checks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import msgspec
from aiohttp.connector import Connection
from aiohttp.tracing import Trace

from ridgeline.core.loop_time import LoopTimeout, loop_clock
from ridgeline.service.errors import ENGINE
from ridgeline.service.fleet.options import RouterConfig
from ridgeline.service.progress import Progress
from ridgeline.service.routing import State

CHECK_S = 0.25
"""Seconds between health checks."""
CONNECT_S = 1.0
"""Seconds in which a replica must accept a connection, in the time of the event loop, as all limits here."""
MOVE_S = 2.0
"""Seconds of silence after which requests without an answer yet are taken from a replica."""
GIVE_UP_S = 10.0
"""Seconds of silence after which answers that have begun are given up."""
_SWEEP_CHECKS = 4
"""Health checks between two looks at every answer."""
_ALIVE = frozenset({200, 204, 404, 405})
"""Statuses of a server that works. One without /health answers 404."""
_SERVING = (State.UP, State.STALLED)
_GUARDED = "/v1/models"
"""A route that needs a key on every server that has keys; /health needs none."""
KEYS_MISSING = (
    "it requires an API key and the router has none, so clients would share files, batches and stored responses: "
    "give the router the replicas' --api-key, or --admin-api-key if they have --api-keys"
)


NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises for a replica's nonsense."""

log = logging.getLogger(__name__)


class ReplicaLost(Exception):
    """The replica, or the connection to it, failed. reached: it may have begun with the request."""

    def __init__(self, message: str, *, reached: bool = True) -> None:
        super().__init__(message)
        self.reached = reached


class Connector(aiohttp.TCPConnector):
    """Makes the connections to replicas. One that is not made within CONNECT_S raises aiohttp.ConnectionTimeoutError."""

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> Connection:
        async with LoopTimeout(CONNECT_S):
            return await super().connect(req, traces, timeout)


class Exchange:
    """A request at a replica. scope: ends it when its time is set to now. received: chunks of the answer so far."""

    __slots__ = ("idle_since", "received", "scope", "seen")

    def __init__(self, scope: asyncio.Timeout) -> None:
        self.scope = scope
        self.received = self.seen = 0
        self.idle_since = -1.0

    def abort(self) -> None:
        self.scope.reschedule(0.0)


class Upstream:
    """One replica over HTTP. `watch` runs its health checks and reports each change of state.

    config: stall_s and idle_s. keyless: the router has no API key; a replica that requires one stays down.
    """

    def __init__(self, url: str, session: aiohttp.ClientSession, config: RouterConfig, *, keyless: bool) -> None:
        self.url = url
        self.trouble = "it was not checked yet"
        """Why it is not up."""
        self.state = State.DOWN
        self.row_limit = 0
        """Rows of batches that it runs now, as its last health check says."""
        self.cache_tokens: int | None = None
        """Tokens that its prefix cache holds, if its health checks say so."""
        self.received = 0
        """Chunks of answers so far."""
        self.exchanges: set[Exchange] = set()
        self._session, self._keyless = session, keyless
        self._stall_s, self._idle_s = config.stall_s, config.idle_s
        self._progress = Progress(config.stall_s)
        self._clock = loop_clock()
        self._silent_since: float | None = None
        """Time of the first of the last health checks without any answer."""

    @property
    def silent_s(self) -> float:
        """Seconds since its first health check without an answer, if it does not answer now."""
        return 0.0 if self._silent_since is None else self._clock.time() - self._silent_since

    @asynccontextmanager
    async def exchange(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: Any
    ) -> AsyncIterator[tuple[Exchange, aiohttp.ClientResponse]]:
        """A request, and the answer whose head has come. Raises ReplicaLost, also for an answer that breaks within the block."""
        try:
            async with asyncio.timeout(None) as scope:
                exchange = Exchange(scope)
                self.exchanges.add(exchange)
                self._clock.begin()
                try:
                    async with await self._send(method, path, headers, body) as reply:
                        yield exchange, reply
                finally:
                    self._clock.end()
                    self.exchanges.discard(exchange)
        except aiohttp.ConnectionTimeoutError:
            raise ReplicaLost(f"it accepts no connection within {CONNECT_S:g} s", reached=False) from None
        except TimeoutError:
            raise ReplicaLost("it makes no progress") from None
        except (aiohttp.ClientError, OSError) as error:
            reached = not isinstance(error, aiohttp.ClientConnectorError)
            raise ReplicaLost(str(error) or type(error).__name__, reached=reached) from error

    async def _send(
        self, method: str, path: str, headers: Sequence[tuple[str, str]], body: Any
    ) -> aiohttp.ClientResponse:
        """The head of an answer. Raises aiohttp.ClientError or OSError, as reading its body does."""
        reply = await self._session.request(
            method,
            self.url + path,
            headers=headers,
            data=body,
            allow_redirects=False,
            skip_auto_headers=("user-agent",),
        )
        _end_with_connection(reply)
        return reply

    async def watch(self, changed: Callable[[State], None]) -> None:
        """Check its health until cancelled. changed: called after every check."""
        checks = 0
        while True:
            try:
                self.state = await self._check()
            except Exception as error:  # without health checks a lost replica would keep its requests
                log.exception("the health check of %s failed unexpectedly", self.url)
                self.state, self.trouble = self._progress.failed(), f"its health check failed ({type(error).__name__})"
            changed(self.state)
            checks += 1
            if checks % _SWEEP_CHECKS == 0 or self._silent_since is not None:
                self._sweep(self._clock.time())
            await asyncio.sleep(CHECK_S)

    async def get(self, path: str, headers: Sequence[tuple[str, str]], timeout_s: float) -> Any:
        """The decoded body of a small answer with status 200. Raises aiohttp.ClientError, OSError or msgspec.DecodeError."""
        async with LoopTimeout(timeout_s), self._session.get(self.url + path, headers=headers) as reply:
            reply.raise_for_status()
            return msgspec.json.decode(await reply.read())

    async def refuses_router(self) -> bool:
        """Whether it requires a key and the router has none. Raises aiohttp.ClientError or OSError."""
        if not self._keyless:
            return False
        async with LoopTimeout(self._stall_s), self._session.get(self.url + _GUARDED) as reply:
            return reply.status == 401

    async def _check(self) -> State:
        received = self.received
        try:
            async with LoopTimeout(self._stall_s), self._session.get(self.url + "/health") as reply:
                body = await reply.read()
            refused = self.state not in _SERVING and reply.status in _ALIVE and await self.refuses_router()
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error, TimeoutError) and self.received != received:  # its answers go on: it has much to do
                self._silent_since = None
                if self.state is State.STALLED:
                    self.state, self.trouble = State.UP, ""
                return self.state
            self.row_limit = 0
            if self._silent_since is None:
                self._silent_since = self._clock.time()
            name = "no answer" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
            self.trouble = f"its health check failed ({name})"
            return self._progress.failed()
        self._silent_since = None
        self.row_limit = _number(body, "batch_rows") or 0
        self.cache_tokens = _number(body, "cache_tokens")
        if reply.status not in _ALIVE:
            self.trouble = f"its health check says: {error_message(body) or reply.status}"
            return self._progress.failed(starting=ENGINE in reply.headers)
        if refused:
            self.trouble = KEYS_MISSING
            return self._progress.failed()
        state = self._progress.checked(self._clock.time(), _number(body, "step"), self.received, len(self.exchanges))
        self.trouble = f"no step and no byte for {self._stall_s:g} s" if state is State.STALLED else ""
        return state

    def _sweep(self, now: float) -> None:
        """Abort exchanges that cannot be expected to go on."""
        silence = self.silent_s
        for exchange in tuple(self.exchanges):
            if exchange.received != exchange.seen or exchange.idle_since < 0:
                exchange.seen, exchange.idle_since = exchange.received, now
            begun = exchange.received > 0
            idle = begun and now - exchange.idle_since > self._idle_s
            if idle or silence > (GIVE_UP_S if begun else MOVE_S):
                exchange.abort()


def _end_with_connection(reply: aiohttp.ClientResponse) -> None:
    """End the body of an answer with an error when its connection ends before it. aiohttp (3.14) closes the connection when bytes
    of a body are malformed, and leaves the body open: its reader would wait forever.
    """
    body, connection = reply.content, reply.connection
    closed = None if connection is None or connection.protocol is None else connection.protocol.closed

    def end(_: object = None) -> None:
        if not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError("its connection has ended, or its bytes are malformed"))

    if closed is None:
        end()
        return
    closed.add_done_callback(end)

    def complete() -> None:
        closed.remove_done_callback(end)

    body.on_eof(complete)


def _number(body: bytes, name: str) -> int | None:
    """A number of a health check of Ridgeline: that of the last step, or of the rows that it runs."""
    try:
        value = msgspec.json.decode(body)
    except NOT_JSON:
        return None
    number = value.get(name) if isinstance(value, dict) else None
    return number if isinstance(number, int) else None


def error_message(body: bytes) -> str:
    """That of an error."""
    try:
        return str(msgspec.json.decode(body)["error"]["message"])[:200]
    except (*NOT_JSON, KeyError, TypeError):
        return ""
