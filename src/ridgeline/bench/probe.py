"""Finding out what a server understands, by asking it: its model, its context, token ids as prompts, honest counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from ridgeline.bench.prompts import WORDS, Prompts, Vocabulary
from ridgeline.bench.stream import Reply
from ridgeline.bench.target import Client, Dialect
from ridgeline.bench.workload import Ask
from ridgeline.core.errors import ConfigError, RidgelineError

_SHORT, _LONG = 40, 160
"""Words of the two prompts whose counts tell what a word costs and what a prompt costs before its first word."""


async def probe(client: Client, wanted: Dialect, *, ids: bool | None, chat: bool | None) -> tuple[Dialect, Vocabulary]:
    """(how to speak to the server, what to make prompts of).

    wanted: fields the user asked for. ids, chat: what the user insists on; None lets the server decide: token ids where
    it takes them, else text; completions where it has them, else chat. Raises ConfigError for a server that cannot be
    measured, RidgelineError with its own words for one that refuses.
    """
    card = await _card(client, wanted.model)
    dialect = replace(wanted, model=wanted.model or card.get("id", ""), context=card.get("max_model_len"))
    found = await _ids(client, dialect.model) if ids is not False and chat is not True else ()
    ways = [replace(dialect, chat=False, ids=True)] if found else []
    if ids is not True:
        ways += [replace(dialect, chat=told, ids=False) for told in (False, True) if chat in (None, told)]
    if not ways:
        raise ConfigError("The server has no /tokenize route, which prompts of token ids need: use --prompts text.")
    error = ""
    for way in ways:
        spoken, error = await _understood(client, way, found)
        if spoken is not None:
            return spoken, Vocabulary(found) if spoken.ids else await _measured(client, spoken)
    raise RidgelineError(f"{client.address.url} refuses all forms of requests: {error}")


async def fetch(client: Client, path: str, body: Any = None) -> Reply:
    """One small request outside the measurement; `text` is the body of its answer."""
    return await client.send(client.address.request(path, None if body is None else msgspec.json.encode(body)))


async def _card(client: Client, model: str) -> dict[str, Any]:
    """What /v1/models says of the model (the first one when none is named); {} where there is no such route."""
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
        raise ConfigError(f"--model is {model!r}, but the server serves {names}.", param="model")
    return next((card for card in cards if not model or card.get("id") == model), {})


async def _ids(client: Client, model: str) -> tuple[int, ...]:
    """Ids of common words by the server's /tokenize; () where it has none."""
    text = " ".join(WORDS)
    reply = await fetch(client, "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    if reply.status != 200:
        return ()
    try:
        return tuple(sorted(set(msgspec.json.decode(reply.text)["tokens"])))
    except (msgspec.DecodeError, KeyError, TypeError):
        return ()


async def _understood(client: Client, way: Dialect, ids: tuple[int, ...]) -> tuple[Dialect | None, str]:
    """The fullest form of a way of asking that the server accepts; None and its words when it accepts none."""
    vocabulary = Vocabulary(ids if way.ids else ())
    prompt = Prompts(vocabulary, 0).make(Ask(0.0, 8, 2), 0)
    error = ""
    for plain in (way, way.without("ignore_eos", "min_tokens")):
        for usage in ("each", "last", "no"):
            spoken = replace(plain, usage=usage)
            reply = await client.send(client.address.request(spoken.path, spoken.body(prompt, 2)))
            if not reply.error:
                return spoken, ""
            error = reply.error
            if reply.status not in (400, 422):
                return None, error
    return None, error


async def _measured(client: Client, dialect: Dialect) -> Vocabulary:
    """Tokens per word and per prompt, from the server's counts of two prompts; its absence leaves one token a word."""
    counts = []
    for words in (_SHORT, _LONG):
        prompt = Prompts(Vocabulary(), 1).make(Ask(0.0, words, 1), words)
        reply = await client.send(client.address.request(dialect.path, dialect.body(prompt, 1)))
        if reply.error or not reply.prompt_tokens:
            return Vocabulary()
        counts.append(reply.prompt_tokens)
    each = (counts[1] - counts[0]) / (_LONG - _SHORT)
    return Vocabulary((), each, counts[0] - each * _SHORT) if each > 0 else Vocabulary()
