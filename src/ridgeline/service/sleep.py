"""Whether the engine of a model sleeps, and its ways there and back. An engine sleeps only while no request needs it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import RequestError, Unavailable
from ridgeline.service.operations import Operations
from ridgeline.wire.client import Client

_LOOK_S = 0.01
"""Seconds between two looks whether requests have ended."""
_ORDER_S = 900.0
"""Seconds in which an engine must have read weights."""
WAIT_S = 60.0
"""Seconds in which running requests may end before a model goes to sleep, unless the caller says otherwise."""


class Sleep:
    """Of one engine. Changes run one at a time, and to their end when their caller leaves; requests that arrive meanwhile wait.

    level: 0 while the engine is awake. users: requests that need it. used: when the last one ended, on `clock`. folder: of the
    weights that `update` has read, "" for those of the start.
    """

    def __init__(
        self,
        config: ServiceConfig,
        client: Callable[[], Client],
        clock: Callable[[], float] = time.monotonic,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """forget: called when the engine has dropped its cached prefixes."""
        self.level = self.users = 0
        self.used = clock()
        self.folder = ""
        self.config, self._client, self._clock, self._forget = config, client, clock, forget
        self._changing = asyncio.Lock()
        self._operations = Operations()

    @property
    def away(self) -> bool:
        """The engine sleeps, or is on its way there or back."""
        return bool(self.level) or self._changing.locked()

    async def restored(self, client: Client | None = None) -> None:
        """The engine was replaced by another one, which is awake and has the weights of the start: read those of the last `update`.

        Raises Unavailable or RequestError if they cannot be read any more.
        """
        self.level, self.used = 0, self._clock()
        if self.folder:
            await self._order("update_weights", self.folder, client)

    def idle_for(self, minutes: float) -> bool:
        """Whether no request has used the engine for some minutes. 0 minutes: never."""
        return bool(minutes) and not self.away and not self.users and self._clock() - self.used >= 60 * minutes

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Wake the engine, and keep it awake. Raises Unavailable if it cannot wake, or if requests may not wake it."""
        while self.away:
            if self.level and self.config.asleep_requests == "refuse":
                raise Unavailable("The model sleeps: wake it up with POST /wake_up, then send the request again.")
            await self.wake()
        self.users += 1
        try:
            yield
        finally:
            self.users -= 1
            self.used = self._clock()

    async def wake(self) -> dict[str, Any]:
        """Wake the engine if it sleeps. Raises Unavailable with the reason if it cannot wake."""
        return await self._operations.run(self._wake())

    async def _wake(self) -> dict[str, Any]:
        async with self._changing:
            if not self.level:
                return {"level": 0}
            reply = await self._order("wake_up")
            self.used = self._clock()
            return reply

    async def sleep(self, level: int = 1, *, abort: bool = False, wait_s: float = WAIT_S) -> dict[str, Any]:
        """Let the running requests end, or end them, and release the engine's memory.

        Raises:
            Unavailable: requests still run after wait_s seconds, or the engine refuses.
            RequestError: the server has no --enable-sleep-mode.
        """
        return await self._operations.run(self._sleep(level, abort, wait_s))

    async def _sleep(self, level: int, abort: bool, wait_s: float) -> dict[str, Any]:
        async with self._changing:
            if self.level >= level:
                return {"level": self.level}
            await self._end_requests(abort, wait_s)
            self._forget()
            return await self._order("sleep", str(level))

    async def update(self, folder: str, *, abort: bool = False, wait_s: float = WAIT_S) -> dict[str, Any]:
        """Replace the weights by those of a folder. A sleeping engine wakes up. The caller lets it run to its end (Front.update).

        Raises as `sleep`, and RequestError for a folder with another architecture.
        """
        async with self._changing:
            await self._end_requests(abort, wait_s)
            self._forget()
            reply = await self._order("update_weights", folder)
            self.folder = folder
            return reply

    async def _end_requests(self, abort: bool, wait_s: float) -> None:
        client, deadline = self._client(), self._clock() + wait_s
        while self.users or client.open_choices:
            if abort:
                client.end_all("An operator has ended the running requests: send the request again.", "aborted")
            if self._clock() >= deadline:
                raise Unavailable(
                    f"Requests still run after {wait_s:g} s: wait longer (timeout_s), or end them (mode=abort)."
                )
            await asyncio.sleep(_LOOK_S)

    async def _order(self, order: str, argument: str = "", client: Client | None = None) -> dict[str, Any]:
        """Send an order as soon as the engine has no request. client: of another engine than the current one."""
        client = client or self._client()
        while (reply := await client.control(order, _ORDER_S, argument)).get("busy"):
            await asyncio.sleep(_LOOK_S)
        self.level = int(reply.get("level", self.level))
        if (problem := reply.get("error")) is not None:
            if reply.get("status") == 400:
                raise RequestError(str(problem), param="model_path" if order == "update_weights" else None)
            raise Unavailable(str(problem))
        return reply
