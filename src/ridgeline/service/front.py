"""What stands behind the app: nothing while the engine loads, then the service, then the reason it is going away."""

from __future__ import annotations

import asyncio

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import EngineFailed, Unavailable
from ridgeline.metrics import Metrics
from ridgeline.service.origins import Origins
from ridgeline.service.state import Service
from ridgeline.wire.client import EngineClient


class Front:
    """The one thing of the service that changes: it opens when the engine serves, and drains when the server ends."""

    def __init__(self, config: ServiceConfig, client: EngineClient, metrics: Metrics) -> None:
        self.config = config
        self.client = client
        self.metrics = metrics
        self.draining = False
        self.active = 0
        """Requests being answered."""
        self.origins = Origins.parse(config.allowed_origins)
        self._hurry = False
        self._service: Service | None = None

    def open(self, service: Service) -> None:
        self._service = service

    def service(self) -> Service:
        """The service. Raises Unavailable while loading or draining, EngineFailed when the engine has ended."""
        if self.client.failure is not None:
            raise EngineFailed(f"The engine has ended: {self.client.failure}")
        if self.draining:
            raise Unavailable("The server is shutting down: send the request to another replica.")
        if self._service is None:
            raise Unavailable(f"The server is not ready: {self.client.trouble or 'the engine is loading'}.")
        return self._service

    @property
    def trouble(self) -> str | None:
        """Why a router should send nothing here, or None."""
        if self.draining:
            return "the server is shutting down"
        if (trouble := self.client.trouble) is not None:
            return trouble.rstrip(".")
        return None if self._service is not None else "the service is starting"

    def hurry(self) -> None:
        """End a drain at once."""
        self._hurry = True

    async def drain(self) -> None:
        """Refuse what is new; wait up to drain_s for what runs."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + self.config.drain_s
        while self.active and not self._hurry and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
