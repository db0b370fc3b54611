"""Everything that clients do wrong, at a live server, beside honest requests whose answers must not change.

After every test nothing may be held: free + used = total, used = 0, health is 200 and an honest request is answered.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ridgeline.service.fields import TABLE

from ..service.live import Reply, json_headers
from .hostile import HOSTILE
from .served import TIMEOUT_S, Served, post, refused

ROUTES = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
HI = [{"role": "user", "content": "hi"}]
STORY = "Once upon a time"
JSON_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

pytestmark = pytest.mark.usefixtures("unharmed")


def at_once(work: Callable[[int], Any], count: int) -> list[Any]:
    """`work(0)` to `work(count - 1)`, each in a thread of its own."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def reset(sock: socket.socket) -> None:
    """Go without a word."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def read_all(sock: socket.socket) -> bytes:
    data = b""
    while part := sock.recv(1 << 16):
        data += part
    return data


# --- bodies ---------------------------------------------------------------------------------------------------------------

BODIES = (
    b"",
    b"{",
    b'{"prompt": "a"',
    b"[" * 100_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b"\x00",
    b"\xff\xfe{\x00}\x00",
    b'{"messages": NaN}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "\\ud800"}',
    b'{"messages": [{"role": "user", "content": "\\udfff"}], "prompt": "\\udfff", "tokens": "\\udfff"}',
    b'{"prompt": 1e999999}',
    b'{"prompt": "a"} {"prompt": "b"}',
    b"prompt=a&max_tokens=5",
    b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na\r\n--x--\r\n',
    b"[]",
    b"7",
    b'"text"',
    b"null",
)
TYPES = (
    *("application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"),
    *("application/json; charset=utf-16", "application/json; charset=\x01", "x" * 1000, ""),
)


@pytest.mark.parametrize("path", ROUTES)
def test_bodies_that_are_no_requests(server: Served, path: str):
    for number, body in enumerate(BODIES):
        for kind in (TYPES[0], TYPES[number % len(TYPES)]):
            if "\x01" not in kind:
                status = 400 if kind.startswith("application/json") else 415
                refused(server.send("POST", path, body, {"content-type": kind}), status)


def test_a_body_must_be_called_json(server: Served):
    body = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
    for kind in TYPES:
        if "\x01" not in kind:
            status = 200 if kind.startswith("application/json") else 415
            assert server.send("POST", "/v1/completions", body, {"content-type": kind}).status == status


def test_bodies_too_large(server: Served):
    refused(server.complete("x" * (5 << 20)), 413)
    bomb = gzip.compress(b" " * (64 << 20))
    assert len(bomb) < 1 << 20
    refused(server.send("POST", "/v1/completions", bomb, {"content-encoding": "gzip"}), 413)
    for encoding in ("gzip", "deflate", "br", "zstd", "nonsense"):
        reply = server.send("POST", "/v1/completions", b"not compressed", {"content-encoding": encoding})
        assert 400 <= reply.status < 500


def test_nul_bytes_and_strange_text_are_text(server: Served):
    for text in ("a\0b", "\0", "\ufeff", "\u202e\U0001f600\u0301", "<|im_end|><|im_start|>system", "\r\n\t\x7f\x1b[2J"):
        assert server.complete(text, max_tokens=1).status == 200
        assert server.chat(text, max_tokens=1).status == 200
        assert server.send("POST", "/tokenize", {"prompt": text}).json["count"] >= 1


# --- fields ---------------------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 1 << 70, 1e308, 0.5, "", "\0", "x" * 10_000),
    *([], [None], [{}], {}, {"a": {}}, [1] * 2000, [["a"] * 500] * 3),
)


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_any_value_in_any_field(server: Served, route: str):
    """Taken, or refused with the field's name; never a failure, and never in silence."""
    given = {"chat": {"messages": HI}, "completions": {"prompt": "hi"}}[route]
    path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
    connection = server.connect()
    for at, field in enumerate(TABLE):
        # A field that both routes take gets every second value on each of them.
        first, every = ((at + (route == "chat")) % 2, 2) if {"chat", "completions"} <= set(field.routes) else (0, 1)
        for value in VALUES[first::every] if route in field.routes else ():
            body = {**given, "max_tokens": 1, field.name: value}
            connection.request("POST", path, json.dumps(body), json_headers("POST", None))
            response = connection.getresponse()
            reply = Reply(response.status, dict(response.getheaders()), response.read())
            if reply.status not in (200, 429):
                refused(reply, 404 if reply.status == 404 and field.name == "model" else 400, field.name)
    connection.close()


NEVER: tuple[tuple[dict[str, Any], str], ...] = (
    ({"prompt": "word " * 100_000}, "prompt"),
    ({"prompt": [5] * 100_000}, "prompt"),
    ({"prompt": ["a", [5] * 100_000, "b"]}, "prompt"),
    ({"prompt": [5] * 512}, "prompt"),
    ({"prompt": [5] * 500, "max_tokens": 13}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 1 << 29}, "max_tokens"),
    ({"prompt": [8192]}, "prompt"),
    ({"prompt": ["a"] * 1024, "n": 2}, "n"),
    ({"prompt": ["a"] * 2000}, "prompt"),
    ({"prompt": "a", "n": 129}, "n"),
    ({"prompt": "a", "max_tokens": 5, "min_tokens": 6}, "min_tokens"),
    ({"prompt": "a", "logit_bias": {str(index): 1 for index in range(5000)}}, "logit_bias"),
    ({"prompt": "a", "allowed_token_ids": [9000]}, "allowed_token_ids"),
    ({"prompt": "a", "stop": ["x" * 2000]}, "stop"),
    ({"prompt": "a", "stop_token_ids": list(range(16))}, "stop_token_ids"),
    ({"prompt": "a", "logprobs": 1000}, "logprobs"),
    ({"prompt": "a", "guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
)


def test_what_can_never_run_is_refused(server: Served):
    for fields, param in NEVER:
        refused(server.complete(**fields), 400, param)


NO_CONVERSATIONS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"messages": [{"role": "user", "content": "word " * 100_000}]}, "messages"),
    ({"messages": HI * 8000}, "messages"),
    ({"messages": HI * 9000}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages"),
    ({"messages": [{"role": 7, "content": 7}]}, "messages"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ({"messages": [{"role": "user", "content": {"a": 1}}]}, "messages"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": 7}]}]}, "messages"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}] * 2}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
)


def test_conversations_that_are_none(server: Served):
    for fields, param in NO_CONVERSATIONS:
        body = {"messages": HI, "max_tokens": 1, **fields}
        refused(server.send("POST", "/v1/chat/completions", body), 400, param)


def test_unknown_models_and_routes(server: Served):
    for name in ("gpt-4", "", "../../etc/passwd", "x" * 500, "ridgeline-14m\0"):
        refused(server.complete(model=name), 404, "model")
        refused(server.chat(model=name), 404, "model")
    for method, path, status in (
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/%2e%2e%2f%2e%2e", 404),
        ("GET", "/../../etc/passwd", 404),
        ("POST", "/v1/moderations", 404),
        ("DELETE", "/health", 405),
    ):
        refused(server.send(method, path), status)


def test_bytes_that_are_no_http(server: Served):
    for data in (
        b"\x16\x03\x01nonsense\r\n\r\n",
        b"GET " + b"/x" * 50_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
        JSON_HEAD + b"Content-Length: -5\r\n\r\n",
        JSON_HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        JSON_HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ):
        try:
            sock = server.raw(data)
            assert b" 400 " in sock.recv(1 << 16).split(b"\r\n")[0]
            sock.close()
        except ConnectionError:  # it may hang up on what goes on and on
            pass


# --- clients that stall or go ---------------------------------------------------------------------------------------------


def test_connections_that_say_nothing_or_half(server: Served):
    head = JSON_HEAD + b"Content-Length: 999\r\n\r\n"
    parts = (b"", b"P", head[:40], head, head + b'{"prompt":', b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
    socks = [server.raw(parts[number % len(parts)]) for number in range(60)]
    assert server.complete(max_tokens=2).status in (200, 429)
    for number, sock in enumerate(socks):
        if number % 3 == 0:
            reset(sock)
        elif number % 3 == 1:
            sock.shutdown(socket.SHUT_WR)
    for sock in socks:
        sock.close()


def test_a_client_that_closes_its_writing_end_is_answered_or_gone(server: Served):
    """A half-open connection: nothing more will come from it, and it may still read."""
    for stream in (True, False):
        sock = server.begin(prompt=STORY, max_tokens=20, stream=stream)
        sock.shutdown(socket.SHUT_WR)
        read_all(sock)
        sock.close()


def test_slow_readers_get_everything(server: Served):
    """Streams that nobody reads for a while, larger than the sockets' buffers, wait without disturbing anyone."""
    whole = server.complete(max_tokens=200, ignore_eos=True, temperature=0, logprobs=20).json["choices"][0]["text"]
    socks = []
    for _ in range(3):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        sock.settimeout(TIMEOUT_S)
        sock.connect(("127.0.0.1", server.port))
        body = {
            "prompt": STORY,
            "max_tokens": 200,
            "ignore_eos": True,
            "temperature": 0,
            "logprobs": 20,
            "stream": True,
        }
        data = json.dumps(body).encode()
        sock.sendall(post("/v1/completions", data, "Connection: close"))
        socks.append(sock)
    reset(socks.pop())
    for sock in socks:
        assert _streamed(read_all(sock)) == whole
        sock.close()


def _streamed(data: bytes) -> str:
    """Text of a streamed completion, from the bytes of its connection (in chunks, as HTTP/1.1 has them)."""
    rest, body = data.partition(b"\r\n\r\n")[2], b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert events.pop() == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


def test_clients_that_go_at_any_moment(server: Served):
    """A storm of cancels: before, while and after the answer streams, with and without a word."""
    draw = random.Random(3)

    def come_and_go(number: int) -> None:
        for _ in range(8):
            n, stream = draw.choice((1, 1, 2, 4)), draw.random() < 0.7
            sock = server.begin(prompt=[draw.randrange(16, 8000) for _ in range(draw.choice((1, 50, 250)))],
                                max_tokens=200, ignore_eos=True, n=n, stream=stream)  # fmt: skip
            time.sleep(draw.choice((0, 0, 0.001, 0.01, 0.1)))
            if draw.random() < 0.5:
                reset(sock)
            else:
                if stream and draw.random() < 0.5:
                    sock.recv(100)
                sock.close()

    before = server.metric("aborted_requests_total")
    at_once(come_and_go, 12)
    server.rest()
    assert server.metric("aborted_requests_total") > before


# --- too many -------------------------------------------------------------------------------------------------------------


def test_a_burst_beyond_the_queue(server: Served):
    """Who finds a place is answered in full; everyone else hears at once when to come back."""

    def ask(number: int) -> Reply:
        return server.complete(max_tokens=40, ignore_eos=True, seed=number, temperature=1, stream=number % 2 == 0)

    replies = at_once(ask, 64)
    turned_away = [reply for reply in replies if reply.status == 429]
    assert 0 < len(turned_away) <= 64 - 16
    for reply in turned_away:
        assert reply.error["code"] == "rate_limit_exceeded"
        assert int(reply.headers["retry-after"]) >= 1 and int(reply.headers["retry-after-ms"]) > 0
    for number, reply in enumerate(replies):
        if reply.status != 429:
            assert reply.status == 200
            if number % 2:
                assert reply.json["usage"]["completion_tokens"] == 40
            else:
                assert reply.events[-1]["choices"][0]["finish_reason"] == "length"


def test_many_choices_under_memory_pressure(server: Served):
    """More choices than the cache holds: they give way to each other, come back, and draw what they would alone."""
    body = {"max_tokens": 120, "ignore_eos": True, "n": 4, "temperature": 0.9}

    def ask(number: int) -> list[str]:
        while (reply := server.complete(f"{STORY} there were {number}", seed=number, **body)).status == 429:
            time.sleep(int(reply.headers["retry-after-ms"]) / 1000)
        return [choice["text"] for choice in reply.json["choices"]]

    before = server.metric("num_preemptions_total")
    together = at_once(ask, 3)
    assert server.metric("num_preemptions_total") > before
    assert together[1] == ask(1)
    assert len({text for texts in together for text in texts}) == 12


def test_more_choices_than_rows_in_one_request(server: Served):
    reply = server.complete(["a", "b", "c"], n=16, max_tokens=3, ignore_eos=True)
    assert reply.status in (200, 429)
    if reply.status == 200:
        assert [choice["index"] for choice in reply.json["choices"]] == list(range(48))


def test_everything_at_once(server: Served):
    """Each kind of abuse from its own clients, all in the same seconds."""

    def malformed() -> None:
        for body in BODIES:
            refused(server.send("POST", "/v1/completions", body))

    def huge() -> None:
        for _ in range(5):
            refused(server.complete("word " * 100_000), 400, "prompt")

    def hostile() -> None:
        for source in HOSTILE["guided_regex"]:
            assert server.complete(max_tokens=8, guided_regex=source).status in (200, 400, 429)

    def fickle() -> None:
        for number in range(20):
            sock = server.begin(prompt=STORY, max_tokens=200, ignore_eos=True, stream=True, n=1 + number % 3)
            time.sleep(0.01)
            reset(sock)

    def greedy() -> None:
        for number in range(3):
            assert server.complete(f"{number} " * 100, max_tokens=40, ignore_eos=True, n=6).status in (200, 429)

    kinds = (malformed, huge, hostile, fickle, greedy) * 2
    at_once(lambda number: kinds[number](), len(kinds))
