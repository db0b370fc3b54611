"""Retired names are found wherever Python lets a name stand. `make lint` looks for them in the project."""

from __future__ import annotations

import pytest

from tools.words import FOLDERS, RETIRED, ROOT, retired


@pytest.mark.parametrize(
    "text",
    [
        "one = 1",
        "for one in range(3): pass",
        "def found(): pass",
        "def f(told): pass",
        "f(own=1)",
        "x.rehearse()",
        "_found = 1",
        "[one for one in x]",
    ],
)
def test_a_retired_name_is_found(text: str) -> None:
    assert retired(text)


def test_words_in_other_names_in_strings_and_comments_are_not() -> None:
    assert retired("one_layer = 'one'  # one\ndef f():\n    'What is found.'") == []


def test_every_retired_name_has_a_better_one() -> None:
    assert all(RETIRED.values()) and all(name == name.lower() for name in RETIRED)


def test_every_folder_with_python_files_is_checked() -> None:
    with_python = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[a-z]*/**/*.py")}
    assert with_python == set(FOLDERS)
