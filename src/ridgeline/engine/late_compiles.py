"""Late compiles: kernels that are compiled after start-up, while requests wait. Warm-up should have prepared them.

Triton calls hooks when a launch finds no kernel in memory. Steps that compile nothing pay nothing.
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
    """Collects late compiles from `watch` on; `take` returns the new ones. clock: monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._compiles: list[LateWork] = []
        self._began: dict[str, float] = {}

    def pause(self) -> None:
        """Start-up begins: remove hooks that an earlier engine of this process set."""
        _set_hooks(None, None)

    def watch(self) -> None:
        """Start-up has ended: set the hooks."""
        _set_hooks(self._compiling, self._compiled)

    def take(self) -> list[LateWork]:
        """Late compiles since the last call."""
        compiles, self._compiles = self._compiles, []
        return compiles

    def _compiling(self, *, key: str, **_: object) -> bool:
        """Hook before Triton compiles a kernel or loads it from disk. Returning True would prevent that."""
        self._began[key] = self._clock()
        return False

    def _compiled(self, *, key: str, fn: Any, **_: object) -> None:
        now = self._clock()
        seconds = now - self._began.pop(key, now)
        self._compiles.append(LateWork("compile", fn.name, seconds))
        log.warning(
            "Requests waited %.3f s while the kernel %s was compiled, because start-up did not compile it. Please report the "
            "model, the options and this line.",
            seconds,
            fn.name,
        )


def _set_hooks(before: Callable[..., bool] | None, after: Callable[..., None] | None) -> None:
    """Set the functions that Triton calls before and after it compiles or loads a kernel, if Triton is installed."""
    if find_spec("triton") is not None:
        from triton import knobs

        knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = before, after
