"""Sends an answer to its client: as server-sent events while it grows, or as one body at its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ridgeline.core.errors import RidgelineError
from ridgeline.core.loop_time import LoopTimeout
from ridgeline.service.call import Call, Usage
from ridgeline.service.errors import as_ridgeline
from ridgeline.service.piece import Piece
from ridgeline.service.state import Service
from ridgeline.service.stream import pieces

SLOW_WRITE_S = 60.0
"""Seconds after which a client that reads nothing is disconnected, in the time of the event loop."""

_UNCHECKED_BYTES = 1 << 14
"""Buffered bytes below which a write never waits."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Streaming:
    """How the caller wants usage in the stream."""

    include_usage: bool = False
    continuous_usage: bool = False


class Events(Protocol):
    """An answer while it grows, as its route sends it."""

    content_type: str
    silence: bytes
    """Sent when nothing else was for a while."""

    def take(self, piece: Piece) -> bytes:
        """The events of a piece; empty while its text is held back."""

    def end(self) -> bytes:
        """The last events of a complete answer."""

    def error(self, error: RidgelineError) -> bytes:
        """The last event of an answer that failed, which clients raise: a connection that only closes would look like an end."""


class Shape(Protocol):
    """How a route formats its answer. Pieces go through `events` for a stream, and through `add` for one body."""

    usage: Usage

    def events(self, streaming: Streaming) -> Events: ...

    def add(self, piece: Piece) -> None: ...

    def whole(self) -> dict[str, Any]:
        """The complete answer."""


async def send_body(service: Service, call: Call, shape: Shape) -> web.Response:
    """Run the call to its end and send one body."""
    return web.Response(body=await make_body(service, call, shape), content_type="application/json")


async def make_body(service: Service, call: Call, shape: Shape) -> bytes:
    """Run the call to its end; returns the JSON of the answer."""
    async with contextlib.aclosing(pieces(service, call, shape.usage)) as batches:
        async for batch in batches:
            for piece in batch:
                shape.add(piece)
    return msgspec.json.encode(shape.whole())


async def send_events(
    request: web.Request, service: Service, call: Call, shape: Shape, streaming: Streaming
) -> web.StreamResponse:
    """Stream the call. Headers are sent with the first event, so that earlier failures get their own HTTP status."""
    events = shape.events(streaming)
    response = web.StreamResponse(
        headers={"content-type": events.content_type, "cache-control": "no-cache", "x-accel-buffering": "no"}
    )
    batches = pieces(service, call, shape.usage)
    async with contextlib.aclosing(event_data(batches, events, service.config.keep_alive_s)) as parts:
        try:
            async for data in parts:
                if not response.prepared:
                    await response.prepare(request)
                await write(request, response, data)
        except (ConnectionError, TimeoutError) as error:
            log.info("stream %s: the client disconnected (%s)", call.id, type(error).__name__)
            if request.transport is not None:
                request.transport.abort()
        except Exception as error:
            if not response.prepared:
                raise
            log.warning("stream %s ended early: %s", call.id, error)
            try:
                await write(request, response, events.error(as_ridgeline(error)))
            except (ConnectionError, TimeoutError):  # it has left, too, or reads too slowly
                if request.transport is not None:
                    request.transport.abort()
    return response


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write, within SLOW_WRITE_S. A timer costs time, so it is used only if earlier writes are still buffered."""
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size() + len(data) < _UNCHECKED_BYTES:
        await response.write(data)
        return
    async with LoopTimeout(SLOW_WRITE_S):
        await response.write(data)


async def event_data(
    batches: AsyncGenerator[list[Piece], None], events: Events, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """Events as bytes, those of one batch joined; `events.silence` after a silence of keep_alive_s."""
    clock = asyncio.get_running_loop().time
    last_write = clock()
    async with contextlib.aclosing(batches):
        async for batch in batches:
            data = b"".join([events.take(piece) for piece in batch])
            now = clock()
            if data:
                yield data
            elif not batch or now - last_write >= keep_alive_s:
                yield events.silence
            else:
                continue
            last_write = now
    yield events.end()
