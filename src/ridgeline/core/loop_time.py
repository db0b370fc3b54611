"""Limits on others, measured in the time of the event loop: a process that is late itself must not find others late.

A limit on a peer (an answer, a heartbeat, a client that reads) is right only if this process would have seen a sign of life. While
a callback blocks the loop, while a full core makes its turns long, or while the process is stopped, signs of life wait unread in
sockets. So a turn of the loop counts as TURN_S at most, however long it takes: before a limit of one second has passed, the loop
has read its sockets 20 times. A loop that is not late has the time of the monotonic clock.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from weakref import WeakKeyDictionary

TURN_S = 0.05
"""Most seconds that count between two times at which the loop reads its sockets."""
_TICK_S = 0.02
_MEMORY_S = 2.0
"""Time constant of the mean lateness."""
_LONGEST_S = 1.0
"""Most seconds of one pause that count in the mean lateness."""


class LoopClock:
    """The time of the running event loop. Get it from `loop_clock`.

    late_s: by how many seconds a timer of the loop fired too late, mean of the last seconds.
    """

    def __init__(self) -> None:
        self.late_s = 0.0
        self._counted = 0.0
        self._ticked = time.monotonic()
        self._wait()

    def time(self) -> float:
        """Seconds since the clock was made, without those in which the loop was late. Monotonic."""
        return self._counted + min(time.monotonic() - self._ticked, TURN_S)

    def _wait(self) -> None:
        asyncio.get_running_loop().call_later(_TICK_S, self._tick)

    def _tick(self) -> None:
        now = time.monotonic()
        passed = now - self._ticked
        self._counted += min(passed, TURN_S)
        self._ticked = now
        passed = min(passed, _LONGEST_S)
        self.late_s += (passed - _TICK_S - self.late_s) * passed / (passed + _MEMORY_S)
        # Not at once: uvloop may run a timer that a timer has set before it reads sockets again.
        asyncio.get_running_loop().call_soon(self._wait)


_clocks: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopClock] = WeakKeyDictionary()


def loop_clock() -> LoopClock:
    """The clock of the running event loop."""
    loop = asyncio.get_running_loop()
    clock = _clocks.get(loop)
    if clock is None:
        clock = _clocks[loop] = LoopClock()
    return clock


class LoopTimeout:
    """As `asyncio.timeout`, in the time of the event loop. Raises TimeoutError out of the block."""

    __slots__ = ("_clock", "_end", "_handle", "_scope", "_seconds")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def __aenter__(self) -> LoopTimeout:
        self._clock = loop_clock()
        self._end = self._clock.time() + self._seconds
        self._scope = asyncio.timeout(None)
        await self._scope.__aenter__()
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.cancel()
        await self._scope.__aexit__(kind, error, traceback)

    def _look(self) -> None:
        left = self._end - self._clock.time()
        if left > 0.0:
            self._handle = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._scope.reschedule(0.0)
