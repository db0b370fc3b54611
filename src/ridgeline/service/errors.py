"""The JSON of errors, `{"error": {"message", "type", "param", "code"}, "request_id"}`, as a response and as an event."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from aiohttp import web

from ridgeline.core.errors import EngineFailed, Overloaded, RidgelineError, Unauthorized, Unavailable
from ridgeline.core.logs import REQUEST_ID
from ridgeline.service.keys.errors import LimitReached, OverBudget

BUSY = "x-ridgeline-queue"
"""Header of a 429 that is the server's, not the key's: another server may have room."""
ENGINE = "x-ridgeline-engine"
"""Header of a 503 while the engine is being started: it is worth waiting for."""

log = logging.getLogger(__name__)


class Starting(Unavailable):
    """The engine is being started."""


def error_body(error: RidgelineError) -> bytes:
    """The JSON object. The four keys of the error are always present, `request_id` within a request."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return _encode({"error": fields})


def _encode(body: Mapping[str, Any]) -> bytes:
    request_id = REQUEST_ID.get()
    return msgspec.json.encode({**body, "request_id": request_id} if request_id else body)


def anthropic_error(error: RidgelineError) -> bytes:
    """The JSON object of Anthropic's Messages API."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    fields = {"type": kind, "message": error.message, "param": error.param, "code": error.code}
    return _encode({"type": "error", "error": fields})


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def ollama_error(error: RidgelineError) -> bytes:
    """The JSON object of Ollama's API."""
    return _encode({"error": error.message})


_BODIES = (("/v1/messages", anthropic_error), ("/api/", ollama_error))
"""Routes by the start of their path, and how they write errors; others as OpenAI."""


def error_event(error: RidgelineError) -> bytes:
    """The error as an event of a stream. Clients raise it; a connection that only closes would look like a short answer."""
    return b"data: " + error_body(error) + b"\n\n"


def as_ridgeline(error: Exception) -> RidgelineError:
    """Any exception as an error for the caller. An unexpected one is logged, and the caller sees only its class."""
    if isinstance(error, RidgelineError):
        return error
    log.error("unexpected error", exc_info=error)
    return EngineFailed(f"Internal error ({type(error).__name__}): the server's log has the details.")


def error_response(error: RidgelineError, path: str = "") -> web.Response:
    """path: of the request, whose API has a form of errors."""
    headers = {}
    body = next((write for start, write in _BODIES if path.startswith(start)), error_body)
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
        if not isinstance(error, LimitReached):
            headers[BUSY] = "full"
    elif isinstance(error, Unavailable):
        headers["retry-after"] = "1"
        if isinstance(error, Starting):
            headers[ENGINE] = "starting"
    elif isinstance(error, OverBudget):
        headers["x-should-retry"] = "false"  # OpenAI's clients retry other answers with status 429
    elif isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return web.Response(status=error.status, body=body(error), content_type="application/json", headers=headers)
