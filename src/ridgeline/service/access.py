"""What the checks of every request need, in a server and in a router: who may call, how large a body may be, and the drain."""

from __future__ import annotations

import asyncio

from ridgeline.core.config import ServiceConfig
from ridgeline.service.bodies import Bodies
from ridgeline.service.hosts import Hosts
from ridgeline.service.keys.keyring import Keyring
from ridgeline.service.origins import Origins
from ridgeline.service.trace import make_tracing


class Access:
    """The base of a server's state. It drains when the server stops."""

    def __init__(self, config: ServiceConfig) -> None:
        self.config = config
        self.prefix = config.root_path.rstrip("/")
        """Path prefix of every address that clients use."""
        self.draining = False
        self.active = 0
        """Requests being answered."""
        self.origins = Origins.parse(config.allowed_origins)
        self.bodies = Bodies(int(config.max_body_mb * (1 << 20)))
        self.hosts = Hosts.parse(config.allowed_hosts, config.host)
        self.keys = Keyring(config)
        self.tracing = make_tracing(config)
        self._hurry = False

    def hurry(self) -> None:
        """End a drain at once."""
        self._hurry = True

    async def drain(self) -> None:
        """Refuse new requests and wait up to drain_s for running ones."""
        self.draining = True
        deadline = asyncio.get_running_loop().time() + self.config.drain_s
        while self.active and not self._hurry and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
