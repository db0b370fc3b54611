"""Starts engine processes and connects to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import Resolved
from ridgeline.core.ticket import NO_POOLS, Pools
from ridgeline.wire.client import EngineClient, EngineTimeouts
from ridgeline.wire.config import encode_config
from ridgeline.wire.messages import StepStats

_READ_LIMIT = 1 << 22
"""Bytes that the stream reader buffers before the engine's socket blocks."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine: its process and its client."""

    process: subprocess.Popen[bytes]
    client: EngineClient

    async def stop(self, patience_s: float = 10.0) -> None:
        """Close the pipe, so that the engine exits; kill it if it does not within patience_s."""
        await self.client.close()
        try:
            await asyncio.to_thread(self.process.wait, patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)

    async def kill(self) -> None:
        """Kill the process and close its client."""
        self.process.kill()
        await self.stop()


class Begun(NamedTuple):
    """A started engine process without a client, and the server's end of its pipe. The engine exits when the pipe is closed."""

    process: subprocess.Popen[bytes]
    pipe: socket.socket
    pools: Pools = NO_POOLS


def begin(model: ModelConfig, engine: EngineConfig, pools: Pools = NO_POOLS) -> Begun:
    """Start `python -m ridgeline.engine` and send it its configuration. It inherits standard output and error, and the memory files
    of pools."""
    server_end, engine_end = socket.socketpair()
    with engine_end:
        command = [sys.executable, "-m", "ridgeline.engine", str(engine_end.fileno())]
        process = subprocess.Popen(
            command,
            pass_fds=[engine_end.fileno(), *pools.descriptors],
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    # The client detects the exit and reports the reason.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        server_end.sendall(encode_config(model, engine, pools))
    return Begun(process, server_end, pools)


def check_engines(config: ServiceConfig) -> None:
    """Refuse numbers of engines that do not hold. Raises ConfigError that names the option and the remedy."""
    for name, other in (("prefill_engines", "decode_engines"), ("decode_engines", "prefill_engines")):
        if getattr(config, name) and not getattr(config, other):
            option, missing = (f"--{word.replace('_', '-')}" for word in (name, other))
            reason = f"an engine for prompts needs one for the other tokens: add {missing} 1, or leave it out"
            raise ConfigError(f"{option} is {getattr(config, name)} without {missing}: {reason}.", param=name)


def begin_engines(resolved: Resolved) -> list[Begun]:
    """Start the engine processes of a configuration, without clients."""
    config = resolved.service
    if not config.prefill_engines:
        return [begin(resolved.model, resolved.engine)]
    count = config.prefill_engines + config.decode_engines
    descriptors = tuple(os.memfd_create(f"ridgeline-pool-{number}") for number in range(count))
    engine = sharing_cores(resolved.engine, count)
    return [begin(resolved.model, engine, Pools(descriptors, number)) for number in range(count)]


def sharing_cores(engine: EngineConfig, count: int) -> EngineConfig:
    """The configuration of one of `count` engines: they share the cores."""
    cores = len(os.sched_getaffinity(0))
    return engine if engine.threads is not None else replace(engine, threads=max(1, cores // count))


async def connect(
    begun: Begun, on_step: Callable[[StepStats], None] | None = None, timeouts: EngineTimeouts = EngineTimeouts()
) -> EngineProcess:
    """Connect a client to a started engine."""
    process, pipe, _ = begun
    reader, writer = await asyncio.open_connection(sock=pipe, limit=_READ_LIMIT)

    async def last_words() -> str:
        return _describe(await asyncio.to_thread(process.wait))

    client = EngineClient(reader, writer, on_step=on_step, last_words=last_words, timeouts=timeouts)
    return EngineProcess(process, client)


async def launch(
    model: ModelConfig,
    engine: EngineConfig,
    on_step: Callable[[StepStats], None] | None = None,
    timeouts: EngineTimeouts = EngineTimeouts(),
    pools: Pools = NO_POOLS,
) -> EngineProcess:
    """Start an engine and connect to it. If this is cancelled or fails, the process is killed."""
    begun = begin(model, engine, pools)
    try:
        return await connect(begun, on_step, timeouts)
    except BaseException:
        begun.process.kill()
        begun.pipe.close()
        begun.process.wait()
        raise


def _describe(status: int) -> str:
    if status >= 0:
        return f"the engine process has ended with status {status}; its output says why."
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = str(-status)
    hint = " (the system kills a process that needs more memory than there is)" if name == "SIGKILL" else ""
    return f"the engine process was ended by {name}{hint}."
