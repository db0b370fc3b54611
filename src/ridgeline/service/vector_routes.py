"""The routes that pool prompts instead of continuing them."""

from __future__ import annotations

from aiohttp import web

from ridgeline.service.embeddings import EMBEDDINGS
from ridgeline.service.generate import generate
from ridgeline.service.rerank import ENDPOINT_RERANK, ENDPOINT_SCORE

ROUTES = web.RouteTableDef()


@ROUTES.post("/v1/embeddings")
async def embeddings(request: web.Request) -> web.StreamResponse:
    """Vectors of texts or token ids."""
    return await generate(request, EMBEDDINGS)


@ROUTES.post("/v1/rerank")
@ROUTES.post("/v2/rerank")
@ROUTES.post("/rerank")
async def rerank(request: web.Request) -> web.StreamResponse:
    """Documents by their relevance to a query, in the form of Jina's and Cohere's APIs."""
    return await generate(request, ENDPOINT_RERANK)


@ROUTES.post("/v1/score")
@ROUTES.post("/score")
async def score(request: web.Request) -> web.StreamResponse:
    """Scores of pairs of texts, in vLLM's form."""
    return await generate(request, ENDPOINT_SCORE)
