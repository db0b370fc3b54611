"""State of a Ridgeline server during a run, stored with the run for a later diagnosis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from ridgeline.bench.probe import fetch
from ridgeline.bench.target import Client
from ridgeline.planner.situation import RECORD

DIAGNOSIS_KEYS = ("facts", "ceilings", "now", "figures", "latencies", "late")
"""Keys of GET /dashboard/data that the diagnosis reads (planner.diagnose.observe)."""


class ServerState:
    """Reads the server's state in the middle of a run (its load) and at the end (figures over the run).

    Use `watch` as the run's progress callback; it calls `progress` in turn.
    """

    def __init__(self, client: Client, label: str, total: int, progress: Callable[[int], None]) -> None:
        """label: what the ids of the run's requests begin with. total: requests of the run."""
        self._client, self._label = client, label
        self._middle, self._progress = max(1, total // 2), progress
        self.done = 0
        """Requests that have ended."""
        self._asking: asyncio.Task[dict[str, Any] | None] | None = None

    def watch(self, done: int) -> None:
        self.done = done
        if self._asking is None and done >= self._middle:
            self._asking = asyncio.get_running_loop().create_task(self._ask())
        self._progress(done)

    async def read(self) -> dict[str, Any] | None:
        """Return the state after the run. None if the server is not a Ridgeline server."""
        middle = await self._asking if self._asking is not None else None
        end = await self._ask() if middle is not None else None
        return end and {**end, "now": (middle or end)["now"], "requests": await self._requests()}

    async def _requests(self) -> list[dict[str, Any]]:
        """The server's records of the run's requests, up to the 1,000 newest."""
        reply = await fetch(self._client, "/requests?limit=1000")
        rows = msgspec.json.decode(reply.text, type=dict)["data"] if reply.status == 200 else []
        ended = (row for row in rows if str(row.get("request_id", "")).startswith(self._label))
        return [{name: row[name] for name in RECORD if name in row} for row in ended]  # older versions record less

    async def _ask(self) -> dict[str, Any] | None:
        reply = await fetch(self._client, "/dashboard/data")
        try:
            data = msgspec.json.decode(reply.text, type=dict) if reply.status == 200 else {}
        except msgspec.DecodeError:
            return None
        return {name: data[name] for name in DIAGNOSIS_KEYS} if data.keys() >= set(DIAGNOSIS_KEYS) else None
