"""The state behind the application: the service while an engine serves, otherwise the reason why there is none."""

from __future__ import annotations

import asyncio

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import Unavailable
from ridgeline.metrics import Metrics
from ridgeline.service.bodies import Bodies
from ridgeline.service.hosts import Hosts
from ridgeline.service.keys.keyring import Keyring
from ridgeline.service.origins import Origins
from ridgeline.service.state import Service
from ridgeline.wire.client import Client


class Front:
    """The only mutable value of the service. It opens when an engine serves, closes when that engine is lost, and drains when the
    server stops.

    client: of the current engine, or of the last one until the next is started.
    """

    def __init__(self, config: ServiceConfig, client: Client, metrics: Metrics) -> None:
        self.config = config
        self.client = client
        self.metrics = metrics
        self.prefix = config.root_path.rstrip("/")
        """Path prefix of every address that clients use."""
        self.draining = False
        self.active = 0
        """Requests being answered."""
        self.origins = Origins.parse(config.allowed_origins)
        self.bodies = Bodies(int(config.max_body_mb * (1 << 20)))
        self.hosts = Hosts.parse(config.allowed_hosts, config.host)
        self.keys = Keyring(config)
        self._hurry = False
        self._lost = ""
        """Why the last engine was lost, while it is being replaced."""
        self._service: Service | None = None

    def open(self, service: Service) -> None:
        """Answer requests with a service whose engine is ready."""
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

    def hurry(self) -> None:
        """End a drain at once."""
        self._hurry = True

    async def drain(self) -> None:
        """Refuse new requests and wait up to drain_s for running ones."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + self.config.drain_s
        while self.active and not self._hurry and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
