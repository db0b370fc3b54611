"""A `ridgeline serve` process for a measurement. It is a process of its own, so that it does not slow down the client."""

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
    """Run `ridgeline serve FLAGS` on a free port within the block and yield its address when it is ready.

    Raises:
        RidgelineError: The server does not start. The message contains its last log lines.
    """
    command = [sys.executable, "-m", "ridgeline", "serve", *flags, "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    reading = None
    try:
        async with asyncio.timeout(START_S):
            url = await _address(process, command)
        # Later log lines must be read, otherwise the server blocks on a full pipe.
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
    lines: list[str] = []
    async for line in process.stderr:
        lines.append(line.decode(errors="replace").rstrip())
        if match := _READY.search(line):
            return match[1].decode()
    last_lines = "\n".join(lines[-_KEPT_LINES:])
    raise RidgelineError(f"`{' '.join(command[2:])}` did not start:\n{last_lines}")


async def _drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    async for _ in process.stderr:
        pass
    await process.wait()
