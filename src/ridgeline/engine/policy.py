"""Who may enter the running set, and when. Everything after admission is shared by all policies.

continuous   whoever fits enters at every step (Orca, Yu et al. 2022, section 3.1).
static:N     a batch of N enters together and nobody else until all have left.
dynamic:N,W  as static, but a batch also opens when its oldest request has waited W milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ridgeline.core.errors import ConfigError

STATIC_PATIENCE_S = 10.0
"""A static batch that never fills opens after this long all the same, so that no request hangs."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes the scheduler plans within. rows: device rows (row 0 is scratch and not counted)."""

    rows: int
    step_tokens: int
    max_len: int


class Waiting(Protocol):
    """What a policy sees of a request that waits. followers: choices of the same prompt that will wait after it."""

    id: str
    arrival: float

    @property
    def followers(self) -> Sequence[object]: ...


class Admission(Protocol):
    def allowed(self, running: int, waiting: Sequence[Waiting], now: float) -> int:
        """How many may enter now, counted from the head of `waiting` (which is in the order of entering)."""

    def opens_in(self, waiting: Sequence[Waiting], now: float) -> float:
        """Seconds until somebody may enter an engine in which nobody runs and nobody arrives."""


class Continuous:
    def allowed(self, running: int, waiting: Sequence[Waiting], now: float) -> int:
        return len(waiting)

    def opens_in(self, waiting: Sequence[Waiting], now: float) -> float:
        return 0.0


class Batched:
    """Static and dynamic batches. A batch names its members when it opens: a newcomer never takes the place of one that
    was cancelled, and one that was preempted comes back into its own batch. All choices of a request enter together."""

    def __init__(self, size: int, window_s: float) -> None:
        self.size = size
        self.window_s = window_s
        self._members: set[str] = set()

    def allowed(self, running: int, waiting: Sequence[Waiting], now: float) -> int:
        if running == 0 and waiting and waiting[0].id not in self._members:
            self._members = self._open(waiting, now)
        outsider = (place for place, request in enumerate(waiting) if request.id not in self._members)
        return next(outsider, len(waiting))

    def _open(self, waiting: Sequence[Waiting], now: float) -> set[str]:
        """Members of the next batch; nobody while it is neither full nor overdue."""
        choices = sum(1 + len(request.followers) for request in waiting)
        if choices < self.size and (not waiting or self.opens_in(waiting, now) > 0):
            return set()
        members: set[str] = set()
        taken = 0
        for request in waiting:
            if taken >= self.size:
                break
            members.add(request.id)
            taken += 1 + len(request.followers)
        return members

    def opens_in(self, waiting: Sequence[Waiting], now: float) -> float:
        return max(0.0, min(request.arrival for request in waiting) + self.window_s - now)


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
        f"--batching is {batching!r}: give continuous, static:N or dynamic:N,WINDOW_MS, as in dynamic:4,100.",
        param="batching",
    )
