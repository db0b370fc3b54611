"""Starts the engine process and connects to it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.wire.client import EngineClient
from ridgeline.wire.config import encode_config
from ridgeline.wire.messages import StepStats

_READ_LIMIT = 1 << 22
"""Bytes the stream reader holds before it makes the engine's socket wait."""


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A running engine: its process and the client that speaks to it."""

    process: asyncio.subprocess.Process
    client: EngineClient

    async def stop(self, patience_s: float = 10.0) -> None:
        """Close the pipe, so that the engine ends by itself; kill it when it does not."""
        await self.client.close()
        try:
            await asyncio.wait_for(self.process.wait(), patience_s)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()


async def launch(
    model: ModelConfig, engine: EngineConfig, on_step: Callable[[StepStats], None] | None = None
) -> EngineProcess:
    """Start `python -m ridgeline.engine` and hand it its configuration. Its output goes where ours goes."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ridgeline.engine",
            str(theirs.fileno()),
            pass_fds=[theirs.fileno()],
            stdin=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the client sees the end and says why
        ours.sendall(encode_config(model, engine))
    reader, writer = await asyncio.open_connection(sock=ours, limit=_READ_LIMIT)

    async def last_words() -> str:
        return _describe(await process.wait())

    return EngineProcess(process, EngineClient(reader, writer, on_step=on_step, last_words=last_words))


def _describe(status: int) -> str:
    if status >= 0:
        return f"the engine process has ended with status {status}; its output says why."
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = str(-status)
    hint = " (the system kills a process that needs more memory than there is)" if name == "SIGKILL" else ""
    return f"the engine process was ended by {name}{hint}."
