"""/v1/rerank and /v1/score: how close texts are, by the cosine of their vectors or a model that answers yes or no."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import mul
from typing import Any

from ridgeline.core.errors import ContextTooLong, RequestError
from ridgeline.service.apis.translate import read_members
from ridgeline.service.call import Call
from ridgeline.service.embeddings import COMMON, MAX_INPUTS
from ridgeline.service.endpoint import Endpoint
from ridgeline.service.fields import LONG, Fields
from ridgeline.service.pooling import Finish, Vectors, pooled_call, read_texts
from ridgeline.service.readers import Boolean, Integer, Reader, Special, Text, wrong
from ridgeline.service.state import Service

_Item = tuple[str, str]
"""The name of a field, and its text."""
_DOCUMENTS = f'a list of at most {MAX_INPUTS - 1} strings or objects {{"text": ...}}'
_TEXTS = f"a string or a list of at most {MAX_INPUTS - 1} strings"


def _read_documents(name: str, value: Any) -> list[str]:
    if not isinstance(value, list) or not 1 <= len(value) < MAX_INPUTS:
        raise wrong(name, value, _DOCUMENTS)
    texts: list[Any] = [item.get("text") if isinstance(item, dict) else item for item in value]
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise wrong(f"{name}[{index}]", value[index], 'a string or an object {"text": ...}')
    return texts


def _read_texts(name: str, value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if (
        not isinstance(texts, list)
        or not 1 <= len(texts) < MAX_INPUTS
        or not all(isinstance(item, str) for item in texts)
    ):
        raise wrong(name, value, _TEXTS)
    return texts


RERANK: Mapping[str, Reader] = {
    **COMMON,
    "query": Text(LONG),
    "documents": Special(_DOCUMENTS, _read_documents),
    "top_n": Integer(1, LONG),
    "return_documents": Boolean(),
}
SCORE: Mapping[str, Reader] = {
    **COMMON,
    "text_1": Special(_TEXTS, _read_texts),
    "text_2": Special(_TEXTS, _read_texts),
}


def _rerank_fields(body: Any) -> Fields:
    return Fields(*read_members(body, RERANK, ("query", "documents")))


async def _rerank_call(service: Service, fields: Fields, arrival: float) -> tuple[Call, Ranking, None]:
    service.card.check(fields.get("model"))
    documents = fields.get("documents")
    items = [(f"documents[{index}]", text) for index, text in enumerate(documents)]
    prompts = await _prompts(service, [("query", fields.get("query"))], items)
    call = pooled_call(service, prompts, fields, "rerank", arrival)
    return call, Ranking(call, service, fields), None


def _score_fields(body: Any) -> Fields:
    return Fields(*read_members(body, SCORE, ("text_1", "text_2")))


async def _score_call(service: Service, fields: Fields, arrival: float) -> tuple[Call, Scoring, None]:
    service.card.check(fields.get("model"))
    first, second = fields.get("text_1"), fields.get("text_2")
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}: send one text_1 for all, or one for each.",
            param="text_1",
        )
    queries, documents = (
        [(f"{name}[{index}]", text) for index, text in enumerate(fields.get(name))] for name in ("text_1", "text_2")
    )
    call = pooled_call(service, await _prompts(service, queries, documents), fields, "score", arrival)
    return call, Scoring(call, service, len(first)), None


async def _prompts(service: Service, first: Sequence[_Item], second: Sequence[_Item]) -> list[list[int]]:
    """What is pooled: all texts, or one prompt for each pair where a judge is asked. first: one text for all, or one for each of
    `second`. Raises RequestError that names the field."""
    judge, most = service.judge, service.limits.request_tokens - 1
    if judge is None:
        return await read_texts(service, [*first, *second])
    for name, text in (*first, *second):
        if not text:
            raise RequestError(f"{name} is empty: send at least one character.", param=name)

    def encode() -> Iterator[list[int]]:
        for index, (name, text) in enumerate(second):
            _, query = first[index % len(first)]
            ids = judge.ids(query, text, partial(service.limits.check_text, field=name))
            if len(ids) > most:
                raise ContextTooLong(f"The prompt of {name} has {len(ids)} tokens: send at most {most}.", param=name)
            yield ids

    return await asyncio.to_thread(lambda: list(encode()))


ENDPOINT_RERANK = Endpoint(_rerank_fields, _rerank_call)
ENDPOINT_SCORE = Endpoint(_score_fields, _score_call)


class _Scores(Vectors):
    """The judge's scores of pairs, or cosines between the first vectors and those after them. first: how many these are, 1 or as
    many as the others."""

    def __init__(self, call: Call, service: Service, first: int) -> None:
        super().__init__(call, Finish(service.embedder.pooling, normalize=service.judge is None))
        self._model, self._first, self._judge = service.card.name, first, service.judge

    def scores(self) -> list[float]:
        vectors = self.vectors()
        if self._judge is not None:
            return [self._judge.score(vector) for vector in vectors]
        first, second = vectors[: self._first], vectors[self._first :]
        return [sum(map(mul, first[index % len(first)], vector)) for index, vector in enumerate(second)]


class Ranking(_Scores):
    """Documents by relevance, in the form of Jina's and Cohere's APIs. See answer.Shape."""

    def __init__(self, call: Call, service: Service, fields: Fields) -> None:
        super().__init__(call, service, 1)
        self._documents: list[str] = fields.get("documents")
        self._most = fields.get("top_n")
        self._shows_text = fields.get("return_documents", True)

    def whole(self) -> dict[str, Any]:
        scores = self.scores()
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: self._most]
        results: list[dict[str, Any]] = [{"index": index, "relevance_score": scores[index]} for index in order]
        if self._shows_text:
            for result in results:
                result["document"] = {"text": self._documents[result["index"]]}
        return {"id": self.call.id, "model": self._model, "results": results, "usage": self.tokens()}


class Scoring(_Scores):
    """Scores of pairs, in vLLM's form. See answer.Shape."""

    def whole(self) -> dict[str, Any]:
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(self.scores())]
        head = {"id": self.call.id, "object": "list", "created": int(self.call.arrival), "model": self._model}
        return {**head, "data": data, "usage": self.tokens()}
