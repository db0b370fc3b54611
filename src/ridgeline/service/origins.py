"""Which pages of other sites may call the API from a browser (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiohttp import web

from ridgeline.core.errors import ConfigError

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*]+|null|\*")
_EXPOSED = "x-request-id, x-ridgeline-ignored-fields, retry-after, retry-after-ms"
_REMEMBERED_S = 600
"""Seconds for which a browser need not ask again."""


@dataclass(frozen=True, slots=True)
class Origins:
    """Origins that are allowed, as browsers send them; "*" stands for all, none for nobody but our own pages."""

    allowed: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Origins:
        """Of a list with commas. Raises ConfigError for what no browser sends."""
        names = [name.strip().lower() for name in text.split(",")] if text.strip() else []
        for name in names:
            if not _ORIGIN.fullmatch(name):
                wanted = "https://chat.example.org (scheme, host and port, no path), several with commas between, or *"
                raise ConfigError(f"allowed_origins has {name!r}: give {wanted}.", param="allowed_origins")
        return cls(frozenset(names))

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks whether it may; None for any other request."""
        asked = request.headers.get("access-control-request-method")
        if request.method != "OPTIONS" or asked is None or not self._allows(request):
            return None
        headers = {"access-control-allow-methods": "GET, POST", "access-control-max-age": str(_REMEMBERED_S)}
        if names := request.headers.get("access-control-request-headers"):
            headers["access-control-allow-headers"] = names
        return web.Response(status=204, headers=headers)

    def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the page that asked read the answer, if it may."""
        if not self.allowed:
            return
        every = "*" in self.allowed
        if not every:
            response.headers["vary"] = "origin"
        if self._allows(request):
            response.headers["access-control-allow-origin"] = "*" if every else request.headers["origin"]
            response.headers["access-control-expose-headers"] = _EXPOSED

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("origin")
        return origin is not None and ("*" in self.allowed or origin in self.allowed)
