"""The fields of OpenAI's streaming chunks (completions and chat) that a measurement needs."""

from __future__ import annotations

from typing import Any

import msgspec


class Delta(msgspec.Struct, gc=False):
    """New content of a chat message."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class Choice(msgspec.Struct, gc=False):
    """One choice: `text` of completions, `delta` of streamed chat, `message` of chat without streaming."""

    text: str | None = None
    delta: Delta | None = None
    message: Delta | None = None
    finish_reason: str | None = None


class Details(msgspec.Struct, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Details | None = None


class Event(msgspec.Struct, gc=False):
    """One chunk, or one complete answer."""

    id: str | None = None
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_DECODER = msgspec.json.Decoder(Event)


def read_event(data: bytes) -> Event:
    """Decode one event's JSON. Raises msgspec.DecodeError."""
    return _DECODER.decode(data)


def count_characters(choice: Choice) -> tuple[int, int]:
    """Return (visible characters, hidden characters).

    Hidden is reasoning. Visible are all other text and the names and arguments of tool calls.
    """
    visible = len(choice.text) if choice.text else 0
    hidden = 0
    for delta in (choice.delta, choice.message):
        if delta is not None:
            visible += len(delta.content or "")
            hidden += len(delta.reasoning_content or delta.reasoning or "")
            visible += sum(_arguments(call) for call in delta.tool_calls or ())
    return visible, hidden


def _arguments(call: Any) -> int:
    function = call.get("function") if isinstance(call, dict) else None
    return sum(len(str(function.get(name) or "")) for name in ("name", "arguments")) if function else 0


def error_message(error: Any) -> str:
    """Return the message of an error object, or the object itself as text."""
    message = error.get("message") if isinstance(error, dict) else error
    return str(message or error)[:300]
