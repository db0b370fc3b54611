"""The state behind the application: the service while an engine serves, otherwise the reason why there is none."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import RidgelineError, Unavailable
from ridgeline.metrics import Metrics
from ridgeline.metrics.exposition import gauge, labelled
from ridgeline.metrics.metrics import PREFIX
from ridgeline.service.access import Access
from ridgeline.service.adapters import AdapterBook
from ridgeline.service.batches.rows import LaneMetrics
from ridgeline.service.errors import Starting
from ridgeline.service.operations import Operations
from ridgeline.service.prompt_log import PromptLog
from ridgeline.service.sleep import Sleep
from ridgeline.service.state import Service
from ridgeline.wire.client import Client

log = logging.getLogger(__name__)


class Front(Access):
    """The only mutable value of the service. It opens when an engine serves, closes when that engine is lost, and drains when the
    server stops.

    client: of the current engine, or of the last one until the next is started.
    """

    def __init__(self, config: ServiceConfig, client: Client, metrics: Metrics) -> None:
        super().__init__(config)
        self.client = client
        self.metrics = metrics
        self.lane: LaneMetrics = metrics
        self.prompts = PromptLog()
        self.sleep = Sleep(config, lambda: self.client, forget=self._forget_prefixes)
        self.adapters = AdapterBook(lambda: self.client, changed=self._forget_answers)
        self._operations = Operations()
        self._lost = ""
        """Why the last engine was lost, while it is being replaced."""
        self._service: Service | None = None

    def open(self, service: Service) -> None:
        """Answer requests with a service whose engine is ready."""
        self.client = service.client
        self._service = service
        self._lost = ""

    def close(self, lost: str) -> None:
        """Answer with 503 until the next `open`. lost: why the engine is being restarted. The next one reads its files again."""
        self._forget_answers()
        self._service = None
        self._lost = lost
        self.prompts.clear()

    def service(self) -> Service:
        """The service. Raises Unavailable while the engine loads or restarts, and while the server drains."""
        if self.draining:
            raise Unavailable("The server is shutting down: send the request to another replica.")
        if self._service is None or self.starting:
            raise Starting(f"The server is not ready: {self.trouble}.")
        return self._service

    def check(self) -> None:
        """Raise Unavailable if no request can be answered now."""
        self.service()

    def names(self, model: str | None) -> tuple[str, ...]:
        """The names that mean the model of a request, which loads nothing. Raises Unavailable and ModelNotFound."""
        return self.service().named(model).card.names(model)

    @asynccontextmanager
    async def serving(self, model: str | None) -> AsyncIterator[Service]:
        """The service for a request for a model, whose engine is awake until the end. Raises Unavailable and ModelNotFound."""
        self.check()
        async with self.sleep.awake():
            yield self.service().named(model)

    async def known(self, model: str | None) -> Service:
        """The service for work that needs no engine, such as that of the tokenizer. Raises Unavailable and ModelNotFound."""
        return self.service().named(model)

    def of(self, model: str | None) -> Front:
        """The front of a model. Raises Unavailable and ModelNotFound."""
        self.service().card.check(model)
        return self

    async def wake(self, model: str | None) -> dict[str, Any]:
        """Wake a model. Raises Unavailable and ModelNotFound."""
        return await self.of(model).sleep.wake()

    async def update(self, model: str | None, folder: str, *, abort: bool, wait_s: float) -> dict[str, Any]:
        """Replace the weights of a model (Sleep.update), also if the caller leaves meanwhile."""
        return await self._operations.run(self._update(model, folder, abort=abort, wait_s=wait_s))

    async def _update(self, model: str | None, folder: str, *, abort: bool, wait_s: float) -> dict[str, Any]:
        front = self.of(model)
        try:
            return await front.sleep.update(folder, abort=abort, wait_s=wait_s)
        finally:
            front._forget_answers()

    def _forget_prefixes(self) -> None:
        """The engine drops its cached prefixes."""
        self.prompts.clear()
        if self._service is not None:
            self._service.pin_book.reset()

    def _forget_answers(self) -> None:
        """The engine has other weights, or another adapter under a name."""
        if self._service is not None:
            self._service.answers.clear()

    def cards(self) -> list[dict[str, Any]]:
        """The models as /v1/models lists them. Raises Unavailable."""
        service, served = self.service(), self.service().card
        shared = {
            "object": "model",
            "owned_by": "ridgeline",
            "max_model_len": service.limits.context,
            "state": "asleep" if self.sleep.level else "awake",
        }
        return [
            {"id": served.name, "created": served.created, "root": served.root, "parent": None, **shared},
            *(
                {"id": card.name, "created": card.created, "root": card.root, "parent": served.name, **shared}
                for card in self.adapters
            ),
        ]

    def card(self, name: str) -> dict[str, Any]:
        """A model by its name. Raises Unavailable and ModelNotFound."""
        card = self.service().card.of(name)
        card.check(name)
        return next(entry for entry in self.cards() if entry["id"] == card.name)

    def render(self) -> bytes:
        """All metrics in the text format of Prometheus."""
        state = "asleep" if self.sleep.level else "awake"
        states = self._states({self.metrics.model_name: state}, ("awake", "asleep"))
        adapters = self.adapters.render(self.metrics.model_name)
        return self.metrics.render() + states.encode() + adapters.encode()

    @staticmethod
    def _states(states: Mapping[str, str], known: Sequence[str]) -> str:
        """The gauge of each model's state."""
        samples = [
            (labelled({"model_name": name, "state": state}), float(state == now))
            for name, now in states.items()
            for state in known
        ]
        return gauge(f"{PREFIX}:model_state", "1 for the state that a model is in.", samples)

    def idle_for(self, minutes: float) -> bool:
        """Whether no request has used the engine for some minutes. 0 minutes: never."""
        return self._service is not None and not self.client.open_choices and self.sleep.idle_for(minutes)

    def tick(self) -> None:
        """Called once a second: update the live figures."""
        self.metrics.live.tick()

    async def sleep_when_idle(self) -> None:
        """Called once a second. Sends the engine to sleep if no request has used it for long enough."""
        if self.draining or not self.idle_for(self.config.idle_sleep_minutes):
            return
        try:
            await self.sleep.sleep(wait_s=0.0)
        except RidgelineError as error:
            log.warning("The model does not go to sleep: %s", error.message)
            self.sleep.used += 60 * self.config.idle_sleep_minutes  # not again at once

    @property
    def starting(self) -> bool:
        return not self.draining and (self._service is None or self.client.failure is not None)

    @property
    def trouble(self) -> str | None:
        """Why a router should send no requests here, or None."""
        if self.draining:
            return "the server is shutting down"
        if self._lost:
            return f"the engine is being restarted, because it was lost: {self._lost}"
        if (trouble := self.client.trouble) is not None:
            return trouble.rstrip(".")
        return None if self._service is not None else "the service is starting"
