"""The client of a server with several models before the first one is loaded."""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from ridgeline.core.errors import Unavailable
from ridgeline.wire.client import Client, Subscription
from ridgeline.wire.messages import Loading, StepStats, Submit, Up


class NoEngine(Client):
    """A client without an engine: it is healthy, and refuses all work."""

    max_unread = open_choices = 0

    def __init__(self) -> None:
        self.ready = asyncio.Event()

    @property
    def facts(self) -> dict[str, Any]:
        return {}

    @property
    def loading(self) -> Loading | None:
        return None

    @property
    def failure(self) -> str | None:
        return None

    @property
    def trouble(self) -> str | None:
        return None

    @property
    def stats(self) -> StepStats | None:
        return None

    @property
    def last_step(self) -> int:
        return -1

    async def wait_ready(self) -> dict[str, Any]:
        self._refuse()

    async def wait_lost(self) -> str:
        self._refuse()

    def submit(self, *requests: Submit) -> Subscription:
        self._refuse()

    async def control(self, order: str, timeout: float = 10.0, argument: str = "") -> dict[str, Any]:
        self._refuse()

    def send(self, message: Up) -> None: ...

    def forget(self, request_id: str) -> None: ...

    def end_all(self, message: str, reason: str) -> None: ...

    async def close(self) -> None: ...

    def _refuse(self) -> NoReturn:
        raise Unavailable("No model is loaded yet: a request to one loads it.")
