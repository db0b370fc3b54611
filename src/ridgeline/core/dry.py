"""The parameters of the DRY penalty, which makes it improbable to repeat a sequence of tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ridgeline.core.errors import RequestError

LONGEST_MATCH = 50
"""Tokens of a repeated sequence that count. A longer one is penalized as this one."""


@dataclass(frozen=True, slots=True)
class Dry:
    """A token that would extend a repeated sequence of L tokens loses multiplier * base ** (L - allowed_length), if L is at least
    allowed_length.

    window: number of last tokens, of prompt and output, that are searched; -1: all. breakers: tokens that no sequence contains.
    Raises RequestError, naming the field of the API.

    Source: P. E. Weidmann, text-generation-webui, pull request 5677 (modules/sampler_hijack.py, DRYLogitsProcessor).
    """

    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    window: int = -1
    breakers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value, kinds, low, high in (
            ("dry_multiplier", self.multiplier, (int, float), 0, 100),
            ("dry_base", self.base, (int, float), 1, 100),
            ("dry_allowed_length", self.allowed_length, int, 1, LONGEST_MATCH),
            ("dry_penalty_last_n", self.window, int, -1, 1 << 30),
        ):
            fits = isinstance(value, kinds) and not isinstance(value, bool)
            if not fits or not math.isfinite(value) or not low <= value <= high:
                noun = "an integer" if kinds is int else "a number"
                raise RequestError(f"{name} is {value!r}: give {noun} from {low} to {high}.", param=name)
        if not all(type(token) is int for token in self.breakers):
            raise RequestError(
                f"dry_sequence_breakers is {self.breakers!r}: give token ids.", param="dry_sequence_breakers"
            )
