"""Every token is scored once, and bad files are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ridgeline.core.errors import ConfigError
from ridgeline.quality.texts import read_texts, windows


@given(some.lists(some.integers(0, 40), max_size=5), some.integers(4, 12), some.integers(0, 2))
def test_every_token_but_a_texts_first_is_scored_once(lengths: list[int], longest: int, overlap: int) -> None:
    texts = [" ".join(str(place * 100 + number) for number in range(length)) for place, length in enumerate(lengths)]
    cut = windows(texts, lambda text: [int(word) for word in text.split()], longest, overlap)
    scored = [(window.document, token) for window in cut for token in window.ids[window.first :]]
    wanted = [(place, place * 100 + number) for place, length in enumerate(lengths) for number in range(1, length)]
    assert scored == wanted
    assert all(window.first >= 1 and len(window.ids) <= longest for window in cut)
    # A window that goes on repeats what stands before its first scored token.
    assert all(window.first >= max(1, overlap) or window.first == 1 for window in cut)


def test_an_overlap_as_long_as_the_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="--overlap is 7"):
        windows(["a"], lambda text: [1], 8, 7)


def test_texts_are_whole_files_or_lines(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text("one\ntwo\n")
    lines.write_text(json.dumps({"text": "one"}) + "\n\n" + json.dumps({"text": "two", "kind": "x"}) + "\n")
    assert read_texts(plain) == ["one\ntwo\n"]
    assert read_texts(lines) == ["one", "two"]


def test_a_line_of_json_may_hold_other_separators_of_lines(tmp_path: Path) -> None:
    said = "a\u2028b\u0085c"
    path = tmp_path / "a.jsonl"
    path.write_text(f'\ufeff{{"text": "{said}"}}\r\n{{"text": "two"}}', encoding="utf-8")
    assert read_texts(path) == [said, "two"]


@pytest.mark.parametrize(("content", "said"), [('{"text": 3}', "line 1"), ("{", "line 1"), ("", "no text")])
def test_a_bad_line_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_texts(path)
