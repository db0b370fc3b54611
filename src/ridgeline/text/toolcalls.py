"""Parses tool calls from streamed text."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ridgeline.text.objects import ObjectReader
from ridgeline.text.python_calls import CallScanner, read_call
from ridgeline.text.reasoning import partial_tag_length
from ridgeline.text.tool_formats import ToolFormat

_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
"""Models confuse these names, so all are accepted. Grammars require those of the format."""
_CALL_ID = "[CALL_ID]"
_MAX_HEADER = 256
"""Maximum characters that are held back until a name is known not to be that of a function."""


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

    Anything that is not a call of such a function is text, tags included. White space around calls is dropped. Arguments are
    streamed, those of Python calls whole; if the output ends inside them they stay incomplete. In a format without tags (Llama 3)
    an output may only start with calls, and text may follow them.
    """

    def __init__(self, form: ToolFormat, names: Collection[str], new_id: Callable[[], str] = new_call_id) -> None:
        self._form = form
        self._names = frozenset(names)
        self._new_id = new_id
        self._state = self._in_text if form.first else self._at_start
        self._pending = ""
        self._raw = ""
        """Text consumed since the last call or visible text, which is shown if no call follows."""
        self._in_list = False
        self._trim = False
        self._name = ""
        self._reader = ObjectReader()
        self._scanner = CallScanner()
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
        unread = self._reader.raw + self._scanner.raw if self._sent < 0 else ""
        self._show(self._raw + unread + self._pending)
        self._raw = self._pending = ""
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

    def _take(self, *tags: str) -> str | None:
        """Consume the first of these tags that follows white space. "": none of them follows. None: it is not known yet."""
        start = self._pending.lstrip()
        for tag in filter(None, tags):
            if start.startswith(tag):
                size = len(self._pending) - len(start) + len(tag)
                self._raw += self._pending[:size]
                self._pending = self._pending[size:]
                return tag
        return None if any(tag.startswith(start) for tag in filter(None, tags)) else ""

    def _in_text(self) -> bool:
        """Text up to an opening tag. Each state function returns whether the next one can continue at once."""
        tag, pending = self._form.first, self._pending
        end = pending.find(tag)
        text = pending[:end] if end >= 0 else pending[: len(pending) - partial_tag_length(pending, tag)]
        visible = text.rstrip()
        self._show(visible)
        if end < 0:
            self._pending = pending[len(visible) :]
            return False
        self._pending, self._raw = pending[end + len(tag) :], text[len(visible) :] + tag
        if self._form.is_list:
            self._state = self._before_list
        elif self._form.begin:
            self._sent, self._state = -1, self._after_element
        else:
            self._begin_call()
        return True

    def _at_start(self) -> bool:
        """The start of an output in a format without tags, or the text after a call in one."""
        start = self._pending.lstrip(" \t\r\n;," if self.calls else None)
        form, begins = self._form, "[" if self._form.is_list else "{"
        if not start:
            return False
        if form.marker and start.startswith(form.marker):
            self._raw += self._pending[: len(self._pending) - len(start)] + form.marker
            self._pending = start[len(form.marker) :]
        elif form.marker.startswith(start):
            return False
        elif form.body == "named" or start.startswith(begins):
            self._raw += self._pending[: len(self._pending) - len(start)]
            self._pending = start
            if form.is_list:
                self._state = self._before_list
            else:
                self._begin_call()
        else:
            self._pending = self._raw + self._pending
            self._raw, self._state = "", self._in_final_text
        return True

    def _in_final_text(self) -> bool:
        self._show(self._pending)
        self._pending = ""
        return False

    def _before_list(self) -> bool:
        bracket = self._take("[")
        if bracket == "":
            self._reject()
        elif bracket:
            self._in_list = True
            self._begin_call()
        return bracket is not None

    def _begin_call(self) -> None:
        self._reader, self._scanner, self._sent = ObjectReader(), CallScanner(), -1
        states = {"object": self._in_object, "named": self._in_name, "python": self._in_python}
        self._state = states[self._form.body]

    def _in_name(self) -> bool:
        """The name of a call whose arguments follow the name."""
        lead, separator = self._form.lead, self._form.separator
        start = self._pending.lstrip()
        end = start.find(separator)
        header = start[: end if end >= 0 else len(start) - partial_tag_length(start, separator)]
        if end >= 0 and (named := self._named(header.removeprefix(lead))):
            size = len(self._pending) - len(start) + end + len(separator)
            self._raw += self._pending[:size]
            self._pending, self._name, self._state = self._pending[size:], named, self._in_object
            return True
        heads = (head + name for name in self._names for head in (lead, ""))
        if end < 0 and len(header) <= _MAX_HEADER and any(_may_become(header, head) for head in heads):
            return False
        self._reject()
        return True

    def _named(self, header: str) -> str:
        """The function that a header names, "" if there is none. Some models write an id behind the name."""
        name = header.partition(_CALL_ID)[0].strip()
        return name if name in self._names else ""

    def _in_object(self) -> bool:
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
            self._end_call()
        return True

    def _in_python(self) -> bool:
        self._pending = self._scanner.push(self._pending)
        name, opened, _ = self._scanner.raw.lstrip().partition("(")
        name = name.rstrip()
        known = name in self._names if opened else any(known.startswith(name) for known in self._names)
        call = read_call(self._scanner.raw) if known and self._scanner.done else None
        if not known or (self._scanner.done and call is None):
            self._reject()
            return True
        if call is None:
            return False
        self._open_call(call[0])
        self._deltas.append(ToolDelta(self.calls - 1, arguments=call[1]))
        self._end_call()
        return True

    def _open_call(self, name: str) -> None:
        self._sent, self._raw = 0, ""
        self._deltas.append(ToolDelta(self.calls, id=self._new_id(), name=name))
        self.calls += 1

    def _end_call(self) -> None:
        self._reader, self._scanner, self._trim = ObjectReader(), CallScanner(), True
        if self._form.close:
            self._state = self._after_call
        elif self._in_list:
            self._state = self._after_element
        else:
            self._state = self._in_text if self._form.first else self._at_start

    def _misnamed(self) -> bool:
        if self._form.body == "named" or self._sent >= 0:
            return False
        name = self._first_value(_NAMES)
        return name is not None and _text_of(name) not in self._names

    def _first_value(self, keys: Sequence[str]) -> str | None:
        return next((value for key in keys if (value := self._reader.value(key)) is not None), None)

    def _reject(self) -> None:
        """What was read since the last call is not a call: it becomes text."""
        self._show(self._raw + self._reader.raw + self._scanner.raw)
        self._reader, self._scanner = ObjectReader(), CallScanner()
        self._raw, self._in_list = "", False
        self._state = self._in_text if self._form.first else self._in_final_text

    def _report(self) -> None:
        """Report the call's name once its arguments begin, then the new part of the arguments."""
        if self._form.body == "named":
            self._report_named()
            return
        reader = self._reader
        key = next((key for key in _ARGUMENTS if reader.begun(key)), None)
        name = self._first_value(_NAMES)
        if name is None or (key is None and not (reader.done and self._form.first)):
            return
        if self._sent < 0:
            self._open_call(_text_of(name))
        self._add_arguments("{}" if key is None else _arguments(reader, key, self._sent))

    def _report_named(self) -> None:
        text = self._reader.raw.lstrip()
        if text and self._sent < 0:
            self._open_call(self._name)
        self._add_arguments(text[max(self._sent, 0) :])

    def _add_arguments(self, arguments: str) -> None:
        if arguments:
            self._deltas.append(ToolDelta(self.calls - 1, arguments=arguments))
            self._sent += len(arguments)

    def _after_call(self) -> bool:
        """The closing tag. If the model omits it, text continues, or the next call."""
        close = self._form.close
        if self._take(close, close.removeprefix("```")) is None:
            return False
        self._raw = ""
        self._state = self._after_element if self._form.begin else self._in_text
        return True

    def _after_element(self) -> bool:
        """Between calls, at the first call of a format with two tags, or at the end of all calls."""
        before = self._raw
        taken = self._take("]", ",") if self._form.is_list else self._take(self._form.end, self._form.open)
        if taken is None:
            return False
        if taken in (",", self._form.open) and taken:
            self._begin_call()
        elif taken and not before:
            self._in_list, self._raw, self._state = False, "", self._after_list
        else:
            self._reject()
        return True

    def _after_list(self) -> bool:
        """The tag that ends all calls, which models may omit."""
        if self._take(self._form.end if self._form.is_list else "", self._form.end_marker) is None:
            return False
        self._raw, self._state = "", self._in_text if self._form.first else self._in_final_text
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
    except (ValueError, RecursionError):
        return ""
    return value if isinstance(value, str) else ""


def _may_become(header: str, head: str) -> bool:
    """Whether more text can make this header name the function of `head`, perhaps with an id behind it."""
    rest = header[len(head) :].strip()
    return head.startswith(header) or (
        header.startswith(head) and (rest.startswith(_CALL_ID) or _CALL_ID.startswith(rest))
    )
