"""Passes a request to a replica and its answer back, byte for byte. It is sent again only while no byte of an answer came."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, TypeAlias

import aiohttp
from aiohttp import HttpVersion11, web

from ridgeline.core.errors import EngineFailed, Unavailable
from ridgeline.service.answer import write
from ridgeline.service.batches.rows import ROW
from ridgeline.service.errors import BUSY, ENGINE, error_event
from ridgeline.service.fleet.balancer import Balancer
from ridgeline.service.fleet.demand import Reading, read_demand
from ridgeline.service.fleet.splice import Splice
from ridgeline.service.fleet.upstream import Exchange, ReplicaLost, Upstream
from ridgeline.service.guard import ACCESS, REQUEST_ID, TRACE, name_request, request_id
from ridgeline.service.routing import Ticket

BALANCER = web.AppKey("balancer", Balancer)
REPLICA = "x-ridgeline-replica"
"""Response header with the name of the replica that answered."""
_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer",
        "transfer-encoding", "upgrade", "content-length", "x-request-id",
    }
)  # fmt: skip
"""Headers of one connection (RFC 9110, section 7.6.1), and those that are set anew."""
_NOT_SENT = _HOP | {"host", "expect", "content-encoding", "accept-encoding", "origin", "referer", "cookie", ROW}
"""Headers of a request that are not passed on: the router has decoded the body and checked the origin; rows are its own."""
_NOT_RETURNED = _HOP | {"date", "server", "vary"}
NOT_READY = frozenset({502, 503, 504})
"""Statuses after which another replica may answer."""
_DEFAULT_PAUSE_S = 0.5
_STREAMED_BODY = 1 << 18
"""Bytes above which a body is written in pieces, so that other streams go on."""
_WHOLE_BYTES = 1 << 20
"""Up to this length an answer of known length is read before any of it is passed on."""

log = logging.getLogger(__name__)


class ClientLost(Exception):
    """The client has left, or reads too slowly."""


Watch: TypeAlias = Callable[[Mapping[str, str], bytes], None]
"""Sees each chunk of an answer with status 200 before it is passed on, with the answer's headers."""


class Outgoing(NamedTuple):
    """What goes to a replica. body: None: that of the request."""

    reading: Reading
    body: bytes | None = None
    watch: Watch | None = None


async def forward(request: web.Request) -> web.StreamResponse:
    """Send a request with a JSON body to the replica that the router chooses, and pass its answer on."""
    return await pass_on(request, lambda body: Outgoing(read_demand(request.headers, body)))


async def pass_on(request: web.Request, read: Callable[[Any], Outgoing]) -> web.StreamResponse:
    """As `forward`, with what `read` makes of the request's body."""
    balancer, access = request.app[BALANCER], request.app[ACCESS]
    if access.draining:
        raise Unavailable("The router is shutting down: send the request to another one.")
    async with AsyncExitStack() as held:
        body, outgoing = await held.enter_async_context(access.bodies.held(request, read))
        demand, body_id = outgoing.reading
        if isinstance(body_id, str) and "x-request-id" not in request.headers:
            name_request(request, request_id(body_id))
        ticket = await balancer.place(demand)
        passing = Passing(request, balancer, ticket, outgoing.body or bytes(body), held)
        passing.watch = outgoing.watch
        try:
            return await passing.run()
        finally:
            balancer.finish(ticket, failed=passing.failed)


class _Answer(web.StreamResponse):
    """Its headers go out with its first bytes, which are here already."""

    _send_headers_immediately = False  # of aiohttp; without the name, headers are a packet of their own


class Passing:
    """One request on its way. failed: what its end says about the replica (`Router.finish`)."""

    def __init__(
        self, request: web.Request, balancer: Balancer, ticket: Ticket, body: bytes, held: AsyncExitStack
    ) -> None:
        self.failed: bool | None = None
        self.watch: Watch | None = None
        self._request, self._balancer, self._ticket = request, balancer, ticket
        self._body = body
        self._held = held
        """Memory of the body, which is released with the first byte of the answer."""
        self._response: web.StreamResponse | None = None
        self._last = b""
        """The last chunk that was sent."""

    async def run(self) -> web.StreamResponse:
        while True:
            name = self._name
            try:
                answer = await self._attempt(name)
            except ClientLost as error:
                self._balancer.count(name, "client_left")
                log.info("%s: the client disconnected (%s)", self._request[REQUEST_ID], error)
                if self._request.transport is not None:
                    self._request.transport.abort()
                assert self._response is not None
                return self._response
            except ReplicaLost as error:
                self._balancer.count(name, "failed")
                if self._response is not None:
                    return await self._broken(self._response, name, error)
                if not await self._balancer.retry(self._ticket, failed=True):
                    message = f"The replica failed before it answered ({error}): send the request again."
                    raise EngineFailed(message) from error
                continue
            except asyncio.CancelledError:
                self._balancer.count(name, "client_left")
                raise
            if answer is not None:
                return answer

    async def _attempt(self, name: str) -> web.StreamResponse | None:
        """Send the request to one replica. None: it is to be sent again. Raises ReplicaLost or ClientLost."""
        if (upstream := self._balancer.upstreams.get(name)) is None:
            raise ReplicaLost("it was removed")
        self._request[TRACE].sent(name)
        body = io.BytesIO(self._body) if len(self._body) > _STREAMED_BODY else self._body
        target = self._request.rel_url.raw_path_qs  # without the host of a target such as http://host/path
        async with upstream.exchange(self._request.method, target, self._headers(), body) as (exchange, reply):
            if (reply.status == 429 and BUSY in reply.headers) or reply.status in NOT_READY:
                return await self._refused(reply)
            return await self._pass(upstream, exchange, reply)

    async def _refused(self, reply: aiohttp.ClientResponse) -> web.StreamResponse | None:
        """The replica is busy or not ready: try another one. Without another one, its answer is passed on."""
        body = await reply.read()
        if reply.status == 429:
            self._balancer.pause(self._ticket, _retry_after(reply.headers))
        elif reply.status == 503:
            self._balancer.down(self._ticket, "it answers 503", starting=ENGINE in reply.headers)
        name = self._name
        if await self._balancer.retry(self._ticket, failed=None if reply.status in (429, 503) else True):
            return None
        self._balancer.count(name, "refused")
        return web.Response(status=reply.status, headers=_returned(reply.headers, name), body=body)

    async def _pass(self, upstream: Upstream, exchange: Exchange, reply: aiohttp.ClientResponse) -> web.StreamResponse:
        """Pass an answer on as it comes."""
        content, request, length = reply.content, self._request, reply.headers.get("content-length")

        def passed() -> None:
            upstream.received += 1
            exchange.received += 1

        splice = self._splice(reply, passed)
        # One that is complete at once is passed on when all of it is here, so that it is sent again if it breaks off.
        whole = length is not None and int(length) <= _WHOLE_BYTES
        chunk = await (content.read() if whole else content.readany())
        self._balancer.first_byte(self._ticket)
        self._body = b""
        await self._held.aclose()
        response = _Answer(status=reply.status, headers=_returned(reply.headers, self._name))
        if length is not None:
            response.content_length = int(length)
        self._response = response
        try:
            await response.prepare(request)
        except OSError as error:
            raise ClientLost(type(error).__name__) from error
        while chunk:
            passed()
            self._last = chunk
            if self.watch is not None and reply.status == 200:
                self.watch(reply.headers, chunk)
            try:
                await write(request, response, chunk)
            except (OSError, TimeoutError) as error:
                raise ClientLost(type(error).__name__) from error
            chunk = content.read_nowait()
            if splice is not None and not chunk:
                self._last = await splice.run() or self._last
            chunk = chunk or await content.readany()
        if splice is not None:
            splice.leave()
        self.failed = None if reply.status >= 500 else False
        self._balancer.count(self._name, "ok" if reply.status < 400 else "refused")
        return response

    def _splice(self, reply: aiohttp.ClientResponse, passed: Callable[[], None]) -> Splice | None:
        """For a stream of events that nobody watches."""
        source = None if reply.connection is None else reply.connection.transport
        target = self._request.transport
        chunks = "chunked" in reply.headers.get("transfer-encoding", "") and self._request.version >= HttpVersion11
        if source is None or target is None or not chunks or self.watch is not None:
            return None
        return Splice(source, target, reply.content, passed) if reply.content_type == "text/event-stream" else None

    async def _broken(self, response: web.StreamResponse, name: str, error: ReplicaLost) -> web.StreamResponse:
        """An answer that has begun cannot go on: a stream ends with an error event, any other answer with its connection."""
        self.failed = True
        log.warning("%s: the answer of replica %s ended early: %s", self._request[REQUEST_ID], name, error)
        if response.content_type == "text/event-stream":
            event = error_event(
                EngineFailed(f"The replica was lost during the answer ({error}): send the request again.")
            )
            try:
                await write(self._request, response, event if self._last.endswith(b"\n\n") else b"\n\n" + event)
            except (OSError, TimeoutError):
                log.info("%s: the client has left, too, or reads too slowly", self._request[REQUEST_ID])
                if self._request.transport is not None:
                    self._request.transport.abort()
        elif self._request.transport is not None:
            self._request.transport.abort()
        return response

    @property
    def _name(self) -> str:
        assert self._ticket.replica is not None
        return self._ticket.replica.name

    def _headers(self) -> list[tuple[str, str]]:
        trace = self._request[TRACE].headers
        headers = [
            (name, value)
            for name, value in self._request.headers.items()
            if (lower := name.lower()) not in _NOT_SENT and lower not in trace and not lower.startswith("sec-fetch-")
        ]
        return [*headers, *trace.items(), ("x-request-id", self._request[REQUEST_ID]), ("accept-encoding", "identity")]


def _returned(headers: Mapping[str, str], name: str) -> list[tuple[str, str]]:
    """The headers of a replica's answer that the client gets."""
    returned = [
        (key, value)
        for key, value in headers.items()
        if (lower := key.lower()) not in _NOT_RETURNED and not lower.startswith("access-control-")
    ]
    return [*returned, (REPLICA, name)]


def _retry_after(headers: Mapping[str, str]) -> float:
    """Seconds that a 429 asks to wait."""
    for name, scale in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return min(60.0, max(0.0, float(headers[name]) * scale))
        except (KeyError, ValueError):
            continue
    return _DEFAULT_PAUSE_S
