"""The dashboard and the chat page: files of this package, served as they are, with nothing from outside."""

from __future__ import annotations

from importlib import resources

from aiohttp import web

from ridgeline.core.errors import NotFound

ROUTES = web.RouteTableDef()
TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "json": "application/json",
    "yml": "application/yaml",
}
POLICY = "default-src 'self'; img-src data:; frame-ancestors 'none'"
"""A page may speak to this server alone."""


@ROUTES.get("/dashboard")
async def dashboard(request: web.Request) -> web.Response:
    return _page("dashboard.html")


@ROUTES.get("/chat")
async def chat(request: web.Request) -> web.Response:
    return _page("chat.html")


@ROUTES.get(r"/dashboard/{name:[a-z]+\.(?:js|css|json|yml)}")
async def part(request: web.Request) -> web.Response:
    """Scripts and styles of the pages; a dashboard for Grafana and alert rules for Prometheus."""
    return _page(request.match_info["name"])


def _page(name: str) -> web.Response:
    file = resources.files("ridgeline.service") / "web" / name
    if not file.is_file():
        raise NotFound(f"There is no page {name}.")
    kind = TYPES[name.rpartition(".")[2]]
    headers = {"content-security-policy": POLICY, "cache-control": "no-cache"}
    return web.Response(body=file.read_bytes(), content_type=kind, charset="utf-8", headers=headers)
