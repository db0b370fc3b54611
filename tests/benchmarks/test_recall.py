"""The recall task of benchmarks/recall.py: contexts hold the pairs that are asked for, and scores line up with the answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import recall
from common import read_rows
from recall import FILLER, KEYS, MARK, PAIRS, QUESTIONS, VALUES, Lesson, batch, contexts, windows_of


@pytest.mark.parametrize(("length", "pairs"), [(8, 2), (64, PAIRS), (33, 8)])
def test_a_context_holds_each_pair_once_and_filler_elsewhere(length: int, pairs: int) -> None:
    ids, keys, values = contexts(20, length, pairs, np.random.default_rng(0))
    for row, row_keys, row_values in zip(ids.tolist(), keys.tolist(), values.tolist(), strict=True):
        held = {row[place]: row[place + 1] for place in range(length - 1) if row[place] in KEYS}
        assert held == dict(zip(row_keys, row_values, strict=True)) and len(held) == pairs
        assert sum(token in VALUES for token in row) == pairs
        assert sum(token in FILLER for token in row) >= length - 2 * pairs - 1


def test_a_batch_counts_only_answers() -> None:
    """The token to predict at a key that is asked for is the value after this key in the context."""
    ids, labels = batch(0, Lesson(1)).tolist()
    for row, wanted in zip(ids, labels, strict=True):
        places = [place for place, label in enumerate(wanted) if label >= 0]
        assert places and all(row[place - 1] == MARK for place in places)
        assert [wanted[place] for place in places] == [row[row.index(row[place]) + 1] for place in places]


@pytest.mark.parametrize("asked", [False, True])
def test_questions_stand_after_the_prompt(asked: bool) -> None:
    windows, values = windows_of(64, 5, asked)
    for window, wanted in zip(windows, values.tolist(), strict=True):
        keys = [window.ids[window.first + 2 * question + 1] for question in range(QUESTIONS)]
        assert window.first == 64 + 2 * QUESTIONS * asked
        assert [window.ids[window.ids.index(key) + 1] for key in keys] == wanted
        assert window.ids[window.first - 1] == keys[-1] or not asked


@pytest.mark.long
def test_a_trained_model_is_measured_with_every_format_policy_and_budget(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    words = ["train", "measure", "--work", str(tmp_path), "--steps", "2", "--lengths", "256,512", "--lists", "1"]
    recall.main([*words, "--longest", "512", "--tokens", "512", "--out", str(out)])
    rows = {row["row"]: row for row in read_rows(out)}
    assert {f"recall-to-512-{name}-512" for name in ("int4", "snap-8x", "selection-8x")} <= rows.keys()
    assert rows["recall-to-512-window-8x-512"]["slots"] < rows["recall-to-512-window-2x-512"]["slots"] < 512
