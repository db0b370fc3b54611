"""HTTP connections: errors that aiohttp raises before the application runs also get the API's error shape."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import http_exceptions, web
from aiohttp.web_protocol import RequestHandler

from ridgeline.core.errors import EngineFailed, RequestError, RidgelineError
from ridgeline.core.loop_time import loop_clock
from ridgeline.service.errors import error_response
from ridgeline.service.guard import from_http, request_id
from ridgeline.service.listen import waited_s


class Connection(RequestHandler):
    """One connection."""

    __slots__ = ()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        loop_clock().saw(waited_s(transport))
        super().connection_made(transport)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to a request that cannot be parsed. It closes the connection. Raises ConnectionError if an answer was already
        started.
        """
        super().handle_error(request, status, exc, message)  # for its log
        error: RidgelineError = EngineFailed("Internal error: the server's log has the details.")
        if status < 500:
            reason = (message or "").strip().split("\n")[0].rstrip(":.")
            if isinstance(exc, http_exceptions.LineTooLong):  # its message quotes the line
                reason = "the request line or a header is longer than 8190 bytes"
            elif isinstance(exc, http_exceptions.InvalidURLError):  # its message is the target
                reason = "the request target is not valid, send a path such as /v1/models"
            error = RequestError(f"Malformed HTTP request: {reason or 'it cannot be parsed'}.")
        response = error_response(error)
        response.set_status(status)
        response.headers["x-request-id"] = request_id(None)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer. Errors that aiohttp raises before any middleware are exceptions that are also answers."""
        answer = from_http(request, resp) if isinstance(resp, web.HTTPException) else resp
        return await super().finish_response(request, answer, start_time)


class _Connections(web.Server):
    """aiohttp's server with `Connection` as its class of connections. aiohttp has no option for it."""

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application on such connections.

    prefix: path before every route. A proxy may have removed it already.
    """

    __slots__ = ("_prefix",)

    def __init__(self, app: web.Application, *, prefix: str = "", **options: Any) -> None:
        super().__init__(app, **options)
        self._prefix = prefix

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Connections
        server.request_factory = partial(_make_request, server.request_factory, self._prefix)
        return server


def _make_request(
    factory: Callable[..., web.BaseRequest], prefix: str, message: Any, *arguments: Any
) -> web.BaseRequest:
    """A request without the prefix in its path, so that routes and checks see one form of each path."""
    path = message.url.raw_path
    if prefix and (path == prefix or path.startswith(f"{prefix}/")):
        url = message.url.with_path(path[len(prefix) :] or "/", encoded=True, keep_query=True)
        message = message._replace(url=url, path=str(url))
    return factory(message, *arguments)
