"""The state behind the application: the service while an engine serves, otherwise the reason why there is none."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import RidgelineError, Unavailable
from ridgeline.metrics import Metrics
from ridgeline.service.access import Access
from ridgeline.service.sleep import Sleep, sleep_when_idle
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
        self.sleep = Sleep(config, lambda: self.client)
        self._lost = ""
        """Why the last engine was lost, while it is being replaced."""
        self._service: Service | None = None

    def open(self, service: Service) -> None:
        """Answer requests with a service whose engine is ready."""
        if self.client is not service.client or self._lost:
            self.sleep.restarted()
        self.client = service.client
        self._service = service
        self._lost = ""

    def close(self, lost: str) -> None:
        """Answer with 503 until the next `open`. lost: why the engine is being restarted."""
        self._service = None
        self._lost = lost

    def service(self) -> Service:
        """The service. Raises Unavailable while the engine loads or restarts, and while the server drains."""
        if self.draining:
            raise Unavailable("The server is shutting down: send the request to another replica.")
        if self._service is None or self.client.failure is not None:
            raise Unavailable(f"The server is not ready: {self.trouble}.")
        return self._service

    def check(self) -> None:
        """Raise Unavailable if no request can be answered now."""
        self.service()

    @asynccontextmanager
    async def serving(self, model: str | None) -> AsyncIterator[Service]:
        """The service for a request for a model, whose engine is awake until the end. Raises Unavailable and ModelNotFound."""
        self.check()
        async with self.sleep.awake():
            yield self.service()

    def of(self, model: str | None) -> Front:
        """The front of a model. Raises Unavailable and ModelNotFound."""
        self.service().card.check(model)
        return self

    def forget_answers(self) -> None:
        """The weights have changed: drop what the service has kept of old ones."""
        service = self.service()
        service.pin_book.reset()
        service.answers.clear()

    async def sleep_when_idle(self) -> None:
        """Called once a second. Sends the engine to sleep if no request has used it for long enough."""
        if self._service is None or self.draining:
            return
        try:
            if await sleep_when_idle(self.sleep, self.config.idle_sleep_minutes):
                self._service.pin_book.reset()
        except RidgelineError as error:
            log.warning("The model does not go to sleep: %s", error.message)
            self.sleep.used += 60 * self.config.idle_sleep_minutes  # not again at once

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
