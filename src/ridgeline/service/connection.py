"""HTTP that never becomes a request of the application: aiohttp refuses it by itself, here in the API's one shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import http_exceptions, web
from aiohttp.web_protocol import RequestHandler

from ridgeline.core.errors import EngineFailed, RequestError, RidgelineError
from ridgeline.service.errors import error_response
from ridgeline.service.guard import from_http, request_id


class Connection(RequestHandler):
    """One connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what could not be read, after which the connection is closed. Raises ConnectionError where one has
        begun."""
        super().handle_error(request, status, exc, message)  # for its log
        error: RidgelineError = EngineFailed("The server failed on this request; its log says more.")
        if status < 500:
            reason = (message or "").strip().split("\n")[0].rstrip(":.")
            if isinstance(exc, http_exceptions.LineTooLong):  # it would quote the line
                reason = "an address or a line of its head is longer than 8190 bytes"
            error = RequestError(f"This is no HTTP request that can be read: {reason or 'it is malformed'}.")
        response = error_response(error)
        response.set_status(status)
        response.headers["x-request-id"] = request_id(None)
        response.force_close()
        return response

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; what aiohttp refuses before any middleware is asked comes as an exception that is one."""
        answer = from_http(request, resp) if isinstance(resp, web.HTTPException) else resp
        return await super().finish_response(request, answer, start_time)


class _Connections(web.Server):
    """aiohttp's server, with connections of our own. It has no place to name their class, so it is made anew of its parts."""

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application on such connections. prefix: path before every route, which a proxy may have removed already."""

    __slots__ = ("_prefix",)

    def __init__(self, app: web.Application, *, prefix: str = "", **options: Any) -> None:
        super().__init__(app, **options)
        self._prefix = prefix

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        server.__class__ = _Connections
        server.request_factory = partial(_make_request, server.request_factory, self._prefix)
        return server


def _make_request(factory: Callable[..., web.BaseRequest], prefix: str, message: Any, *rest: Any) -> web.BaseRequest:
    """A request without the prefix in its path, so that routes and the rules about them know one path only."""
    path = message.url.raw_path
    if prefix and (path == prefix or path.startswith(f"{prefix}/")):
        url = message.url.with_path(path[len(prefix) :] or "/", encoded=True, keep_query=True)
        message = message._replace(url=url, path=str(url))
    return factory(message, *rest)
