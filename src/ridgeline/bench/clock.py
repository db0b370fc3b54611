"""A timer for asyncio that is accurate to some tens of microseconds. Event loop timers have a resolution of milliseconds."""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
import time
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Protocol

_MONOTONIC = 1  # CLOCK_MONOTONIC, which time.perf_counter() reads on Linux
_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC  # TFD_NONBLOCK, TFD_CLOEXEC


class Clock(Protocol):
    """Time in seconds and waiting. Tests use a clock with virtual time."""

    def now(self) -> float: ...

    async def until(self, when: float) -> None: ...


def resolve_future(future: asyncio.Future[None]) -> None:
    """Complete a future unless it is done already."""
    if not future.done():
        future.set_result(None)


class _Span(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


class _Timer(ctypes.Structure):
    _fields_ = (("every", _Span), ("at", _Span))


class Alarm:
    """Calls functions at times of `time.perf_counter`, by one kernel timer (timerfd_create(2)) in the running event loop.

    Use it as a context manager.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._file = self._libc.timerfd_create(_MONOTONIC, _FLAGS)
        if self._file < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create failed")
        self._loop.add_reader(self._file, self._ring)

    def __enter__(self) -> Alarm:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._file)
        os.close(self._file)

    def now(self) -> float:
        return time.perf_counter()

    def at(self, when: float, call: Callable[[], None]) -> None:
        """Call `call` at `when`, or as soon as the loop runs if `when` is past."""
        first = not self._due or when < self._due[0][0]
        heapq.heappush(self._due, (when, next(self._order), call))
        if first:
            self._set(when)

    async def until(self, when: float) -> None:
        """Return at `when`, or at once if it is past."""
        if when <= time.perf_counter():
            return
        future = self._loop.create_future()
        self.at(when, partial(resolve_future, future))
        await future

    def _set(self, when: float) -> None:
        seconds = int(when)
        # All zeros would disarm the timer.
        timer = _Timer(_Span(0, 0), _Span(seconds, max(1, int((when - seconds) * 1e9))))
        self._libc.timerfd_settime(self._file, _ABSOLUTE, ctypes.byref(timer), None)

    def _ring(self) -> None:
        try:
            os.read(self._file, 8)
        except BlockingIOError:  # the timer was set again after it fired
            return
        now = time.perf_counter()
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        if self._due:
            self._set(self._due[0][0])
