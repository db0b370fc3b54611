"""Calls of Python functions with literal arguments, as some models write them: `add(a=1, b="x")`."""

from __future__ import annotations

import json
import re

_STRING = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
_TOKEN = re.compile(rf"(?P<space>\s*)(?:(?P<string>{_STRING})|(?P<word>[A-Za-z_]\w*)|(?P<other>.))", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_OPENERS, _CLOSERS = "([{", ")]}"


class CallScanner:
    """Finds the end of a call in streamed text."""

    def __init__(self) -> None:
        self.raw = ""
        self.done = False
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def push(self, text: str) -> str:
        """Read more text. Returns the text after the call."""
        for position, letter in enumerate(text):
            if self._quote:
                closes = letter == self._quote and not self._escaped
                self._escaped = letter == "\\" and not self._escaped
                self._quote = "" if closes else self._quote
            elif letter in "\"'":
                self._quote = letter
            elif letter in _OPENERS:
                self._depth += 1
            elif letter in _CLOSERS:
                self._depth -= 1
                self.done = self._depth <= 0
            if self.done:
                self.raw += text[: position + 1]
                return text[position + 1 :]
        self.raw += text
        return ""


def read_call(raw: str) -> tuple[str, str] | None:
    """The name and the arguments, as a JSON object, of a call that CallScanner found; None if it is not such a call."""
    name, _, rest = raw.partition("(")
    if not rest.endswith(")"):
        return None
    words: list[str] = []
    depth, at_key = 0, True
    for match in _TOKEN.finditer(rest[:-1].rstrip()):
        words.append(match["space"] + _translate(match, at_key=at_key))
        other = match["other"] or " "
        depth += (other in _OPENERS) - (other in _CLOSERS)
        at_key = other == "," and depth == 0
    text = "{" + "".join(words) + "}"
    try:
        arguments = json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
        arguments.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        arguments = json.dumps(json.loads(text))
    except (ValueError, RecursionError):
        return None
    return name.strip(), arguments


def _translate(match: re.Match[str], *, at_key: bool) -> str:
    """One token of Python as JSON. What has no translation makes the JSON invalid."""
    if match["string"] is not None:
        return json.dumps(_ESCAPE.sub(_unescape, match["string"][1:-1]))
    if match["word"] is not None:
        return json.dumps(match["word"]) if at_key else _WORDS.get(match["word"], match["word"])
    return {"=": ":", "(": "[", ")": "]"}.get(match["other"], match["other"])


def _unescape(match: re.Match[str]) -> str:
    number = match[1] or match[2] or match[3]
    if number is not None:
        code = int(number, 16)
        return chr(code) if code < 0x110000 else match[0]
    return _LETTERS.get(match[4], match[4] if match[4] in "\\'\"" else match[0])
