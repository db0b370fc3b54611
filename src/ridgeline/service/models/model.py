"""One of several models: its engine process and its part of the service while it is loaded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ridgeline.core.errors import Unavailable
from ridgeline.core.slo import Slo
from ridgeline.metrics import Metrics
from ridgeline.service.engines import launch_engines
from ridgeline.service.front import Front
from ridgeline.service.models.file import ModelEntry
from ridgeline.service.reference import make_reference
from ridgeline.service.server import Server
from ridgeline.service.supervisor import Supervisor

STATES = ("unloaded", "loading", "awake", "asleep", "failed")


class Model:
    """A model of the file. It is loaded at most once at a time.

    set_price: takes the price of its device, and raises ConfigError if budgets of keys need one.
    leaving: others wait for its memory, so that new requests wait, too. loads: how often it was loaded. load_s: seconds of the last
    time.
    """

    def __init__(self, entry: ModelEntry, folder: Path) -> None:
        self.entry, self.folder, self.name = entry, folder, entry.name
        self.metrics = Metrics(
            self.name, entry.resolved.service.metrics_alias, slo=Slo.parse(entry.resolved.service.slo)
        )
        self.set_price: Callable[[float], None] = lambda price: None
        self.created = int(time.time())
        self.leaving = False
        self.waiting = 0
        """Requests that wait until the model is awake."""
        self.rising: asyncio.Task[None] | None = None
        """Loads or wakes the model."""
        self.loads, self.load_s = 0, 0.0
        self._server: Server | None = None
        self._supervisor: Supervisor | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._problem = ""
        """Why the last load failed, or why the engine was given up."""
        self._weights = ""
        """Folder of the weights that an operator has loaded instead of those of the model's folder."""

    @property
    def front(self) -> Front | None:
        """The part of the service; None while the model is not loaded."""
        lost = self._keeping is not None and self._keeping.done()
        return None if self._server is None or self._keeping is None or lost else self._server.front

    @property
    def awake(self) -> bool:
        """Requests may go to the engine at once."""
        return self.front is not None and not self.front.sleep.away and not self.leaving

    @property
    def busy(self) -> bool:
        front = self.front
        return front is not None and (front.sleep.users > 0 or front.client.open_choices > 0)

    @property
    def used(self) -> float:
        """When its last request ended, in the seconds of `time.monotonic`. 0: it is not loaded."""
        return 0.0 if self.front is None else self.front.sleep.used

    @property
    def takes_memory(self) -> bool:
        return self.front is not None and not self.front.sleep.level

    @property
    def state(self) -> str:
        if self.front is None:
            loading = self.rising is not None and not self.rising.done()
            return "loading" if loading else "failed" if self._problem else "unloaded"
        return "asleep" if self.front.sleep.level else "awake"

    async def load(self) -> None:
        """Start the engine and wait until it serves. Raises Unavailable with the reason if it does not."""
        await self.unload()  # what an engine that was given up has left
        started, resolved, self._problem = time.monotonic(), self.entry.resolved, ""
        start = partial(launch_engines, resolved, self.metrics)
        try:
            self._supervisor = Supervisor(await start(), start, resolved.service)
            reference = make_reference(resolved.service, resolved.model, resolved.engine)
            self._server = Server(resolved.service, self._supervisor, self.metrics, reference)
            await self._server.open(self.folder, self.name)
            self.set_price(self.metrics.live.ceilings.price)
            self._server.front.sleep.folder = self._weights
            await self._server.front.sleep.restored()
        except asyncio.CancelledError:
            await self.unload()
            raise
        except Exception as error:
            self._problem = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
            await self.unload()
            raise Unavailable(f"The model {self.name!r} cannot be loaded: {self._problem}") from error
        self._keeping = asyncio.get_running_loop().create_task(self._keep(self._server))
        self.loads += 1
        self.load_s = time.monotonic() - started

    async def _keep(self, server: Server) -> None:
        """Replace lost engines. Ends when no restart is left, and when a sleeping engine is lost, whose memory others may have. The
        next request then loads the model again.
        """
        try:
            await server.keep_open(while_awake=True)
        except Exception as error:
            self._problem = getattr(error, "message", None) or f"{type(error).__name__}: {error}"

    async def unload(self) -> None:
        """End the engine's process."""
        server, supervisor, keeping = self._server, self._supervisor, self._keeping
        if server is not None:
            self._weights = server.front.sleep.folder
        self._server = self._supervisor = self._keeping = None
        if keeping is not None:
            keeping.cancel()
            await asyncio.wait({keeping})
        if server is not None:
            await server.stop()
        if supervisor is not None:
            await supervisor.stop()

    async def evict(self) -> None:
        """Give the memory to others. Nobody uses the model."""
        front = self.front
        if front is not None and self.entry.evict == "sleep" and front.trouble is None:
            await front.sleep.sleep(wait_s=0.0)
        else:
            await self.unload()

    def card(self) -> dict[str, Any]:
        """The model as /v1/models lists it. The context is known once it was loaded."""
        length = self.entry.resolved.model.max_model_len
        if self.front is not None:
            length = int(self.front.client.facts.get("max_len") or 0) or length
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "ridgeline",
            "root": self.entry.resolved.model.model or self.name,
            "parent": None,
            "max_model_len": length,
            "state": self.state,
            **({"problem": self._problem} if self._problem else {}),
        }
