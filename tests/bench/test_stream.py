"""Reading answers from bytes, however they are cut."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from ridgeline.bench.load import divide
from ridgeline.bench.options import TargetConfig, dialect
from ridgeline.bench.stream import Connection, Reply

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"


class Wire:
    """A transport that only remembers."""

    def __init__(self) -> None:
        self.sent = b""
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.sent += data

    def abort(self) -> None:
        self.aborted = True


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str, tokens: int | None = None, finish: str = "null") -> bytes:
    usage = f',"usage":{{"prompt_tokens":9,"completion_tokens":{tokens}}}' if tokens is not None else ""
    return f'data: {{"choices":[{{"text":"{text}","finish_reason":{finish}}}]{usage}}}\n\n'.encode()


class Asked:
    """A connection with one request under way, and a clock that counts its looks."""

    def __init__(self, *, shows_reasoning: bool = False) -> None:
        self.time = 0.0
        self.ended = 0
        self.wire = Wire()
        self.connection = Connection(lambda: self.time)
        self.connection.connection_made(cast(asyncio.Transport, self.wire))
        self.reply = Reply(self._end, shows_reasoning=shows_reasoning)
        self.connection.send(b"POST", self.reply)

    def _end(self) -> None:
        self.ended += 1

    def read(self, *parts: bytes) -> Reply:
        for part in parts:
            self.time += 1.0
            self.connection.data_received(part)
        return self.reply


USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":3}}}'
    b"\n\n"
)
WHOLE = (
    HEAD
    + chunk(event("", 0))
    + chunk(event("one", 1))
    + chunk(b": keep-alive\n\n")
    + chunk(event(" two", 2) + event(" three", 4, '"stop"'))
    + chunk(USAGE)
    + chunk(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
def test_any_cut_gives_the_same_answer(size: int) -> None:
    asked = Asked()
    reply = asked.read(*(WHOLE[at : at + size] for at in range(0, len(WHOLE), size)))
    assert asked.ended == 1
    assert (reply.error, reply.finish, reply.status) == ("", "stop", 200)
    assert (reply.character_count, reply.event_count, reply.output_tokens) == (13, 3, 4)
    assert (reply.prompt_tokens, reply.cached_tokens) == (9, 3)
    assert reply.tokens[-1] == 4 and list(reply.times) == sorted(set(reply.times))
    assert not asked.connection.closed  # another request may follow


def test_what_one_read_holds_is_one_arrival() -> None:
    asked = Asked()
    reply = asked.read(HEAD + chunk(event("", 0)), chunk(event("a", 1)), chunk(event("b", 2)) + chunk(event("c", 3)))
    assert list(reply.times) == [2.0, 3.0]
    assert list(reply.tokens) == [1, 3]
    assert divide(reply) == ((1, 2), "server")


def test_tokens_without_counts_are_one_per_event_or_shared_by_length() -> None:
    asked = Asked()
    reply = asked.read(HEAD + chunk(event("ab")), chunk(event("cd") + event("ef")), chunk(event("gh")))
    assert divide(reply) == ((1, 2, 1), "one")
    reply.output_tokens = 5  # an end token has no event
    assert divide(reply) == ((1, 2, 1), "one")
    reply.output_tokens = 8
    assert divide(reply) == ((2, 4, 2), "characters")


def test_thoughts_are_tokens_but_no_answer() -> None:
    asked = Asked()
    think = b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'
    says = b'data: {"choices":[{"delta":{"content":"yes"}}]}\n\n'
    role = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    reply = asked.read(HEAD + chunk(role), chunk(think), chunk(says))
    assert list(reply.times) == [2.0, 3.0]
    assert (reply.answered, reply.hidden, reply.character_count) == (3.0, 2, 5)


def test_a_tool_call_is_published_with_its_first_delta() -> None:
    asked = Asked()
    think = b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'
    call = b'data: {"choices":[{"delta":{"tool_calls":[{"function":{"name":"add","arguments":"{1}"}}]}}]}\n\n'
    reply = asked.read(HEAD + chunk(think), chunk(call), chunk(call))
    assert (reply.answered, reply.hidden, reply.character_count) == (2.0, 2, 14)
    assert list(reply.times) == [1.0, 2.0, 3.0]


def test_reasoning_is_published_if_the_user_sees_it() -> None:
    think = b'data: {"choices":[{"delta":{"reasoning_content":"hm"}}]}\n\n'
    says = b'data: {"choices":[{"delta":{"content":"yes"}}]}\n\n'
    hidden, shown = Asked(), Asked(shows_reasoning=True)
    assert hidden.read(HEAD + chunk(think), chunk(says)).answered == 2.0
    assert shown.read(HEAD + chunk(think), chunk(says)).answered == 1.0
    asked = TargetConfig(extra_body='{"include_reasoning": true}')
    assert dialect(asked)[0].shows_reasoning and not dialect(TargetConfig())[0].shows_reasoning


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([HEAD + chunk(event("a")), b"0\r\n\r\n"], "the stream ended before the end of the answer"),
        ([HEAD + chunk(b'data: {"error":{"message":"no memory"}}\n\n'), b"0\r\n\r\n"], "no memory"),
        ([b'HTTP/1.1 429 -\r\ncontent-length: 28\r\n\r\n{"error":{"message":"later"}}'[:-1]], "HTTP 429: "),
        ([b"HTTP/1.1 502 -\r\ncontent-length: 4\r\n\r\n", b"oops"], "HTTP 502: oops"),
        ([b"HTTP/1.1 200 -\r\ncontent-length: 2\r\n\r\n{}"], "HTTP 200 instead of a stream"),
        ([HEAD + chunk(b"data: {nonsense\n\n")], "the answer cannot be read"),
        ([b"nonsense\r\n\r\n"], "the answer cannot be read"),
    ],
)
def test_errors_are_results(parts: list[bytes], words: str) -> None:
    asked = Asked()
    reply = asked.read(*parts)
    assert asked.ended == 1
    assert reply.error.startswith(words)


def test_a_connection_that_breaks_off_ends_its_request() -> None:
    asked = Asked()
    asked.read(HEAD + chunk(event("a")))
    asked.connection.connection_lost(None)
    assert (asked.ended, asked.connection.closed) == (1, True)
    assert "before the end of the answer" in asked.reply.error
    plain = Asked()
    plain.read(b"HTTP/1.0 500 -\r\n\r\nno length")
    plain.connection.connection_lost(None)
    assert plain.reply.error == "HTTP 500: no length"


def test_close_and_abandon_close() -> None:
    asked = Asked()
    body: Any = b"HTTP/1.1 404 -\r\nConnection: close\r\ncontent-length: 0\r\n\r\n"
    asked.read(body)
    assert asked.wire.aborted
    other = Asked()
    other.connection.abandon("no end within 1 s")
    assert (other.reply.error, other.wire.aborted, other.ended) == ("no end within 1 s", True, 1)
