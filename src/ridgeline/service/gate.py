"""The door: how many choices may wait, and when a caller who finds it full should come back."""

from __future__ import annotations

import time
from collections.abc import Callable

from ridgeline.core.errors import Overloaded

_MEMORY_S = 10.0
"""Time constant of the measured rate: about the last ten seconds count."""
_SHORTEST_S = 0.05
_LONGEST_S = 60.0
_UNKNOWN_S = 1.0


class Gate:
    """Bounds the queue in front of one engine. All counts are choices.

    rows: choices the engine can run at once; more than that wait. max_queue: how many may wait.
    """

    def __init__(self, max_queue: int, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_queue = max_queue
        self.rows = rows
        self._clock = clock
        self._rate = 0.0
        self._last_end: float | None = None

    def admit(self, open_choices: int, waiting: int) -> None:
        """Let a request in, or raise Overloaded because the queue is full.

        open_choices: submitted and not ended. waiting: of these, not running as the engine last said.
        """
        full = open_choices >= self.rows + self.max_queue or waiting >= max(1, self.max_queue)
        if full and open_choices:
            ahead = max(open_choices - self.rows, waiting)
            raise Overloaded(
                f"The queue is full ({ahead} requests wait, at most {self.max_queue} may): retry after the time in retry-after.",
                retry_after_s=self.retry_after(ahead),
            )

    def ended(self, choices: int = 1) -> None:
        """Choices have ended: the engine's rate is measured by these."""
        now = self._clock()
        if self._last_end is not None:
            gap = max(now - self._last_end, 1e-6)
            share = gap / (gap + _MEMORY_S)
            self._rate += (choices / gap - self._rate) * share
        self._last_end = now

    def retry_after(self, ahead: int) -> float:
        """Seconds until a place in the queue is expected, at the rate at which choices ended lately."""
        if self._rate <= 0:
            return _UNKNOWN_S
        return min(_LONGEST_S, max(_SHORTEST_S, (ahead - self.max_queue + 1) / self._rate))
