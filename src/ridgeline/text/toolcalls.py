"""Tool calls read out of streamed text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from ridgeline.text.objects import ObjectReader
from ridgeline.text.reasoning import held_prefix
from ridgeline.text.tools import ToolFormat

_ARGUMENTS = ("arguments", "parameters")
"""Models mix the two names up; which one a format teaches matters only for grammars."""


@dataclass(frozen=True, slots=True)
class ToolDelta:
    """News of call number `index` of an output: first its id and name, then fragments of its arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call; `arguments` is the JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """Splits one output into text and calls of the functions in `names`.

    An object that names no such function is text, tags and all. White space around calls is dropped. Arguments stream
    as they come; if the output ends inside them they stay incomplete. Without tags (Llama 3) calls can only begin the
    output, and what follows them is text.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], new_id: Callable[[], str] = new_call_id) -> None:
        self._form = form
        self._names = frozenset(names)
        self._new_id = new_id
        self._step = self._in_text if form.open else self._at_start
        self._pending = ""
        self._trim = False
        self._reader = ObjectReader()
        self._sent = -1
        self._content: list[str] = []
        self._deltas: list[ToolDelta] = []
        self.calls = 0
        """Calls reported so far."""

    def push(self, text: str) -> tuple[str, list[ToolDelta]]:
        """New text to show (it comes before the calls), and news of calls."""
        self._pending += text
        while self._step():
            pass
        return self._news()

    def finish(self) -> tuple[str, list[ToolDelta]]:
        """What was held back; the output is over."""
        if self._step == self._in_call and self._sent < 0:
            self._reject()
        self._show(self._pending)
        self._pending = ""
        return self._news()

    def _news(self) -> tuple[str, list[ToolDelta]]:
        news = "".join(self._content), self._deltas
        self._content, self._deltas = [], []
        return news

    def _show(self, text: str) -> None:
        text = text.lstrip() if self._trim else text
        if text:
            self._trim = False
            self._content.append(text)

    def _in_text(self) -> bool:
        """Text up to an opening tag. Each step returns whether another one can go on from there."""
        tag, pending = self._form.open, self._pending
        end = pending.find(tag)
        text = pending[:end] if end >= 0 else pending[: len(pending) - held_prefix(pending, tag)]
        shown = text.rstrip()
        self._show(shown)
        self._pending = pending[end + len(tag) :] if end >= 0 else pending[len(shown) :]
        if end >= 0:
            self._begin_call()
        return end >= 0

    def _at_start(self) -> bool:
        """The start of an output without tags, or what follows a call in one."""
        seen = self._pending.lstrip(" \t\r\n;," if self.calls else None)
        marker = self._form.marker
        if marker and seen.startswith(marker):
            self._pending = seen[len(marker) :]
        elif seen.startswith("{"):
            self._pending = seen
            self._begin_call()
        elif seen and not marker.startswith(seen):
            self._step = self._plain
        else:
            return False
        return True

    def _plain(self) -> bool:
        self._show(self._pending)
        self._pending = ""
        return False

    def _begin_call(self) -> None:
        self._reader, self._sent, self._step = ObjectReader(), -1, self._in_call

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
            self._step = self._behind_call if self._form.open else self._at_start
        return True

    def _misnamed(self) -> bool:
        name = self._reader.value("name")
        return name is not None and self._sent < 0 and _text_of(name) not in self._names

    def _reject(self) -> None:
        """The object is no call after all: it becomes text."""
        self._show(self._form.open + self._reader.raw)
        self._step = self._in_text if self._form.open else self._plain

    def _report(self) -> None:
        """Tell the call's name once its arguments begin, then the new part of the arguments."""
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

    def _behind_call(self) -> bool:
        """The closing tag; a model that forgets it goes on in text."""
        seen, tag = self._pending.lstrip(), self._form.close
        if seen.startswith(tag):
            self._pending = seen[len(tag) :]
        elif tag.startswith(seen):
            return False
        self._step = self._in_text
        return True


def parse_tool_calls(form: ToolFormat, names: Collection[str], text: str) -> tuple[str, list[ToolCall]]:
    """A whole output: its text and its calls."""
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
    """Arguments beyond `sent`: an object as it comes; anything else once it is whole (a text holds the JSON itself)."""
    if reader.opens_object(key):
        return reader.partial(key, sent)
    whole = reader.value(key)
    if whole is None:
        return ""
    text = _text_of(whole) if whole.startswith('"') else "{}" if whole == "null" else whole
    return text[sent:]


def _text_of(raw: str) -> str:
    """The text of a JSON string, "" for anything else."""
    try:
        value = json.loads(raw)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""
