"""Servers of our own, started for a measurement: in processes of their own, so that they do not share the client's."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ridgeline.core.errors import RidgelineError

_READY = re.compile(rb"ready.* (http://\S+)/v1")
START_S = 900.0
_STOP_S = 60.0
_KEPT_LINES = 20


@asynccontextmanager
async def serving(flags: Sequence[str]) -> AsyncIterator[str]:
    """`ridgeline serve FLAGS` on a free port of this machine: its address once it answers; ends with the block.

    Raises RidgelineError with the server's last words when it does not come up.
    """
    command = [sys.executable, "-m", "ridgeline", "serve", *flags, "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    reading = None
    try:
        async with asyncio.timeout(START_S):
            url = await _address(process, command)
        # Whatever it says later must be read, or it waits for a reader.
        reading = asyncio.ensure_future(_drain(process))
        yield url
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.wait() if reading is None else reading, _STOP_S)
        except TimeoutError:
            process.kill()
        await process.wait()


async def _address(process: asyncio.subprocess.Process, command: Sequence[str]) -> str:
    assert process.stderr is not None
    said: list[str] = []
    async for line in process.stderr:
        said.append(line.decode(errors="replace").rstrip())
        if found := _READY.search(line):
            return found[1].decode()
    words = "\n".join(said[-_KEPT_LINES:])
    raise RidgelineError(f"`{' '.join(command[2:])}` did not start:\n{words}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    async for _ in process.stderr:
        pass
    await process.wait()
