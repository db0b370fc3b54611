"""Responses: the object, and the events in which it grows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ridgeline.core.errors import RidgelineError
from ridgeline.service.answer import Streaming
from ridgeline.service.call import Call, Usage
from ridgeline.service.chat import ChatShape, Part
from ridgeline.service.choices import COMMENT, EVENT_STREAM
from ridgeline.service.piece import CONTENT_FILTER, Piece

_encode = msgspec.json.Encoder().encode
_INCOMPLETE = {"length": "max_output_tokens", CONTENT_FILTER: "content_filter"}
"""Why a response is incomplete, by the reason for which its answer ended."""
_ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "store": True,
    "temperature": None,
    "top_p": None,
    "tool_choice": "auto",
    "tools": [],
    "truncation": "disabled",
    "user": None,
}
"""Fields of the request that the response repeats, and what they are if the request has none."""


def response_usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning},
        "total_tokens": usage.prompt + usage.completion,
    }


class Item:
    """An item of the output: a thought, a message or a call. text: of a call, its arguments."""

    def __init__(self, kind: str, item_id: str, place: int, call_id: str = "", name: str = "") -> None:
        self.kind, self.id, self.place = kind, item_id, place
        self.call_id, self.name, self.text = call_id, name, ""

    @property
    def part(self) -> dict[str, Any]:
        """Its only part of content."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def body(self, status: str) -> dict[str, Any]:
        head = {"id": self.id, "type": self.kind, "status": status}
        if self.kind == "function_call":
            return head | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [self.part] if status != "in_progress" else []
        if self.kind == "reasoning":
            return head | {"summary": [], "content": content}
        return head | {"role": "assistant", "content": content}


class ResponseShape:
    """A response. See answer.Shape.

    request: the fields of its body. created: unix seconds. on_end: called with the complete response.
    """

    def __init__(self, call: Call, chat: ChatShape, model: str, request: Mapping[str, Any], created: int) -> None:
        self.usage = chat.usage
        self.chat = chat
        self.id = call.id
        self.items: list[Item] = []
        self.on_end: Callable[[dict[str, Any]], None] = lambda response: None
        self._request, self._model, self._created = request, model, created
        self._finish = ""

    def events(self, streaming: Streaming) -> ResponseEvents:
        return ResponseEvents(self)

    def add(self, piece: Piece) -> None:
        self.grow(piece)

    def grow(self, piece: Piece) -> list[tuple[Item, str]]:
        """The items that a piece begins or continues, each with its new text."""
        if piece.withdrawal is not None:
            self._finish = CONTENT_FILTER
            begun = bool(self.items)
            self.items = []
            return self._text("message", piece.withdrawal.replacement) if not begun else []
        part: Part = self.chat.grow(piece)
        self._finish = part.finish
        grown = []
        if part.reasoning:
            grown += self._text("reasoning", part.reasoning)
        if part.content:
            grown += self._text("message", part.content)
        for call in part.calls:
            if call.id:
                self.items.append(self._item("function_call", call.id, call.name))
            self.items[-1].text += call.arguments
            grown.append((self.items[-1], call.arguments))
        return grown

    def _text(self, kind: str, text: str) -> list[tuple[Item, str]]:
        if not self.items or self.items[-1].kind != kind:
            self.items.append(self._item(kind))
        self.items[-1].text += text
        return [(self.items[-1], text)]

    def _item(self, kind: str, call_id: str = "", name: str = "") -> Item:
        place = len(self.items)
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        return Item(kind, f"{prefix}_{self.id.removeprefix('resp_')}_{place}", place, call_id, name)

    def object(self, status: str) -> dict[str, Any]:
        """The response in a state: queued, in_progress, completed, incomplete or failed."""
        asked, text = self._request, self._request.get("text", {})
        effort = asked.get("reasoning", {}).get("effort")
        ended = status in ("completed", "incomplete")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": _INCOMPLETE[self._finish]} if status == "incomplete" else None,
            "model": self._model,
            "output": [item.body(self.status_of(item)) for item in self.items] if ended else [],
            **{name: asked.get(name, default) for name, default in _ECHOED.items()},
            "text": {"format": text.get("format") or {"type": "text"}},
            "reasoning": {"effort": effort, "summary": None},
            "usage": response_usage(self.usage) if ended else None,
        }

    @property
    def status(self) -> str:
        return "incomplete" if self._finish in _INCOMPLETE else "completed"

    def status_of(self, item: Item) -> str:
        """Only the last item can be incomplete."""
        return self.status if item is self.items[-1] else "completed"

    def whole(self) -> dict[str, Any]:
        response = self.object(self.status)
        self.on_end(response)
        return response


class ResponseEvents:
    """A response as numbered events. See answer.Events."""

    content_type = EVENT_STREAM
    silence = COMMENT

    def __init__(self, shape: ResponseShape) -> None:
        self._shape = shape
        self._number = 0
        self._open: Item | None = None

    def take(self, piece: Piece) -> bytes:
        events = []
        if self._number == 0:
            events += [
                self._event(f"response.{state}", {"response": self._shape.object("in_progress")})
                for state in ("created", "in_progress")
            ]
        for item, text in self._shape.grow(piece):
            if item is not self._open:
                events += self._close() + self._begin(item)
            if text:
                kind, members = self._about(item)
                events.append(self._event(f"response.{kind}.delta", {**members, "delta": text}))
        return b"".join(events)

    def end(self) -> bytes:
        events = self._close()
        response = self._shape.whole()
        return b"".join([*events, self._event(f"response.{response['status']}", {"response": response})])

    def error(self, error: RidgelineError) -> bytes:
        failed = self._shape.object("failed") | {
            "error": {"code": error.code or "server_error", "message": error.message}
        }
        return self._event("response.failed", {"response": failed})

    def _begin(self, item: Item) -> list[bytes]:
        self._open = item
        added = {"output_index": item.place, "item": item.body("in_progress")}
        events = [self._event("response.output_item.added", added)]
        if item.kind == "message":
            part = {**item.part, "text": ""}
            events.append(self._event("response.content_part.added", {**self._place(item), "part": part}))
        return events

    def _close(self) -> list[bytes]:
        """End the open item."""
        item, self._open = self._open, None
        if item is None or item not in self._shape.items:  # withdrawn
            return []
        kind, members = self._about(item)
        name = "arguments" if item.kind == "function_call" else "text"
        full = {**members, name: item.text} | ({"name": item.name} if item.kind == "function_call" else {})
        events = [self._event(f"response.{kind}.done", full)]
        if item.kind == "message":
            events.append(self._event("response.content_part.done", {**self._place(item), "part": item.part}))
        done = {"output_index": item.place, "item": item.body(self._shape.status_of(item))}
        return [*events, self._event("response.output_item.done", done)]

    def _about(self, item: Item) -> tuple[str, dict[str, Any]]:
        """The name of an item's events, and their members."""
        if item.kind == "function_call":
            return "function_call_arguments", {"item_id": item.id, "output_index": item.place}
        if item.kind == "reasoning":
            return "reasoning_text", self._place(item)
        return "output_text", {**self._place(item), "logprobs": []}

    def _place(self, item: Item) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": item.place, "content_index": 0}

    def _event(self, kind: str, members: Mapping[str, Any]) -> bytes:
        body = _encode({"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)
