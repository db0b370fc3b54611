"""One JSON object followed character by character, with the raw text of the values at its top level."""

from __future__ import annotations

import json


class ObjectReader:
    """Give it text with `push`; ask for values by key at any time.

    It follows strings and brackets only and does not judge what stands between them.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.done = False
        self.failed = False
        """The text is no object: `raw` holds what was read of it."""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._key_start = -1
        self._expects_value = False
        self._spans: dict[str, tuple[int, int]] = {}

    def push(self, text: str) -> str:
        """Read on; returns what follows the object (or, after a failure, the rest)."""
        base = len(self.raw)
        self.raw += text
        for position in range(base, len(self.raw)):
            if self._in_string:
                self._string(position)
            else:
                self._structure(position)
            if self.done or self.failed:
                rest = self.raw[position + 1 :]
                self.raw = self.raw[: position + 1]
                return rest
        return ""

    def begun(self, key: str) -> bool:
        """Whether a character of the key's value has come."""
        return key in self._spans

    def opens_object(self, key: str) -> bool:
        """Whether the value of a key that has begun is an object."""
        return self.raw[self._spans[key][0]] == "{"

    def partial(self, key: str, skip: int = 0) -> str:
        """The value of a key that has begun, as far as it has come, less its first `skip` characters."""
        start, end = self._spans[key]
        return self.raw[start + skip : end if end >= 0 else None]

    def value(self, key: str) -> str | None:
        """The key's value once it is whole."""
        whole = self._spans.get(key, (0, -1))[1] >= 0
        return self.partial(key).rstrip() if whole else None

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
        """The current value ends here, if it stands at the top level and has not ended yet."""
        start, end = self._spans.get(self._key or "", (-1, -1))
        if self._depth <= 1 and start >= 0 and end < 0:
            self._spans[self._key or ""] = (start, position)

    def _read_key(self, position: int) -> str:
        try:
            return str(json.loads(self.raw[self._key_start : position + 1]))
        except ValueError:
            return ""
