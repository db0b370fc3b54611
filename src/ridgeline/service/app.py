"""The application: all routes, and the handlers of the two generating routes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from ridgeline.service import adapter_routes, debug, insight, openapi, pages, routes, sleep_routes, vector_routes
from ridgeline.service.apis import messages, ollama, ollama_embed, responses
from ridgeline.service.apis.response_store import ResponseStore
from ridgeline.service.batches import routes as batch_routes
from ridgeline.service.batches.admission import LaneAdmission
from ridgeline.service.batches.engine_rows import ROWS, EngineRows
from ridgeline.service.batches.lane import run_lane
from ridgeline.service.batches.rows import WatchedRows
from ridgeline.service.batches.settings import read_impact
from ridgeline.service.front import Front
from ridgeline.service.generate import generate
from ridgeline.service.guard import ACCESS, FRONT, add_headers, guard
from ridgeline.service.keys import routes as key_routes
from ridgeline.service.read_call import CHAT, COMPLETIONS

MODEL_ROWS: web.AppKey[WatchedRows] = web.AppKey("model_rows")
_TICK_S = 1.0


def make_app(front: Front, rows: WatchedRows | None = None) -> web.Application:
    """The aiohttp application. Run it with `handler_cancellation`, so that a disconnect ends the request.

    rows: those of several models; without them the front's engine runs rows.
    """
    app = web.Application(middlewares=[guard])
    app[ACCESS] = app[FRONT] = front
    if rows is None:
        app[ROWS] = _engine_rows(front)
    else:
        app[MODEL_ROWS] = rows
    app[responses.STORE] = ResponseStore(int(front.config.response_store_mb * (1 << 20)))
    app.on_response_prepare.append(add_headers)
    app.cleanup_ctx.append(_tick)
    app.cleanup_ctx.append(_watch_keys)
    app.cleanup_ctx.append(_run_rows)
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/v1/completions", _completions)
    app.router.add_routes(vector_routes.ROUTES)
    app.router.add_routes(messages.ROUTES)
    app.router.add_routes(ollama.ROUTES)
    app.router.add_routes(ollama_embed.ROUTES)
    app.router.add_post("/v1/responses", responses.create)
    app.router.add_routes(responses.ROUTES)
    app.router.add_routes(routes.ROUTES)
    app.router.add_routes(sleep_routes.ROUTES)
    app.router.add_routes(adapter_routes.ROUTES)
    app.router.add_routes(debug.ROUTES)
    app.router.add_routes(batch_routes.ROUTES)
    app.router.add_routes(key_routes.ROUTES)
    app.router.add_routes(insight.ROUTES)
    app.router.add_routes(pages.ROUTES)
    app.router.add_routes(openapi.ROUTES)
    openapi.add_document(app)
    return app


def _engine_rows(front: Front) -> EngineRows:
    live = front.metrics.live
    admission = LaneAdmission(live.slo, read_impact(front.config.batch_impact))
    return EngineRows(lambda: None if front.sleep.away else front, live, admission)


async def _tick(app: web.Application) -> AsyncIterator[None]:
    """Update the live figures once a second while the application runs, also without requests."""

    async def tick() -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            app[FRONT].tick()
            await app[FRONT].sleep_when_idle()

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


async def _run_rows(app: web.Application) -> AsyncIterator[None]:
    """Run rows of batches while the application runs: those of a router, and those of the server's own batches."""
    front = app[FRONT]
    rows = app.get(ROWS) or app[MODEL_ROWS]
    watching = asyncio.create_task(rows.watch())
    async with run_lane(front, rows, front.lane) as lane:
        if lane is not None:
            app[batch_routes.LANE] = lane
        yield
    watching.cancel()


async def _chat(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, as a whole or as server-sent events."""
    return await generate(request, CHAT)


async def _completions(request: web.Request) -> web.StreamResponse:
    """Continue a text, as a whole or as server-sent events."""
    return await generate(request, COMPLETIONS)
