"""Vectors in the form of Ollama's API. Texts that are too long are cut unless `truncate` is false."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from ridgeline.service.apis.translate import read_members
from ridgeline.service.call import Call
from ridgeline.service.embeddings import MAX_INPUTS
from ridgeline.service.endpoint import Endpoint
from ridgeline.service.fields import LONG, Fields
from ridgeline.service.generate import generate
from ridgeline.service.pooling import Finish, Vectors, pooled_call, read_finish, read_texts
from ridgeline.service.readers import Boolean, Integer, Reader, Record, Special, Text, Texts, wrong
from ridgeline.service.state import Service

ROUTES = web.RouteTableDef()

_COMMON: Mapping[str, Reader] = {
    "model": Text(512),
    "options": Record({}, open=True),
    "keep_alive": Special("a duration", lambda name, value: value),
}
EMBED: Mapping[str, Reader] = {
    **_COMMON,
    "input": Texts(MAX_INPUTS, LONG),
    "truncate": Boolean(),
    "dimensions": Integer(1, LONG),
}
EMBED_PROMPT: Mapping[str, Reader] = {**_COMMON, "prompt": Text(LONG)}


@ROUTES.post("/api/embed")
async def embed(request: web.Request) -> web.StreamResponse:
    """Vectors of texts in the form of Ollama's API."""
    return await generate(request, Endpoint(_read_embed, _call))


@ROUTES.post("/api/embeddings")
async def embed_prompt(request: web.Request) -> web.StreamResponse:
    """The vector of a prompt in the form of Ollama's older route."""
    return await generate(request, Endpoint(_read_prompt, _call))


def _read_embed(body: Any) -> Fields:
    fields = _read(body, EMBED, "input")
    if not fields.get("input"):
        raise wrong("input", [], "at least one text")
    return fields


def _read_prompt(body: Any) -> Fields:
    return _read(body, EMBED_PROMPT, "prompt")


def _read(body: Any, known: Mapping[str, Reader], required: str) -> Fields:
    values, ignored = read_members(body, known, (required,))
    without_effect = [f"options.{name}" for name in values.get("options", {})]
    return Fields(values, (*ignored, *without_effect, *(["keep_alive"] if "keep_alive" in values else [])))


async def _call(service: Service, fields: Fields, arrival: float) -> tuple[Call, OllamaVectors, None]:
    service.card.check(fields.get("model"))
    prompt, inputs = fields.get("prompt"), fields.get("input", ())
    items = [("prompt", prompt)] if prompt is not None else [(f"input[{at}]", text) for at, text in enumerate(inputs)]
    prompts = await read_texts(service, items, truncate=fields.get("truncate", True))
    call = pooled_call(service, prompts, fields, "ollama", arrival)
    return call, OllamaVectors(call, read_finish(service, fields), service.card.name, prompt is not None), None


class OllamaVectors(Vectors):
    """See answer.Shape. single: the older route, which answers with one vector."""

    def __init__(self, call: Call, finish: Finish, model: str, single: bool) -> None:
        super().__init__(call, finish)
        self._model, self._single = model, single

    def whole(self) -> dict[str, Any]:
        vectors = [vector.tolist() for vector in self.vectors()]
        if self._single:
            return {"embedding": vectors[0]}
        return {
            "model": self._model,
            "embeddings": vectors,
            "total_duration": int((time.time() - self.call.arrival) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self.usage.prompt,
        }
