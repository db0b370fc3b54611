"""Runs a fleet behind its router until it is stopped, with the routes and signals that manage it."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict

from aiohttp import web

from ridgeline.core.errors import RidgelineError
from ridgeline.service.fleet.app import MORE_SERIES
from ridgeline.service.fleet.file import FleetFile
from ridgeline.service.fleet.fleet import Fleet
from ridgeline.service.fleet.launcher import Launcher
from ridgeline.service.fleet.server import routing
from ridgeline.service.routes import json_response
from ridgeline.service.server import run_until, stop_signals

MANAGER = web.AppKey("manager", list)
"""The fleet, once it exists."""
ROUTES = web.RouteTableDef()

log = logging.getLogger(__name__)


@ROUTES.post("/admin/restart")
async def restart(request: web.Request) -> web.Response:
    """Replace every replica, one after the other, without a failed request. Answers when all are replaced."""
    fleet = _fleet(request)
    await asyncio.shield(asyncio.ensure_future(fleet.restart()))
    return json_response({"replicas": sorted(fleet.members)})


@ROUTES.get("/admin/decisions")
async def decisions(request: web.Request) -> web.Response:
    """The last decisions of the autoscaler with their inputs, the latest first."""
    return json_response({"object": "list", "data": [asdict(item) for item in reversed(_fleet(request).decisions)]})


def _fleet(request: web.Request) -> Fleet:
    fleet: Fleet = request.app[MANAGER][0]
    return fleet


def extension(manager: list[Fleet]) -> Callable[[web.Application], None]:
    """Adds the fleet's routes and metrics to a router. manager: gets the fleet once it exists."""

    def extend(app: web.Application) -> None:
        app[MANAGER] = manager
        app[MORE_SERIES] = lambda: manager[0].render()
        app.router.add_routes(ROUTES)

    return extend


async def run_fleet(
    file: FleetFile, launcher: Launcher, listeners: Sequence[socket.socket], say: Callable[[str], None]
) -> None:
    """Run until SIGTERM or SIGINT; SIGHUP replaces the replicas one after the other. say: prints what happens.

    Raises RidgelineError if the first replicas do not start.
    """
    manager: list[Fleet] = []
    async with routing(file.service, file.router, listeners, extension(manager)) as server:
        stopped = stop_signals(server.access)
        try:
            async with Fleet(file, launcher, server.balancer, say) as fleet:
                manager.append(fleet)
                restarts: set[asyncio.Task[None]] = set()

                def renew() -> None:
                    task = asyncio.ensure_future(_restart(fleet, say))
                    restarts.add(task)
                    task.add_done_callback(restarts.discard)

                asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, renew)
                say(f"listening on {server.url}; requests wait until a replica is ready")
                await run_until(stopped, _work(fleet, file))
                await server.access.drain()
                for task in restarts:
                    task.cancel()
        except RidgelineError:
            server.access.hurry()
            raise


async def _work(fleet: Fleet, file: FleetFile) -> None:
    first = file.fleet.replicas
    if file.scaling is not None:
        least, most = file.scaling.bounds(off_peak=False)
        first = min(max(first, least), most)
    await fleet.scale(first)
    scaling = asyncio.ensure_future(fleet.autoscale())
    try:
        await fleet.failed
    finally:
        scaling.cancel()


async def _restart(fleet: Fleet, say: Callable[[str], None]) -> None:
    try:
        await fleet.restart()
        say("all replicas are replaced")
    except RidgelineError as error:
        say(f"the restart has stopped: {error.message}")
