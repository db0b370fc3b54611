"""The routes that pool prompts instead of continuing them."""

from __future__ import annotations

from aiohttp import web

from ridgeline.service.embeddings import EMBEDDINGS
from ridgeline.service.generate import generate

ROUTES = web.RouteTableDef()


@ROUTES.post("/v1/embeddings")
async def embeddings(request: web.Request) -> web.StreamResponse:
    """Vectors of texts or token ids."""
    return await generate(request, EMBEDDINGS)
