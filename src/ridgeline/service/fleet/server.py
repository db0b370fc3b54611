"""Runs a router: start, serve, drain, stop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from aiohttp import web

from ridgeline.core.config import ServiceConfig
from ridgeline.service.access import Access
from ridgeline.service.address import Address
from ridgeline.service.fleet.app import make_router_app
from ridgeline.service.fleet.balancer import Balancer
from ridgeline.service.fleet.options import RouterConfig
from ridgeline.service.server import listen, stop_signals


class RouterServer:
    """A router that listens. url: its address."""

    def __init__(self, access: Access, balancer: Balancer, url: str) -> None:
        self.access, self.balancer, self.url = access, balancer, url


@asynccontextmanager
async def routing(
    config: ServiceConfig,
    router: RouterConfig,
    listeners: Sequence[socket.socket],
    extend: Callable[[web.Application], None] = lambda app: None,
) -> AsyncIterator[RouterServer]:
    """A router within the block; at its end it drains. listeners: bound sockets (`listen.bind`). extend: adds routes."""
    access, address = Access(config), Address.read(config)
    async with Balancer(router, config.max_queue, config.admin_api_key or config.api_key) as balancer:
        app = make_router_app(access, balancer)
        extend(app)
        runner = await listen(app, address, listeners)
        try:
            yield RouterServer(access, balancer, address.url(runner.addresses[0][1]))
        finally:
            await access.drain()
            await runner.cleanup()
            await asyncio.to_thread(access.tracing.close)


async def serve_router(
    config: ServiceConfig,
    router: RouterConfig,
    replicas: Sequence[str],
    listeners: Sequence[socket.socket],
    announce: Callable[[str], None],
) -> None:
    """Route to replicas with known addresses until SIGTERM or SIGINT. announce: called with the router's address.

    Raises ConfigError if a replica requires a key and the router has none.
    """
    async with routing(config, router, listeners) as server:
        stopped = stop_signals(server.access)
        for number, url in enumerate(replicas):
            server.balancer.add(f"replica-{number}", url)
        await server.balancer.check_keys()
        announce(server.url)
        await stopped.wait()
