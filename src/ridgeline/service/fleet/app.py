"""The router's application: routes that go to a replica, and those that it answers itself.

A handler's docstring says what the route does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import aiohttp
import msgspec
from aiohttp import web

import ridgeline
from ridgeline.core.errors import NotFound, Unavailable
from ridgeline.metrics import CONTENT_TYPE
from ridgeline.service.access import Access
from ridgeline.service.errors import error_response
from ridgeline.service.fleet.balancer import Balancer
from ridgeline.service.fleet.proxy import BALANCER, forward
from ridgeline.service.fleet.series import render
from ridgeline.service.guard import ACCESS, add_headers, guard
from ridgeline.service.routes import json_response
from ridgeline.service.routing import State

Series: TypeAlias = Callable[[], str]
MORE_SERIES: web.AppKey[Series] = web.AppKey("more_series")
"""Series of what stands beside the router: a fleet."""
ROUTES = web.RouteTableDef()
_VECTORS = ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score")
_FORWARDED = ("/v1/chat/completions", "/v1/completions", *_VECTORS, "/tokenize", "/detokenize")
_MODELS_S = 2.0
_KEYS = ("authorization", "x-api-key")


def make_router_app(access: Access, balancer: Balancer) -> web.Application:
    """The aiohttp application. Run it with `handler_cancellation`, so that a disconnect ends the request."""
    app = web.Application(middlewares=[guard])
    app[ACCESS], app[BALANCER], app[MORE_SERIES] = access, balancer, lambda: ""
    app.on_response_prepare.append(add_headers)
    for path in _FORWARDED:
        app.router.add_post(path, forward)
    app.router.add_routes(ROUTES)
    return app


@ROUTES.get("/health")
async def health(request: web.Request) -> web.Response:
    """200 while a replica is up, or the fleet sleeps until the next request; otherwise 503 with the reasons."""
    balancer = request.app[BALANCER]
    if request.app[ACCESS].draining:
        return error_response(Unavailable("Not healthy: the router is shutting down."))
    up = sum(replica.serves for replica in balancer.router.replicas.values())
    if not up and not balancer.asleep:
        reasons = "; ".join(f"{name}: {upstream.trouble}" for name, upstream in balancer.upstreams.items())
        return error_response(Unavailable(f"Not healthy: no replica is up ({reasons or 'there are none'})."))
    return json_response({"status": "ok", "replicas": {"up": up, "total": len(balancer.upstreams)}})


@ROUTES.get("/version")
async def version(request: web.Request) -> web.Response:
    """The router's version."""
    return json_response({"version": ridgeline.__version__})


@ROUTES.get("/metrics")
async def metrics(request: web.Request) -> web.Response:
    """The router's metrics in the text format of Prometheus."""
    text = render(request.app[BALANCER]) + request.app[MORE_SERIES]()
    return web.Response(body=text.encode(), headers={"content-type": CONTENT_TYPE})


@ROUTES.get("/v1/models")
async def models(request: web.Request) -> web.Response:
    """The models that the replicas serve, each once."""
    return json_response({"object": "list", "data": await _models(request)})


@ROUTES.get("/v1/models/{name:.+}")
async def model(request: web.Request) -> web.Response:
    """A model by its name; 404 for another name."""
    name, cards = request.match_info["name"], await _models(request)
    for card in cards:
        if name in (card["id"], card.get("root")):
            return json_response(card)
    known = ", ".join(repr(card["id"]) for card in cards)
    raise NotFound(f"The model {name[:80]!r} does not exist: the replicas serve {known}.", param="model")


@ROUTES.get("/admin/replicas")
async def replicas(request: web.Request) -> web.Response:
    """The replicas: address, state, requests in flight, backlog, measured prefill rate."""
    return json_response({"object": "list", "at": time.time(), "data": _replicas(request.app[BALANCER])})


def _replicas(balancer: Balancer) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "url": balancer.upstreams[name].url,
            "state": "draining" if replica.draining else replica.state.value,
            "trouble": balancer.upstreams[name].trouble,
            "circuit_closed": replica.breaker.closed,
            "running": replica.running,
            "limit": replica.capacity.limit,
            "backlog_tokens": replica.backlog,
            "prefill_tokens_s": replica.prefill_tokens_s,
        }
        for name, replica in balancer.router.replicas.items()
    ]


async def _models(request: web.Request) -> list[dict[str, Any]]:
    """The model cards of all replicas that serve. Raises Unavailable if none answers."""
    balancer = request.app[BALANCER]
    headers = [(name, request.headers[name]) for name in _KEYS if name in request.headers]
    serving = [
        upstream.get("/v1/models", headers, _MODELS_S)
        for name, upstream in balancer.upstreams.items()
        if balancer.router.replicas[name].state in (State.UP, State.STALLED)
    ]
    cards: dict[str, dict[str, Any]] = {}
    for answer in await asyncio.gather(*serving, return_exceptions=True):
        if isinstance(answer, dict):
            cards |= {card["id"]: card for card in answer["data"] if card["id"] not in cards}
        elif not isinstance(answer, aiohttp.ClientError | OSError | msgspec.DecodeError):
            assert isinstance(answer, BaseException)
            raise answer
    if not cards:
        raise Unavailable("No replica is up: send the request again later.")
    return list(cards.values())
