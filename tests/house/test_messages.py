"""Messages for users avoid phrases that this project has retired."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import ridgeline

SOURCES = Path(ridgeline.__file__).parent
RETIRED = {
    r"(?<!here )\bis no\b": "write `is not a ...`",
    r"\bis none\.": "write what the value is",
    r"\bholds no\b": "write `has no ...`",
    r"\bwhat there is\b": "write `lists the options`",
    r"\bcannot be asked\b": "write `Cannot reach ...`",
    r"\bcannot be had\b": "write `is not supported`",
    r"\bnobody\b|\bwhoever\b": "name the program or the person",
    r"\btold\b": "write `given`, `reported` or `distinguished`",
}
"""Pattern -> what to write instead. Keep the list short: only phrases that readers did not understand."""
CALLS = {"print", "debug", "info", "warning", "error", "exception", "critical", "option", "add_argument"}
ERRORS = ("Error", "Failed", "DoesNotFit", "UnsupportedModel")


def messages(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of the literals in raised errors, log lines, prints and help texts; `{}` stands for a value."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _speaks(node.func):
            yield from _texts(node)


def _speaks(function: ast.expr) -> bool:
    name = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
    return name in CALLS or name.endswith(ERRORS)


def _texts(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        yield node.lineno, "".join(map(str, parts))
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.lineno, node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _texts(child)


def retired(source: str) -> list[str]:
    return [
        f"{line}: {text!r}: {remedy}"
        for line, text in messages(source)
        for pattern, remedy in RETIRED.items()
        if re.search(pattern, text, re.IGNORECASE)
    ]


def test_retired_phrases_are_seen_in_messages_only() -> None:
    assert retired('raise ConfigError(f"{path} is no text.")') == ["1: '{} is no text.': write `is not a ...`"]
    assert len(retired('log.warning("nobody reads this")\noption(3, "what there is")')) == 2
    assert retired('x = "whoever"\n"""Nobody."""\nprint("There is no page.")') == []


def test_no_message_has_a_retired_phrase() -> None:
    odd = [
        f"{path.relative_to(SOURCES)}:{words}" for path in SOURCES.rglob("*.py") for words in retired(path.read_text())
    ]
    assert not odd, "these messages are hard to understand:\n" + "\n".join(sorted(odd))
