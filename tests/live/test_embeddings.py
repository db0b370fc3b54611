"""Vectors of the real model: alone, together, in batches, and as transformers computes them."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from operator import mul
from typing import Any

import openai
import pytest

from ridgeline.models.hub import shipped_model

from .served import MODEL, Served

TEXTS = ["Once upon a time there was a lighthouse.", "The keeper lit the lamp.", "Rain", "word " * 300]


@pytest.fixture(scope="module")
def client(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def embed(client: openai.OpenAI, texts: Any) -> list[list[float]]:
    return [item.embedding for item in client.embeddings.create(model=MODEL, input=texts).data]


def close(ours: list[float], theirs: list[float]) -> bool:
    return len(ours) == len(theirs) and all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(ours, theirs, strict=True))


def test_alone_and_beside_others(client: openai.OpenAI, server: Served) -> None:
    alone = [embed(client, text)[0] for text in TEXTS]
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(server.chat, max_tokens=30) for _ in range(4)]
        together = list(pool.map(lambda _: embed(client, TEXTS), range(4)))
    assert all(answer.result().status == 200 for answer in answers)
    for vectors in together:
        assert all(close(*pair) for pair in zip(vectors, alone, strict=True))
    assert all(math.isclose(sum(map(mul, vector, vector)), 1, abs_tol=1e-4) for vector in alone)
    assert not close(alone[0], alone[1])


def test_a_client_that_goes_leaves_nothing(server: Served) -> None:
    sock = server.begin("/v1/embeddings", input=[f"{number} " + "word " * 300 for number in range(256)])
    deadline = time.monotonic() + 10
    while not server.stats()["running"]:
        assert time.monotonic() < deadline
    sock.close()
    stats = server.rest()
    assert (stats["running"], stats["waiting"], stats["used"]) == (0, 0, 0)


@pytest.mark.long
def test_as_transformers_computes_them(client: openai.OpenAI) -> None:
    import torch
    import transformers

    folder = shipped_model()
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, ours in zip(TEXTS, embed(client, TEXTS), strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state[0, -1]
        assert close(ours, (hidden / hidden.norm()).tolist())
