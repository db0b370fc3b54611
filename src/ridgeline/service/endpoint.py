"""How a generating route reads its requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from ridgeline.service.answer import Shape, Streaming
from ridgeline.service.call import Call
from ridgeline.service.fields import Fields
from ridgeline.service.state import Service

Read = tuple[Call, Shape, Streaming | None]
"""A call, the shape of its answer, and how to stream it (None: as one body)."""


class Endpoint(NamedTuple):
    """fields: of a decoded body. call: from those at an arrival time; Any: what `fields` returns. Both raise RequestError."""

    fields: Callable[[Any], Fields]
    call: Callable[[Service, Any, float], Awaitable[Read]]
