"""An event loop whose time is virtual: a run of minutes takes milliseconds, and its times are exact."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Coroutine
from typing import Any, TypeVar

from ridgeline.bench.stream import Reply
from ridgeline.core.workload import RequestSpec

T = TypeVar("T")


class VirtualLoop(asyncio.SelectorEventLoop):
    """Jumps to the next timer whenever there is nothing to do."""

    def __init__(self) -> None:
        self._virtual = 0.0
        super().__init__()

    def time(self) -> float:
        return self._virtual

    def _run_once(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0].cancelled():
            heapq.heappop(timers)._scheduled = False
        if not self._ready and timers:  # type: ignore[attr-defined]
            self._virtual = max(self._virtual, timers[0].when())
        super()._run_once()  # type: ignore[misc]


class LoopClock:
    """The running loop's time."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def until(self, when: float) -> None:
        await asyncio.sleep(max(0.0, when - self.now()))


def run(work: Coroutine[Any, Any, T]) -> T:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


class FakeServer:
    """A sender without a network: first token after ttft, then one per itl; `slots` requests at once."""

    def __init__(self, ttft: float = 0.1, itl: float = 0.01, slots: int = 1 << 30) -> None:
        self.ttft, self.itl = ttft, itl
        self.gate = asyncio.Semaphore(slots)
        self.under_way = self.most = 0
        self.heard: list[bytes] = []

    async def send(self, data: bytes) -> Reply:
        clock = LoopClock()
        reply = Reply(lambda: None)
        reply.sent = clock.now()
        self.heard.append(data)
        async with self.gate:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
            await asyncio.sleep(self.ttft)
            for token in range(int(data)):
                if token:
                    await asyncio.sleep(self.itl)
                reply.times.append(clock.now())
                reply.tokens.append(token + 1)
                reply.events.append(token + 1)
                reply.characters.append(4 * (token + 1))
            self.under_way -= 1
        reply.output_tokens = reply.event_count = int(data)
        reply.character_count = 4 * reply.output_tokens
        reply.prompt_tokens = 5
        reply.finish, reply.ended, reply.status = "length", clock.now(), 200
        return reply


class FakeWriter:
    """Writes only how many tokens are wanted."""

    def write(self, ask: RequestSpec, index: int, name: str, run_id: str = "") -> tuple[bytes, int]:
        return str(ask.output).encode(), 0
