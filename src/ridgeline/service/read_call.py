"""From a body's checked fields to a call: the same for a request over HTTP and for a row of a batch."""

from __future__ import annotations

import uuid

from ridgeline.service.answer import Shape, Streaming
from ridgeline.service.call import Call
from ridgeline.service.chat import read_chat
from ridgeline.service.completions import read_completion
from ridgeline.service.fields import Fields, Route
from ridgeline.service.state import Service


async def read_call(
    service: Service, route: Route, fields: Fields, arrival: float
) -> tuple[Call, Shape, Streaming | None]:
    """The call, the shape of its answer, and how to stream it (None: as one body). Raises RequestError."""
    call_id = uuid.uuid4().hex
    if route == "chat":
        return await read_chat(service, fields, f"chatcmpl-{call_id}", arrival)
    return await read_completion(service, fields, f"cmpl-{call_id}", arrival)
