"""Splits outputs in OpenAI's harmony format (gpt-oss): messages, each with a header that names its channel and recipient.

Source: https://github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re

from ridgeline.text.reasoning import ReasoningSplitter, Splitter, Tags, partial_tag_length

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>", _START, _CHANNEL)
"""Tags that end a message; the last two where a model forgets the end."""
_END = re.compile("|".join(map(re.escape, _ENDS)))
_CALL = "<|call|>"
_MAX_HEADER = 256
_BEGINNINGS = (_START, _CHANNEL, _MESSAGE, "to=", "assistant")
_NAMED_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_EMPTY_HEADER = re.compile(r"(<\|start\|>\s*(assistant)?\s*)?")


class HarmonySplitter:
    """Splits one output into visible and hidden text.

    The channel `analysis` is hidden, text of other channels is visible. A message to a recipient is visible as text.tool_formats
    HARMONY has it, for the parser of tool calls. Text without a header, and headers that are not valid, are visible as they are.
    Messages of one kind are separated by a line break.
    """

    def __init__(self, *, channel: str = "") -> None:
        """channel: of the message that the prompt leaves open, "" if there is none."""
        self._pending = ""
        self._in_body = channel != ""
        self._hidden = channel == "analysis"
        self._is_call = False
        self._separator = {True: "", False: ""}
        """Text between the last message and the next one, for hidden and for visible messages."""
        self._said: set[bool] = set()
        self._output: dict[bool, list[str]] = {True: [], False: []}

    def push(self, text: str) -> tuple[str, str]:
        """New (visible, hidden) text."""
        self._pending += text
        while self._body() if self._in_body else self._header():
            pass
        return self._take()

    def finish(self) -> tuple[str, str]:
        """The text held back, as (visible, hidden), at the end of the output."""
        if self._in_body:
            self._emit(self._pending)
        elif not _EMPTY_HEADER.fullmatch(self._pending):
            self._open("", "")
            self._emit(self._pending)
        self._pending = ""
        return self._take()

    def _take(self) -> tuple[str, str]:
        visible, hidden = "".join(self._output[False]), "".join(self._output[True])
        self._output = {True: [], False: []}
        return visible, hidden

    def _emit(self, text: str) -> None:
        if text:
            self._output[self._hidden].append(self._separator[self._hidden] + text)
            self._separator[self._hidden] = ""
            self._said.add(self._hidden)

    def _open(self, channel: str, recipient: str) -> None:
        self._in_body, self._is_call = True, recipient != ""
        self._hidden = channel == "analysis" and not recipient
        if recipient:
            self._emit(f"{_CHANNEL}commentary to={recipient}{_MESSAGE}")

    def _header(self) -> bool:
        """A header up to <|message|>. Returns whether the body can be read at once."""
        end = self._pending.find(_MESSAGE, 0, _MAX_HEADER + len(_MESSAGE))
        header = self._pending if end < 0 else self._pending[:end]
        if end >= 0 and _starts_header(header):
            channel, recipient = _NAMED_CHANNEL.search(header), _RECIPIENT.search(header)
            self._open("final" if channel is None else channel[1], "" if recipient is None else recipient[1])
            self._pending = self._pending[end + len(_MESSAGE) :]
            return True
        if end < 0 and len(header) < _MAX_HEADER + len(_MESSAGE) and _may_start_header(header):
            return False
        self._open("", "")
        self._emit(self._pending[:1])  # which may be the start of a tag that would end the body at once
        self._pending = self._pending[1:]
        return True

    def _body(self) -> bool:
        """Text up to a tag that ends the message. Returns whether the next header can be read at once."""
        end = _END.search(self._pending)
        if end is None:
            keep = len(self._pending) - max(partial_tag_length(self._pending, tag) for tag in _ENDS)
            self._emit(self._pending[:keep])
            self._pending = self._pending[keep:]
            return False
        self._emit(self._pending[: end.start()])
        if self._is_call:
            self._emit(_CALL)
        used = end.start() if end[0] in (_START, _CHANNEL) else end.end()
        self._pending, self._in_body = self._pending[used:], False
        self._separator[self._hidden] = "\n" if self._hidden in self._said and not self._is_call else ""
        return True


def make_splitter(tags: Tags | None, *, inside: bool, channel: str = "") -> Splitter:
    """The splitter for an output. inside: the prompt ends inside of reasoning. channel: of a message that it leaves open."""
    if tags is not None and tags.channels:
        return HarmonySplitter(channel=channel)
    return ReasoningSplitter(tags, inside=inside)


def open_channel(prompt: str) -> str:
    """The channel of the message that a prompt leaves open; "" if it does not."""
    body = prompt.rfind(_MESSAGE)
    if body < 0 or any(end in prompt[body:] for end in _ENDS):
        return ""
    channels = _NAMED_CHANNEL.findall(prompt[:body].rpartition(_START)[2])
    return channels[-1] if channels else "final"


def _starts_header(header: str) -> bool:
    return header.strip() == "" or header.lstrip().startswith(_BEGINNINGS)


def _may_start_header(header: str) -> bool:
    start = header.lstrip()
    return start.startswith(_BEGINNINGS) or any(tag.startswith(start) for tag in _BEGINNINGS)
