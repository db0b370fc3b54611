"""A server in a thread of this process, for commands that need one when the user names none."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import uvloop

from ridgeline.core.resolve import Resolved
from ridgeline.metrics import Metrics
from ridgeline.models.hub import resolve_model
from ridgeline.service.launch import launch
from ridgeline.service.listen import bind
from ridgeline.service.server import Server, run_until
from ridgeline.service.supervisor import Supervisor


def private(resolved: Resolved) -> Resolved:
    """Restrict a configuration to this machine: plain HTTP on a free loopback port, without API keys and proxy path."""
    disabled: dict[str, Any] = {
        "ssl_certfile": None,
        "ssl_keyfile": None,
        "ssl_keyfile_password": None,
        "root_path": "",
        "api_key": None,
        "admin_api_key": None,
        "api_keys": "",
    }
    return replace(resolved, service=replace(resolved.service, host="127.0.0.1", port=0, **disabled))


class Hosted:
    """Context manager that runs a server: `with Hosted(private(resolved), progress) as url`.

    Uses the same service and engine process as `ridgeline serve`.
    """

    def __init__(self, resolved: Resolved, progress: Callable[[str, int, int], None]) -> None:
        self._resolved = resolved
        self._progress = progress
        self._folder = resolve_model(resolved.model)
        self._start_ended = threading.Event()
        self._stop = asyncio.Event()
        self._url = ""
        self._error: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="hosted-server", daemon=True)

    def __enter__(self) -> str:
        """Wait until the server answers; returns its address. Re-raises the error of a failed start."""
        self._thread.start()
        self._start_ended.wait()
        if self._error is not None:
            raise self._error
        return self._url

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            uvloop.run(self._serve())
        except Exception as error:  # __enter__ raises it in the calling thread
            self._error = error
        finally:
            self._start_ended.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        resolved, folder = self._resolved, self._folder
        name = resolved.model.model or folder.name
        metrics = Metrics(resolved.service.served_model_name or name)
        start = partial(launch, resolved.model, resolved.engine, metrics.on_step)
        process = await start()
        supervisor = Supervisor(process, start, resolved.service)
        server = Server(resolved.service, supervisor, metrics)
        try:
            await server.start(bind(resolved.service.host, resolved.service.port))
            opening = asyncio.ensure_future(server.open(folder, name))
            while not (await asyncio.wait({opening}, timeout=0.05))[0]:
                if (loading := process.client.loading) is not None:
                    self._progress(loading.stage, loading.done, loading.total)
            opening.result()
            self._url = server.url
            self._start_ended.set()
            await run_until(self._stop, server.keep_open())
        finally:
            await server.stop()
            await supervisor.stop()
