"""The prompts that a server was sent, as a stream of events for routers: `GET /admin/prompts`.

A router predicts which prefixes a server has cached from the prompts that were sent there. It does not see those of other routers,
nor those from before its own start. So the server tells: each prompt is an event with a number and the hashes of its chunks, which
are those of the router's index (`prefix_index.py`), so that nobody needs a tokenizer. What the cache evicts is not told: the router
knows its size, and predicts that as well as it could be told (docs/log/2026-11-28-cache-events.md).

The log keeps the last `MAX_CHUNKS` chunks. A follower names the last event that it has. If the log has dropped the next one, or the
cache was cleared since, the follower gets the event `cleared` and then all that the log has.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple

from ridgeline.service.fleet.demand import read_demand

MAX_CHUNKS = 1 << 16
"""Chunks that the log keeps: of 8 million tokens, 4 MB."""
KEEP_S = 600.0
"""Seconds after the last follower in which prompts are still hashed, so that a router that starts again finds them."""
SILENCE_S = 5.0
"""Seconds without an event after which a comment is sent, so that both ends notice a lost connection."""
LOOK_S = 0.5
_CHUNK_BYTES = 8


class PromptEvent(NamedTuple):
    """chunks: None: the cache was cleared, or events are lost: forget what came before."""

    id: str
    chunks: Sequence[int] | None

    def encode(self) -> bytes:
        """As a server-sent event."""
        kind, data = ("cleared", "") if self.chunks is None else ("prompt", pack(self.chunks))
        return f"id: {self.id}\nevent: {kind}\ndata: {data}\n\n".encode()


class PromptLog:
    """The log of one server. Every method runs in the event loop, except `read`."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, Sequence[int]]] = deque()
        self._held = self._last = 0
        """Chunks in the log, and the number of the last event."""
        self._begin_anew()
        self._followers = 0
        self._followed = -KEEP_S
        """When the last follower left."""
        self._changed = asyncio.Event()

    def _begin_anew(self) -> None:
        self._epoch = uuid.uuid4().hex[:16]
        """Changes when the cache is cleared."""

    @property
    def followed(self) -> bool:
        return self._followers > 0 or time.monotonic() - self._followed < KEEP_S

    def read(self, headers: Mapping[str, str], body: Any) -> Sequence[int]:
        """The chunks of a request's prompt; none while nobody follows."""
        return read_demand(headers, body).demand.chunks if self.followed else ()

    def add(self, chunks: Sequence[int]) -> None:
        """The engine gets a prompt."""
        if not chunks:
            return
        self._last += 1
        self._entries.append((self._last, chunks))
        self._held += len(chunks)
        while self._held > MAX_CHUNKS and len(self._entries) > 1:
            self._held -= len(self._entries.popleft()[1])
        self._wake()

    def clear(self) -> None:
        """The engine's cache was cleared."""
        self._entries.clear()
        self._held = 0
        self._begin_anew()
        self._wake()

    def since(self, event_id: str) -> list[PromptEvent]:
        """What follows an event; "" for a follower that has none."""
        epoch, _, number = event_id.partition("-")
        known = int(number) if number.isdecimal() else 0
        first = self._entries[0][0] if self._entries else self._last + 1
        events = []
        if event_id and (epoch != self._epoch or known < first - 1 or known > self._last):
            known = first - 1
            events = [PromptEvent(self._name(known), None)]
        begin = max(0, known + 1 - first)
        return events + [PromptEvent(self._name(n), chunks) for n, chunks in list(self._entries)[begin:]]

    async def follow(self, event_id: str, silence_s: float) -> AsyncGenerator[list[PromptEvent], None]:
        """The events after one, as they come; an empty list after silence_s without any."""
        self._followers += 1
        try:
            while True:
                changed, events = self._changed, self.since(event_id)
                if events:
                    event_id = events[-1].id
                    yield events
                    continue
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(silence_s):
                        await changed.wait()
                        continue
                yield []
        finally:
            self._followers -= 1
            self._followed = time.monotonic()

    def _name(self, number: int) -> str:
        return f"{self._epoch}-{number}"

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def pack(chunks: Sequence[int]) -> str:
    return b"".join(chunk.to_bytes(_CHUNK_BYTES, "big") for chunk in chunks).hex()


def unpack(text: str) -> tuple[int, ...]:
    """Raises ValueError."""
    data = bytes.fromhex(text)
    if len(data) % _CHUNK_BYTES:
        raise ValueError("a chunk has 8 bytes")
    return tuple(int.from_bytes(data[at : at + _CHUNK_BYTES], "big") for at in range(0, len(data), _CHUNK_BYTES))
