"""Operations that change an engine: they go on to their end when the client that has ordered them leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from ridgeline.core.errors import RidgelineError

_T = TypeVar("_T")

log = logging.getLogger(__name__)


class Operations:
    """Those that run. Half an operation would leave the service with another state than the engine has."""

    def __init__(self) -> None:
        self._running: set[asyncio.Task[Any]] = set()

    async def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run `work` to its end, also if the caller is cancelled meanwhile. Raises its errors."""
        task = asyncio.get_running_loop().create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                task.add_done_callback(_log_failure)
            raise


def _log_failure(task: asyncio.Task[Any]) -> None:
    """Nobody waits for the operation any more: its error goes to the log."""
    if task.cancelled() or (error := task.exception()) is None:
        return
    if isinstance(error, RidgelineError):
        log.warning("an operation whose client has left failed: %s", error.message)
    else:
        log.error("an operation whose client has left failed", exc_info=error)
