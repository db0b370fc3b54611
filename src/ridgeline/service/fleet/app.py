"""The router's application: routes that go to a replica, and those that it answers itself.

A handler's docstring says what the route does.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

from aiohttp import web

import ridgeline
from ridgeline.core.errors import NotFound, Unavailable
from ridgeline.metrics import CONTENT_TYPE
from ridgeline.service.access import Access
from ridgeline.service.apis import responses
from ridgeline.service.apis.response_store import ResponseStore
from ridgeline.service.batches import routes as batch_routes
from ridgeline.service.batches.lane import run_lane
from ridgeline.service.errors import error_response
from ridgeline.service.fleet import ledger
from ridgeline.service.fleet.balancer import Balancer
from ridgeline.service.fleet.demand import tenant_of
from ridgeline.service.fleet.proxy import BALANCER, forward
from ridgeline.service.fleet.responses import create
from ridgeline.service.fleet.rows import ReplicaRows
from ridgeline.service.fleet.series import render
from ridgeline.service.guard import ACCESS, HOLDER, Handler, add_headers, guard
from ridgeline.service.keys.keyring import UNKNOWN, Holder
from ridgeline.service.routes import json_response

Series: TypeAlias = Callable[[], str]
MORE_SERIES: web.AppKey[Series] = web.AppKey("more_series")
"""Series of what stands beside the router: a fleet."""
ROUTES = web.RouteTableDef()
_VECTORS = ("/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score")
_FORWARDED = ("/v1/chat/completions", "/v1/completions", *_VECTORS, "/tokenize", "/detokenize")
_WORK = frozenset({*_FORWARDED, "/v1/responses", "/v1/files"})
"""Routes whose POST is refused while the router is late. All others are answered."""


def make_router_app(access: Access, balancer: Balancer) -> web.Application:
    """The aiohttp application. Run it with `handler_cancellation`, so that a disconnect ends the request."""
    app = web.Application(middlewares=[guard, _admit, _name_client])
    app[ACCESS], app[BALANCER], app[MORE_SERIES] = access, balancer, lambda: ""
    app[responses.STORE] = ResponseStore(int(access.config.response_store_mb * (1 << 20)))
    app.cleanup_ctx.append(_run_lane)
    app.on_response_prepare.append(add_headers)
    for path in _FORWARDED:
        app.router.add_post(path, forward)
    app.router.add_post("/v1/responses", create)
    for table in (responses.ROUTES, batch_routes.ROUTES, ledger.ROUTES, ROUTES):
        app.router.add_routes(table)
    return app


@web.middleware
async def _admit(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse new work before its body is read, while the router is late."""
    if request.method == "POST" and request.path in _WORK:
        request.app[BALANCER].admit()
    return await handler(request)


@web.middleware
async def _name_client(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Give a client whose key only the replicas check a name of its own, by its key: it owns its stored responses."""
    if request.get(HOLDER) is UNKNOWN:
        request[HOLDER] = Holder(tenant_of(request.headers), admin=False)
    return await handler(request)


async def _run_lane(app: web.Application) -> AsyncIterator[None]:
    """Run rows of batches at the replicas while the application runs."""
    access, balancer = app[ACCESS], app[BALANCER]
    async with run_lane(access, ReplicaRows(balancer, access.config.api_key), balancer.counts.lane) as lane:
        if lane is not None:
            app[batch_routes.LANE] = lane
        yield


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
    cards: dict[str, dict[str, Any]] = {}
    for answer in (await ledger.ask_replicas(request, "/v1/models")).values():
        cards |= {card["id"]: card for card in answer["data"] if card["id"] not in cards}
    if not cards:
        raise Unavailable("No replica is up: send the request again later.")
    return list(cards.values())
