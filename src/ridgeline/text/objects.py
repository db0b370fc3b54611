"""Reads one JSON object character by character and gives the raw text of its top-level values."""

from __future__ import annotations

import json


class ObjectReader:
    """Receives text with `push` and gives values by key at any time.

    It tracks strings and brackets only, and does not validate the text between them.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.done = False
        self.failed = False
        """The text is not an object; `raw` holds the text read so far."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._key_start = -1
        self._expects_value = False
        self._spans: dict[str, tuple[int, int]] = {}

    def push(self, text: str) -> str:
        """Read more text. Returns the text after the object or, after a failure, the remaining text."""
        base = len(self.raw)
        self.raw += text
        for position in range(base, len(self.raw)):
            if self._in_string:
                self._string(position)
            else:
                self._structure(position)
            if self.done or self.failed:
                remainder = self.raw[position + 1 :]
                self.raw = self.raw[: position + 1]
                return remainder
        return ""

    def begun(self, key: str) -> bool:
        """Whether the first character of the key's value was read."""
        return key in self._spans

    def opens_object(self, key: str) -> bool:
        """Whether the value of a key that has begun is an object."""
        return self.raw[self._spans[key][0]] == "{"

    def partial(self, key: str, skip: int = 0) -> str:
        """The part of a key's value that was read, without its first `skip` characters. The value must have begun."""
        start, end = self._spans[key]
        return self.raw[start + skip : end if end >= 0 else None]

    def value(self, key: str) -> str | None:
        """The key's value once it is complete."""
        complete = self._spans.get(key, (0, -1))[1] >= 0
        return self.partial(key).rstrip() if complete else None

    def _string(self, position: int) -> None:
        letter = self.raw[position]
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        elif letter == '"':
            self._in_string = False
            if self._depth == 1 and self._key is None:
                self._key = self._read_key(position)

    def _structure(self, position: int) -> None:
        letter = self.raw[position]
        if self._depth == 0:
            self.failed = letter != "{" and not letter.isspace()
        if self._expects_value and self._key is not None and not letter.isspace():
            self._expects_value = False
            self._spans[self._key] = (position, -1)
        if letter == '"':
            self._in_string = True
            if self._depth == 1 and self._key is None:
                self._key_start = position
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            self.done = self._depth == 0
            self._end_value(position if self.done else position + 1)
        elif letter == ":" and self._depth == 1:
            self._expects_value = self._key is not None and self._key not in self._spans
        elif letter == "," and self._depth == 1:
            self._end_value(position)
            self._key = None

    def _end_value(self, position: int) -> None:
        """End the current value here, if it is at the top level and has not ended yet."""
        start, end = self._spans.get(self._key or "", (-1, -1))
        if self._depth <= 1 and start >= 0 and end < 0:
            self._spans[self._key or ""] = (start, position)

    def _read_key(self, position: int) -> str:
        try:
            return str(json.loads(self.raw[self._key_start : position + 1]))
        except ValueError:
            return ""
