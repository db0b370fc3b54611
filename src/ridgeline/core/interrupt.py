"""Ctrl-C between two steps, not in the middle of one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import TypeVar

_T = TypeVar("_T")


class Whole:
    """Inside of the `with`, calls through it are not broken off by Ctrl-C: KeyboardInterrupt comes behind them, since what is left
    half done could neither be gone on with nor ended in order. Outside of such calls, and for a second Ctrl-C in one, it
    comes at once. Only Python's own way to raise it is changed, so an event loop or a thread that is not the main one sees
    nothing of this; a call costs a tenth of a microsecond."""

    def __init__(self) -> None:
        self._busy = self._caught = self._ours = False

    def __enter__(self) -> Whole:
        if threading.current_thread() is threading.main_thread():
            self._ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, self._catch)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._ours:
            with suppress(ValueError):  # a generator that another thread ends; the handler left does what Python's does
                signal.signal(signal.SIGINT, signal.default_int_handler)

    def __call__(self, work: Callable[[], _T]) -> _T:
        self._busy = True
        try:
            return work()
        finally:
            self._busy = False
            if self._caught:
                self._caught = False
                raise KeyboardInterrupt

    def _catch(self, number: int, frame: object) -> None:
        if self._caught or not self._busy:
            self._caught = False
            raise KeyboardInterrupt
        self._caught = True
