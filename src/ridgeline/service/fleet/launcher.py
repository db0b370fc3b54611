"""Where replicas run. A launcher starts a server and says when it has ended; everything else is the fleet's."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import re
import signal
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import RidgelineError
from ridgeline.core.resolve import ENVIRONMENT, STANDARD_INPUT
from ridgeline.service.fleet.options import SHARED

_LISTENING = re.compile(r"listening on (https?://[^\s;]+)")
_KEPT_LINES = 20
_SHOWN = ("WARNING", "ERROR", "CRITICAL", "ridgeline:")
_LAST_LINE = "curl "
"""Start of the last line that `ridgeline serve` prints when it is ready."""
_PR_SET_PDEATHSIG = 1


class Running(Protocol):
    """A replica that was started. url: its address; it may not be ready yet."""

    @property
    def url(self) -> str: ...

    async def wait_ended(self) -> str:
        """Wait for its end; returns how it ended."""

    async def stop(self, patience_s: float) -> None:
        """Let it finish its requests and end; kill it after patience_s. May be called repeatedly."""


class Launcher(Protocol):
    async def start(self, name: str, place: int) -> Running:
        """Start a replica; returns when its address is known. place: number of its GPUs' entry. Raises RidgelineError."""

    async def close(self) -> None:
        """Release what the launcher holds. All replicas have ended."""


class LocalReplica:
    """A `ridgeline serve` process of this machine."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, show: Callable[[str], None]) -> None:
        self.url = ""
        self.process = process
        self._name, self._show = name, show
        self._tail: deque[str] = deque(maxlen=_KEPT_LINES)
        self._listening = asyncio.Event()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def wait_listening(self) -> None:
        """Raises RidgelineError with its last lines if it ends before."""
        listening = asyncio.ensure_future(self._listening.wait())
        try:
            await asyncio.wait({listening, self._reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()
        if not self._listening.is_set():
            raise RidgelineError(f"The replica {self._name} did not start: {await self.wait_ended()}.")

    async def wait_ended(self) -> str:
        await asyncio.shield(self._reading)
        status = await self.process.wait()
        how = f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
        last = self._tail[-1] if self._tail else ""
        return f"its process has ended with {how}" + (f" ({last})" if last and status > 0 else "")

    async def stop(self, patience_s: float) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), patience_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self.process.wait()

    async def _read(self) -> None:
        """Show its output: warnings, and everything once it is ready. It must be read to its end, otherwise the process blocks."""
        assert self.process.stderr is not None
        ready = False
        async for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip()
            if text:
                self._tail.append(text)
            if ready or text.startswith(_SHOWN):
                self._show(f"[{self._name}] {text}")
            ready = ready or text.startswith(_LAST_LINE)
            if (match := _LISTENING.search(text)) and not self.url:
                self.url = match[1]
                self._listening.set()


class LocalLauncher:
    """Starts replicas as processes of this machine. They end when this process does.

    serve: options of each. gpus: as in `FleetFile`. keys: options with keys, handed to them in the environment.
    """

    def __init__(
        self, serve: Mapping[str, Any], gpus: Sequence[str], keys: Mapping[str, str], show: Callable[[str], None]
    ) -> None:
        self._gpus, self._keys, self._show = gpus, keys, show
        self._serve = dict(serve)

    async def start(self, name: str, place: int) -> LocalReplica:
        replica = await self.spawn(name, place)
        try:
            await replica.wait_listening()
        except BaseException:
            await replica.stop(0.0)
            raise
        return replica

    async def spawn(self, name: str, place: int) -> LocalReplica:
        """Start the process. Returns at once; a rank without service listens on no address."""
        with open(
            os.memfd_create("ridgeline-replica"), "w+b"
        ) as options:  # no file is left when this process is killed
            options.write(json.dumps(self.options(place)).encode())
            options.flush()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "ridgeline", "serve", "--config", str(STANDARD_INPUT)),
                stdin=options,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=self.environment(place),
                start_new_session=True,  # Ctrl-C ends the fleet, which drains its replicas
                preexec_fn=_end_with_parent,
            )
        return LocalReplica(name, process, self._show)

    async def close(self) -> None:
        """Nothing is held."""

    def options(self, place: int) -> dict[str, Any]:
        """Those of a replica. A folder of KV pages has one server, so each place has its own below --kv-disk."""
        folder = self._serve.get("kv_disk")
        return self._serve | ({"kv_disk": str(Path(folder) / f"place-{place}")} if folder else {})

    def environment(self, place: int) -> dict[str, str]:
        """That of a replica: this process's, without options of the router, which the replica would read as its own."""
        routers = {ENVIRONMENT + name.upper() for name in SHARED}
        environment = {name: value for name, value in os.environ.items() if name not in routers}
        environment |= {ENVIRONMENT + name.upper(): key for name, key in self._keys.items()}
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[place]
        return environment


def known_keys(service: ServiceConfig) -> dict[str, str]:
    """The keys of a router, which its replicas have, too."""
    keys = {"api_key": service.api_key, "admin_api_key": service.admin_api_key}
    return {name: key for name, key in keys.items() if key is not None}


def _end_with_parent() -> None:
    """Runs in the new process: the kernel ends it when the fleet's process is killed (prctl(2))."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
