"""What a Ridgeline server said of itself during a run, kept with the run so that it can be diagnosed later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from ridgeline.bench.probe import fetch
from ridgeline.bench.target import Client

KEPT = ("facts", "ceilings", "now", "figures", "latencies", "late")
"""Parts of GET /dashboard/data that a diagnosis reads (planner.diagnose.observe)."""


class ServerState:
    """Asks in the middle of a run, when requests wait and run if ever, and at its end for figures that cover it all.

    progress: told of every request that ended, as `watch` is, which stands in for it.
    """

    def __init__(self, client: Client, total: int, progress: Callable[[int], None]) -> None:
        self._client, self._middle, self._progress = client, max(1, total // 2), progress
        self._asking: asyncio.Task[dict[str, Any] | None] | None = None

    def watch(self, done: int) -> None:
        if self._asking is None and done >= self._middle:
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        self._progress(done)

    async def read(self) -> dict[str, Any] | None:
        """The state, after the run; None where the server is none of ours."""
        middle = await self._asking if self._asking is not None else None
        end = await self._ask() if middle is not None else None
        return end and {**end, "now": (middle or end)["now"]}

    async def _ask(self) -> dict[str, Any] | None:
        reply = await fetch(self._client, "/dashboard/data")
        try:
            found = msgspec.json.decode(reply.text, type=dict) if reply.status == 200 else {}
        except msgspec.DecodeError:
            return None
        return {name: found[name] for name in KEPT} if found.keys() >= set(KEPT) else None
