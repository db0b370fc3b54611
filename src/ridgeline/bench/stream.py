"""An HTTP/1.1 client connection for server-sent events that costs a few microseconds per chunk.

An HTTP library costs several times as much per chunk, and a busy load generator distorts its own measurements.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import cast

import msgspec

from ridgeline.bench.events import Event, count_characters, error_message, read_event

_MAX_HEAD = 1 << 16
_KEPT_TEXT = 1 << 24
"""Bytes kept of a body that is not an event stream."""


class Reply:
    """The reply to one request, filled by its connection. Times are of `time.perf_counter`, NaN if the event did not happen.

    An arrival is the data of one read of the socket that contains new output. The arrays have one entry per arrival.
    """

    __slots__ = (
        "answered", "cached_tokens", "characters", "done", "ended", "error", "events", "finish", "hidden", "id", "has_output",
        "output_tokens", "prompt_tokens", "character_count", "sent", "shows_reasoning", "status", "text", "times", "tokens",
        "event_count",
    )  # fmt: skip

    def __init__(self, done: Callable[[], None], *, shows_reasoning: bool = False) -> None:
        """done: called when the reply has ended. See `Connection.send`. shows_reasoning: the user sees reasoning too."""
        self.done = done
        self.shows_reasoning = shows_reasoning
        self.sent = self.answered = self.ended = float("nan")
        """answered: when the first visible content arrived, which is text that is not hidden reasoning, or part of a tool call."""
        self.status = 0
        self.error = self.finish = self.id = ""
        """error: empty if the request succeeded. id: of the answer in the server."""
        self.text = b""
        """A body that is not an event stream."""
        self.times = array("d")
        self.tokens = array("l")
        """Cumulative tokens by the server's count; 0 if it does not count each chunk."""
        self.events = array("l")
        """Cumulative events with output."""
        self.characters = array("l")
        """Cumulative characters."""
        self.has_output = False
        """The current read of the socket contains new output."""
        self.event_count = self.character_count = self.hidden = 0
        """event_count: events with output. hidden: characters of reasoning."""
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0


class Connection(asyncio.Protocol):
    """An HTTP connection that serves one request at a time and is reused afterwards."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self.closed = False
        self.idle_since = 0.0
        self._reset()

    def _reset(self) -> None:
        self._raw = b""  # bytes not yet parsed as HTTP
        self._body = b""  # an incomplete line of the body
        self._text = bytearray()  # a body that is not an event stream
        self._headed = self._chunked = self._events = self._ended = self._closes = False
        self._remaining: int | None = (
            None  # bytes to the end of the body or of its chunk; None: the body ends with the connection
        )

    # --- called by asyncio ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._reply is not None:
            if self._headed and not self._chunked and self._remaining is None and not self._events:
                self._finish()  # the body ends with the connection
            else:
                self._fail(f"connection lost: {exc}" if exc else "the connection closed before the end of the answer")

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None:  # data without a request
            self.close()
            return
        now = self._clock()
        reply.has_output = False
        try:
            self._read(self._raw + data if self._raw else data, reply, now)
        except (ValueError, IndexError, msgspec.DecodeError) as error:
            self._fail(f"the answer cannot be read: {error}")
            return
        if reply.has_output:
            reply.times.append(now)
            reply.tokens.append(reply.output_tokens)
            reply.events.append(reply.event_count)
            reply.characters.append(reply.character_count)
        if self._ended:
            self._finish()

    # --- called by the load generator -------------------------------------------------------------------------------

    def send(self, data: bytes, reply: Reply) -> None:
        """Send a request. `reply.done` is called when the answer has ended or failed."""
        assert self._transport is not None and self._reply is None
        self._reset()
        self._reply = reply
        reply.sent = self._clock()
        self._transport.write(data)

    def abandon(self, error: str) -> None:
        """End the current request with an error. Closing the connection cancels it at the server."""
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
                    raise ValueError("the HTTP headers of the response are not complete")
                self._raw = data
                return
            self._head(data[:end], reply)
            data = data[end + 4 :]
            self._raw = b""
        if self._chunked:
            self._read_chunks(data, reply, now)
        elif self._remaining is None:
            self._take(data, reply, now)
        else:
            self._remaining -= len(data)
            self._take(data, reply, now)
            self._ended = self._remaining <= 0

    def _head(self, head: bytes, reply: Reply) -> None:
        first, *lines = head.split(b"\r\n")
        reply.status = int(first.split(b" ", 2)[1])
        fields = {}
        for line in lines:
            name, _, value = line.partition(b":")
            fields[name.strip().lower()] = value.strip().lower()
        self._headed = True
        self._chunked = fields.get(b"transfer-encoding", b"").endswith(b"chunked")
        self._remaining = (
            0 if self._chunked else int(fields[b"content-length"]) if b"content-length" in fields else None
        )
        self._events = reply.status == 200 and fields.get(b"content-type", b"").startswith(b"text/event-stream")
        self._closes = fields.get(b"connection") == b"close" or first.startswith(b"HTTP/1.0")

    def _read_chunks(self, data: bytes, reply: Reply, now: float) -> None:
        """Read a chunked body (RFC 9112, section 7.1). `_remaining` counts bytes of the chunk, its line end included."""
        offset, size = 0, len(data)
        remaining = self._remaining or 0
        while offset < size:
            if not remaining:
                end = data.find(b"\r\n", offset)
                if end < 0:
                    break
                length = int(data[offset:end].split(b";")[0], 16)
                if not length:  # the last chunk; trailers may follow, and an empty line ends them
                    self._ended = data.startswith(b"\r\n", end + 2) or b"\r\n\r\n" in data[end:]
                    break
                offset, remaining = end + 2, length + 2
            taken = min(remaining, size - offset)
            remaining -= taken
            # The last two bytes of the chunk are its line end, which is not content.
            content = data[offset : max(offset, offset + taken - max(0, 2 - remaining))]
            offset += taken
            if content:
                self._take(content, reply, now)
        self._remaining = remaining
        self._raw = data[offset:] if offset < size and not self._ended else b""

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
                    _take_event(reply, read_event(payload), now)

    def _finish(self) -> None:
        reply = self._reply
        assert reply is not None
        if not self._events and not reply.error:
            reply.text = bytes(self._text)
            reply.error = _error_of_body(reply.status, reply.text)
        if not reply.finish and not reply.error:
            reply.error = "the stream ended before the end of the answer"
        self._done(reply)

    def _fail(self, error: str) -> None:
        reply = self._reply
        assert reply is not None
        reply.error = reply.error or error
        self._closes = True
        self._done(reply)

    def _done(self, reply: Reply) -> None:
        self._reply = None
        reply.ended = self.idle_since = self._clock()
        if self._closes:
            self.close()
        reply.done()


def _take_event(reply: Reply, event: Event, now: float) -> None:
    """Add an event to a reply. It has output if it contains text or a token without text (such as half a character)."""
    if event.error is not None:
        reply.error = error_message(event.error)
        return
    n_characters = 0
    for choice in event.choices:
        visible, hidden = count_characters(choice)
        if (visible or (hidden and reply.shows_reasoning)) and reply.answered != reply.answered:
            reply.answered = now
        n_characters += visible + hidden
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
    # An event with usage only is the final count and has no output.
    if n_characters or (event.choices and reply.output_tokens > before):
        reply.has_output = True
        reply.event_count += 1
        reply.character_count += n_characters


def _error_of_body(status: int, text: bytes) -> str:
    """Return the error message of a body that is not an event stream."""
    try:
        event = read_event(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return f"HTTP {status}: {text[:200].decode(errors='replace')}"
    if event.error is not None:
        return f"HTTP {status}: {error_message(event.error)}"
    return f"HTTP {status} instead of a stream of events"
