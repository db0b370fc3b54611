"""Checks and headers of every request: host, origin, key, content type, request id, error format."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any, TypeVar

from aiohttp import HttpVersion11, web

from ridgeline.core.errors import (
    MethodNotAllowed,
    NotFound,
    NotJson,
    RequestError,
    RidgelineError,
)
from ridgeline.core.logs import REQUEST_ID as LOGGED_ID
from ridgeline.service.access import Access
from ridgeline.service.errors import as_ridgeline, error_response
from ridgeline.service.front import Front
from ridgeline.service.hosts import Hosts
from ridgeline.service.keys.errors import AdminOnly
from ridgeline.service.keys.keyring import Holder
from ridgeline.service.trace import Trace

ACCESS = web.AppKey("access", Access)
FRONT = web.AppKey("front", Front)
REQUEST_ID = web.RequestKey("request_id", str)
IGNORED = web.RequestKey("ignored", tuple)
"""Names for the header x-ridgeline-ignored-fields."""
HOLDER = web.RequestKey("holder", Holder)
"""Who sends the request. Missing on routes that need no key."""
TRACE = web.RequestKey("trace", Trace)

_T = TypeVar("_T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_HEADER_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MAX_NAMES = 32
_PAGES = frozenset({"/", "/dashboard", "/chat", "/docs"})
"""HTML pages. Other sites may link to them."""
_OPEN = frozenset({"/health", "/openapi.json"}) | _PAGES
_OPEN_FILES = re.compile(r"/dashboard/(chat/)?[a-z]+\.(js|css)")
"""Routes that need no key. Pages contain no data; they request it with the key."""
_ADMIN = re.compile(
    r"/(reset_prefix_cache|sleep|wake_up|is_sleeping|update_weights_from_disk|v1/(un)?load_lora_adapter|admin/.*|debug/.*"
    r"|requests(/.*)?|runs/.*|dashboard/data)"
)
"""Routes of operators: they change the server for all clients, or show the requests of others."""
_FORMS = frozenset({"/v1/files"})
"""Routes whose body is a form. They check its content type themselves."""
_JSON_TYPE = re.compile(r"application/(json|[^\s/;,]+\+json)")
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_CLIENT_LEFT = 499
"""Status in logs and traces of a request whose client left before the answer, as nginx has it."""

log = logging.getLogger(__name__)


async def read_json(request: web.Request, read: Callable[[Any], _T]) -> _T:
    """The result of `read` for the decoded body of a request."""
    return await request.app[ACCESS].bodies.read(request, read)


def check_model(request: web.Request, model: str | None) -> None:
    """Check that the client may use a model before it is loaded. Raises ModelNotAllowed, Unavailable and ModelNotFound."""
    request[HOLDER].check_model(*request.app[FRONT].names(model))


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Set the request's id, check access, answer every error in the API's format; trace and log the request."""
    access, began, status = request.app[ACCESS], time.perf_counter(), _CLIENT_LEFT
    name_request(request, request_id(request.headers.get("x-request-id")))
    request[TRACE] = access.tracing.begin(request)
    access.active += 1
    try:
        response = await _answer(request, handler, access)
        status = response.status
        return response
    finally:
        access.active -= 1
        request[TRACE].end(request[REQUEST_ID], status)
        _log(request, status, time.perf_counter() - began)


def name_request(request: web.Request, name: str) -> None:
    """Give the request its id, which its answer, its log lines and its spans have."""
    request[REQUEST_ID] = name
    LOGGED_ID.set(name)


async def _answer(request: web.Request, handler: Handler, access: Access) -> web.StreamResponse:
    try:
        _check_framing(request)
        _check_host(request, access.hosts)
        if (answer := access.origins.preflight(request)) is not None:
            return answer
        access.origins.check(request, _PAGES)
        if request.path not in _OPEN and not _OPEN_FILES.fullmatch(request.path):
            request[HOLDER] = _check_key(request, access)
        if request.method not in _SAFE_METHODS and request.match_info.http_exception is None:
            _check_content_type(request)
        return await handler(request)
    except web.HTTPException as error:
        return from_http(request, error)
    except Exception as error:
        return error_response(as_ridgeline(error), request.path)


def _log(request: web.Request, status: int, seconds: float) -> None:
    """A line for each request at its end. Reads, such as health checks, are of the lowest level."""
    level = logging.DEBUG if request.method in _SAFE_METHODS else logging.INFO
    if log.isEnabledFor(level):
        values = {"method": request.method, "path": request.path[:200], "status": status, "seconds": round(seconds, 4)}
        log.log(level, "%(method)s %(path)s %(status)d in %(seconds)g s", values, extra={"fields": values})


def _check_framing(request: web.Request) -> None:
    """Refuse chunks in HTTP/1.0, which has none: a proxy may not see where the body ends (RFC 9112, section 6.1)."""
    if request.version < HttpVersion11 and "transfer-encoding" in request.headers:
        raise RequestError("HTTP/1.0 has no chunks: send content-length, or HTTP/1.1.", param="transfer-encoding")


def _check_host(request: web.Request, hosts: Hosts) -> None:
    """Refuse a request without a valid Host header, or with a host that is not allowed."""
    values = request.headers.getall("host", [])
    if len(values) > 1 or (not values and request.version >= HttpVersion11):
        raise RequestError("The header Host must be sent once: HTTP/1.1 requires it.", param="host")
    for host in values:
        hosts.check(host)
    if not request.raw_path.startswith("/"):  # GET http://host/path names a host too, which precedes the header
        hosts.check(f"[{host}]" if ":" in (host := request.url.host or "") else host)


def _check_key(request: web.Request, access: Access) -> Holder:
    """Who sends the request: the holder of `Authorization: Bearer KEY` or `x-api-key: KEY`. A Bearer key takes precedence."""
    scheme, _, sent = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        sent = request.headers.get("x-api-key", "")
    admin = _ADMIN.fullmatch(request.path) is not None
    holder = access.keys.holder(sent.strip(), anonymous=not admin)
    if admin and not holder.admin:
        raise AdminOnly(
            f"{request.path[:200]} is a route of operators: send the key of the option --admin-api-key, which the server may have."
        )
    return holder


def _check_content_type(request: web.Request) -> None:
    """Require JSON. Browsers ask for permission before a page of another site may send JSON, but not for other types.

    They also ask before every DELETE. An upload is a form, which needs no permission: there the check of the origin must suffice.
    """
    if request.method == "DELETE" or request.path in _FORMS:
        return
    content_type = request.headers.get("content-type", "")
    if not _JSON_TYPE.fullmatch(content_type.partition(";")[0].strip().lower()):
        problem = (
            f"The content type {content_type[:60]!r} is not JSON"
            if content_type
            else "The header content-type is missing"
        )
        raise NotJson(f"{problem}: send the header content-type: application/json.", param="content-type")


def from_http(request: web.BaseRequest, error: web.HTTPException) -> web.Response:
    """An error that aiohttp raises, in the API's format."""
    answer: RidgelineError = NotFound(f"Unknown route {request.method} {request.path[:200]}: check the path.")
    if error.status == 405:
        allowed = error.headers.get("Allow", "")
        answer = MethodNotAllowed(f"{request.path[:200]} does not accept {request.method}: use {allowed}.")
    elif error.status != 404:
        answer = RequestError(f"{error.reason}: {error.text or 'the request is refused'}.")
    response = error_response(answer, request.path)
    response.set_status(error.status)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response


def request_id(header: str | None) -> str:
    """The caller's id if it is a valid header value, otherwise a new one."""
    return header if header is not None and _REQUEST_ID.fullmatch(header) else f"req_{uuid.uuid4().hex}"


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    request.app[ACCESS].origins.add_headers(request, response)
    response.headers["x-request-id"] = request.get(REQUEST_ID) or request_id(None)
    if (holder := request.get(HOLDER)) is not None:
        response.headers.update(holder.headers())
    names = islice((name for name in request.get(IGNORED, ()) if _HEADER_NAME.fullmatch(name)), _MAX_NAMES)
    if request.get(IGNORED):
        response.headers["x-ridgeline-ignored-fields"] = ", ".join(names) or "?"
