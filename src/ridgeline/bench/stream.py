"""HTTP/1.1 with server-sent events, read from the socket's bytes: a few microseconds per chunk.

An HTTP library costs several times as much per chunk, and a load generator that is busy measures itself.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import cast

import msgspec

from ridgeline.bench.events import Event, error_words, read_event, said

_MAX_HEAD = 1 << 16
_KEPT_TEXT = 1 << 24
"""Bytes kept of a body that is no stream of events."""


class Reply:
    """What came back for one request, filled by its connection. Times are those of `time.perf_counter`; nan: never.

    times, tokens, events, characters: one entry per arrival, which is all that one read of the socket held; the last three
    count from the start. tokens: as the server counts them, 0 where it does not say. answered: when the first of the
    answer came that is not a thought. told: events that brought something. said: characters. hidden: characters of
    thoughts and calls of tools. id: the server's name of the answer. text: a body that is no stream of events. error: ""
    while all is well.
    """

    __slots__ = (
        "answered", "cached_tokens", "characters", "done", "ended", "error", "events", "finish", "hidden", "id", "news",
        "output_tokens", "prompt_tokens", "said", "sent", "status", "text", "times", "tokens", "told",
    )  # fmt: skip

    def __init__(self, done: Callable[[], None]) -> None:
        self.done = done
        self.sent = self.answered = self.ended = float("nan")
        self.status = 0
        self.error = self.finish = self.id = ""
        self.text = b""
        self.times = array("d")
        self.tokens = array("l")
        self.events = array("l")
        self.characters = array("l")
        self.news = False
        self.told = self.said = self.hidden = 0
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0


class Connection(asyncio.Protocol):
    """One connection; one request at a time. idle: another request may follow."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self.closed = False
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._raw = b""  # bytes not yet understood as HTTP
        self._body = b""  # the body's bytes not yet understood as lines
        self._text = bytearray()  # a body that is no stream of events
        self._headed = self._chunked = self._events = self._ended = self._final = False
        self._left: int | None = (
            None  # bytes until the end of the body or of its chunk; None: until the connection's end
        )

    # --- asyncio's side ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._reply is not None:
            if self._headed and not self._chunked and self._left is None and not self._events:
                self._finish()  # a body that lasts as long as its connection
            else:
                self._fail(f"connection lost: {exc}" if exc else "the connection closed before the end of the answer")

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None:  # nobody asked for this
            self.close()
            return
        now = self._clock()
        reply.news = False
        try:
            self._read(self._raw + data if self._raw else data, reply, now)
        except (ValueError, IndexError, msgspec.DecodeError) as error:
            self._fail(f"the answer cannot be read: {error}")
            return
        if reply.news:
            reply.times.append(now)
            reply.tokens.append(reply.output_tokens)
            reply.events.append(reply.told)
            reply.characters.append(reply.said)
        if self._ended:
            self._finish()

    # --- the load generator's side ----------------------------------------------------------------------------------

    def send(self, data: bytes, reply: Reply) -> None:
        """Send a whole request; `reply.done` is called when its answer has ended, in whatever way."""
        assert self._transport is not None and self._reply is None
        self._reset()
        self._reply = reply
        reply.sent = self._clock()
        self._transport.write(data)

    def abandon(self, error: str) -> None:
        """End the request under way with an error; closing the connection cancels it at the server."""
        if self._reply is not None:
            self._fail(error)

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # --- HTTP -------------------------------------------------------------------------------------------------------

    def _read(self, data: bytes, reply: Reply, now: float) -> None:
        if not self._headed:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MAX_HEAD:
                    raise ValueError("the HTTP head has no end")
                self._raw = data
                return
            self._head(data[:end], reply)
            data = data[end + 4 :]
            self._raw = b""
        if self._chunked:
            self._read_chunks(data, reply, now)
        elif self._left is None:
            self._take(data, reply, now)
        else:
            self._left -= len(data)
            self._take(data, reply, now)
            self._ended = self._left <= 0

    def _head(self, head: bytes, reply: Reply) -> None:
        first, *lines = head.split(b"\r\n")
        reply.status = int(first.split(b" ", 2)[1])
        fields = {}
        for line in lines:
            name, _, value = line.partition(b":")
            fields[name.strip().lower()] = value.strip().lower()
        self._headed = True
        self._chunked = fields.get(b"transfer-encoding", b"").endswith(b"chunked")
        self._left = 0 if self._chunked else int(fields[b"content-length"]) if b"content-length" in fields else None
        self._events = reply.status == 200 and fields.get(b"content-type", b"").startswith(b"text/event-stream")
        self._final = fields.get(b"connection") == b"close" or first.startswith(b"HTTP/1.0")

    def _read_chunks(self, data: bytes, reply: Reply, now: float) -> None:
        """Bodies in chunks (RFC 9112, section 7.1). `_left`: bytes of the current chunk, its line end included."""
        at, size = 0, len(data)
        left = self._left or 0
        while at < size:
            if not left:
                end = data.find(b"\r\n", at)
                if end < 0:
                    break
                length = int(data[at:end].split(b";")[0], 16)
                if not length:  # the last one; trailers may follow, an empty line ends them
                    self._ended = data.startswith(b"\r\n", end + 2) or b"\r\n\r\n" in data[end:]
                    break
                at, left = end + 2, length + 2
            taken = min(left, size - at)
            left -= taken
            # What is left of this chunk may be a part of its line end, which is no content.
            content = data[at : max(at, at + taken - max(0, 2 - left))]
            at += taken
            if content:
                self._take(content, reply, now)
        self._left = left
        self._raw = data[at:] if at < size and not self._ended else b""

    # --- events -----------------------------------------------------------------------------------------------------

    def _take(self, content: bytes, reply: Reply, now: float) -> None:
        if not self._events:
            self._text += content[: _KEPT_TEXT - len(self._text)]
            return
        *lines, self._body = (self._body + content if self._body else content).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    reply.finish = reply.finish or "done"
                elif payload:
                    _note(reply, read_event(payload), now)

    def _finish(self) -> None:
        reply = self._reply
        assert reply is not None
        if not self._events and not reply.error:
            reply.text = bytes(self._text)
            reply.error = _plain_error(reply.status, reply.text)
        if not reply.finish and not reply.error:
            reply.error = "the stream ended before the end of the answer"
        self._done(reply)

    def _fail(self, error: str) -> None:
        reply = self._reply
        assert reply is not None
        reply.error = reply.error or error
        self._final = True
        self._done(reply)

    def _done(self, reply: Reply) -> None:
        self._reply = None
        reply.ended = self.idle_since = self._clock()
        if self._final:
            self.close()
        reply.done()


def _note(reply: Reply, event: Event, now: float) -> None:
    """Take one event. It is an arrival when it brings text, or a token that has none (half a character, say)."""
    if event.error is not None:
        reply.error = error_words(event.error)
        return
    gained = 0
    for choice in event.choices:
        answer, hidden = said(choice)
        if answer and reply.answered != reply.answered:
            reply.answered = now
        gained += answer + hidden
        reply.hidden += hidden
        reply.finish = choice.finish_reason or reply.finish
    if event.id and not reply.id:
        reply.id = event.id
    before = reply.output_tokens
    usage = event.usage
    if usage is not None:
        reply.prompt_tokens = usage.prompt_tokens or reply.prompt_tokens
        reply.output_tokens = usage.completion_tokens or reply.output_tokens
        if usage.prompt_tokens_details is not None:
            reply.cached_tokens = usage.prompt_tokens_details.cached_tokens or 0
    # Usage that comes alone is the last word on what was counted before, no news.
    if gained or (event.choices and reply.output_tokens > before):
        reply.news = True
        reply.told += 1
        reply.said += gained


def _plain_error(status: int, text: bytes) -> str:
    """Words of an answer that is no stream of events."""
    try:
        event = read_event(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"HTTP {status}: {text[:200].decode(errors='replace')}"
    if event.error is not None:
        return f"HTTP {status}: {error_words(event.error)}"
    return f"HTTP {status} instead of a stream of events"
