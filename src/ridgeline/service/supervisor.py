"""Keeps an engine running: replaces a process that has ended or is stuck by another one with the same configuration."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import EngineFailed
from ridgeline.wire.client import Client

log = logging.getLogger(__name__)


class RunningEngine(Protocol):
    """An engine process with its client. `stop` and `kill` may be called repeatedly."""

    @property
    def client(self) -> Client: ...

    async def stop(self) -> None: ...

    async def kill(self) -> None: ...


class Supervisor:
    """Owns the engine processes of a server, one after the other.

    engine: the first one, already started. start: starts another one with the same configuration. clock: monotonic seconds.
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
        """Times of the restarts within the last `_minutes`."""

    async def wait_lost(self) -> str:
        """Wait until the engine is lost; log and return the reason. Raises EngineFailed if no restart is left."""
        reason = (await self.engine.client.wait_lost()).rstrip(".")
        await self.engine.client.close()  # ignore what a stuck engine still sends
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

    async def restart(self) -> Client:
        """Kill the lost engine, then start another one. Returns its client, which is not ready yet.

        The order matters: the lost process may hold the device's memory until it has ended.
        """
        await self.engine.kill()
        self.engine = await self._start()
        return self.engine.client

    async def stop(self) -> None:
        """Let the engine exit; kill it if it does not."""
        await self.engine.stop()
