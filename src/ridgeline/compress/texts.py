"""Texts that compression needs: rows to calibrate with, and others, of other documents, to judge by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from random import Random

from ridgeline.quality.texts import Window, windows

JUDGING = 4
"""Every fourth document judges, where no other text is given to do so."""
SHORTEST = 32
"""Tokens below which a row says too little to calibrate with."""

Encode = Callable[[str], Sequence[int]]


def default_calibration() -> Path:
    """The sample of prose, documentation, code, mathematics and dialogue that comes with the package (licences by line)."""
    return Path(str(files("ridgeline").joinpath("assets", "calibration.jsonl")))


def split(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """(texts to calibrate with, texts to judge by). A single text is cut instead: its last quarter judges."""
    if len(texts) < 2:
        cut = len(texts[0]) * (JUDGING - 1) // JUDGING
        return [texts[0][:cut]], [texts[0][cut:]]
    judging = [text for place, text in enumerate(texts) if place % JUDGING == JUDGING - 1]
    return [text for place, text in enumerate(texts) if place % JUDGING != JUDGING - 1], judging or [texts[-1]]


def calibration_rows(
    texts: Sequence[str], encode: Encode, length: int, tokens: int, seed: int = 0
) -> list[tuple[int, ...]]:
    """Rows of at most `length` tokens, about `tokens` in all, drawn from all documents; longest first, so that equally long
    ones run together."""
    rows = [one.ids for one in windows(texts, encode, length, 0) if len(one.ids) >= SHORTEST]
    Random(seed).shuffle(rows)
    kept, count = [], 0
    for row in rows:
        if count < tokens:
            kept.append(row)
            count += len(row)
    return sorted(kept, key=len, reverse=True)


def judging_windows(texts: Sequence[str], encode: Encode, length: int, tokens: int, seed: int = 0) -> list[Window]:
    """Windows of at most `length` tokens until `tokens` are scored, whole documents in random order; longest first."""
    order = Random(seed).sample(range(len(texts)), len(texts))
    kept, count = [], 0
    for place in order:
        for one in windows([texts[place]], encode, length, 0):
            if count < tokens:
                kept.append(replace(one, document=place))
                count += one.tokens
    return sorted(kept, key=lambda one: len(one.ids), reverse=True)
