"""Keeps an engine running: a process that has ended or is stuck is replaced by another one with the same configuration."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import EngineFailed
from ridgeline.wire.client import EngineClient

log = logging.getLogger(__name__)


class RunningEngine(Protocol):
    """An engine process with the client that speaks to it. Both ways to end it may be called again."""

    @property
    def client(self) -> EngineClient: ...

    async def stop(self) -> None: ...

    async def kill(self) -> None: ...


class Supervisor:
    """Owns the engine processes of a server, one after the other.

    engine: the first one, already begun. start: starts another one with the same configuration. clock: seconds that only grow.
    """

    def __init__(
        self,
        engine: RunningEngine,
        start: Callable[[], Awaitable[RunningEngine]],
        config: ServiceConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._start = start
        self._limit = config.engine_restarts
        self._minutes = config.engine_restart_minutes
        self._clock = clock
        self._restarts: deque[float] = deque()
        """Times of the restarts that count: those of the last `_minutes`."""

    async def wait_lost(self) -> str:
        """Wait until the engine is lost; logs and returns why. Raises EngineFailed when it may not be restarted."""
        reason = (await self.engine.client.wait_lost()).rstrip(".")
        await self.engine.client.close()  # what a stuck engine still sends is not read
        now = self._clock()
        while self._restarts and now - self._restarts[0] > 60 * self._minutes:
            self._restarts.popleft()
        if len(self._restarts) >= self._limit:
            log.error("The engine is lost: %s. No restart is left: the server ends.", reason)
            await self.engine.kill()
            allowed = f"--engine-restarts {self._limit} (within --engine-restart-minutes {self._minutes:g})"
            raise EngineFailed(f"the engine is lost: {reason}. {allowed} allows no further restart.")
        self._restarts.append(now)
        count = len(self._restarts)
        log.error("The engine is lost: %s. It is restarted (%d of %d restarts).", reason, count, self._limit)
        return reason

    async def restart(self) -> EngineClient:
        """End what is left of the lost engine, then start another one; returns its client, which is not ready yet.

        The order matters: the lost process may hold the device's memory until it has ended.
        """
        await self.engine.kill()
        self.engine = await self._start()
        return self.engine.client

    async def stop(self) -> None:
        """Let the engine end by itself, and kill it when it does not."""
        await self.engine.stop()
