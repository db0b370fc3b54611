"""/v1/responses at a router, which keeps the stored responses of all replicas: the next one may be made by another replica.

A request goes to a replica with the items of the responses before it (`PREVIOUS`), so replicas store nothing. The response is read
from the answer as it passes, and stored before its last bytes are passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from ridgeline.service.apis.response_items import PREVIOUS, as_items
from ridgeline.service.apis.response_store import ResponseStore, Stored
from ridgeline.service.apis.responses import STORE
from ridgeline.service.choices import EVENT_STREAM
from ridgeline.service.fleet.demand import read_demand
from ridgeline.service.fleet.proxy import Outgoing, pass_on
from ridgeline.service.guard import HOLDER

_ENDS = (b"event: response.completed\n", b"event: response.incomplete\n")
_DATA = b"data: "


async def create(request: web.Request) -> web.StreamResponse:
    """Answer a text or a list of items, as a response or as its events."""
    store, owner = request.app[STORE], request[HOLDER].name

    def read(body: Any) -> Outgoing:
        if not isinstance(body, dict):
            return Outgoing(read_demand(request.headers, body))
        previous = body.get("previous_response_id")
        known = store.conversation(owner, previous) if isinstance(previous, str) else []
        body = {**body, PREVIOUS: known}
        reading, keeper = read_demand(request.headers, body), Keeper(store, owner, body)
        return Outgoing(reading, msgspec.json.encode(body), keeper.see)

    return await pass_on(request, read)


class Keeper:
    """Stores the response of one request when it has passed. body: of the request."""

    def __init__(self, store: ResponseStore, owner: str, body: Mapping[str, Any]) -> None:
        self._store, self._owner, self._body = store, owner, body
        self._rest = bytearray()
        """What follows the last complete event, or the body so far."""

    def see(self, headers: Mapping[str, str], chunk: bytes) -> None:
        """A chunk of an answer with status 200 is about to be passed on."""
        if self._body.get("store") is False:
            return
        self._rest += chunk
        if not headers.get("content-type", "").startswith(EVENT_STREAM):
            if len(self._rest) == int(headers.get("content-length", -1)):
                self._keep(msgspec.json.decode(self._rest))
            return
        end = self._rest.rfind(b"\n\n")
        if end < 0:
            return
        for event in bytes(self._rest[:end]).split(b"\n\n"):
            if event.startswith(_ENDS):
                self._keep(msgspec.json.decode(event[event.index(_DATA) + len(_DATA) :])["response"])
        del self._rest[: end + 2]

    def _keep(self, response: dict[str, Any]) -> None:
        previous = self._body.get("previous_response_id")
        self._store.put(self._owner, Stored(response, as_items(self._body["input"]), previous))
