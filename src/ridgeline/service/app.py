"""The application: all routes, and the handlers of the two generating routes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

from aiohttp import web

from ridgeline.core.errors import Overloaded
from ridgeline.service import insight, openapi, pages, routes
from ridgeline.service.answer import send_body, send_events
from ridgeline.service.batches import routes as batch_routes
from ridgeline.service.batches.lane import run_lane
from ridgeline.service.declared import RUN_ID, read_declared, read_run_id
from ridgeline.service.fields import Route, read_fields
from ridgeline.service.front import Front
from ridgeline.service.guard import (
    ACCESS,
    FRONT,
    HOLDER,
    IGNORED,
    REQUEST_ID,
    add_headers,
    guard,
    read_json,
    request_id,
)
from ridgeline.service.keys import routes as key_routes
from ridgeline.service.read_call import read_call

_TICK_S = 1.0


def make_app(front: Front) -> web.Application:
    """The aiohttp application. Run it with `handler_cancellation`, so that a disconnect ends the request."""
    app = web.Application(middlewares=[guard])
    app[ACCESS] = app[FRONT] = front
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_tick)
    app.cleanup_ctx.append(_watch_keys)
    app.cleanup_ctx.append(_run_lane)
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/v1/completions", _completions)
    app.router.add_routes(routes.ROUTES)
    app.router.add_routes(batch_routes.ROUTES)
    app.router.add_routes(key_routes.ROUTES)
    app.router.add_routes(insight.ROUTES)
    app.router.add_routes(pages.ROUTES)
    app.router.add_routes(openapi.ROUTES)
    openapi.add_document(app)
    return app


async def _tick(app: web.Application) -> AsyncIterator[None]:
    """Update the live figures once a second while the application runs, also without requests."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            app[FRONT].metrics.live.tick()

    ticking = asyncio.create_task(tick())
    yield
    ticking.cancel()


async def _watch_keys(app: web.Application) -> AsyncIterator[None]:
    """Read API keys again when their file changes, and write what they have used."""
    keys = app[FRONT].keys

    async def watch() -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            keys.reload()
            await asyncio.to_thread(keys.flush)

    watching = asyncio.create_task(watch())
    yield
    watching.cancel()
    await asyncio.wait({watching})
    keys.close()


async def _run_lane(app: web.Application) -> AsyncIterator[None]:
    """Run rows of batches while the application runs."""
    async with run_lane(app[FRONT]) as lane:
        if lane is not None:
            app[batch_routes.LANE] = lane
        yield


async def _chat(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, as a whole or as server-sent events."""
    return await _generate(request, "chat")


async def _completions(request: web.Request) -> web.StreamResponse:
    """Continue a text, as a whole or as server-sent events."""
    return await _generate(request, "completions")


async def _generate(request: web.Request, route: Route) -> web.StreamResponse:
    """Read and check the request, submit it to the engine, and answer."""
    arrival = time.time()
    front = request.app[FRONT]
    service = front.service()
    declared, unknown = read_declared(request.headers.items())
    run_id = read_run_id(request.headers.getall(RUN_ID, []))
    fields = await read_json(request, partial(read_fields, route))
    if unknown or fields.ignored:
        request[IGNORED] = (*fields.ignored, *unknown)
    if (body_id := fields.get("request_id")) is not None and "x-request-id" not in request.headers:
        request[REQUEST_ID] = request_id(body_id)
    call, shape, streaming = await read_call(service, route, fields, arrival)
    if call.ignored:
        request[IGNORED] = (*request.get(IGNORED, ()), *call.ignored)
    holder = request[HOLDER]
    holder.check_model(*service.card.names(fields.get("model")))
    call, changed = holder.bind(replace(call, declared=declared, request_id=request[REQUEST_ID], run_id=run_id))
    if changed:
        request[IGNORED] = (*request.get(IGNORED, ()), *changed)
    service.metrics.live.on_arrival()
    stats = service.client.stats
    try:
        holder.check(call)
        service.gate.admit(service.client.open_choices, stats.waiting if stats is not None else 0, holder.name)
    except Overloaded:
        service.metrics.aborted("overloaded")
        raise
    if (lane := request.app.get(batch_routes.LANE)) is not None:
        lane.wake()
    with holder.running(call):
        if streaming is None:
            return await send_body(service, call, shape)
        return await send_events(request, service, call, shape, streaming)
