"""Limits on others, measured in the time of the event loop: a process that is late itself must not find others late.

A limit on a peer (an answer, a heartbeat, a client that reads) is right only if this process would have seen a sign of life. While
a callback blocks the loop, while a full core makes its turns long, or while the process is stopped, signs of life wait unread in
sockets. So a turn of the loop counts as TURN_S at most, however long it takes: before a limit of one second has passed, the loop
has read its sockets 20 times. A loop that is not late has the time of the monotonic clock.

While nobody waits with a limit below `_LONG_S`, the clock ticks 4 times a second instead of 50 times, and a turn counts as 0.28 s
at most: before a limit of `_LONG_S` has passed, the loop has read its sockets 20 times, too.

The clock also measures how late the loop is, which says whether this process has more to do than it can. A process that stands,
or that gets little of a core, is late without having much to do. So the mean rises with the CPU time in which the loop is late,
and falls with the time of the clock.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from weakref import WeakKeyDictionary

TURN_S = 0.05
"""Most seconds that count between two times at which the loop reads its sockets."""
_TICK_S = 0.02
_IDLE_TICK_S = 0.25
_LONG_S = 20 * (_IDLE_TICK_S + TURN_S - _TICK_S)
"""Limits from which on slow ticks do."""
_MEMORY_S = 1.0
"""Time constant of the mean lateness: seconds of CPU time in which it rises, of the clock in which it falls."""
_LATEST_S = 1.0
"""Most seconds of lateness that count in the mean."""


class LoopClock:
    """The time of the running event loop. Get it from `loop_clock`.

    late_s: by how many seconds timers of the loop fire too late, and bytes are read too late (`saw`), because of what this process
    has to do: a mean.
    """

    def __init__(self) -> None:
        self.late_s = 0.0
        self._counted = 0.0
        self._waits = 0
        """Short limits that run."""
        self._saw = 0.0
        self._pause = _TICK_S
        self._ticked, self._cpu = time.monotonic(), time.thread_time()
        self._wait()

    def time(self) -> float:
        """Seconds since the clock was made, without those in which the loop was late. Monotonic."""
        return self._counted + self._at_most(time.monotonic() - self._ticked)

    def begin(self) -> None:
        """Somebody waits with a short limit, until `end`."""
        self._waits += 1
        if self._pause > _TICK_S:
            self._handle.cancel()
            self._tick()

    def end(self) -> None:
        self._waits -= 1

    def saw(self, late_s: float) -> None:
        """Bytes are read only now that came late_s ago. Connections wait in the system before the loop accepts them: uvloop takes
        one in a turn, so that turns stay short however many wait.
        """
        self._saw = max(self._saw, late_s)

    def _at_most(self, passed: float) -> float:
        return min(passed, self._pause + TURN_S - _TICK_S)

    def _wait(self) -> None:
        self._handle: asyncio.Handle = asyncio.get_running_loop().call_later(self._pause, self._tick)

    def _tick(self) -> None:
        now, cpu = time.monotonic(), time.thread_time()
        passed = now - self._ticked
        self._counted += self._at_most(passed)
        late = min(max(passed - self._pause, self._saw), _LATEST_S)
        weight = cpu - self._cpu if late > self.late_s else min(passed, _LATEST_S)
        self.late_s += (max(0.0, late) - self.late_s) * weight / (weight + _MEMORY_S)
        self._ticked, self._cpu, self._saw = now, cpu, 0.0
        self._pause = _TICK_S if self._waits else _IDLE_TICK_S
        # Not at once: uvloop may run a timer that a timer has set before it reads sockets again.
        self._handle = asyncio.get_running_loop().call_soon(self._wait)


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

    __slots__ = ("_clock", "_end", "_handle", "_scope", "_seconds", "_short")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._short = seconds < _LONG_S

    async def __aenter__(self) -> LoopTimeout:
        self._clock = loop_clock()
        self._end = self._clock.time() + self._seconds
        self._scope = asyncio.timeout(None)
        await self._scope.__aenter__()
        if self._short:
            self._clock.begin()
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._handle.cancel()
        if self._short:
            self._clock.end()
        await self._scope.__aexit__(kind, error, traceback)

    def _look(self) -> None:
        left = self._end - self._clock.time()
        if left > 0.0:
            self._handle = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._scope.reschedule(0.0)
