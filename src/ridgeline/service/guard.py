"""What every request passes on its way in and out: request id, key, body limit, error shape."""

from __future__ import annotations

import asyncio
import hmac
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from ridgeline.core.errors import (
    BodyTooLarge,
    BodyTooSlow,
    MethodNotAllowed,
    NotFound,
    RequestError,
    RidgelineError,
    Unauthorized,
)
from ridgeline.service.errors import as_ridgeline, error_response
from ridgeline.service.front import Front

FRONT = web.AppKey("front", Front)
REQUEST_ID = web.RequestKey("request_id", str)
IGNORED = web.RequestKey("ignored", tuple)
"""Fields of the body that nobody knows."""

_T = TypeVar("_T")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_HEADER_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MOST_NAMES = 32
_OPEN = frozenset({"/health", "/dashboard", "/chat"})
_OPEN_FILES = re.compile(r"/dashboard/[a-z]+\.(js|css)")
"""Routes that need no key: the pages are the same for everybody, what they show is asked for with it."""
_BODY_S = 300.0
"""Seconds in which a body must arrive: who sends half of one would hold a connection, and up a drain, for ever."""
_UNDONE = ("identity", "gzip", "deflate")
"""Encodings of a body that are undone wherever we run; others only where aiohttp finds a library for them."""
_LARGE = 1 << 18
"""Bytes of a body that is decoded and checked in a thread, so that no stream waits for it."""


async def read_json(request: web.Request, read: Callable[[Any], _T]) -> _T:
    """What `read` makes of the decoded body. Raises RequestError when it is no JSON, BodyTooLarge above the limit,
    BodyTooSlow when it does not come."""
    try:
        async with asyncio.timeout(_BODY_S):
            data = await request.read()
    except TimeoutError as error:
        raise BodyTooSlow(f"The body did not arrive within {_BODY_S:g} seconds: send it at once.") from error
    except web.HTTPRequestEntityTooLarge as error:
        limit = request.app[FRONT].config.max_body_mb
        raise BodyTooLarge(f"The body is larger than {limit:g} MiB: send less.") from error
    except web.RequestPayloadError as error:
        raise RequestError(
            "The body is not what its headers say: check content-encoding and transfer-encoding."
        ) from error
    try:
        if len(data) > _LARGE:
            return await asyncio.to_thread(lambda: read(msgspec.json.decode(data)))
        return read(msgspec.json.decode(data))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        coded = request.headers.get("content-encoding", "identity").lower()
        if coded not in _UNDONE:
            raise RequestError(
                f"The body's content-encoding {coded[:40]!r} is not known: send one of {', '.join(_UNDONE)}."
            ) from error
        raise RequestError(f"The body is not valid JSON: {error}.") from error


@web.middleware
async def guard(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Gives the request its id, asks for the key, and turns every error into the one shape."""
    front = request.app[FRONT]
    request[REQUEST_ID] = request_id(request.headers.get("x-request-id"))
    if (told := front.origins.preflight(request)) is not None:
        return told
    front.active += 1
    try:
        if request.path not in _OPEN and not _OPEN_FILES.fullmatch(request.path):
            _check_key(request, front.config.api_key)
        return await handler(request)
    except web.HTTPException as error:
        return from_http(request, error)
    except Exception as error:
        return error_response(as_ridgeline(error))
    finally:
        front.active -= 1


def _check_key(request: web.Request, key: str | None) -> None:
    if key is None:
        return
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not hmac.compare_digest(_raw(given.strip()), _raw(key)):
        raise Unauthorized("The API key is missing or wrong: send it as `Authorization: Bearer KEY`.")


def _raw(text: str) -> bytes:
    """The bytes that were sent, also those that are no text."""
    return text.encode("utf-8", "surrogateescape")


def from_http(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals, in the error shape."""
    known: RidgelineError = NotFound(f"There is no {request.method} {request.path[:200]}.")
    if error.status == 405:
        allowed = error.headers.get("Allow", "")
        known = MethodNotAllowed(f"{request.path[:200]} takes {allowed}, not {request.method}.")
    elif error.status != 404:
        known = RequestError(f"{error.reason}: {error.text or 'aiohttp refuses this request'}.")
    response = error_response(known)
    response.set_status(error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def request_id(given: str | None) -> str:
    """The caller's id when it can stand in a header, else a new one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    request.app[FRONT].origins.add_headers(request, response)
    response.headers["x-request-id"] = request.get(REQUEST_ID) or request_id(None)
    names = [name for name in request.get(IGNORED, ()) if _HEADER_NAME.fullmatch(name)][:_MOST_NAMES]
    if request.get(IGNORED):
        response.headers["x-ridgeline-ignored-fields"] = ", ".join(names) or "?"
