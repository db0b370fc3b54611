"""Bodies of requests: what they may cost when decoded, and what many of them may hold at once."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from ridgeline.core.errors import BodyTooLarge, Overloaded
from ridgeline.service.bodies import _costs, _MemoryBudget, check_cost
from ridgeline.service.json_values import decode_json

from .live import Live, behaviour, counts, live

MIB = 1 << 20


@pytest.mark.parametrize(
    "item", [b"{}", b"[]", b'""', b'"ab"', b"[1]", b'{"a":1}', b'{"a":{}}', b'{"\\"":"\\\\"}'], ids=bytes.decode
)
def test_many_small_values_are_refused_before_they_are_decoded(item: bytes) -> None:
    with pytest.raises(BodyTooLarge, match="send fewer values"):
        check_cost(bytearray(b"[" + b",".join([item] * (8 * MIB // len(item))) + b"]"))


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"prompt": "{}[],:" * (4 * MIB)}),
        json.dumps({"prompt": '"{}",' * (3 * MIB)}),
        json.dumps({"prompt": "\\" * (8 * MIB)}),
        json.dumps({"prompt": "A sentence, as people write them: with commas. " * 500_000}),
        json.dumps({"prompt": [[1234] * 2048] * 1024}),
        json.dumps({"messages": [{"role": "user", "content": "hello"}] * 8192}),
    ],
    ids=["braces", "quotes", "backslashes", "prose", "ids", "messages"],
)
def test_long_texts_many_prompts_and_long_conversations_are_decoded(body: str) -> None:
    check_cost(bytearray(body.encode()))


def test_slices_count_what_the_whole_has() -> None:
    """Strings and escapes that lie across the slices' borders."""
    draw = random.Random(5)
    for _ in range(200):
        body = json.dumps([draw.choice(['"', "\\", '\\"', "{", 1, {}, {'"\\': "[,"}, "é"]) for _ in range(30)])
        costs = [list(_costs(bytearray(body.encode()), size))[-1] for size in (1, 2, 3, 7, 1 << 20)]
        assert len(set(costs)) == 1, body
        values = json.loads(body)
        assert costs[0] == 80 + 20 * 29 + sum(_value_cost(value) for value in values)


def _value_cost(value: object) -> int:
    """By the table of costs, without reading JSON."""
    if isinstance(value, str):
        return 60
    return 80 + (150 + 60 + 60 if value else 0) if isinstance(value, dict) else 0


def test_a_large_body_is_refused_by_what_it_holds() -> None:
    with live(behaviour(counts)) as server:
        for body in (b"[" + b"{}," * (10 * MIB) + b"{}]", b'{"prompt":[' + b"{}," * (10 * MIB) + b"{}]}"):
            answer = server.send("POST", "/v1/completions", body)
            assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        assert server.complete(prompt="{}," * 100_000).error["code"] == "context_length_exceeded"


def test_a_declared_length_above_the_limit_is_refused_before_the_body_arrives() -> None:
    with live(behaviour(counts), max_body_mb=1) as server:
        sock = _begin(server, MIB + 1, b"{")
        answer = sock.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 413 ") and b"--max-body-mb" in answer
        sock.close()


async def test_large_bodies_share_their_room_in_turn() -> None:
    room, order = _MemoryBudget(10), []

    async def hold(name: str, size: int, until: asyncio.Event) -> None:
        async with room.reserve(size):
            order.append(name)
            await until.wait()

    ends = {name: asyncio.Event() for name in "abcd"}
    tasks = []
    for name, size in zip("abcd", (6, 4, 10, 1), strict=True):
        tasks.append(asyncio.create_task(hold(name, size, ends[name])))
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert order == ["a", "b"]  # d would fit before c, and waits for its turn
    ends["a"].set()
    for _ in range(10):
        await asyncio.sleep(0)
    assert order == ["a", "b"]
    tasks[2].cancel()  # a client that goes while it waits
    ends["b"].set()
    ends["d"].set()
    await asyncio.wait(tasks)
    assert order == ["a", "b", "d"]
    async with room.reserve(10):
        pass


async def test_a_body_that_finds_no_room_is_told_to_come_back() -> None:
    room = _MemoryBudget(10, patience_s=0.01)
    async with room.reserve(10):
        with pytest.raises(Overloaded, match="Too many large bodies"):
            async with room.reserve(1):
                pass
    async with room.reserve(10):
        pass


def test_small_bodies_need_no_room() -> None:
    with live(behaviour(counts), max_body_mb=64) as server:
        large = b'{"prompt": "' + b"a" * (MIB // 4 + 100)
        sock = _begin(server, 64 * MIB, large)
        _until(lambda: not _answered(server, large + b'"}'))
        assert server.complete(max_tokens=1).status == 200
        sock.close()
        _until(lambda: _answered(server, large + b'"}'))


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end


def _answered(server: Live, body: bytes) -> bool:
    """Whether a body is answered soon, as one is that need not wait for room."""
    with _begin(server, len(body), body) as sock:
        sock.settimeout(0.5)
        try:
            return sock.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
        except TimeoutError:
            return False


def _begin(server: Live, length: int, body: bytes) -> socket.socket:
    """A request of which only a part arrives."""
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=10)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + body)
    return sock


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("1e308", 1e308),
        ("-4.9e-324", -5e-324),
        ("0.1", 0.1),
        ("2.5E3", 2500.0),
        ("1.7976931348623157e308", sys.float_info.max),
    ],
)
def test_numbers_are_read_as_python_reads_them(literal: str, value: float) -> None:
    assert decode_json(f"[{literal}, 7]") == [value, 7]


@pytest.mark.parametrize("text", ["1e309", "[1, -1e400]", "NaN", "1e", "Infinity"])
def test_what_is_no_finite_number_is_refused(text: str) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_json(text)


def test_a_megabyte_of_extreme_numbers_is_read_as_fast_as_of_others() -> None:
    """msgspec alone takes 20 times as long for them."""

    def seconds(literal: str) -> float:
        text = f"[{','.join([literal] * 50_000)}]"
        started = time.thread_time()
        decode_json(text)
        return time.thread_time() - started

    assert min(seconds("1e308") for _ in range(3)) < 5 * min(seconds("1.5") for _ in range(3))


def test_bodies_that_are_empty_or_too_deep_are_refused_in_words() -> None:
    with live(behaviour(counts)) as server:
        assert server.send("POST", "/v1/completions", b" ").error["message"] == "The body is empty: send a JSON object."
        deep = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
        assert "nested too deeply" in server.send("POST", "/v1/completions", deep).error["message"]


def test_json_inside_of_strings_is_bounded_too() -> None:
    """Such values are read after the body was checked."""
    with live(behaviour(counts)) as server:
        schema = json.dumps({"x": [{}] * 30_000})
        error = server.complete(guided_json=schema).error
        assert error["param"] == "guided_json" and "more than 65536: shorten it" in error["message"]
        call = {"function": {"name": "f", "arguments": json.dumps({"a": [[]] * 300_000})}}
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
        error = server.chat(messages=messages).error
        assert error["param"] == "messages[1].tool_calls" and "shorten them" in error["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "x" * 100_000, "content": "hi"}]},
        {"messages": [{"role": "user", "content": [{"type": "x" * 100_000}]}]},
        {"tools": [{"type": "x" * 100_000}]},
        {"temperature": "x" * 100_000},
    ],
)
def test_an_error_quotes_a_short_part_of_a_long_value(fields: dict[str, Any]) -> None:
    with live(behaviour(counts)) as server:
        reply = server.chat(**fields)
        assert reply.status == 400 and len(reply.data) < 1000
