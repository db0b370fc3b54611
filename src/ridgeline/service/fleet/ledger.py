"""The routes of /requests at a router: the ledgers of all replicas as one. A handler's docstring says what the route does."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from aiohttp import web

from ridgeline.core.errors import Unavailable
from ridgeline.service.fleet.proxy import BALANCER
from ridgeline.service.fleet.upstream import NOT_JSON
from ridgeline.service.insight import no_request, read_order
from ridgeline.service.routes import json_response
from ridgeline.service.routing import State

ROUTES = web.RouteTableDef()
_ANSWER_S = 2.0
_KEYS = ("authorization", "x-api-key")


@ROUTES.get("/requests")
async def requests(request: web.Request) -> web.Response:
    """Requests that have ended at the replicas, as on a server, each with its replica."""
    order, limit = read_order(request)
    answers = await ask_replicas(request, f"/requests?order={order}&limit={limit}")
    if not answers:
        raise Unavailable("No replica lists its requests: give all of them the --admin-api-key of the router.")
    rows = [{**row, "replica": name} for name, answer in answers.items() for row in answer["data"]]
    rows.sort(key=lambda row: row["e2e_s"] + (0.0 if order == "slowest" else row["arrived_at"]), reverse=True)
    return json_response({"object": "list", "data": rows[:limit]})


@ROUTES.get("/requests/{id}")
@ROUTES.get("/requests/{id}/why")
async def ended_request(request: web.Request) -> web.Response:
    """One request that has ended, or why it was slow, from the replica that answered it."""
    answers = await ask_replicas(request, request.rel_url.raw_path_qs)
    if not answers:
        raise no_request(request.match_info["id"])
    name, answer = next(iter(answers.items()))
    return json_response({**answer, "replica": name})


async def ask_replicas(request: web.Request, path: str) -> dict[str, Any]:
    """What each replica that serves answers to a small request, with the client's key. Those that answer an error are left out.

    Raises Unavailable if none serves.
    """
    balancer = request.app[BALANCER]
    headers = [(name, request.headers[name]) for name in _KEYS if name in request.headers]
    names = [
        name
        for name, replica in balancer.router.replicas.items()
        if replica.state in (State.UP, State.STALLED) and name in balancer.upstreams
    ]
    if not names:
        raise Unavailable("No replica is up: send the request again later.")
    asked = (balancer.upstreams[name].get(path, headers, _ANSWER_S) for name in names)
    answers = {}
    for name, answer in zip(names, await asyncio.gather(*asked, return_exceptions=True), strict=True):
        if isinstance(answer, dict):
            answers[name] = answer
        elif isinstance(answer, BaseException) and not isinstance(answer, (aiohttp.ClientError, OSError, *NOT_JSON)):
            raise answer
    return answers
