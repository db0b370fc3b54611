"""The home, dashboard, chat and documentation pages: files of this package, without external resources."""

from __future__ import annotations

import html
from collections.abc import Mapping
from importlib import resources
from string import Template

import msgspec
from aiohttp import web
from aiohttp.hdrs import ACCEPT

import ridgeline
from ridgeline.core.errors import NotFound
from ridgeline.service.guard import FRONT

ROUTES = web.RouteTableDef()
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "json": "application/json",
    "yml": "application/yaml",
}
POLICY = "; ".join(
    (
        "default-src 'self'",
        "img-src data:",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Pages may connect to this server only. With Trusted Types a browser refuses to parse strings as HTML: pages make elements."""
_SAFETY = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # a link in an answer does not tell the other site where the server is
}
_CACHING = {"cache-control": "no-cache", "vary": "accept"}
LINKS = {
    "docs": "/docs",
    "openapi": "/openapi.json",
    "chat": "/chat",
    "dashboard": "/dashboard",
    "models": "/v1/models",
    "health": "/health",
    "metrics": "/metrics",
}
"""Links in the answer of `GET /`."""


@ROUTES.get("/")
async def home(request: web.Request) -> web.Response:
    """The server's name, version and links: a page for browsers, JSON for other clients."""
    front = request.app[FRONT]
    model = front.metrics.model_name
    if not _accepts_html(request.headers.get(ACCEPT, "")):
        links = {name: front.prefix + path for name, path in LINKS.items()}
        body = {"name": "ridgeline", "version": ridgeline.__version__, "model": model, **links}
        return web.Response(body=msgspec.json.encode(body), content_type="application/json", headers=_CACHING)
    key = "" if not front.keys.needed else ' -H "authorization: Bearer $RIDGELINE_API_KEY"'
    values = {
        "model": model,
        "version": ridgeline.__version__,
        "origin": f"{request.url.origin()}{front.prefix}",
        "base": f"{front.prefix}/",
        "key": key,
    }
    return _page("home.html", {name: html.escape(value) for name, value in values.items()})


@ROUTES.get("/dashboard")
async def dashboard(request: web.Request) -> web.Response:
    """The dashboard page."""
    return _page("dashboard.html")


@ROUTES.get("/chat")
async def chat(request: web.Request) -> web.Response:
    """The chat page."""
    return _page("chat.html")


@ROUTES.get("/docs")
async def docs(request: web.Request) -> web.Response:
    """The page that documents this API and can send requests to it."""
    return _page("docs.html")


@ROUTES.get(r"/dashboard/{name:(?:chat/)?[a-z]+\.(?:js|css|json|yml)}")
async def part(request: web.Request) -> web.Response:
    """Scripts and styles of the pages; a dashboard for Grafana and alert rules for Prometheus."""
    return _page(request.match_info["name"])


def _accepts_html(accept: str) -> bool:
    """Whether the header names text/html, as browsers do. A bare */* gets JSON."""
    for entry in accept.lower().split(","):
        kind, *parameters = (part.strip() for part in entry.split(";"))
        if kind == "text/html":
            return not any(
                parameter.replace(" ", "") in ("q=0", "q=0.0", "q=0.00", "q=0.000") for parameter in parameters
            )
    return False


def _page(name: str, values: Mapping[str, str] | None = None) -> web.Response:
    """A file of the folder web. With `values` it is a template, and they replace its $names."""
    file = resources.files("ridgeline.service") / "web" / name
    if not file.is_file():
        raise NotFound(f"There is no page {name}.")
    body = file.read_bytes()
    headers = {**_SAFETY, **_CACHING}
    if values is not None:
        body = Template(body.decode()).substitute(values).encode()
    kind = TYPES[name.rpartition(".")[2]]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=headers)
