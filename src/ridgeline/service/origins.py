"""Checks which pages of other sites may call the server from a browser.

A browser names the page's site in `Origin` and its relation to the server in `Sec-Fetch-Site`; no script can change
either header. Requests of a site that is not allowed are refused before they have an effect. Pages of allowed sites may
read the answers (CORS, https://fetch.spec.whatwg.org/#http-cors-protocol). Programs send neither header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from aiohttp import web

from ridgeline.core.errors import ConfigError, CrossSiteRequest

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s,*]+|null|\*")
_EXPOSED = ", ".join(
    [
        "x-request-id, x-ridgeline-ignored-fields, retry-after, retry-after-ms, x-should-retry",
        *(
            f"x-ratelimit-{figure}-{kind}"
            for figure in ("limit", "remaining", "reset")
            for kind in ("requests", "tokens")
        ),
    ]
)
_MAX_AGE_S = 600
"""Seconds for which a browser may cache a permission."""
_FOREIGN = frozenset({"cross-site", "same-site"})
"""Values of Sec-Fetch-Site for a page of another origin; another port of the same host is "same-site"."""
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


@dataclass(frozen=True, slots=True)
class Origins:
    """allowed: origins as browsers send them; "*" allows all. The server's own pages are always allowed."""

    allowed: frozenset[str]

    @classmethod
    def parse(cls, text: str) -> Origins:
        """Read a list separated by commas. Raises ConfigError for an entry that is not an origin."""
        names = [name.strip().lower() for name in text.split(",")] if text.strip() else []
        for name in names:
            if not _ORIGIN.fullmatch(name):
                expected = (
                    "origins as https://chat.example.org (scheme, host and port, no path), separated by commas, or *"
                )
                raise ConfigError(f"allowed_origins has {name!r}: give {expected}.", param="allowed_origins")
        return cls(frozenset(names))

    def check(self, request: web.Request, pages: frozenset[str]) -> None:
        """Raises CrossSiteRequest for a browser's request from a page of a site that is not allowed.

        pages: paths of HTML pages. Other sites may link to them.
        """
        if "*" in self.allowed or self._allows(request):
            return
        origin = request.headers.get("origin")
        if origin is not None and not _same_origin(origin, request.headers.get("host", "")):
            raise CrossSiteRequest(
                f"Pages of {origin[:100]} may not call this server: add the site to --allowed-origins.", param="origin"
            )
        site = request.headers.get("sec-fetch-site", "").lower()
        if site in _FOREIGN and not (request.path in pages and _opens_page(request)):
            raise CrossSiteRequest(
                f"A page of another site may not make this request (sec-fetch-site: {site}): "
                "add the site to --allowed-origins and call the server with fetch in mode cors.",
                param="sec-fetch-site",
            )

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a preflight request for an allowed page; None for any other request."""
        requested_method = request.headers.get("access-control-request-method")
        if request.method != "OPTIONS" or requested_method is None or not self._allows(request):
            return None
        headers = {"access-control-allow-methods": "GET, POST, DELETE", "access-control-max-age": str(_MAX_AGE_S)}
        if names := request.headers.get("access-control-request-headers"):
            headers["access-control-allow-headers"] = names
        return web.Response(status=204, headers=headers)

    def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Allow pages of allowed sites to read the answer."""
        if not self.allowed:
            return
        allows_all = "*" in self.allowed
        if not allows_all:
            response.headers["vary"] = "origin"
        if self._allows(request):
            response.headers["access-control-allow-origin"] = "*" if allows_all else request.headers["origin"]
            response.headers["access-control-expose-headers"] = _EXPOSED

    def _allows(self, request: web.Request) -> bool:
        origin = request.headers.get("origin")
        return origin is not None and ("*" in self.allowed or origin.lower() in self.allowed)


def _same_origin(origin: str, host: str) -> bool:
    """Whether a page's origin is this server. Compares host and port only: behind a TLS proxy the schemes differ."""
    scheme, separator, place = origin.lower().partition("://")
    port = _DEFAULT_PORTS.get(scheme, "")
    return (
        scheme in _DEFAULT_PORTS
        and bool(separator)
        and place.removesuffix(port) == host.strip().lower().removesuffix(port)
    )


def _opens_page(request: web.Request) -> bool:
    """Whether a browser opens the address as a page, for example after a click on a link."""
    kind = (request.method, request.headers.get("sec-fetch-mode"), request.headers.get("sec-fetch-dest"))
    return kind == ("GET", "navigate", "document")
