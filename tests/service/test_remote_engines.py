"""Where engines of other hosts connect: strangers that say nothing, and a host that is out of file descriptors."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager

from ridgeline.core.config import ServiceConfig
from ridgeline.core.handshake import connect
from ridgeline.service.remote_engines import TOPIC, RemoteEngines

SECRET = "the secret"


@asynccontextmanager
async def listening() -> AsyncIterator[tuple[RemoteEngines, str]]:
    """A service that engines may join, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    engines = RemoteEngines(ServiceConfig(remote_engines="prefill", engine_address=address, engine_secret=SECRET))
    try:
        yield engines, address
    finally:
        await engines.close()


async def test_strangers_that_say_nothing_delay_nobody() -> None:
    async with listening() as (_, address):
        with ExitStack() as stack:
            host, _, port = address.partition(":")
            for _ in range(2 * (os.cpu_count() or 1) + 8):  # more than asyncio.to_thread has threads
                stack.enter_context(socket.create_connection((host, int(port))))
            await asyncio.sleep(0.1)
            began = time.monotonic()
            await asyncio.to_thread(time.sleep, 0)  # as tokenization of a long prompt
            assert time.monotonic() - began < 1


async def test_engines_join_after_a_time_without_file_descriptors() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with listening() as (_, address):
        host, _, port = address.partition(":")
        with socket.socket() as early:
            early.setblocking(False)
            with ExitStack() as stack:
                stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
                resource.setrlimit(resource.RLIMIT_NOFILE, (early.fileno() + 1, hard))
                early.connect_ex((host, int(port)))
                await asyncio.sleep(0.1)
        (await asyncio.to_thread(connect, address, SECRET.encode(), TOPIC)).close()
