"""The way of every generating request, whatever its API: read, check, admit, answer."""

from __future__ import annotations

import time
from dataclasses import replace

from aiohttp import web

from ridgeline.core.errors import Overloaded
from ridgeline.service.answer import send_body, send_events
from ridgeline.service.batches.engine_rows import ROWS, answer_row
from ridgeline.service.batches.rows import ENDPOINTS, ROW
from ridgeline.service.call import Call
from ridgeline.service.declared import RUN_ID, read_declared, read_run_id
from ridgeline.service.endpoint import Endpoint
from ridgeline.service.guard import (
    FRONT,
    HOLDER,
    IGNORED,
    REQUEST_ID,
    TRACE,
    check_model,
    name_request,
    read_json,
    request_id,
)
from ridgeline.service.state import Service


async def generate(request: web.Request, endpoint: Endpoint) -> web.StreamResponse:
    """Read and check the request, submit it to the engine, and answer."""
    arrival, front = time.time(), request.app[FRONT]
    front.check()
    rows = request.app.get(ROWS)
    if rows is not None and ROW in request.headers and request.path in ENDPOINTS and not request[HOLDER].limited:
        return await answer_row(request, rows)
    declared = read_declared(request.headers.items())
    run_id = read_run_id(request.headers.getall(RUN_ID, []))
    log = front.prompts
    fields, chunks = await read_json(request, lambda body: (endpoint.fields(body), log.read(request.headers, body)))
    if declared[1] or fields.ignored:
        request[IGNORED] = (*fields.ignored, *declared[1])
    if (body_id := fields.get("request_id")) is not None and "x-request-id" not in request.headers:
        name_request(request, request_id(body_id))
    check_model(request, fields.get("model"))
    async with front.serving(fields.get("model")) as service:
        call, shape, streaming = await endpoint.call(service, fields, arrival)
        call = replace(call, declared=declared[0], request_id=request[REQUEST_ID], run_id=run_id, trace=request[TRACE])
        call = _admitted(request, service, call)
        log.add(chunks)
        if rows is not None:
            rows.wake()
        with request[HOLDER].running(call):
            if streaming is None:
                return await send_body(service, call, shape)
            return await send_events(request, service, call, shape, streaming)


def _admitted(request: web.Request, service: Service, call: Call) -> Call:
    """The call as its holder may make it. Raises Overloaded, and what the holder refuses."""
    if call.ignored:
        request[IGNORED] = (*request.get(IGNORED, ()), *call.ignored)
    holder = request[HOLDER]
    call, changed = holder.bind(call)
    if changed:
        request[IGNORED] = (*request.get(IGNORED, ()), *changed)
    service.metrics.live.on_arrival()
    if call.adapter:
        service.card.adapters.requests[call.adapter] += 1
    stats = service.client.stats
    try:
        holder.check(call)
        service.gate.admit(service.client.open_choices, stats.waiting if stats is not None else 0, holder.name)
    except Overloaded:
        service.metrics.aborted("overloaded")
        raise
    return call
