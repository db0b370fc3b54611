"""When an engine for prompts becomes one for the other tokens, or the reverse. Pure: no clock, no asyncio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

PATIENCE_S = 5.0
"""Seconds for which one kind must be overloaded and the other one idle, so that a burst changes nothing."""
FULL, IDLE = 1.0, 0.5
"""Mean loads from which a kind is overloaded, and up to which it can spare an engine."""
PROMPT_STEPS = 2
"""Full steps of open prompt tokens that are a load of 1: the engine computes one, and the next one waits."""


@dataclass(frozen=True, slots=True)
class Load:
    """An engine that serves. load: of prompts, open tokens by PROMPT_STEPS full steps; else, open choices by rows."""

    number: int
    prefill: bool
    load: float


class Roles:
    """Watches the loads of both kinds. patience_s: see PATIENCE_S."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._since = {True: math.inf, False: math.inf}
        """Kind (prefill) -> time since which it could use an engine of the other kind."""

    def decide(self, loads: Sequence[Load], now: float) -> int | None:
        """The number of the engine that changes its kind now, or None. now: monotonic seconds."""
        kinds = {prefill: [each for each in loads if each.prefill == prefill] for prefill in (True, False)}
        for prefill, since in self._since.items():
            lacking, others = kinds[prefill], kinds[not prefill]
            lacks = bool(lacking) and len(others) > 1 and _mean(lacking) >= FULL and _mean(others) <= IDLE
            self._since[prefill] = min(since, now) if lacks else math.inf
            if lacks and now - self._since[prefill] >= self._patience_s:
                self._since[prefill] = math.inf
                return min(others, key=lambda each: (each.load, each.number)).number
        return None


def _mean(loads: Sequence[Load]) -> float:
    return fmean(each.load for each in loads)
