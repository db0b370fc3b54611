"""Starts engine processes and connects to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from ridgeline.core.config import EngineConfig, ModelConfig, ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.handshake import derive
from ridgeline.core.resolve import Resolved
from ridgeline.core.ticket import NO_POOLS, Pools
from ridgeline.wire.client import SILENCE_S, EngineClient
from ridgeline.wire.config import encode_config
from ridgeline.wire.messages import StepStats

READ_LIMIT = 1 << 22
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
    """Refuse options of engines that do not hold. Raises ConfigError that names the option and the remedy."""
    for name, other in (("prefill_engines", "decode_engines"), ("decode_engines", "prefill_engines")):
        if getattr(config, name) and not getattr(config, other):
            option, missing = (f"--{word.replace('_', '-')}" for word in (name, other))
            reason = f"an engine for prompts needs one for the other tokens: add {missing} 1, or leave it out"
            raise ConfigError(f"{option} is {getattr(config, name)} without {missing}: {reason}.", param=name)
    if config.hand_over == "tcp" and not config.prefill_engines:
        raise ConfigError("--hand-over tcp needs --prefill-engines and --decode-engines.", param="hand_over")
    needs = {"engine_address": "its HOST:PORT for engines of other hosts", "engine_secret": "a secret of all hosts"}
    if config.models and (config.join or config.remote_engines):
        raise ConfigError(
            "--models runs engines of this host only: leave --remote-engines and --join out.", param="models"
        )
    if config.join and not config.engine_secret:
        raise ConfigError("--join needs --engine-secret, that of the service.", param="engine_secret")
    for name, what in needs.items() if config.remote_engines else ():
        if not getattr(config, name):
            raise ConfigError(f"--remote-engines needs --{name.replace('_', '-')}, {what}.", param=name)
    if config.engine_address and not config.remote_engines:
        raise ConfigError(
            "--engine-address needs --remote-engines: say which engines join, prefill or decode.",
            param="remote_engines",
        )
    if config.remote_engines and config.hand_over != "tcp":
        raise ConfigError(
            "--remote-engines needs --hand-over tcp: other hosts share no memory with this one.", param="hand_over"
        )
    for name in ("engine_address", "join"):
        host, _, port = getattr(config, name).rpartition(":")
        if getattr(config, name) and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ConfigError(
                f"--{name.replace('_', '-')} is {getattr(config, name)!r}: give HOST:PORT, as in 10.0.0.1:7000.",
                param=name,
            )


def begin_engines(resolved: Resolved) -> list[Begun]:
    """Start the engine processes of a configuration, without clients."""
    config = resolved.service
    if not config.prefill_engines:
        return [begin(resolved.model, resolved.engine)]
    local = local_engines(config)
    engine = sharing_cores(resolved.engine, len(local))
    return [begin(resolved.model, engine, pools) for pools in make_pools(config, local)]


def local_engines(config: ServiceConfig) -> range:
    """Numbers of the engines of this host. Those for prompts come first."""
    first = config.prefill_engines if config.remote_engines == "prefill" else 0
    return range(first, config.prefill_engines + (config.decode_engines if config.remote_engines != "decode" else 0))


def make_pools(config: ServiceConfig, local: range) -> list[Pools]:
    """How each engine of this host hands over."""
    if config.hand_over == "tcp":
        host = config.engine_address.rpartition(":")[0].strip("[]") or "127.0.0.1"
        secret = derive(config.engine_secret or secrets.token_hex(32), "pages")
        return [Pools((), number, host, secret, len(local)) for number in local]
    descriptors = tuple(os.memfd_create(f"ridgeline-pool-{number}") for number in local)
    return [Pools(descriptors, number) for number in local]


def sharing_cores(engine: EngineConfig, count: int) -> EngineConfig:
    """The configuration of one of `count` engines: they share the cores."""
    cores = len(os.sched_getaffinity(0))
    return engine if engine.threads is not None else replace(engine, threads=max(1, cores // count))


async def connect(
    begun: Begun, on_step: Callable[[StepStats], None] | None = None, silence_s: float = SILENCE_S
) -> EngineProcess:
    """Connect a client to a started engine."""
    process, pipe, _ = begun
    reader, writer = await asyncio.open_connection(sock=pipe, limit=READ_LIMIT)

    async def last_words() -> str:
        return _describe(await asyncio.to_thread(process.wait))

    client = EngineClient(reader, writer, on_step=on_step, last_words=last_words, silence_s=silence_s)
    return EngineProcess(process, client)


async def launch(
    model: ModelConfig,
    engine: EngineConfig,
    on_step: Callable[[StepStats], None] | None = None,
    silence_s: float = SILENCE_S,
    pools: Pools = NO_POOLS,
) -> EngineProcess:
    """Start an engine and connect to it. If this is cancelled or fails, the process is killed."""
    begun = begin(model, engine, pools)
    try:
        return await connect(begun, on_step, silence_s)
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
