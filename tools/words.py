"""Retired names: words that said nothing to a reader, or that meant something else than in the field.

    words.py        prints each use in src, tests, benchmarks, tools and training, and the name to write instead;
                    exit status 1 if there is a use

Names are those of the syntax tree: variables, parameters, attributes, functions, classes and modules. Docstrings and comments are
not checked. docs/glossary.md has the project's terms.
"""

from __future__ import annotations

import ast
import gc
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks", "tools", "training")
"""Folders whose Python files are checked."""
RETIRED: Mapping[str, str] = {
    "one": "the noun that it holds: a layer, a row, a request",
    "found": "the noun that it holds: a result, a match, candidates",
    "own": "the noun that it holds, or local_, private_",
    "told": "the noun that it holds: a message, a report",
    "heat": "temperature",
    "glance": "probe",
    "welcome": "grant",
    "forgive": "grant",
    "credit": "budget",
    "wishes": "logits_inputs",
    "residents": "row_table",
    "expel": "drop",
    "rehearse": "warm_up",
    "rehearsal": "warm_up",
    "weigh": "memory_of, or a count of bytes",
    "whoever": "the noun that it holds",
    "somebody": "the noun that it holds",
    "nobody": "NO_TOKEN, EMPTY, None: what is absent",
    "thing": "the noun that it holds",
}
"""Retired names, and what to write instead. Constants in capitals are not names of this list: ONE may be the number."""


def names(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of every name that a module defines or uses, and of keywords of calls."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg or "", node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def retired(text: str) -> list[tuple[str, int]]:
    """Retired names of a module's text, with their lines. Underscores at the ends do not hide a name."""
    return [(name, line) for name, line in names(ast.parse(text)) if name.strip("_") in RETIRED]


def main() -> int:
    uses = 0
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        if path.stem in RETIRED:
            print(f"{path.relative_to(ROOT)}: the module's name is retired: {RETIRED[path.stem]}")
            uses += 1
        for name, line in retired(path.read_text()):
            print(f"{path.relative_to(ROOT)}:{line}: {name!r} is retired: write {RETIRED[name.strip('_')]}")
            uses += 1
    return int(uses > 0)


if __name__ == "__main__":
    gc.disable()  # syntax trees are millions of objects that stay: looking for garbage among them takes most of the time
    sys.exit(main())
