"""Offload: which blocks of cached prefixes lie in host memory and on disk. Pure Python; `kv.copies` moves the bytes.

The pool evicts a cached block; its page is copied to a slot of host memory before the block is overwritten, and from there to a
file (kv.disk). A block stays in both until it is the least recently used there, or older than the time to live. Slots have
reference counts like blocks of the pool: a slot that a transfer reads, a store fills or a file is written from is not reused.

Ownership: the scheduler's thread calls everything here. Slot 0 is never used, so that 0 can mean "lacking".
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ridgeline.core.cost import CostModel, step_work
from ridgeline.core.events import TierCounts
from ridgeline.core.plan import Transfer
from ridgeline.core.spec import KvLayout
from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.prefix import PrefixIndex, Source

OFFLOAD = "offload"
"""Origin of transfers from the tiers. A page above 0 is a slot of host memory, one below 0 the number of a file."""


class Part(NamedTuple):
    """What a page holds: the block of one group at the end of a prefix."""

    key: bytes
    group: int


class Files(Protocol):
    """The disk tier (kv.disk.Disk). Numbers of files are above 0."""

    counts: TierCounts

    def find(self, part: Part) -> int:
        """The number of the file of a part; 0: there is none."""

    def hold(self, numbers: Sequence[int]) -> None:
        """Keep the files until they are released."""

    def release(self, numbers: Sequence[int]) -> None:
        """The files were read."""

    def write(self, part: Part, slot: int) -> bool:
        """Write a slot of host memory to a file in the background. False: it is not written."""

    def written(self) -> Sequence[int]:
        """Slots whose writing has ended since the last call."""

    def clear(self) -> None:
        """Remove all files."""


Pays = Callable[[int, int, int, int], bool]
"""Whether to copy pays: first token, end, pages in host memory, pages on disk."""


@dataclass(frozen=True, slots=True)
class CopyCost:
    """Decides whether keys and values are copied or computed. page_bytes: of a block of one group. bytes_per_s, file_bytes_per_s:
    rates of copies from host memory and from files."""

    cost: CostModel
    page_bytes: int
    bytes_per_s: float
    file_bytes_per_s: float = math.inf

    def pays(self, start: int, end: int, in_memory: int, on_disk: int) -> bool:
        """Whether to copy pages from memory and files is faster than a prompt step with the tokens from `start` to `end`."""
        seconds = in_memory / self.bytes_per_s + on_disk / self.file_bytes_per_s
        return seconds * self.page_bytes < self.cost.step_s(step_work(self.cost.spec, [(start, end - start)], 0))


class Offload(Source):
    """Host memory of `slots` pages, and the files below it.

    pays: decides between copying and computing. ttl_s: seconds after which a page in host memory is dropped; 0: never. clock:
    seconds.
    """

    origin = OFFLOAD

    def __init__(
        self,
        layout: KvLayout,
        slots: int,
        pays: Pays,
        files: Files | None = None,
        *,
        ttl_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = TierCounts("host", page_bytes=layout.page_bytes)
        self.files = files
        self._index = PrefixIndex(layout.groups, layout.page_tokens)
        self._pool = BlockPool(slots, self._drop)
        self._pays, self._ttl_s, self._clock = pays, ttl_s, clock
        self._groups = len(layout.groups)
        self._reading: dict[int, list[int]] = {}
        """Ticket -> places that its transfer reads."""
        self._planned: dict[Part, tuple[int, int]] = {}
        """Part -> (block, slot) of the next plan's store."""
        self._storing: dict[int, dict[Part, int]] = {}
        """Ticket -> slots that its store fills."""
        self._cleared: set[int] = set()
        """Tickets of stores whose content is no longer wanted."""
        self._stored_at: dict[int, float] = {}

    # --- the way up -------------------------------------------------------------------------------------------------

    def find(self, chain: Sequence[bytes], first: int) -> list[list[int]]:
        return [[self._place(Part(key, group)) for group in range(self._groups)] for key in chain[first:]]

    def _place(self, part: Part) -> int:
        if slot := self._slot(part):
            if not self._ttl_s or self._clock() - self._stored_at[slot] < self._ttl_s:
                return slot
            if not self._pool.refs(slot):
                self._drop(slot)
                self._pool.forget(slot)
        return -self.files.find(part) if self.files is not None else 0

    def _slot(self, part: Part) -> int:
        entry = self._index.get(part.key)
        return entry[part.group] if entry else 0

    def pays(self, start: int, end: int, places: Sequence[int]) -> bool:
        in_memory = sum(place > 0 for place in places)
        return self._pays(start, end, in_memory, len(places) - in_memory)

    def begins(self, ticket: int, places: Sequence[int]) -> None:
        self._reading[ticket] = list(places)
        for place in places:
            if place > 0:
                self._pool.share(place)
        if self.files is not None:
            self.files.hold([-place for place in places if place < 0])

    def ended(self, ticket: int, arrived: bool) -> None:
        places = self._reading.pop(ticket, ())
        for place in places:
            if place > 0:
                self._release(place)
                self.counts.loaded += arrived
        if self.files is not None and places:
            on_disk = [-place for place in places if place < 0]
            self.files.release(on_disk)
            self.files.counts.loaded += arrived * len(on_disk)
        wanted = arrived and ticket not in self._cleared
        self._cleared.discard(ticket)
        for part, slot in self._storing.pop(ticket, {}).items():
            self._end_store(part, slot, wanted)

    # --- the way down -----------------------------------------------------------------------------------------------

    def evicted(self, key: bytes, group: int, block: int) -> None:
        self._take_written()
        part = Part(key, group)
        if slot := self._slot(part):
            self._pool.share(slot)  # used now: it becomes the last to be reused
            self._release(slot)
        elif part in self._planned or any(part in parts for parts in self._storing.values()):
            return
        elif self._pool.free:
            self._planned[part] = block, self._pool.take()
        else:
            self.counts.dropped += 1

    def stores(self, tickets: Iterator[int]) -> list[Transfer]:
        self._take_written()
        if not self._planned:
            return []
        ticket, planned = next(tickets), self._planned
        self._planned = {}
        # Blocks that follow each other go to slots that do: they are copied together, on the way back too.
        parts = sorted(planned, key=lambda part: planned[part][0])
        blocks = tuple(planned[part][0] for part in parts)
        slots = tuple(sorted(slot for _, slot in planned.values()))
        self._storing[ticket] = dict(zip(parts, slots, strict=True))
        return [Transfer(ticket, blocks, OFFLOAD, slots)]

    def _end_store(self, part: Part, slot: int, wanted: bool) -> None:
        """A store has ended. A file is written from its slot before that may be reused."""
        if not wanted:
            self.counts.dropped += 1
            self._pool.release(slot, keep=False)
            return
        self._index.insert(part.key, part.group, slot)
        self._stored_at[slot] = self._clock()
        self.counts.stored += 1
        if self.files is None or not self.files.write(part, slot):
            self._release(slot)

    def _take_written(self) -> None:
        for slot in self.files.written() if self.files is not None else ():
            self._release(slot)

    def _release(self, slot: int) -> None:
        self._pool.release(slot, keep=self._index.holds(slot))

    def _drop(self, slot: int) -> None:
        """The slot will be reused, or its time has passed."""
        self._index.evict(slot)
        self.counts.dropped += 1

    def clear(self) -> None:
        """Drop all prefixes, also those that are being stored."""
        for slot in self._index.clear():
            self._pool.forget(slot)
        for _, slot in self._planned.values():
            self._pool.release(slot, keep=False)
        self._planned.clear()
        self._cleared.update(self._storing)
        if self.files is not None:
            self.files.clear()

    # --- measures ---------------------------------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """Pages that can be stored now."""
        return self._pool.free

    @property
    def held(self) -> int:
        """Slots that are being copied or written to files."""
        self._take_written()
        return self._pool.used

    def tiers(self) -> list[TierCounts]:
        """The counts of each tier since the start."""
        self.counts.blocks = self._index.blocks
        return [self.counts] + ([] if self.files is None else [self.files.counts])

    def check(self) -> None:
        """Raise AssertionError if a slot is lost or doubled."""
        self._pool.check()
