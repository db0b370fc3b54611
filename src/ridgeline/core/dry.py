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
        for name, value, low, high in (
            ("dry_multiplier", self.multiplier, 0, 100),
            ("dry_base", self.base, 1, 100),
            ("dry_allowed_length", self.allowed_length, 1, 1 << 20),
            ("dry_penalty_last_n", self.window, -1, 1 << 30),
        ):
            if not isinstance(value, (int, float)) or not math.isfinite(value) or not low <= value <= high:
                raise RequestError(f"{name} is {value!r}: give a number from {low} to {high}.", param=name)
