"""Raw HTTP that two parsers could read in two ways (request smuggling), and headers that try to become others.

After each one, the same connection carries a second request for /smuggled, which must never be answered: it stands where
the first request's body is. The server answers once, or refuses and closes the connection.
"""

from __future__ import annotations

import json
import re

import pytest

from .served import Served, post

pytestmark = pytest.mark.usefixtures("unharmed")

HOST = "Host: localhost\r\n"
TYPE = "Content-Type: application/json\r\n"
POST = f"POST /tokenize HTTP/1.1\r\n{HOST}{TYPE}"
HIDDEN = "GET /smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAST = f"GET /version HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n"
BODY = '{"prompt": "hi"}'
CHUNKS = f"{len(BODY):x}\r\n{BODY}\r\n0\r\n\r\n"
LENGTH = f"Content-Length: {len(BODY)}\r\n"

AMBIGUOUS: dict[str, dict[str, str]] = {
    "lengths": {
        "length-then-chunks": f"{POST}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{HIDDEN}",
        "chunks-then-length": f"{POST}Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n{HIDDEN}",
        "two-lengths": f"{POST}Content-Length: 0\r\n{LENGTH}\r\n{BODY}{HIDDEN}",
        "two-equal-lengths": f"{POST}{LENGTH}{LENGTH}\r\n{BODY}{HIDDEN}",
        "list-of-lengths": f"{POST}Content-Length: 0, {len(BODY)}\r\n\r\n{BODY}{HIDDEN}",
        "plus": f"{POST}Content-Length: +{len(BODY)}\r\n\r\n{BODY}{HIDDEN}",
        "hex": f"{POST}Content-Length: 0x10\r\n\r\n{BODY}{HIDDEN}",
        "two-words": f"{POST}Content-Length: 1 6\r\n\r\n{BODY}{HIDDEN}",
        "empty-length": f"{POST}Content-Length: \r\n\r\n{HIDDEN}",
        "negative": f"{POST}Content-Length: -1\r\n\r\n{HIDDEN}",
        "overflow": f"{POST}Content-Length: 18446744073709551617\r\n\r\n{HIDDEN}",
        "space-before-colon": f"{POST}Content-Length : {len(BODY)}\r\n\r\n{BODY}{HIDDEN}",
    },
    "encodings": {
        "identity": f"{POST}Transfer-Encoding: identity\r\n\r\n{HIDDEN}",
        "chunked-identity": f"{POST}Transfer-Encoding: chunked, identity\r\n\r\n{CHUNKS}{HIDDEN}",
        "chunked-twice": f"{POST}Transfer-Encoding: chunked, chunked\r\n\r\n{CHUNKS}{HIDDEN}",
        "two-encodings": f"{POST}Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n{CHUNKS}{HIDDEN}",
        "xchunked": f"{POST}Transfer-Encoding: xchunked\r\n\r\n{CHUNKS}{HIDDEN}",
        "tab-chunked": f"{POST}Transfer-Encoding: \x0bchunked\r\n\r\n{CHUNKS}{HIDDEN}",
        "encoding-space-colon": f"{POST}Transfer-Encoding : chunked\r\n\r\n{CHUNKS}{HIDDEN}",
        "http-1.0-chunks": f"POST /tokenize HTTP/1.0\r\n{HOST}{TYPE}Transfer-Encoding: chunked\r\n\r\n{CHUNKS}{HIDDEN}",
    },
    "chunks": {
        "size-overflow": f"{POST}Transfer-Encoding: chunked\r\n\r\n10000000000000010\r\n{BODY}\r\n0\r\n\r\n{HIDDEN}",
        "size-negative": f"{POST}Transfer-Encoding: chunked\r\n\r\n-1\r\n{BODY}\r\n0\r\n\r\n{HIDDEN}",
        "size-hex-prefix": f"{POST}Transfer-Encoding: chunked\r\n\r\n0x10\r\n{BODY}\r\n0\r\n\r\n{HIDDEN}",
        "size-space": f"{POST}Transfer-Encoding: chunked\r\n\r\n 10\r\n{BODY}\r\n0\r\n\r\n{HIDDEN}",
        "size-empty": f"{POST}Transfer-Encoding: chunked\r\n\r\n\r\n{HIDDEN}",
        "size-underscore": f"{POST}Transfer-Encoding: chunked\r\n\r\n1_0\r\n{BODY}\r\n0\r\n\r\n{HIDDEN}",
        "chunk-too-long": f"{POST}Transfer-Encoding: chunked\r\n\r\n5\r\n{BODY}\r\n0\r\n\r\n{HIDDEN}",
        "extension-newline": f"{POST}Transfer-Encoding: chunked\r\n\r\n10;a\n{BODY}\r\n0\r\n\r\n{HIDDEN}",
        "extension-long": f"{POST}Transfer-Encoding: chunked\r\n\r\n10;{'a' * 70_000}\r\n{BODY}\r\n0\r\n\r\n{HIDDEN}",
        "chunk-lf-only": f"{POST}Transfer-Encoding: chunked\r\n\r\n10\n{BODY}\n0\n\n{HIDDEN}",
    },
    "headers": {
        "obs-fold": f"{POST}X-A: b\r\n Content-Length: 0\r\n{LENGTH}\r\n{BODY}{HIDDEN}",
        "obs-fold-first": f"POST /tokenize HTTP/1.1\r\n {HOST}{TYPE}{LENGTH}\r\n{BODY}{HIDDEN}",
        "obs-fold-encoding": f"{POST}Transfer-Encoding:\r\n chunked\r\n\r\n{CHUNKS}{HIDDEN}",
        "lf-only": f"{POST}{LENGTH}\r\n".replace("\r\n", "\n") + BODY + HIDDEN,
        "cr-only": f"POST /tokenize HTTP/1.1\r\n{HOST}X-A: b\rContent-Length: 0\r\n{TYPE}{LENGTH}\r\n{BODY}{HIDDEN}",
        "nul": f"{POST}X-A: b\0c\r\n{LENGTH}\r\n{BODY}{HIDDEN}",
        "no-name": f"{POST}: b\r\n{LENGTH}\r\n{BODY}{HIDDEN}",
        "name-with-space": f"{POST}X A: b\r\n{LENGTH}\r\n{BODY}{HIDDEN}",
        "underscores": f"{POST}Content_Length: 0\r\n{LENGTH}\r\n{BODY}{HIDDEN}",
    },
    "first line": {
        "tabs": f"POST\t/tokenize\tHTTP/1.1\r\n{HOST}{TYPE}{LENGTH}\r\n{BODY}{HIDDEN}",
        "version": f"POST /tokenize HTTP/9.9\r\n{HOST}{TYPE}{LENGTH}\r\n{BODY}{HIDDEN}",
        "no-version": f"POST /tokenize\r\n{HOST}{TYPE}{LENGTH}\r\n{BODY}{HIDDEN}",
        "http-2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + HIDDEN,
        "method": f"POST,GET /tokenize HTTP/1.1\r\n{HOST}{TYPE}{LENGTH}\r\n{BODY}{HIDDEN}",
        "space-in-target": f"POST /tokenize x HTTP/1.1\r\n{HOST}{TYPE}{LENGTH}\r\n{BODY}{HIDDEN}",
    },
}  # fmt: skip


def statuses(data: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/\d\.\d (\d{3}) ", data)]


@pytest.mark.parametrize("kind", AMBIGUOUS)
def test_a_request_that_can_be_read_in_two_ways(server: Served, kind: str) -> None:
    """Refused, and the connection is closed, so that nobody reads on at the wrong place; or read as HTTP says."""
    for name, request in AMBIGUOUS[kind].items():
        data = server.exchange((request + LAST).encode())
        first, *rest = statuses(data)
        if first == 400:
            assert not rest, name
            continue
        # What stands behind a body that was read as HTTP says is the next request, for everybody.
        assert name in READ and first == 200, (name, data[:300])
        assert rest == [404, 200] and data.count(b"/smuggled") == 1, name


READ = {"underscores", "extension-long"}
"""Requests of `AMBIGUOUS` with one meaning only."""


def test_targets(server: Served) -> None:
    for target, status in (
        ("http://localhost/version", 200),
        ("http://LOCALHOST:1/version", 200),
        ("http://evil.example/version", 403),
        ("http://localhost@evil.example/version", 403),
        ("//evil.example/version", 404),
        ("*", 400),
        ("version", 400),
        ("/version#x", 200),
        ("/version\\..\\x", 404),
    ):
        answer = server.exchange(f"GET {target} HTTP/1.1\r\n{HOST}Connection: close\r\n\r\n".encode())
        assert statuses(answer) == [status], (target, answer[:300])
    with server.raw(f"CONNECT evil.example:443 HTTP/1.1\r\nHost: evil.example:443\r\n\r\n{HIDDEN}".encode()) as sock:
        assert statuses(sock.recv(1 << 16))[:1] == [403]  # no tunnel: what follows is a request of its own


def test_requests_in_one_packet_are_answered_in_turn(server: Served) -> None:
    request = post("/tokenize", BODY.encode())
    assert statuses(server.exchange(request * 20 + LAST.encode())) == [200] * 21


def test_upgrades_are_ignored(server: Served) -> None:
    for kind in ("websocket", "h2c", "TLS/1.0"):
        with server.raw(
            f"GET /version HTTP/1.1\r\n{HOST}Connection: Upgrade\r\nUpgrade: {kind}\r\n\r\n".encode()
        ) as sock:
            assert statuses(sock.recv(1 << 16)) == [200]


def test_no_header_becomes_another(server: Served) -> None:
    for value in (
        b"a\rSet-Cookie: x=1",
        b"a\nSet-Cookie: x=1",
        b"a\0b",
        b"a\r\n Set-Cookie: x=1",
        b"\xff\xfe",
        b"a" * 9000,
    ):
        answer = server.exchange(
            f"GET /version HTTP/1.1\r\n{HOST}Connection: close\r\n".encode() + b"X-Request-Id: " + value + b"\r\n\r\n"
        )
        head = answer.partition(b"\r\n\r\n")[0].lower()
        assert statuses(answer)[0] in (200, 400) and b"set-cookie" not in head
        assert re.search(rb"x-request-id: req_[0-9a-f]{32}(\r\n|$)", head), head
    encoded = server.send("GET", "/version", headers={"x-request-id": "a%0d%0aset-cookie:x=1"})
    assert encoded.headers["x-request-id"] == "a%0d%0aset-cookie:x=1" and "set-cookie" not in encoded.headers
    for body in ({"request_id": "a\r\nset-cookie: x=1"}, {"a\r\nset-cookie: x=1": 1}, {"é\0": 1}):
        reply = server.send("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 1, **body})
        assert reply.status == 200 and "set-cookie" not in json.dumps(reply.headers).replace("x-request-id", "")
        assert re.fullmatch(r"req_[0-9a-f]{32}", reply.headers["x-request-id"])
        assert reply.headers.get("x-ridgeline-ignored-fields", "?") == "?"
