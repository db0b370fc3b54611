"""Connections that are idle or slow beside honest requests, and compressed bodies that unpack to far more than was sent."""

from __future__ import annotations

import gzip
import json
import socket
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from .served import Served, bounded_growth, growth, post, refused

pytestmark = pytest.mark.usefixtures("unharmed")

FULL = pytest.mark.long


@contextmanager
def connections(server: Served, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(server.raw(b"")) for _ in range(count)]


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=FULL)])
def test_idle_connections(server: Served, count: int) -> None:
    """They hold no place of the queue. Some have said nothing, some have had an answer."""
    with bounded_growth(server), connections(server, count) as idle:
        for sock in idle[::2]:
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        for _ in range(8):
            assert server.complete(max_tokens=2).status in (200, 429)
        for sock in idle:  # each of them may still ask
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("count", [24, pytest.param(120, marks=FULL)])
def test_slow_connections(server: Served, count: int) -> None:
    """Every request arrives byte by byte, all of them at the same time, and every one is answered."""
    body = json.dumps({"prompt": "Once upon a time"}).encode()
    data = post("/tokenize", body, "Connection: close")
    with bounded_growth(server), connections(server, count) as slow:
        for at in range(len(data)):
            for sock in slow:
                sock.sendall(data[at : at + 1])
            if at % 40 == 0:
                assert server.complete(max_tokens=1).status in (200, 429)
        for sock in slow:
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def _packed(size: int, encoding: str) -> bytes:
    """`size` zeros, compressed piece by piece."""
    window = {"gzip": 31, "deflate": 15, "raw": -15}[encoding]
    packer = zlib.compressobj(9, zlib.DEFLATED, window)
    piece = b" " * (1 << 20)
    return b"".join(packer.compress(piece) for _ in range(size >> 20)) + packer.flush()


@pytest.mark.parametrize("size", [64 << 20, pytest.param(512 << 20, marks=FULL)])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw"])
def test_bombs(server: Served, size: int, encoding: str) -> None:
    bomb = _packed(size, encoding)
    assert len(bomb) < size / 500
    headers = {"content-encoding": "deflate" if encoding == "raw" else encoding}

    def ask(_: int) -> None:
        refused(server.send("POST", "/v1/completions", bomb, headers), 413)

    def ask_at_once() -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))

    assert growth(server, ask_at_once) < 150


def test_bombs_in_parts_and_in_layers(server: Served) -> None:
    """Many members of gzip in one body; a bomb inside of another; and one that comes in chunks."""
    parts = gzip.compress(b" " * (1 << 20)) * 64
    refused(server.send("POST", "/v1/completions", parts, {"content-encoding": "gzip"}), 413)
    layers = gzip.compress(_packed(64 << 20, "gzip"))
    for encoding in ("gzip", "gzip, gzip"):
        reply = server.send("POST", "/v1/completions", layers, {"content-encoding": encoding})
        refused(reply, reply.status)
        assert reply.status in (400, 413)
    bomb = _packed(64 << 20, "gzip")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
    chunks = b"".join(
        b"%x\r\n%s\r\n" % (len(bomb[at : at + 100]), bomb[at : at + 100]) for at in range(0, len(bomb), 100)
    )
    answer = server.exchange(
        f"{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode() + chunks + b"0\r\n\r\n"
    )
    assert answer.startswith(b"HTTP/1.1 413 ")
