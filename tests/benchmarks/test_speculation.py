"""Rows of drafters: which ways there are, what is counted, and forced text."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest
import speculation
from speculation import Prompt, Sum, Text, Timed, rows, ways

from ridgeline.models.hub import shipped_model


def arguments(**given: object) -> Namespace:
    return Namespace(**{"model": "", "device": "cpu", "dtype": "auto", "threads": 1, "batch": [1]} | given)


def test_ways_are_those_whose_weights_the_folder_has(tmp_path: Path) -> None:
    (tmp_path / "draft").mkdir()
    assert set(ways(tmp_path)) == {"reference", "lookahead", "recycling", "draft", "reference+draft", "auto"}
    assert ways(tmp_path)["reference+draft"] == f"reference+draft:{tmp_path / 'draft'}"
    assert {"medusa", "recurrent", "reference+recurrent"} <= set(ways(speculation.ASSETS))


def test_a_row_counts_tokens_per_row_and_answers_that_differ() -> None:
    plain = Sum(tokens=8, seconds=2.0, rows=8, answers=[[1, 2], [3, 4]])
    drafted = Sum(tokens=8, seconds=1.0, rows=4, answers=[[1, 2], [3, 5]])
    sums = {("plain", "mixed", "greedy"): plain, ("draft", "mixed", "greedy"): drafted}
    args = arguments(model="a/target", device="cuda", dtype="float32")
    by_name = {row["row"]: row for row in rows(args, 8, sums)}
    row = by_name["gpu-target-float32-draft-mixed-greedy-b8"]
    assert (row["ratio"], row["accepted_len"], row["answers_changed"], row["prompts"]) == (2.0, 2.0, 1, 2)


@pytest.mark.parametrize("way", ["", "reference"])
def test_a_forced_answer_is_the_text(way: str) -> None:
    text = Text()
    with text.dictate():
        timed = Timed(way, arguments())
        tokens = [300 + at for at in range(40)]
        said = timed.run([Prompt("docs", tokens + tokens[:8], tokens[8:24])], True, 0.0, 1, text)
        timed.engine.close()
    assert shipped_model().is_dir()
    assert said.answers == [tokens[8:24]]
