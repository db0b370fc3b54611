"""One shape for every error: `{"error": {"message", "type", "param", "code"}}`, as a response and as an event."""

from __future__ import annotations

import logging
import math

import msgspec
from aiohttp import web

from ridgeline.core.errors import EngineFailed, Overloaded, RidgelineError, Unauthorized, Unavailable

log = logging.getLogger(__name__)


def error_body(error: RidgelineError) -> bytes:
    """The JSON object, all four keys always there."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def error_event(error: RidgelineError) -> bytes:
    """The same in the middle of a stream: clients raise it, where a bare close would read as a short success."""
    return b"data: " + error_body(error) + b"\n\n"


def as_ridgeline(error: Exception) -> RidgelineError:
    """Any exception as one the caller may see; what is not ours is logged, and only its kind is told."""
    if isinstance(error, RidgelineError):
        return error
    log.error("unexpected error", exc_info=error)
    return EngineFailed(f"The server failed on this request ({type(error).__name__}); its log says more.")


def error_response(error: RidgelineError) -> web.Response:
    headers = {}
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(math.ceil(error.retry_after_s))
        headers["retry-after-ms"] = str(math.ceil(error.retry_after_s * 1000))
    elif isinstance(error, Unavailable):
        headers["retry-after"] = "1"
    elif isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return web.Response(status=error.status, body=error_body(error), content_type="application/json", headers=headers)
