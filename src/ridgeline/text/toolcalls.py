"""Parses tool calls from streamed text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ridgeline.text.objects import ObjectReader
from ridgeline.text.reasoning import partial_tag_length
from ridgeline.text.tools import ToolFormat

_ARGUMENTS = ("arguments", "parameters")
"""Models confuse the two names, so both are accepted. Grammars require the one of the format."""


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """Update of call number `index` of an output: first its id and name, then fragments of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A complete call. `arguments` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Splits one output into text and calls of the functions in `names`.

    An object that names no such function is text, tags included. White space around calls is dropped. Arguments are streamed; if
    the output ends inside them they stay incomplete. In a format without tags (Llama 3) an output may only start with calls, and
    text may follow them.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], new_id: Callable[[], str] = new_call_id) -> None:
        self._form = form
        self._names = frozenset(names)
        self._new_id = new_id
        self._state = self._in_text if form.open else self._at_start
        self._pending = ""
        self._trim = False
        self._reader = ObjectReader()
        self._sent = -1
        self._content: list[str] = []
        self._deltas: list[ToolDelta] = []
        self.calls = 0
        """Calls reported so far."""

    def push(self, text: str) -> tuple[str, list[ToolDelta]]:
        """New visible text (it comes before the calls), and updates of calls."""
        self._pending += text
        while self._state():
            pass
        return self._take_updates()

    def finish(self) -> tuple[str, list[ToolDelta]]:
        """The text held back and the last updates, at the end of the output."""
        if self._state == self._in_call and self._sent < 0:
            self._reject()
        self._show(self._pending)
        self._pending = ""
        return self._take_updates()

    def _take_updates(self) -> tuple[str, list[ToolDelta]]:
        updates = "".join(self._content), self._deltas
        self._content, self._deltas = [], []
        return updates

    def _show(self, text: str) -> None:
        text = text.lstrip() if self._trim else text
        if text:
            self._trim = False
            self._content.append(text)

    def _in_text(self) -> bool:
        """Text up to an opening tag. Each state function returns whether the next one can continue at once."""
        tag, pending = self._form.open, self._pending
        end = pending.find(tag)
        text = pending[:end] if end >= 0 else pending[: len(pending) - partial_tag_length(pending, tag)]
        visible = text.rstrip()
        self._show(visible)
        self._pending = pending[end + len(tag) :] if end >= 0 else pending[len(visible) :]
        if end >= 0:
            self._begin_call()
        return end >= 0

    def _at_start(self) -> bool:
        """The start of an output in a format without tags, or the text after a call in one."""
        start = self._pending.lstrip(" \t\r\n;," if self.calls else None)
        marker = self._form.marker
        if marker and start.startswith(marker):
            self._pending = start[len(marker) :]
        elif start.startswith("{"):
            self._pending = start
            self._begin_call()
        elif start and not marker.startswith(start):
            self._state = self._in_final_text
        else:
            return False
        return True

    def _in_final_text(self) -> bool:
        self._show(self._pending)
        self._pending = ""
        return False

    def _begin_call(self) -> None:
        self._reader, self._sent, self._state = ObjectReader(), -1, self._in_call

    def _in_call(self) -> bool:
        self._pending = self._reader.push(self._pending)
        if self._reader.failed or self._misnamed():
            self._reject()
            return True
        self._report()
        if not self._reader.done:
            return False
        if self._sent < 0:
            self._reject()
        else:
            self._trim = True
            self._state = self._after_call if self._form.open else self._at_start
        return True

    def _misnamed(self) -> bool:
        name = self._reader.value("name")
        return name is not None and self._sent < 0 and _text_of(name) not in self._names

    def _reject(self) -> None:
        """The object is not a call: it becomes text."""
        self._show(self._form.open + self._reader.raw)
        self._state = self._in_text if self._form.open else self._in_final_text

    def _report(self) -> None:
        """Report the call's name once its arguments begin, then the new part of the arguments."""
        reader = self._reader
        key = next((key for key in _ARGUMENTS if reader.begun(key)), None)
        name = reader.value("name")
        if name is None or (key is None and not (reader.done and self._form.open)):
            return
        if self._sent < 0:
            self._sent = 0
            self._deltas.append(ToolDelta(self.calls, id=self._new_id(), name=_text_of(name)))
            self.calls += 1
        arguments = "{}" if key is None else _arguments(reader, key, self._sent)
        if arguments:
            self._deltas.append(ToolDelta(self.calls - 1, arguments=arguments))
            self._sent += len(arguments)

    def _after_call(self) -> bool:
        """The closing tag. If the model omits it, text continues."""
        start, tag = self._pending.lstrip(), self._form.close
        if start.startswith(tag):
            self._pending = start[len(tag) :]
        elif tag.startswith(start):
            return False
        self._state = self._in_text
        return True


def parse_tool_calls(form: ToolFormat, names: Collection[str], text: str) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a complete output."""
    parser = ToolCallParser(form, names)
    pushed, last = parser.push(text), parser.finish()
    deltas = [*pushed[1], *last[1]]
    calls = [
        ToolCall(head.id, head.name, "".join(delta.arguments for delta in deltas if delta.index == head.index))
        for head in deltas
        if head.id
    ]
    return pushed[0] + last[0], calls


def _arguments(reader: ObjectReader, key: str, sent: int) -> str:
    """Arguments beyond `sent`. An object is streamed; other values are returned once complete (a string holds the JSON itself)."""
    if reader.opens_object(key):
        return reader.partial(key, sent)
    value = reader.value(key)
    if value is None:
        return ""
    text = _text_of(value) if value.startswith('"') else "{}" if value == "null" else value
    return text[sent:]


def _text_of(raw: str) -> str:
    """The text of a JSON string; "" for anything else."""
    try:
        value = json.loads(raw)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
