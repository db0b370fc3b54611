"""Hand-over of pages between engines: what one keeps for others, and what others keep for it.

The pool of an engine is a memory file without a name (memfd_create). The service makes one for each engine and every engine
inherits all of them. Nothing is copied to export a page: its block gets a reference, and other engines read the file. The system
frees the memory when the last process that holds the file has ended, also after SIGKILL: there is no name that could stay.

A page is read with `pread` and not through a mapping. If its engine has ended and the service has emptied the file, the read is
short; a mapping would end the reading process (SIGBUS). A page that was reused meanwhile has another checksum. Keys of blocks cover
the fingerprint of model and KV format, so that pages of another model are never asked for.

The roles of a hand-over and the word ticket: DistServe (arXiv:2401.09670, section 4.3) pulls, as here; Splitwise
(arXiv:2311.18677, section 4.2) pushes layer by layer.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple, Protocol

from ridgeline.core.events import TierCounts
from ridgeline.core.spec import KvLayout
from ridgeline.core.ticket import Pools, Ticket
from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.prefix import PrefixIndex, Source

HAND_OVER = "hand-over"
"""Origin of transfers from other engines. A page is below 0: minus the number of a `Place`."""
DEADLINE_S = 30.0
"""Seconds after which pages are no longer kept for another engine, and a ticket is no longer used."""


class Place(NamedTuple):
    """A page in the pool of another engine, and its check, by which its transport sees that the page has changed."""

    engine: int
    page: int
    check: int


class Transport(Protocol):
    """Moves pages between pools."""

    def export(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        """For each of the own pages the number under which others find it, and its check; both travel in the ticket. The pages
        keep their content until they are released. None at all if there is no room for them."""

    def release(self, pages: Sequence[int]) -> None:
        """The content of exported pages may change from now on. Called once for each export that had room."""

    def pull(self, place: Place, target: memoryview) -> bool:
        """Copy a page of another engine. False: it is lost or has changed. Any thread may call this."""


class SharedPools:
    """Transport between processes of one host, over memory files."""

    def __init__(self, pools: Pools, page_bytes: int) -> None:
        self._descriptors, self._page_bytes = pools.descriptors, page_bytes
        self._pool = memoryview(b"")

    def register(self, pool: memoryview) -> None:
        """The bytes of the own pool; other engines read them from now on."""
        self._pool = pool

    def export(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        size = self._page_bytes
        return [(page, zlib.crc32(self._pool[page * size : (page + 1) * size])) for page in pages]

    def release(self, pages: Sequence[int]) -> None:
        """Nothing to do: a page that has changed has another checksum."""

    def pull(self, place: Place, target: memoryview) -> bool:
        if not 0 <= place.engine < len(self._descriptors):
            return False
        length = os.preadv(self._descriptors[place.engine], [target], place.page * self._page_bytes)
        return length == self._page_bytes and zlib.crc32(target) == place.check


class _Export(NamedTuple):
    """Blocks that are kept for another engine. until: on the monotonic clock, in seconds."""

    blocks: list[int]
    until: float


class HandOver(Source):
    """Both sides of the hand-over of an engine. The scheduler's thread calls everything but `read`.

    pool, index: of the engine's own blocks; set after the leases exist.
    """

    origin = HAND_OVER

    def __init__(
        self,
        layout: KvLayout,
        transport: Transport,
        local: int,
        *,
        deadline_s: float = DEADLINE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = TierCounts(HAND_OVER, page_bytes=layout.page_bytes)
        """blocks: kept now. stored: exported. loaded: pulled. dropped: not pulled within the deadline, or did not arrive."""
        self._groups, self._local, self._transport = len(layout.groups), local, transport
        self._deadline_s, self._clock = deadline_s, clock
        self._exports: dict[str, _Export] = {}
        self._places: dict[int, Place] = {}
        self._numbers = count(1)
        self._known: dict[bytes, list[int]] = {}
        """Key of a block -> minus the number of the place of each group, of the newest ticket."""
        self._expected: dict[str, tuple[float, dict[bytes, list[int]]]] = {}
        """Name -> deadline, and the entries of its ticket."""
        self._pulls: dict[int, int] = {}
        """Ticket number of a transfer -> pages that it pulls."""

    # --- the engine that computed a prompt --------------------------------------------------------------------------

    def export(self, name: str, chain: Sequence[bytes], index: PrefixIndex, pool: BlockPool) -> Ticket:
        """Keep the blocks of a prompt for another engine until `release(name)` or the deadline. chain: of its full blocks. The
        ticket is empty if the blocks are not in the index, or if the transport has no room for them."""
        length, tables = index.match(chain, len(chain))
        blocks = [block for table in tables for block in table if block]
        exported = self._transport.export(blocks)
        if not exported:
            return Ticket(self._local, (), (), ())
        for block in blocks:
            pool.share(block)
        self._exports[name] = _Export(blocks, self._clock() + self._deadline_s)
        self.counts.stored += len(blocks)
        place_of = dict(zip(blocks, exported, strict=True)) | {0: (0, 0)}
        rows = [[place_of[block] for block in row] for row in zip(*tables, strict=True)]
        pages, checks = (tuple(tuple(place[part] for place in row) for row in rows) for part in (0, 1))
        return Ticket(self._local, tuple(chain[:length]), pages, checks)

    def release(self, name: str, index: PrefixIndex, pool: BlockPool) -> None:
        """The blocks of an export were pulled or are not needed any more. Unknown names are ignored."""
        if (export := self._exports.pop(name, None)) is None:
            return
        self._transport.release(export.blocks)
        for block in reversed(export.blocks):
            pool.release(block, keep=index.holds(block))

    def expire(self, index: PrefixIndex, pool: BlockPool) -> None:
        """Release exports and forget tickets that are past their deadline."""
        now = self._clock()
        for name, export in list(self._exports.items()):
            if export.until > now:
                break  # in order of their deadlines
            self.counts.dropped += len(export.blocks)
            self.release(name, index, pool)
        for name, (until, _) in list(self._expected.items()):
            if until > now:
                break
            self.forget(name)

    # --- the engine that goes on ------------------------------------------------------------------------------------

    def expect(self, name: str, ticket: Ticket) -> None:
        """Another engine keeps the pages of a prompt, until `forget(name)` or the deadline."""
        self.forget(name)
        entries = {
            key: [self._place(ticket.engine, *part) for part in zip(pages, checks, strict=True)]
            for key, pages, checks in zip(ticket.keys, ticket.pages, ticket.checks, strict=True)
        }
        self._expected[name] = self._clock() + self._deadline_s, entries
        self._known |= entries

    def _place(self, engine: int, page: int, check: int) -> int:
        if not page:
            return 0
        number = next(self._numbers)
        self._places[number] = Place(engine, page, check)
        return -number

    def forget(self, name: str) -> None:
        """The ticket of a request is no longer used. Unknown names are ignored."""
        _, entries = self._expected.pop(name, (0.0, {}))
        for key, numbers in entries.items():
            if self._known.get(key) is numbers:
                del self._known[key]
            for number in numbers:
                self._places.pop(-number, None)

    def find(self, chain: Sequence[bytes], first: int) -> list[list[int]]:
        if not self._known:
            return []
        nothing = [0] * self._groups
        return [self._known.get(key, nothing) for key in chain[first:]]

    def begins(self, ticket: int, places: Sequence[int]) -> None:
        self._pulls[ticket] = len(places)

    def ended(self, ticket: int, arrived: bool) -> None:
        pages = self._pulls.pop(ticket, 0)
        self.counts.loaded += arrived * pages
        self.counts.dropped += (not arrived) * pages

    def places(self, numbers: Sequence[int]) -> list[Place]:
        """The places of a transfer's pages; none if one is not known any more."""
        places = [self._places[-number] for number in numbers if -number in self._places]
        return places if len(places) == len(numbers) else []

    def read(self, number: int, target: memoryview) -> bool:
        """Copy the page of a place. False: it is not known any more, or did not arrive. Any thread may call this."""
        place = self._places.get(number)
        return place is not None and self._transport.pull(place, target)

    def close(self) -> None:
        """Nothing is pulled any more."""
        self._places.clear()

    def tiers(self) -> list[TierCounts]:
        self.counts.blocks = sum(len(export.blocks) for export in self._exports.values())
        return [self.counts]
