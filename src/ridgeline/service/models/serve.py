"""Run a server with several models until a signal ends it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from ridgeline.core.config import ServiceConfig
from ridgeline.service.address import Address
from ridgeline.service.app import make_app
from ridgeline.service.batches.settings import read_impact
from ridgeline.service.models.file import ModelEntry
from ridgeline.service.models.front import ModelsFront
from ridgeline.service.models.model import Model
from ridgeline.service.models.rows import ModelRows
from ridgeline.service.server import listen, stop_signals


async def serve_models(
    config: ServiceConfig,
    entries: Sequence[tuple[ModelEntry, Path]],
    listeners: Sequence[socket.socket],
    announce: Callable[[str], None],
) -> None:
    """Run until SIGTERM or SIGINT. entries: each model with its folder. announce: called with the address once it listens."""
    front = ModelsFront(config, [Model(entry, folder) for entry, folder in entries])
    rows = ModelRows(front, read_impact(config.batch_impact))
    stopped = stop_signals(front)
    address = Address.read(config)
    runner = await listen(make_app(front, rows), address, listeners)
    try:
        announce(address.url(runner.addresses[0][1]))
        await stopped.wait()
    finally:
        await front.drain()
        await runner.cleanup()
        await front.end()
        await asyncio.to_thread(front.tracing.close)
