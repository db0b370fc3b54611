"""Who may enter the running set, and when. Everything after admission is shared by all policies.

continuous   whoever fits enters at every step (Orca, Yu et al. 2022, section 3.1).
static:N     a batch of N enters together and nobody else until all have left.
dynamic:N,W  as static, but a batch also opens when its oldest request has waited W milliseconds.
"""

from __future__ import annotations

from typing import Protocol

from ridgeline.core.errors import ConfigError

STATIC_PATIENCE_S = 10.0
"""A static batch that never fills opens after this long all the same, so that no request hangs."""


class Admission(Protocol):
    def allowed(self, running: int, waiting: int, oldest_wait_s: float) -> int:
        """How many requests may enter now."""

    def entered(self) -> None:
        """One request entered."""


class Continuous:
    def allowed(self, running: int, waiting: int, oldest_wait_s: float) -> int:
        return waiting

    def entered(self) -> None:
        pass


class Batched:
    """Static and dynamic batches: a batch opens when nobody runs, and stays open until its `size` have entered.

    `left` lets one batch enter over several steps (its prompts may exceed one step's tokens).
    """

    def __init__(self, size: int, window_s: float) -> None:
        self.size = size
        self.window_s = window_s
        self._left = 0

    def allowed(self, running: int, waiting: int, oldest_wait_s: float) -> int:
        if running == 0:
            full = waiting >= self.size or (waiting > 0 and oldest_wait_s >= self.window_s)
            self._left = min(self.size, waiting) if full else 0
        return self._left

    def entered(self) -> None:
        self._left -= 1


def admission(batching: str) -> Admission:
    """Read `continuous`, `static:N` or `dynamic:N,WINDOW_MS`. Raises ConfigError."""
    kind, _, rest = batching.partition(":")
    numbers = rest.split(",") if rest else []
    try:
        if kind == "continuous" and not numbers:
            return Continuous()
        if kind == "static" and len(numbers) == 1 and int(numbers[0]) > 0:
            return Batched(int(numbers[0]), STATIC_PATIENCE_S)
        if kind == "dynamic" and len(numbers) == 2 and int(numbers[0]) > 0 and float(numbers[1]) >= 0:
            return Batched(int(numbers[0]), float(numbers[1]) / 1000)
    except ValueError:
        pass
    raise ConfigError(
        f"batching is {batching!r}: give continuous, static:N or dynamic:N,WINDOW_MS, as in dynamic:4,100.",
        param="batching",
    )
