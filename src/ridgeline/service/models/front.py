"""The state behind the application of a server with several models: which are loaded, which sleep, and who gives way."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import EngineFailed, ModelNotFound, RidgelineError, Unavailable
from ridgeline.metrics import Metrics
from ridgeline.metrics.exposition import merged
from ridgeline.service.batches.rows import LaneCounts
from ridgeline.service.front import Front
from ridgeline.service.models.model import STATES, Model
from ridgeline.service.models.no_engine import NoEngine
from ridgeline.service.state import LATEST, Service

_LOOK_S = 0.02
"""Seconds between two looks whether a model is free to give way."""

log = logging.getLogger(__name__)


class ModelsFront(Front):
    """Loads a model when a request names it. Loads, wakes and evictions run one at a time.

    Without --models-memory-gb one model is awake at a time. With it, several are, as long as their memory_gb fit. The model that
    was used least recently gives way. client, metrics and sleep are those of the model that was used last.
    """

    def __init__(self, config: ServiceConfig, models: Sequence[Model]) -> None:
        super().__init__(config, NoEngine(), Metrics(", ".join(model.name for model in models)))
        self.models = {model.name: model for model in models}
        for model in models:
            model.set_price = self.keys.set_price
        self.lane = self._lane = LaneCounts()
        self._last: Model | None = None
        self._changing = asyncio.Lock()
        self._letting_in: asyncio.Task[None] | None = None
        limit = config.models_memory_gb
        self._limit = None if limit is None else int(limit * (1 << 30))

    # --- what routes ask ----------------------------------------------------------------------------------------------

    def model(self, name: str | None) -> Model:
        """A model by its name; without one, that which was used last, or the first. Raises ModelNotFound."""
        if name is None:
            return self._last or next(iter(self.models.values()))
        match = self.models.get(name) or self.models.get(name.removesuffix(LATEST))
        if match is None:
            known = ", ".join(map(repr, self.models))
            raise ModelNotFound(f"The model {name[:80]!r} does not exist: this server serves {known}.", param="model")
        return match

    def check(self) -> None:
        if self.draining:
            raise Unavailable("The server is shutting down: send the request to another replica.")

    @property
    def trouble(self) -> str | None:
        return "the server is shutting down" if self.draining else None

    def service(self) -> Service:
        return self.of(None).service()

    def names(self, model: str | None) -> tuple[str, ...]:
        return (self.model(model).name,)

    def of(self, model: str | None) -> Front:
        self.check()
        chosen = self.model(model)
        if chosen.front is None:
            raise Unavailable(f"The model {chosen.name!r} is {chosen.state}: a request to it loads it.")
        return chosen.front

    @asynccontextmanager
    async def serving(self, model: str | None) -> AsyncIterator[Service]:
        self.check()
        chosen = self.model(model)
        await self._up(chosen)
        assert chosen.front is not None
        self._use(chosen, chosen.front)
        async with chosen.front.serving(None) as service:
            yield service

    async def known(self, model: str | None) -> Service:
        self.check()
        chosen = self.model(model)
        if chosen.front is None:
            await self._up(chosen)
        return self.of(chosen.name).service()

    async def wake(self, model: str | None) -> dict[str, Any]:
        self.check()
        chosen = self.model(model)
        await self._up(chosen)
        return {"level": 0, "model": chosen.name}

    async def _update(self, model: str | None, folder: str, *, abort: bool, wait_s: float) -> dict[str, Any]:
        await self.wake(model)
        return await super()._update(model, folder, abort=abort, wait_s=wait_s)

    def cards(self) -> list[dict[str, Any]]:
        return [model.card() for model in self.models.values()]

    def card(self, name: str) -> dict[str, Any]:
        return self.model(name).card()

    def render(self) -> bytes:
        texts = [model.metrics.render().decode() for model in self.models.values()]
        return merged(
            [
                *texts,
                self._states({model.name: model.state for model in self.models.values()}, STATES),
                self._lane.render(),
            ]
        ).encode()

    # --- who is awake -------------------------------------------------------------------------------------------------

    def _use(self, model: Model, front: Front) -> None:
        self._last = model
        self.client, self.metrics, self.sleep = front.client, front.metrics, front.sleep

    async def _up(self, model: Model) -> None:
        """Wait until a model is awake. Raises Unavailable if it cannot be loaded, or not within --models-load-s.

        A request that leaves does not stop the load, which others may wait for.
        """
        model.waiting += 1
        try:
            async with asyncio.timeout(self.config.models_load_s):
                while not model.awake:
                    if model.rising is None or model.rising.done():
                        model.rising = asyncio.get_running_loop().create_task(self._rise(model))
                        model.rising.add_done_callback(_retrieve)
                    await asyncio.shield(model.rising)
        except TimeoutError:
            raise Unavailable(
                f"The model {model.name!r} is not loaded within {self.config.models_load_s:g} s: send the request again later."
            ) from None
        finally:
            model.waiting -= 1

    async def _rise(self, model: Model) -> None:
        """Load or wake a model. Others may take its memory when the requests that wait for it have begun."""
        await self._changing.acquire()
        try:
            if not model.awake:
                if not model.takes_memory:
                    await self._make_room(model)
                if model.front is None:
                    await model.load()
                    log.info("model %s is loaded in %.1f s", model.name, model.load_s)
                else:
                    await model.front.sleep.wake()
        except BaseException:
            self._changing.release()
            raise
        self._letting_in = asyncio.get_running_loop().create_task(self._let_in(model))

    async def _let_in(self, model: Model) -> None:
        """Let the requests begin that wait for a model, then let others take memory."""
        try:
            while model.waiting and model.awake:
                await asyncio.sleep(0)
        finally:
            self._changing.release()

    async def _make_room(self, model: Model) -> None:
        """Let others give way until the memory suffices. The one that was used least recently comes first, if it is idle."""
        try:
            while others := self._in_the_way(model):
                idle = [other for other in others if not other.busy]
                if not idle:
                    others[0].leaving = True  # its next requests wait, so that it becomes idle
                elif await _evicted(idle[0]):
                    continue
                await asyncio.sleep(_LOOK_S)
        finally:
            for other in self.models.values():
                other.leaving = False

    def _in_the_way(self, model: Model) -> list[Model]:
        """The models that are awake, by their last use, if there is no room for another one."""
        others = self._others(model)
        return [] if self._fit([*others, model]) else others

    def _others(self, model: Model) -> list[Model]:
        """The other models that are awake, by their last use."""
        others = [other for other in self.models.values() if other is not model and other.takes_memory]
        return sorted(others, key=lambda other: other.used)

    def _fit(self, models: Sequence[Model]) -> bool:
        """Whether models may be awake together."""
        if self._limit is None:
            return len(models) <= 1
        return sum(model.entry.memory for model in models) <= self._limit

    def fits_beside_others(self, model: Model) -> bool:
        """Whether a model can be awake if none gives way."""
        return not self._in_the_way(model)

    def has_room(self, model: Model, idle_s: float) -> bool:
        """Whether a model can be awake if only those give way that no request has used for idle_s."""
        since = time.monotonic() - idle_s
        kept = [other for other in self._others(model) if other.busy or other.used > since]
        return not self._changing.locked() and self._fit([*kept, model])

    def tick(self) -> None:
        for model in self.models.values():
            model.metrics.live.tick()

    async def sleep_when_idle(self) -> None:
        for model in self.models.values():
            front = model.front
            if front is None or self._changing.locked() or self.draining:
                continue
            if model.entry.evict == "sleep":
                await front.sleep_when_idle()
            elif front.idle_for(model.entry.resolved.service.idle_sleep_minutes):
                async with self._changing:
                    if front.idle_for(model.entry.resolved.service.idle_sleep_minutes):
                        await model.unload()

    async def end(self) -> None:
        """End all engines."""
        for model in self.models.values():
            if model.rising is not None and not model.rising.done():
                model.rising.cancel()
                with suppress(asyncio.CancelledError, RidgelineError):
                    await model.rising
        await asyncio.gather(*(model.unload() for model in self.models.values()))


def _retrieve(task: asyncio.Task[None]) -> None:
    """Take the error of a task, which nobody may wait for any more."""
    if not task.cancelled():
        task.exception()


async def _evicted(model: Model) -> bool:
    """Whether a model has given its memory away. False: a request came first, or its engine was lost meanwhile: look again."""
    try:
        await model.evict()
    except (EngineFailed, Unavailable):
        return False
    return True
