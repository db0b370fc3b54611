"""The part of Go templates that the Helm chart uses, so that its output can be checked without Helm. It refuses everything else.

Known: fields of `.` and `$`, variables of range, strings and numbers, pipelines, if, else, range, end, and the functions below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml

_ACTION = re.compile(r"(\s*)\{\{(-?)\s*(.*?)\s*\}\}", re.S)
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s()]+|[()]')


def to_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=None if not value else False).rstrip("\n")


FUNCTIONS = {
    "quote": lambda value: json.dumps(str(value)),
    "int": int,
    "add": lambda left, right: int(left) + int(right),
    "div": lambda left, right: int(left) // int(right),
    "until": lambda count: list(range(count)),
    "toYaml": to_yaml,
    "nindent": lambda width, text: "\n" + "\n".join(" " * width + line for line in text.splitlines()),
}


class Action(NamedTuple):
    text: str


def render(source: str, values: Mapping[str, Any], release: str) -> str:
    """The output of a template."""
    root = {"Values": values, "Release": {"Name": release}}
    text, rest = _block(_parse(source), {".": root, "$": root}, 0)
    assert rest == -1, "an end has no beginning"
    return text


def _parse(source: str) -> list[str | Action]:
    parts: list[str | Action] = []
    at = 0
    for match in _ACTION.finditer(source):
        parts += [source[at : match.start()] + ("" if match[2] else match[1]), Action(match[3])]
        at = match.end()
    return [*parts, source[at:]]


def _block(parts: Sequence[str | Action], scope: Mapping[str, Any], at: int, wanted: bool = True) -> tuple[str, int]:
    """The output from a place up to the next end or else of its level, and that place; -1 at the end of the template."""
    output = ""
    while at < len(parts):
        part = parts[at]
        at += 1
        if isinstance(part, str):
            output += part
            continue
        keyword, _, rest = part.text.partition(" ")
        if keyword in ("end", "else"):
            return output, at - 1
        if keyword == "if":
            is_true = bool(wanted and _pipeline(rest, scope))
            first, at = _block(parts, scope, at, is_true)
            second = ""
            if parts[at] == Action("else"):
                second, at = _block(parts, scope, at + 1, wanted and not is_true)
            output += first if is_true else second if wanted else ""
            at += 1
        elif keyword == "range":
            name, _, expression = rest.rpartition(":=")
            items = _pipeline(expression.strip(), scope) if wanted else []
            for item in items:
                output += _block(parts, {**scope, ".": item, name.strip() or ".": item}, at)[0]
            at = _block(parts, scope, at, False)[1] + 1
        elif wanted:
            output += str(_pipeline(part.text, scope))
    return output, -1


def _pipeline(text: str, scope: Mapping[str, Any]) -> Any:
    result: tuple[Any, ...] = ()
    for command in text.split("|"):
        result = (_call(_WORD.findall(command), scope, result),)
    return result[0]


def _call(words: list[str], scope: Mapping[str, Any], piped: tuple[Any, ...]) -> Any:
    if words[0] not in FUNCTIONS:
        assert len(words) == 1 and not piped, words
        return _operand(words[0], scope)
    arguments, rest = [], words[1:]
    while rest:
        if rest[0] == "(":
            close = rest.index(")")
            arguments.append(_call(rest[1:close], scope, ()))
            rest = rest[close + 1 :]
        else:
            arguments.append(_operand(rest[0], scope))
            rest = rest[1:]
    return FUNCTIONS[words[0]](*arguments, *piped)


def _operand(word: str, scope: Mapping[str, Any]) -> Any:
    if word.startswith('"') or word.isdigit():
        return json.loads(word)
    if word in scope:
        return scope[word]
    start, *names = word.split(".")
    value = scope[start or "."]
    for name in names:
        value = value[name]  # a value that values.yaml does not have is a mistake
    return value
