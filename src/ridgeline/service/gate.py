"""Admission control: how many choices may wait, and when a caller should retry if the queue is full."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from ridgeline.core.errors import Overloaded

_MEMORY_S = 10.0
"""Time constant of the measured rate, in seconds."""
_MIN_RETRY_S = 0.05
_MAX_RETRY_S = 60.0
_DEFAULT_RETRY_S = 1.0


class Gate:
    """Bounds the queue of one engine. All counts are choices.

    rows: choices that the engine runs at once; others wait. max_queue: maximum choices that may wait.
    """

    def __init__(self, max_queue: int, rows: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_queue = max_queue
        self.rows = rows
        self._clock = clock
        self.batch_choices = 0
        """Choices of batch rows in flight. They leave the queue to online requests, so they do not count here."""
        self._open: Counter[str] = Counter()
        """Choices of online requests in flight, by client."""
        self._rate = 0.0
        self._last_end: float | None = None

    def admit(self, open_choices: int, waiting: int, client: str = "") -> None:
        """Admit a request, or raise Overloaded if the queue is full.

        A client that has less in flight than its share of the queue is admitted still: the requests of one client do not shut
        out another. The queue is then at most twice as long.

        open_choices: submitted and not ended. waiting: those of them that do not run, by the engine's last report.
        """
        open_choices -= self.batch_choices
        waiting = max(0, waiting - self.batch_choices)  # rows of batches wait before any online request does
        full = open_choices >= self.rows + self.max_queue or waiting >= max(1, self.max_queue)
        others = [choices for name, choices in self._open.items() if name != client]
        share = self.max_queue / (1 + len(others))
        if full and open_choices and open_choices - sum(others) >= share:
            ahead = max(open_choices - self.rows, waiting)
            raise Overloaded(
                f"The queue is full: {ahead} requests wait, and --max-queue is {self.max_queue}. Retry after the seconds in "
                "the header retry-after.",
                retry_after_s=self.retry_after(ahead),
            )

    def began(self, choices: int, client: str = "") -> None:
        """`choices` of a client go to the engine."""
        self._open[client] += choices

    def ended(self, choices: int = 1, client: str = "") -> None:
        """`choices` have ended: update the measured rate."""
        self._open[client] -= choices
        if self._open[client] <= 0:
            del self._open[client]
        now = self._clock()
        if self._last_end is not None:
            gap = max(now - self._last_end, 1e-6)
            weight = gap / (gap + _MEMORY_S)
            self._rate += (choices / gap - self._rate) * weight
        self._last_end = now

    def retry_after(self, ahead: int) -> float:
        """Seconds until a place in the queue is expected, at the recent rate of ended choices."""
        if self._rate <= 0:
            return _DEFAULT_RETRY_S
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, (ahead - self.max_queue + 1) / self._rate))
