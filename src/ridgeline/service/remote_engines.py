"""Engines of other hosts (`ridgeline serve MODEL --join HOST:PORT`): they connect to the service and look like its own processes.

The connection of an engine is the pipe of its process (wire.messages), after a handshake (core.handshake). The service sends the
configuration; the host adds its model folder, its address and the secret for pages, which is never sent. When an engine ends, its
host connects again, so that the service can replace it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.core.handshake import SILENCE_S, PeerError, connect, derive, greet, limit, receive_bytes
from ridgeline.core.resolve import Resolved
from ridgeline.core.ticket import Pools
from ridgeline.core.version import VERSION
from ridgeline.service.launch import READ_LIMIT
from ridgeline.wire.client import EngineClient
from ridgeline.wire.config import EngineOrder, encode_config, receive_config
from ridgeline.wire.messages import StepStats

TOPIC = b"engine " + VERSION.encode()
JOIN_S = 600.0
"""Seconds for which a host looks for its service."""
_CLOCK = struct.Struct("<d")
_RETRY_S = 0.5
_GREETERS = 32
"""Connections that are greeted at a time. Threads of their own: strangers that say nothing must not delay requests."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RemoteEngine:
    """An engine of another host (supervisor.RunningEngine): it ends with its connection. shift: its monotonic clock minus ours."""

    client: EngineClient
    shift: float

    async def stop(self) -> None:
        await self.client.close()

    async def kill(self) -> None:
        await self.client.close()


class RemoteEngines:
    """The engines of other hosts that have joined. Without --remote-engines it listens to nobody."""

    def __init__(self, config: ServiceConfig) -> None:
        self._secret = (config.engine_secret or "").encode()
        self._joined: asyncio.Queue[socket.socket] = asyncio.Queue()
        self._listener = _listen(config.engine_address) if config.remote_engines else None
        loop = asyncio.get_running_loop()
        self._tasks = set[asyncio.Task[None]]()
        self._greeters = ThreadPoolExecutor(_GREETERS, thread_name_prefix="greeter")
        if self._listener is not None:
            self._tasks.add(loop.create_task(self._accept(self._listener)))

    async def take(
        self, model: ModelConfig, engine: EngineConfig, number: int, on_step: Callable[[StepStats], None]
    ) -> RemoteEngine:
        """Wait for an engine and give it the configuration and its number."""
        log.warning("Engine %d is awaited from another host.", number)
        while True:
            sock = await self._joined.get()
            try:
                shift = await asyncio.to_thread(_order, sock, encode_config(model, engine, Pools((), number)))
            except (PeerError, OSError) as error:
                log.warning("An engine of another host has left: %s.", error)
                sock.close()
                continue
            reader, writer = await asyncio.open_connection(sock=sock, limit=READ_LIMIT)
            return RemoteEngine(EngineClient(reader, writer, on_step=on_step), shift)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._greeters.shutdown(wait=False, cancel_futures=True)
        if self._listener is not None:
            self._listener.close()
        while not self._joined.empty():
            self._joined.get_nowait().close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # no file descriptor is free, or the other end has left
                log.warning("A connection to --engine-address cannot be accepted: %s.", error)
                await asyncio.sleep(_RETRY_S)
                continue
            task = loop.create_task(self._greet(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _greet(self, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._greeters, greet, sock, self._secret, TOPIC)
        except (PeerError, OSError) as error:
            log.warning("A connection to --engine-address is closed: %s.", error)
            sock.close()
        else:
            self._joined.put_nowait(sock)


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        family = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, int(port)), family=family, backlog=64)
    except OSError as error:
        reason = f"({error.strerror}): give an address of this host and a free port"
        raise ConfigError(f"--engine-address {address} cannot be used {reason}.", param="engine_address") from error
    listener.setblocking(False)
    return listener


def _order(sock: socket.socket, config: bytes) -> float:
    """Send the configuration. Returns how far the other host's monotonic clock is ahead."""
    sock.settimeout(None)
    sock.sendall(config)
    (there,) = _CLOCK.unpack(receive_bytes(sock, _CLOCK.size, time.monotonic() + SILENCE_S))
    limit(sock, send_s=0.0)
    sock.setblocking(False)
    return float(there) - time.monotonic()


# --- the other host -----------------------------------------------------------------------------------------------------


def run_engine_host(resolved: Resolved, tell: Callable[[str], None]) -> int:
    """Run an engine for a service of another host, one process after the other, until SIGTERM or SIGINT; returns the exit status.
    Raises EngineFailed if no service is found for JOIN_S."""
    stopped: list[bool] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.append(True))
    address, deadline = resolved.service.join, time.monotonic() + JOIN_S
    tell(f"an engine of this host joins {address}")
    while not stopped:
        try:
            process = _join(resolved, stopped)
        except (PeerError, OSError, ConfigError) as error:
            if time.monotonic() > deadline:
                raise EngineFailed(f"No service at {address} takes this engine ({error}): check --join.") from error
            time.sleep(_RETRY_S)
            continue
        while process.poll() is None and not stopped:
            time.sleep(_RETRY_S)
        process.kill()
        process.wait()
        deadline = time.monotonic() + JOIN_S
    return 0


def _join(resolved: Resolved, stopped: list[bool]) -> subprocess.Popen[bytes]:
    """Wait until the service needs an engine, and start it."""
    secret = resolved.service.engine_secret or ""
    with connect(resolved.service.join, secret.encode(), TOPIC) as sock:
        while not stopped and not _has_data(sock):
            pass
        order = receive_config(sock)
        sock.sendall(_CLOCK.pack(time.monotonic()))
        limit(sock, send_s=0.0)  # the engine inherits the socket
        here = Pools((), order.pools.local, sock.getsockname()[0], derive(secret, "pages"))
        return _start(sock, own_order(order, resolved, here))


def own_order(order: EngineOrder, resolved: Resolved, pools: Pools) -> bytes:
    """The configuration of the service with the model folder and the threads of this host."""
    model = replace(order.model, model=resolved.model.model, revision=resolved.model.revision)
    return encode_config(model, replace(order.engine, threads=resolved.engine.threads), pools)


def _has_data(sock: socket.socket) -> bool:
    sock.settimeout(_RETRY_S)
    with suppress(TimeoutError):
        sock.recv(1, socket.MSG_PEEK)
        limit(sock, receive_s=SILENCE_S)
        return True
    return False


def _start(sock: socket.socket, config: bytes) -> subprocess.Popen[bytes]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-m", "ridgeline.engine", str(sock.fileno()), str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[sock.fileno(), theirs.fileno()], stdin=subprocess.DEVNULL)
        ours.sendall(config)
    return process
