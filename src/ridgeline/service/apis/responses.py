"""The routes of OpenAI's Responses API: /v1/responses, and stored responses.

Responses are kept in memory unless `store` is false, so that a later request can go on from `previous_response_id`; the oldest go
first (response_store.py).
"""

from __future__ import annotations

from aiohttp import web

from ridgeline.core.errors import RequestError
from ridgeline.service.apis.response_items import endpoint
from ridgeline.service.apis.response_store import ResponseStore, Stored
from ridgeline.service.generate import generate
from ridgeline.service.guard import HOLDER
from ridgeline.service.routes import json_response

ROUTES = web.RouteTableDef()
"""Those of stored responses, which a router has, too."""
STORE = web.AppKey("responses", ResponseStore)


async def create(request: web.Request) -> web.StreamResponse:
    """Answer a text or a list of items, as a response or as its events."""
    return await generate(request, endpoint(request.app[STORE], request[HOLDER].name))


@ROUTES.get("/v1/responses/{id}")
async def retrieve(request: web.Request) -> web.Response:
    """A stored response."""
    return json_response(_stored(request).response)


@ROUTES.get("/v1/responses/{id}/input_items")
async def input_items(request: web.Request) -> web.Response:
    """The items of a stored response's input, those of the responses before it included."""
    stored = _stored(request)
    items = [*request.app[STORE].conversation(request[HOLDER].name, stored.previous), *stored.items]
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]}
    return json_response({"object": "list", "data": items, **ends, "has_more": False})


@ROUTES.delete("/v1/responses/{id}")
async def delete(request: web.Request) -> web.Response:
    """Delete a stored response. Responses that go on from it cannot be continued any more."""
    stored = _stored(request)
    request.app[STORE].delete(request[HOLDER].name, stored.response["id"])
    return json_response({"id": stored.response["id"], "object": "response", "deleted": True})


@ROUTES.post("/v1/responses/{id}/cancel")
async def cancel(request: web.Request) -> web.Response:
    """Refused: only background runs can be cancelled, and there are none."""
    response_id = _stored(request).response["id"]
    raise RequestError(f"{response_id} does not run in the background: close its connection instead.", param="id")


def _stored(request: web.Request) -> Stored:
    return request.app[STORE].get(request[HOLDER].name, request.match_info["id"])
