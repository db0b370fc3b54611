"""Texts for compression: calibration rows, and evaluation windows of other documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from random import Random

from ridgeline.quality.texts import Window, windows

EVALUATION_STRIDE = 4
"""Every fourth document is for evaluation if no evaluation text is given."""
MIN_ROW_TOKENS = 32
"""Minimum tokens of a calibration row."""

Encode = Callable[[str], Sequence[int]]


def default_calibration() -> Path:
    """Return the packaged sample of prose, documentation, code, mathematics and dialogue. Each line states its licence."""
    return Path(str(files("ridgeline").joinpath("assets", "calibration.jsonl")))


def split(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split texts into (calibration, evaluation). Of a single text the last quarter is for evaluation."""
    if len(texts) < 2:
        cut = len(texts[0]) * (EVALUATION_STRIDE - 1) // EVALUATION_STRIDE
        return [texts[0][:cut]], [texts[0][cut:]]
    evaluation = [text for index, text in enumerate(texts) if index % EVALUATION_STRIDE == EVALUATION_STRIDE - 1]
    return [
        text for index, text in enumerate(texts) if index % EVALUATION_STRIDE != EVALUATION_STRIDE - 1
    ], evaluation or [texts[-1]]


def calibration_rows(
    texts: Sequence[str], encode: Encode, length: int, tokens: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """Draw rows of at most `length` tokens from all documents, about `tokens` in total.

    The longest rows come first, so that rows of equal length run in one batch.
    """
    rows = [window.ids for window in windows(texts, encode, length, 0) if len(window.ids) >= MIN_ROW_TOKENS]
    Random(seed).shuffle(rows)
    kept, count = [], 0
    for row in rows:
        if count < tokens:
            kept.append(row)
            count += len(row)
    return sorted(kept, key=len, reverse=True)


def evaluation_windows(texts: Sequence[str], encode: Encode, length: int, tokens: int, seed: int = 0) -> list[Window]:
    """Draw windows of at most `length` tokens from documents in random order until `tokens` are scored. Longest first."""
    order = Random(seed).sample(range(len(texts)), len(texts))
    kept, count = [], 0
    for document in order:
        for window in windows([texts[document]], encode, length, 0):
            if count < tokens:
                kept.append(replace(window, document=document))
                count += window.tokens
    return sorted(kept, key=lambda window: len(window.ids), reverse=True)
