"""Random mutations of valid requests: each is answered, or refused as the client's mistake."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .honest import REQUESTS
from .served import Served, bounded_growth, refused

SEEDS = tuple(REQUESTS.values()) + (
    ("/tokenize", {"prompt": "Once upon a time", "add_special_tokens": True, "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [300, 301, 302]}),
)
SCALARS: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 1 << 31, 1 << 63, -(1 << 70), 0.5, -0.0, 1e308, 1e-320),
    *("", "\0", "\ud800", "é", "\u202e", "<|im_end|>", "../..", "x" * 5000, "None", "[" * 100),
)
FIELDS = (
    "n",
    "stop",
    "seed",
    "logprobs",
    "stream",
    "stream_options",
    "guided_regex",
    "logit_bias",
    "tools",
    "best_of",
    "x",
)
CLIENT_ERRORS = frozenset({400, 404, 413, 429})

pytestmark = pytest.mark.usefixtures("unharmed")

Draw = random.Random


def _scalar(draw: Draw) -> Any:
    return draw.choice(SCALARS)


def _value(draw: Draw, depth: int = 0) -> Any:
    kind = draw.random()
    if depth > 3 or kind < 0.6:
        return _scalar(draw)
    if kind < 0.8:
        return [_value(draw, depth + 1) for _ in range(draw.choice((0, 1, 3, 40)))]
    return {
        draw.choice((*FIELDS, "type", "role", "content")): _value(draw, depth + 1) for _ in range(draw.randrange(4))
    }


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a value with each of its keys."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            items += [(value, key), *_places(value[key])]
    return items


def _replace(draw: Draw, body: dict[str, Any]) -> None:
    holder, key = draw.choice(_places(body))
    holder[key] = _value(draw)


def _remove(draw: Draw, body: dict[str, Any]) -> None:
    holder, key = draw.choice(_places(body))
    del holder[key]


def _add(draw: Draw, body: dict[str, Any]) -> None:
    body[draw.choice(FIELDS)] = _value(draw)


def _repeat(draw: Draw, body: dict[str, Any]) -> None:
    holder, key = draw.choice(_places(body))
    holder[key] = [holder[key]] * draw.choice((2, 17, 200))


def _rename(draw: Draw, body: dict[str, Any]) -> None:
    holder, key = draw.choice([place for place in _places(body) if isinstance(place[0], dict)])
    holder[draw.choice((key.upper(), key + "\r\nx: y", "", key[::-1]))] = holder.pop(key)


def _flip(draw: Draw, data: bytearray) -> None:
    for _ in range(draw.choice((1, 3, 20))):
        data[draw.randrange(len(data))] = draw.randrange(256)


def _cut(draw: Draw, data: bytearray) -> None:
    del data[draw.randrange(len(data)) :]


def _insert(draw: Draw, data: bytearray) -> None:
    at = draw.randrange(len(data))
    data[at:at] = draw.choice((draw.randbytes(5), b"\xff\xfe", b"\0", b'"', b"{" * 50, b"//", b"NaN", b"\\u"))


def _double(draw: Draw, data: bytearray) -> None:
    start, end = sorted(draw.choices(range(len(data) + 1), k=2))
    data[end:end] = data[start:end]


TREES: tuple[Callable[[Draw, dict[str, Any]], None], ...] = (_replace, _replace, _remove, _add, _add, _repeat, _rename)
BYTES: tuple[Callable[[Draw, bytearray], None], ...] = (_flip, _cut, _insert, _double)


def mutated(number: int) -> tuple[str, bytes]:
    """Path and body of the mutation with this number."""
    draw = random.Random(number)
    path, valid = draw.choice(SEEDS)
    body = json.loads(json.dumps(valid))
    for _ in range(draw.choice((1, 1, 2, 4))):
        if _places(body):
            draw.choice(TREES)(draw, body)
    data = bytearray(json.dumps(body).encode())
    if draw.random() < 0.3:
        draw.choice(BYTES)(draw, data)
    return path, bytes(data)


@pytest.mark.parametrize("numbers", [range(60), pytest.param(range(60, 500), marks=pytest.mark.long)], ids=str)
def test_mutations(server: Served, numbers: range) -> None:
    def ask(number: int) -> int:
        path, data = mutated(number)
        reply = server.send("POST", path, data)
        context = (number, path, data[:500], reply.data[:500])
        if reply.status == 200:
            assert b'"server_error"' not in reply.data, context
        else:
            assert reply.status in CLIENT_ERRORS, context
            refused(reply, reply.status)
        return reply.status

    with bounded_growth(server), ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(ask, numbers))
    assert {200, 400} <= set(statuses)
