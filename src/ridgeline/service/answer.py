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

from ridgeline.core.events import PinOutcome
from ridgeline.service.breakpoints import Breakpoint
from ridgeline.service.call import Call, Usage
from ridgeline.service.errors import as_ridgeline, error_event
from ridgeline.service.fields import TTLS
from ridgeline.service.piece import Piece
from ridgeline.service.state import Service
from ridgeline.service.stream import pieces

SLOW_WRITE_S = 60.0
"""Seconds after which a client that reads nothing is disconnected."""

_UNCHECKED_BYTES = 1 << 14
"""Buffered bytes below which a write never waits."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Streaming:
    """How the caller wants usage in the stream."""

    include_usage: bool = False
    continuous_usage: bool = False


class Shape(Protocol):
    """How a route formats its answer. Pieces go through `choices` for a stream and through `add` for a body."""

    usage: Usage
    body_head: dict[str, Any]
    """The members before `choices`: id, object, created, model and so on."""
    head: bytes
    """The start of every event, up to its choices: `{"id":...,"model":...`."""

    def choices(self, piece: Piece) -> list[bytes]:
        """JSON of the `choices` entries of a piece, each for an event of its own; empty while its text is held back."""

    def empty(self, index: int) -> bytes:
        """An entry without text for tokens of choice `index` that have no text yet."""

    def add(self, piece: Piece) -> None: ...

    def body(self) -> list[dict[str, Any]]:
        """The `choices` of the complete answer."""


def usage_dict(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object. Always includes cached_tokens and cache_write_tokens, in whole blocks of the prefix cache. With
    breakpoints, prompt_cache says what became of each; with --token-prices, billed is the price. answer_cached: the
    answer comes from the answer cache, and no token was computed."""
    details: dict[str, Any] = {
        "cached_tokens": usage.cached,
        "cache_write_tokens": sum(usage.written.values()),
    }
    content = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
    if usage.pins:
        details["cache_write_details"] = {f"ephemeral_{ttl}_tokens": usage.written.get(ttl, 0) for ttl in TTLS}
        content["prompt_cache"] = [_pin(point, outcome) for point, outcome in usage.pins]
    if usage.repeated:
        content["answer_cached"] = True
    if usage.prices is not None:
        content["billed"] = usage.prices.bill(usage.billable, usage.price_factor)
    return content


def _pin(point: Breakpoint, outcome: PinOutcome) -> dict[str, Any]:
    return {
        "tokens": outcome.tokens,
        "ttl": point.ttl,
        "state": outcome.state,
        "reason": outcome.reason or None,
        "lost": outcome.lost or None,
    }


async def send_body(service: Service, call: Call, shape: Shape) -> web.Response:
    """Run the call to its end and send one body."""
    return web.Response(body=await make_body(service, call, shape), content_type="application/json")


async def make_body(service: Service, call: Call, shape: Shape) -> bytes:
    """Run the call to its end; returns the JSON of the answer."""
    async with contextlib.aclosing(pieces(service, call, shape.usage)) as batches:
        async for batch in batches:
            for piece in batch:
                shape.add(piece)
    body = {**shape.body_head, "choices": shape.body(), "usage": usage_dict(shape.usage)}
    return msgspec.json.encode(body)


async def send_events(
    request: web.Request, service: Service, call: Call, shape: Shape, streaming: Streaming
) -> web.StreamResponse:
    """Stream the call. Headers are sent with the first event, so that earlier failures get their own HTTP status."""
    response = web.StreamResponse(
        headers={
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
    )
    batches = pieces(service, call, shape.usage)
    async with contextlib.aclosing(_events(batches, shape, streaming, service.config.keep_alive_s)) as events:
        try:
            async for data in events:
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
            await response.write(error_event(as_ridgeline(error)))
    return response


async def write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Write, within SLOW_WRITE_S. A timer costs time, so it is used only if earlier writes are still buffered."""
    transport = request.transport
    if transport is not None and transport.get_write_buffer_size() + len(data) < _UNCHECKED_BYTES:
        await response.write(data)
        return
    async with asyncio.timeout(SLOW_WRITE_S):
        await response.write(data)


async def _events(
    batches: AsyncGenerator[list[Piece], None], shape: Shape, streaming: Streaming, keep_alive_s: float
) -> AsyncGenerator[bytes, None]:
    """Events as bytes, those of one batch joined; a comment after a silence of keep_alive_s.

    Tokens may have no text yet: half a character, the start of a stop string, hidden reasoning. With continuous usage they still
    get an event, empty but for the count, so that the client sees every step. Otherwise they get none, because a client would
    mistake an empty event for the first text.
    """
    head, tail = b"data: " + shape.head + b',"choices":[', b"]}\n\n"
    if streaming.include_usage:
        tail = b'],"usage":null}\n\n'
    clock = asyncio.get_running_loop().time
    last_write = clock()
    async with contextlib.aclosing(batches):
        async for batch in batches:
            events: list[bytes] = []
            for piece in batch:
                choices = shape.choices(piece)
                if streaming.continuous_usage:
                    if piece.count and not choices:
                        choices = [shape.empty(piece.index)]
                    tail = b'],"usage":' + msgspec.json.encode(usage_dict(shape.usage)) + b"}\n\n"
                events += [head + choice + tail for choice in choices]
            now = clock()
            if events:
                yield b"".join(events)
            elif not batch or now - last_write >= keep_alive_s:
                yield b": keep-alive\n\n"
            else:
                continue
            last_write = now
    if streaming.include_usage:
        yield head + b'],"usage":' + msgspec.json.encode(usage_dict(shape.usage)) + b"}\n\n"
    yield b"data: [DONE]\n\n"
