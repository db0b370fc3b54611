"""bad_words, DRY and beam search over HTTP, with the real engine."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

from tests.models.beams import theirs

from .served import Served

PROMPT = "Once upon a time there was a girl. Once upon a time there was a"
BODY = {"temperature": 0, "max_tokens": 48, "ignore_eos": True}


def tokens(server: Served, **fields: Any) -> list[str]:
    reply = server.complete(PROMPT, logprobs=0, **{**BODY, **fields})
    assert reply.status == 200, reply.data
    drawn: list[str] = reply.json["choices"][0]["logprobs"]["tokens"]
    return drawn


def repeated(drawn: list[str]) -> bool:
    """Whether three tokens follow each other twice."""
    triples = list(zip(drawn, drawn[1:], drawn[2:], strict=False))
    return len(set(triples)) < len(triples)


def test_bad_words_are_in_no_answer(server: Served) -> None:
    free = server.complete(PROMPT, **BODY).json["choices"][0]["text"]
    words = free.split()[1:3]
    bound = server.complete(PROMPT, bad_words=words, n=2, **{**BODY, "temperature": 1}, seed=1)
    assert bound.status == 200, bound.data
    for choice in bound.json["choices"]:
        assert choice["text"] != free and not set(words) & set(choice["text"].split())
    chat = {"messages": [{"role": "user", "content": PROMPT}], **BODY}
    answer = server.send("POST", "/v1/chat/completions", chat).json["choices"][0]["message"]["content"]
    word = answer.split()[1]
    events = server.send("POST", "/v1/chat/completions", {**chat, "bad_words": [word], "stream": True}).data
    parts = [json.loads(line[6:]) for line in events.decode().split("\n\n") if line.startswith("data: {")]
    text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts)
    assert text and word not in text.split()
    assert server.complete(PROMPT, bad_words=[""], **BODY).error["param"] == "bad_words"


def test_dry_breaks_repetitions(server: Served) -> None:
    free = tokens(server, max_tokens=64)
    assert repeated(free), "otherwise there is nothing to break"
    dry = {"dry_multiplier": 100, "dry_base": 4, "dry_sequence_breakers": []}
    assert not repeated(tokens(server, max_tokens=64, **dry))
    two = tokens(server, **dry, dry_allowed_length=1)
    pairs = list(pairwise(two))
    assert len(set(pairs)) == len(pairs)
    assert tokens(server, max_tokens=16, **dry, dry_penalty_last_n=0) == free[:16], "nothing is searched"
    refused = server.complete(PROMPT, dry_allowed_length=0)
    assert (refused.status, refused.error["param"]) == (400, "dry_allowed_length")


def test_beams_are_those_of_transformers(server: Served) -> None:
    fields = {"use_beam_search": True, "n": 3, "max_tokens": 12}
    answer = server.complete("The answer is", **fields)
    assert answer.status == 200, answer.data
    texts = [choice["text"] for choice in answer.json["choices"]]
    assert texts == theirs("The answer is", 12, num_beams=3, length_penalty=1.0, early_stopping=False)
    assert answer.json["usage"]["completion_tokens"] > 0
    assert server.rest()["used"] == 0
