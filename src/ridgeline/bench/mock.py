"""A mock server with known latencies and no model, to check the load generator and other clients.

Chunk k is due ttft_s + k * itl_s after the last byte of the request. A late chunk does not delay the following ones.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec

from ridgeline.bench.clock import Alarm
from ridgeline.core.errors import ConfigError
from ridgeline.core.process import raise_file_limit, with_rare_collections

CHAT_OVERHEAD = 7
"""Tokens that the mock's chat template adds."""
VOCABULARY = 50_000


@dataclass(frozen=True, slots=True)
class Speed:
    """Latencies and limits of the mock server."""

    ttft_s: float = 0.2
    itl_s: float = 0.05
    per_chunk: int = 1
    """Tokens in a chunk."""
    slots: int | None = None
    """Most concurrent requests; further ones wait. None: no limit."""
    failing: float = 0.0
    """Share of requests answered with an error."""
    context: int = 131_072
    """Most tokens of prompt plus answer, as reported by /v1/models."""


class MockServer:
    """The mock server. It serves within its context; `url` is its address."""

    def __init__(self, speed: Speed, host: str = "127.0.0.1", port: int = 0) -> None:
        self.speed = speed
        self.running = 0
        self.waiting: deque[_Answer] = deque()
        self.rng = random.Random(0)
        self._host, self._port = host, port

    async def __aenter__(self) -> MockServer:
        raise_file_limit()
        self.alarm = Alarm()
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(partial(_Peer, self), self._host, self._port, backlog=4096)
        except OSError as error:
            self.alarm.__exit__()
            where = f"{self._host}:{self._port}"
            raise ConfigError(f"Cannot listen on {where} ({error.strerror}): choose another --port.") from None
        self.url = "http://{}:{}".format(*self._server.sockets[0].getsockname()[:2])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.alarm.__exit__()

    def admit(self, answer: _Answer) -> None:
        """Start a request if a slot is free, else queue it."""
        if self.speed.slots is not None and self.running >= self.speed.slots:
            self.waiting.append(answer)
            return
        self.running += 1
        answer.begin()

    def release(self) -> None:
        """Free the slot of an ended request and start waiting requests."""
        self.running -= 1
        while self.waiting and (self.speed.slots is None or self.running < self.speed.slots):
            answer = self.waiting.popleft()
            if not answer.gone:
                self.running += 1
                answer.begin()


class _Peer(asyncio.Protocol):
    """A client's connection."""

    def __init__(self, server: MockServer) -> None:
        self._server = server
        self._data = b""
        self._answer: _Answer | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None:
            self._answer.cancel()

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.strip().lower() == b"content-length":
                length = int(value)
        if len(body) < length:
            return
        self._data = body[length:]
        method, path, *_ = head.split(b" ", 2)
        self._handle(method.decode(), path.decode(), body[:length])

    def _handle(self, method: str, path: str, body: bytes) -> None:
        try:
            fields = msgspec.json.decode(body, type=dict) if body else {}
        except msgspec.DecodeError as error:
            self._json(400, _error(f"The body is not JSON: {error}."))
            return
        if (method, path) == ("GET", "/v1/models"):
            card = {"id": "mock", "object": "model", "owned_by": "mock", "max_model_len": self._server.speed.context}
            self._json(200, {"object": "list", "data": [card]})
        elif (method, path) == ("POST", "/tokenize"):
            words = str(fields.get("prompt", "")).split()
            ids = [sum(word.encode()) % VOCABULARY for word in words]
            self._json(200, {"count": len(ids), "tokens": ids})
        elif method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            self._complete(fields, chat="chat" in path)
        else:
            self._json(404, _error(f"Unknown route {path}."))

    def _complete(self, fields: dict[str, Any], *, chat: bool) -> None:
        if self._server.rng.random() < self._server.speed.failing:
            self._json(500, _error("The mock server fails this request (--failing)."))
            return
        self._answer = _Answer(self._server, self._transport, fields, chat)
        self._server.admit(self._answer)

    def _json(self, status: int, value: Any) -> None:
        body = msgspec.json.encode(value)
        head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)


class _Answer:
    """A streamed answer."""

    def __init__(self, server: MockServer, transport: asyncio.Transport, fields: dict[str, Any], chat: bool) -> None:
        self._server = server
        self._transport = transport
        self._total = int(fields.get("max_completion_tokens") or fields.get("max_tokens") or 16)
        options = fields.get("stream_options") or {}
        self._include_usage = bool(options.get("include_usage"))
        self._usage_in_chunks = bool(options.get("continuous_usage_stats"))
        self._prompt = _prompt_tokens(fields) + (CHAT_OVERHEAD if chat else 0)
        self._chat = chat
        self._sent = 0
        self._chunks = 0
        self.gone = False

    def begin(self) -> None:
        self._started = time.perf_counter()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        opening = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        self._transport.write(head + (_event(opening) if self._chat else b""))
        self._schedule_chunk()

    def cancel(self) -> None:
        """Stop the answer, because the client has disconnected."""
        self.gone = True

    def _schedule_chunk(self) -> None:
        speed = self._server.speed
        self._server.alarm.at(self._started + speed.ttft_s + self._chunks * speed.itl_s, self._send_chunk)

    def _send_chunk(self) -> None:
        if self.gone:
            self._server.release()
            return
        count = min(self._server.speed.per_chunk, self._total - self._sent)
        self._sent += count
        self._chunks += 1
        text = " word" * count
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if self._sent >= self._total else None}
        choice |= {"delta": {"content": text}} if self._chat else {"text": text}
        event: dict[str, Any] = {"id": "mock", "object": "chunk", "model": "mock", "choices": [choice]}
        if self._usage_in_chunks:
            event["usage"] = self._usage()
        self._transport.write(_event(event))
        if self._sent < self._total:
            self._schedule_chunk()
            return
        last = _event({"choices": [], "usage": self._usage()}) if self._include_usage else b""
        self._transport.write(last + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
        self.gone = True
        self._server.release()

    def _usage(self) -> dict[str, int]:
        total = self._prompt + self._sent
        return {"prompt_tokens": self._prompt, "completion_tokens": self._sent, "total_tokens": total}


def _prompt_tokens(fields: dict[str, Any]) -> int:
    """Count the token ids of a prompt, or the words of its texts."""
    prompt = fields.get("prompt", "")
    if isinstance(prompt, list):
        return len(prompt)
    texts = [prompt, *(message.get("content") or "" for message in fields.get("messages", ()))]
    return sum(len(text.split()) for text in texts)


def _event(value: Any) -> bytes:
    return _chunk(b"data: " + msgspec.json.encode(value) + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "mock", "param": None, "code": None}}


async def serve_mock(speed: Speed, host: str, port: int, listening: Callable[[str], None]) -> None:
    """Serve until cancelled."""
    async with MockServer(speed, host, port) as server:
        listening(server.url)
        await with_rare_collections(asyncio.Event().wait())
