"""What the answers of OpenAI's two generating routes have in common: choices, usage, and events that have the form of the body."""

from __future__ import annotations

from typing import Any

import msgspec

from ridgeline.core.errors import RidgelineError
from ridgeline.core.events import PinOutcome
from ridgeline.service.answer import Streaming
from ridgeline.service.breakpoints import Breakpoint
from ridgeline.service.call import Usage
from ridgeline.service.errors import error_event
from ridgeline.service.fields import TTLS
from ridgeline.service.piece import Piece

EVENT_STREAM = "text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"


class ChoicesShape:
    """An answer with `choices`. See answer.Shape.

    body_head: the members before choices: id, object, created, model and so on. head: the start of every event, up to its choices:
    `{"id":...,"model":...`.
    """

    usage: Usage
    body_head: dict[str, Any]
    head: bytes

    def choices(self, piece: Piece) -> list[bytes]:
        """JSON of the `choices` entries of a piece, each for an event of its own; empty while its text is held back."""
        raise NotImplementedError

    def empty(self, index: int) -> bytes:
        """An entry without text for tokens of choice `index` that have no text yet."""
        raise NotImplementedError

    def body(self) -> list[dict[str, Any]]:
        """The `choices` of the complete answer."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        return {**self.body_head, "choices": self.body(), "usage": usage_dict(self.usage)}

    def events(self, streaming: Streaming) -> ChunkEvents:
        return ChunkEvents(self, streaming)


class ChunkEvents:
    """Chunks as server-sent events. See answer.Events.

    Tokens may have no text yet: half a character, the start of a stop string, hidden reasoning. With continuous usage they still
    get an event, empty but for the count, so that the client sees every step. Otherwise they get none, because a client would
    mistake an empty event for the first text.
    """

    content_type = EVENT_STREAM
    silence = COMMENT

    def __init__(self, shape: ChoicesShape, streaming: Streaming) -> None:
        self._shape, self._streaming = shape, streaming
        self._head = b"data: " + shape.head + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if streaming.include_usage else b"]}\n\n"

    def take(self, piece: Piece) -> bytes:
        choices, tail = self._shape.choices(piece), self._tail
        if self._streaming.continuous_usage:
            if piece.count and not choices:
                choices = [self._shape.empty(piece.index)]
            tail = b'],"usage":' + self._usage() + b"}\n\n"
        return b"".join([self._head + choice + tail for choice in choices])

    def end(self) -> bytes:
        done = b"data: [DONE]\n\n"
        if not self._streaming.include_usage:
            return done
        return self._head + b'],"usage":' + self._usage() + b"}\n\n" + done

    def error(self, error: RidgelineError) -> bytes:
        return error_event(error)

    def _usage(self) -> bytes:
        return msgspec.json.encode(usage_dict(self._shape.usage))


def usage_dict(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object. Always includes cached_tokens and cache_write_tokens, in whole blocks of the prefix cache. With
    breakpoints, prompt_cache says what became of each; with --token-prices, billed is the price. answer_cached: the
    answer comes from the answer cache, and no token was computed."""
    details: dict[str, Any] = {
        "cached_tokens": usage.cached,
        "cache_write_tokens": sum(usage.written.values()),
    }
    content = {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }
    if usage.pins:
        details["cache_write_details"] = {f"ephemeral_{ttl}_tokens": usage.written.get(ttl, 0) for ttl in TTLS}
        content["prompt_cache"] = [_pin(point, outcome) for point, outcome in usage.pins]
    if usage.repeated:
        content["answer_cached"] = True
    if usage.prices is not None:
        content["billed"] = usage.prices.bill(usage.billable, usage.price_factor)
    return content


def _pin(point: Breakpoint, outcome: PinOutcome) -> dict[str, Any]:
    return {
        "tokens": outcome.tokens,
        "ttl": point.ttl,
        "state": outcome.state,
        "reason": outcome.reason or None,
        "lost": outcome.lost or None,
    }
