"""Starts the engine process and connects to it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.wire.client import EngineClient, Patience
from ridgeline.wire.config import encode_config
from ridgeline.wire.messages import StepStats

_READ_LIMIT = 1 << 22
"""Bytes the stream reader holds before it makes the engine's socket wait."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine: its process and the client that speaks to it."""

    process: subprocess.Popen[bytes]
    client: EngineClient

    async def stop(self, patience_s: float = 10.0) -> None:
        """Close the pipe, so that the engine ends by itself; kill it when it does not."""
        await self.client.close()
        try:
            await asyncio.to_thread(self.process.wait, patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)

    async def kill(self) -> None:
        """End the process at once, whatever it does, and close its client."""
        self.process.kill()
        await self.stop()


class Begun(NamedTuple):
    """An engine's process that nobody speaks to yet, and our end of its pipe. It ends when that is closed."""

    process: subprocess.Popen[bytes]
    pipe: socket.socket


def begin(model: ModelConfig, engine: EngineConfig) -> Begun:
    """Start `python -m ridgeline.engine` and hand it its configuration. Its output goes where ours goes."""
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "ridgeline.engine", str(theirs.fileno())]
        process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, start_new_session=True
        )
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client sees the end and says why
        ours.sendall(encode_config(model, engine))
    return Begun(process, ours)


async def connect(
    begun: Begun, on_step: Callable[[StepStats], None] | None = None, patience: Patience = Patience()
) -> EngineProcess:
    """Speak to an engine that was begun."""
    process, pipe = begun
    reader, writer = await asyncio.open_connection(sock=pipe, limit=_READ_LIMIT)

    async def last_words() -> str:
        return _describe(await asyncio.to_thread(process.wait))

    client = EngineClient(reader, writer, on_step=on_step, last_words=last_words, patience=patience)
    return EngineProcess(process, client)


async def launch(
    model: ModelConfig,
    engine: EngineConfig,
    on_step: Callable[[StepStats], None] | None = None,
    patience: Patience = Patience(),
) -> EngineProcess:
    """Begin an engine and speak to it. Whoever cancels this leaves no process behind."""
    begun = begin(model, engine)
    try:
        return await connect(begun, on_step, patience)
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
