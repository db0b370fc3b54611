"""/v1/embeddings: texts or token ids in, vectors out."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping
from functools import partial
from typing import Any

from ridgeline.service.apis.translate import read_members
from ridgeline.service.call import Call
from ridgeline.service.endpoint import Endpoint
from ridgeline.service.fields import LONG, PROMPT_FORMS, Fields, read_prompts
from ridgeline.service.pooling import Finish, Vectors, pooled_call, read_finish, read_texts
from ridgeline.service.readers import Boolean, Integer, OneOf, Reader, Special, Text
from ridgeline.service.state import Service

MAX_INPUTS = 2048
"""Inputs of a request, as in OpenAI's API."""
COMMON: Mapping[str, Reader] = {
    "model": Text(512),
    "user": Text(1024),
    "priority": Integer(-(1 << 31), (1 << 31) - 1),
    "cache_salt": Text(256),
    "request_id": Text(256),
}
"""Fields of every route with vectors."""
BODY: Mapping[str, Reader] = {
    **COMMON,
    "input": Special(PROMPT_FORMS, partial(read_prompts, most=MAX_INPUTS)),
    "encoding_format": OneOf(("float", "base64")),
    "dimensions": Integer(1, LONG),
    "normalize": Boolean(),
    "add_special_tokens": Boolean(),
}


def _read_fields(body: Any) -> Fields:
    return Fields(*read_members(body, BODY, ("input",)))


async def _call(service: Service, fields: Fields, arrival: float) -> tuple[Call, Embeddings, None]:
    service.card.check(fields.get("model"))
    finish, inputs = read_finish(service, fields), fields.get("input")
    names = ["input"] if len(inputs) == 1 else [f"input[{index}]" for index in range(len(inputs))]
    prompts = await read_texts(
        service, list(zip(names, inputs, strict=True)), special=fields.get("add_special_tokens", True)
    )
    call = pooled_call(service, prompts, fields, "embd", arrival)
    return call, Embeddings(call, finish, service.card.name, fields.get("encoding_format") == "base64"), None


EMBEDDINGS = Endpoint(_read_fields, _call)


class Embeddings(Vectors):
    """A list of `embedding` objects. See answer.Shape. packed: vectors are float32 in base64, the lowest byte first."""

    def __init__(self, call: Call, finish: Finish, model: str, packed: bool) -> None:
        super().__init__(call, finish)
        self._model, self._packed = model, packed

    def whole(self) -> dict[str, Any]:
        data = [
            {"object": "embedding", "index": index, "embedding": _packed(vector) if self._packed else vector.tolist()}
            for index, vector in enumerate(self.vectors())
        ]
        return {"object": "list", "data": data, "model": self._model, "usage": self.tokens()}


def _packed(vector: array[float]) -> str:
    if sys.byteorder == "big":
        vector.byteswap()
    return base64.b64encode(vector.tobytes()).decode()
