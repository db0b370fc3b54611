"""Pages of a GPU in host memory that other processes read, where GPUs cannot read each other.

Pages are copied to slots of a memory file while the engine goes on. The stamp of a slot (kv.peer_pools) goes up by one when a copy
begins, by one when it has ended, and by two when the page is released; tickets have the stamp of the end. So a reader sees whether
it has to wait (one less), may read (equal), or is too late (anything else).
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

from ridgeline.kv.copies import Event
from ridgeline.ops.peer_memory import Run

log = logging.getLogger(__name__)

HOST_BYTES = 4 << 30
"""Most host memory for pages of one engine. It is taken when it is used first."""
PIECE_BYTES = 256 << 20
"""Bytes that are pinned at a time."""
CHUNK_BYTES = 32 << 20
"""Bytes that are copied before readers may begin with them."""
_POLL_S = 0.0002


class Memory(Protocol):
    """ops.peer_memory.PeerMemory."""

    def bind(self) -> None: ...

    def pin(self, address: int, size: int) -> None: ...

    def copy(self, runs: Sequence[Run]) -> Event: ...


class HostPages:
    """Slots for pages of an engine. stamps: of the slots. address: of slot 0 in this process."""

    def __init__(self, stamps: memoryview[int], address: int, page_bytes: int, memory: Memory) -> None:
        self._stamps, self._address, self._page_bytes, self._memory = stamps, address, page_bytes, memory
        self._free = list(range(len(stamps)))
        """A heap: low slots first, so that little memory is used."""
        self._slots: dict[int, tuple[int, int]] = {}
        """Page -> its slot, and the stamp of the end of its copy."""
        self._pinned = 0
        """Slots whose memory is pinned."""
        self._lock = threading.Lock()
        """Guards the stamps."""
        self._copies: SimpleQueue[tuple[Event, Sequence[tuple[int, int]]]] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def export(self, pages: Sequence[int], pool: int) -> list[tuple[int, int]]:
        """Begin to copy pages of the pool at an address. Returns slots and stamps; none if there is no room. A page that is held
        already is not copied again."""
        new = [page for page in dict.fromkeys(pages) if page not in self._slots]
        if len(new) > len(self._free):
            return []
        for page in new:
            slot = heapq.heappop(self._free)
            with self._lock:
                self._stamps[slot] = _plus(self._stamps[slot], 1)
                self._slots[page] = slot, _plus(self._stamps[slot], 1)
        try:
            self._copy(new, pool)
        except RuntimeError:
            log.exception("pages are not handed over")
            self.release(new)
            return []
        return [self._slots[page] for page in pages]

    def release(self, pages: Sequence[int]) -> None:
        """The slots of pages are free."""
        for page in pages:
            slot, _ = self._slots.pop(page, (-1, 0))
            if slot >= 0:
                with self._lock:
                    self._stamps[slot] = _plus(self._stamps[slot], 2)
                heapq.heappush(self._free, slot)

    def _copy(self, pages: Sequence[int], pool: int) -> None:
        size = self._page_bytes
        self._pin(max((self._slots[page][0] for page in pages), default=-1) + 1)
        count = max(1, CHUNK_BYTES // size)
        for first in range(0, len(pages), count):
            chunk = pages[first : first + count]
            ends = [self._slots[page] for page in chunk]
            runs = [
                Run(self._address + slot * size, pool + page * size, size)
                for page, (slot, _) in zip(chunk, ends, strict=True)
            ]
            self._copies.put((self._memory.copy(runs), ends))
        if self._thread is None:
            self._thread = threading.Thread(target=self._publish, name="kv-publish", daemon=True)
            self._thread.start()

    def _pin(self, slots: int) -> None:
        """Pin the memory of the first slots, in pieces. Copies work without, at a fraction of the rate."""
        piece = max(1, PIECE_BYTES // self._page_bytes)
        while self._pinned < slots:
            count = min(piece, len(self._stamps) - self._pinned)
            try:
                self._memory.pin(self._address + self._pinned * self._page_bytes, count * self._page_bytes)
            except RuntimeError as error:
                log.warning("Memory for pages of other engines is not pinned (%s): copies are slow.", error)
            self._pinned += count

    def _publish(self) -> None:
        """Set the stamps of copies that have ended. Runs in a thread."""
        self._memory.bind()
        while True:
            event, ends = self._copies.get()
            while not event.query():
                time.sleep(_POLL_S)
            with self._lock:
                for slot, end in ends:
                    if _plus(self._stamps[slot], 1) == end:  # otherwise released meanwhile
                        self._stamps[slot] = end


def is_pending(stamp: int, check: int) -> bool:
    """Whether the copy of a slot has begun and not ended. check: the stamp of its end."""
    return _plus(stamp, 1) == check


def _plus(stamp: int, number: int) -> int:
    return (stamp + number) & 0xFFFF_FFFF
