"""/v1/rerank and /v1/score, and Ollama's vectors by its official client."""

from __future__ import annotations

from operator import mul
from typing import Any

import ollama
import pytest

from .live import MODEL, Live, ids
from .test_embeddings import raw, unit

DOCUMENTS = ["the end", "hello", "the lamp is lit"]


def cosine(first: str, second: str) -> float:
    """Of the vectors that the fake engine makes."""
    return sum(map(mul, unit(raw(ids(first))), unit(raw(ids(second)))))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_by_relevance(endless: Live, path: str):
    body = {"model": MODEL, "query": "hello", "documents": [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]}
    answer = endless.send("POST", path, body).json
    results = answer["results"]
    scores = [cosine("hello", text) for text in DOCUMENTS]
    assert [result["index"] for result in results] == sorted(range(3), key=lambda index: -scores[index])
    for result in results:
        assert result["relevance_score"] == pytest.approx(scores[result["index"]], abs=1e-6)
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    tokens = len(ids("hello")) + sum(len(ids(text)) for text in DOCUMENTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens} and answer["model"] == MODEL
    (best,) = endless.send("POST", path, {**body, "top_n": 1, "return_documents": False}).json["results"]
    assert best.keys() == {"index", "relevance_score"} and best["index"] == 1


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_scores_of_pairs(endless: Live, path: str):
    answer = endless.send("POST", path, {"text_1": "hello", "text_2": DOCUMENTS}).json
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([cosine("hello", text) for text in DOCUMENTS])
    assert [(entry["index"], entry["object"]) for entry in answer["data"]] == [(at, "score") for at in range(3)]
    pairs = endless.send("POST", path, {"text_1": DOCUMENTS, "text_2": DOCUMENTS[::-1]}).json["data"]
    expected = [cosine(*pair) for pair in zip(DOCUMENTS, DOCUMENTS[::-1], strict=True)]
    assert [entry["score"] for entry in pairs] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a"}, "documents"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a", 3]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a", {"image": "b"}]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a", "b" * 4000]}, "documents[1]"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["a", ""]}, "text_2[1]"),
        ("/v1/score", {"text_1": "a", "text_2": 7}, "text_2"),
        ("/v1/score", {"text_1": "a", "text_2": "b", "model": "other"}, "model"),
    ],
)
def test_what_is_refused(endless: Live, path: str, body: dict[str, Any], param: str):
    answer = endless.send("POST", path, body)
    assert answer.status in (400, 404) and answer.json["error"]["param"] == param


def test_ollama(endless: Live):
    client = ollama.Client(f"http://127.0.0.1:{endless.port}")
    answer = client.embed(MODEL + ":latest", ["hello", "the end"])
    assert answer.model == MODEL and answer.prompt_eval_count == len(ids("hello")) + len(ids("the end"))
    for vector, text in zip(answer.embeddings, ["hello", "the end"], strict=True):
        assert vector == pytest.approx(unit(raw(ids(text))), abs=1e-6)
    (short,) = client.embed(MODEL, "hello", dimensions=2).embeddings
    assert short == pytest.approx(unit(raw(ids("hello"))[:2]), abs=1e-6)
    assert client.embeddings(MODEL, "hello").embedding == pytest.approx(unit(raw(ids("hello"))), abs=1e-6)
    client.embed(MODEL, "b" * 4000)
    assert len(endless.engine.submits[-1].tokens) == 2047
    with pytest.raises(ollama.ResponseError, match="input\\[1\\] has 4000 tokens: send at most 2047"):
        client.embed(MODEL, ["a", "b" * 4000], truncate=False)
    with pytest.raises(ollama.ResponseError, match="other"):
        client.embed("other", "a")
