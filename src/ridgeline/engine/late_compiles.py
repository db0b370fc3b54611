"""What was compiled after Ready, while requests waited: start-up should have done it.

Triton tells of kernels through hooks, which it calls only when a launch finds no kernel in memory. Nothing here costs a step
anything that compiles nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from ridgeline.core.events import LateWork

log = logging.getLogger(__name__)


class LateCompiles:
    """Collects from `watch` on; `take` hands over what has come since the last call. clock: seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._compiles: list[LateWork] = []
        self._began: dict[str, float] = {}

    def rest(self) -> None:
        """Start-up begins. Triton's hooks, of which a process has one each, are free of what an engine before this one set."""
        _set_hooks(None, None)

    def watch(self) -> None:
        """Start-up is over."""
        _set_hooks(self._compiling, self._compiled)

    def take(self) -> list[LateWork]:
        """What was late since the last call."""
        if not self._compiles:
            return []
        compiles, self._compiles = self._compiles, []
        return compiles

    def _compiling(self, *, key: str, **_: object) -> bool:
        """Triton is about to compile a kernel, or to load it from disk. True would keep it from that."""
        self._began[key] = self._clock()
        return False

    def _compiled(self, *, key: str, fn: Any, **_: object) -> None:
        now = self._clock()
        seconds = now - self._began.pop(key, now)
        self._compiles.append(LateWork("compile", fn.name, seconds))
        log.warning(
            "The compile of %s took %.3f s while requests waited, because start-up did not prepare it. Please report the model, "
            "the options and this line.",
            fn.name,
            seconds,
        )


def _set_hooks(before: Callable[..., bool] | None, after: Callable[..., None] | None) -> None:
    """What Triton, where it is installed, calls before and after it compiles or loads a kernel."""
    if find_spec("triton") is not None:
        from triton import knobs

        knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = before, after
