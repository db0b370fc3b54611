"""Judges a replica by its progress: a process that answers health checks may still not compute. No clock, no asyncio."""

from __future__ import annotations

from ridgeline.service.routing import State


class Progress:
    """The state of one replica from its health checks.

    A check brings the number of the engine's last step; None if the server reports none. A replica that has requests, reports
    steps and neither makes a step nor sends a byte for `stall_s` is stalled. A check that fails makes it DOWN, or STARTING, at
    once.
    """

    def __init__(self, stall_s: float = 1.0) -> None:
        self._stall_s = stall_s
        self._seen: tuple[int | None, int] | None = None
        self._progressed = 0.0

    def failed(self, *, starting: bool = False) -> State:
        """starting: it says that its engine is being started."""
        self._seen = None
        return State.STARTING if starting else State.DOWN

    def checked(self, now: float, step: int | None, received: int, running: int) -> State:
        """received: chunks of answers so far. running: requests in flight."""
        if self._seen != (step, received) or not running:
            self._seen, self._progressed = (step, received), now
        if step is None or now - self._progressed <= self._stall_s:
            return State.UP
        return State.STALLED
