"""From a body's checked fields to a call: the same for a request over HTTP and for a row of a batch."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from functools import partial

from ridgeline.service.chat import read_chat
from ridgeline.service.completions import read_completion
from ridgeline.service.endpoint import Endpoint, Read
from ridgeline.service.fields import Fields, Route, read_fields
from ridgeline.service.state import Service


async def _chat(service: Service, fields: Fields, arrival: float) -> Read:
    return await read_chat(service, fields, f"chatcmpl-{uuid.uuid4().hex}", arrival)


async def _completion(service: Service, fields: Fields, arrival: float) -> Read:
    return await read_completion(service, fields, f"cmpl-{uuid.uuid4().hex}", arrival)


CHAT = Endpoint(partial(read_fields, "chat"), _chat)
COMPLETIONS = Endpoint(partial(read_fields, "completions"), _completion)
_BY_ROUTE: Mapping[Route, Endpoint] = {"chat": CHAT, "completions": COMPLETIONS}


async def read_call(service: Service, route: Route, fields: Fields, arrival: float) -> Read:
    """Raises RequestError."""
    return await _BY_ROUTE[route].call(service, fields, arrival)
