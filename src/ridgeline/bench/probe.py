"""Detection of a server's features by requests: model, context, token ids as prompts, usage counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from ridgeline.bench.prompts import WORDS, Prompts, Vocabulary
from ridgeline.bench.stream import Reply
from ridgeline.bench.target import Client, Dialect
from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.core.workload import RequestSpec

_SHORT, _LONG = 40, 160
"""Words of two prompts. From their token counts follow the tokens per word and the tokens of an empty prompt."""


async def probe(client: Client, wanted: Dialect, *, ids: bool | None, chat: bool | None) -> tuple[Dialect, Vocabulary]:
    """Find the form of requests that the server accepts and the vocabulary of prompts.

    Args:
        wanted: The user's model and fields.
        ids: Prompts as token ids (True) or text (False). None: token ids if the server supports them.
        chat: Chat (True) or completions (False). None: completions if the server supports them.
    Raises:
        ConfigError: The server is unreachable or lacks what the options need.
        RidgelineError: The server refuses all forms of requests.
    """
    card = await _model_card(client, wanted.model)
    dialect = replace(wanted, model=wanted.model or card.get("id", ""), context=card.get("max_model_len"))
    token_ids = await _tokenized_words(client, dialect.model) if ids is not False and chat is not True else ()
    candidates = [replace(dialect, chat=False, ids=True)] if token_ids else []
    if ids is not True:
        candidates += [
            replace(dialect, chat=use_chat, ids=False) for use_chat in (False, True) if chat in (None, use_chat)
        ]
    if not candidates:
        raise ConfigError("Prompts of token ids need the route /tokenize, which the server lacks: use --prompts text.")
    error = ""
    for candidate in candidates:
        accepted, error = await _accepted_variant(client, candidate, token_ids)
        if accepted is not None:
            return accepted, Vocabulary(token_ids) if accepted.ids else await _measure_vocabulary(client, accepted)
    raise RidgelineError(f"{client.address.url} rejected all test requests. The last error was: {error}")


async def fetch(client: Client, path: str, body: Any = None) -> Reply:
    """Send one request outside of the measurement. The reply's `text` is the body."""
    return await client.send(client.address.request(path, None if body is None else msgspec.json.encode(body)))


async def _model_card(client: Client, model: str) -> dict[str, Any]:
    """Return the entry of the model in /v1/models (by default the first one), or {} without such a route."""
    reply = await fetch(client, "/v1/models")
    if reply.status == 0:
        url = client.address.url
        raise ConfigError(f"Cannot reach {url} ({reply.error}): is the server running?", param="url")
    if reply.status in (401, 403):
        raise ConfigError(
            f"{client.address.url} requires an API key (HTTP {reply.status}): give --api-key.", param="api_key"
        )
    try:
        cards = msgspec.json.decode(reply.text)["data"] if reply.status == 200 else []
    except (msgspec.DecodeError, KeyError, TypeError):
        cards = []
    if model and cards and model not in [card.get("id") for card in cards]:
        names = ", ".join(str(card.get("id")) for card in cards)
        raise ConfigError(
            f"--model is {model!r}, but the server serves {names}: give one of these names.", param="model"
        )
    return next((card for card in cards if not model or card.get("id") == model), {})


async def _tokenized_words(client: Client, model: str) -> tuple[int, ...]:
    """Return the token ids of common words from the server's /tokenize, or () without that route."""
    text = " ".join(WORDS)
    reply = await fetch(client, "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    if reply.status != 200:
        return ()
    try:
        return tuple(sorted(set(msgspec.json.decode(reply.text)["tokens"])))
    except (msgspec.DecodeError, KeyError, TypeError):
        return ()


async def _accepted_variant(client: Client, candidate: Dialect, ids: tuple[int, ...]) -> tuple[Dialect | None, str]:
    """Find the variant with most fields that the server accepts, or return None and the last error."""
    vocabulary = Vocabulary(ids if candidate.ids else ())
    prompt = Prompts(vocabulary, 0).make(RequestSpec(0.0, 8, 2), 0)
    error = ""
    for base in (candidate, candidate.without("ignore_eos", "min_tokens")):
        for usage in ("each", "last", "no"):
            variant = replace(base, usage=usage)
            reply = await client.send(client.address.request(variant.path, variant.body(prompt, 2)))
            if not reply.error:
                return variant, ""
            error = reply.error
            if reply.status not in (400, 422):
                return None, error
    return None, error


async def _measure_vocabulary(client: Client, dialect: Dialect) -> Vocabulary:
    """Measure tokens per word and per prompt from the server's counts. Without counts, a word is one token."""
    counts = []
    for words in (_SHORT, _LONG):
        prompt = Prompts(Vocabulary(), 1).make(RequestSpec(0.0, words, 1), words)
        reply = await client.send(client.address.request(dialect.path, dialect.body(prompt, 1)))
        if reply.error or not reply.prompt_tokens:
            return Vocabulary()
        counts.append(reply.prompt_tokens)
    tokens_per_word = (counts[1] - counts[0]) / (_LONG - _SHORT)
    return (
        Vocabulary((), tokens_per_word, counts[0] - tokens_per_word * _SHORT) if tokens_per_word > 0 else Vocabulary()
    )
