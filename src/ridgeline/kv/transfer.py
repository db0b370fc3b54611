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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count, takewhile
from typing import NamedTuple

from ridgeline.core.events import TierCounts
from ridgeline.core.spec import KvLayout
from ridgeline.core.ticket import Pools, Ticket
from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.prefix import PrefixIndex, Source

HAND_OVER = "hand-over"
"""Origin of transfers from other engines. A page is below 0: minus the number of a `Place`."""
DEADLINE_S = 30.0
"""Seconds after which pages are no longer kept for another engine, and a ticket is no longer used."""

FREE_SHARE = 0.25
"""Share of the blocks that must be free to keep blocks before the end of their prompt: other requests need them more."""


class Place(NamedTuple):
    """A page in the pool of another engine, and its check, by which its transport sees that the page has changed."""

    engine: int
    page: int
    check: int
    address: str = ""
    """Of the engine (Ticket.address)."""


class Transport:
    """Moves pages between pools: memory files (SharedPools), memory of GPUs (kv.peer_pools), TCP (kv.tcp_pools)."""

    address: str = ""
    """Of the own engine, for its tickets."""
    early: bool = False
    """Whether pages travel before their prompt is computed to its end."""

    def export(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        """For each of the own pages the number under which others find it, and its check; both travel in the ticket. The pages
        keep their content until they are released. None at all if there is no room for them."""
        raise NotImplementedError

    def release(self, pages: Sequence[int]) -> None:
        """The content of exported pages may change from now on. Called once for each export that had room."""

    def pull(self, place: Place, target: memoryview) -> bool:
        """Copy a page of another engine. False: it is lost or has changed. Any thread may call this."""
        raise NotImplementedError

    def fetch(self, places: Iterable[Place]) -> None:
        """Pages of other engines will be pulled. Those that were fetched before are not asked for again."""

    def drop(self, places: Iterable[Place]) -> None:
        """Pages that were fetched are not pulled any more."""

    def close(self) -> None:
        """Nothing is pulled any more, here or by others."""


class SharedPools(Transport):
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


@dataclass(slots=True)
class _Export:
    """Blocks that are kept for another engine, with number and check of each. rows: blocks of the prompt that were offered. until:
    on the monotonic clock, in seconds."""

    until: float
    places: dict[int, tuple[int, int]] = field(default_factory=dict)
    rows: int = 0


@dataclass(slots=True)
class _Expected:
    """What another engine keeps for a request. entries: of its whole ticket. fetched: places."""

    until: float
    entries: dict[bytes, list[int]] = field(default_factory=dict)
    fetched: list[Place] = field(default_factory=list)


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
        self._whole = [number for number, group in enumerate(layout.groups) if group.window is None]
        """Groups whose blocks are all needed by later tokens."""
        self._deadline_s, self._clock = deadline_s, clock
        self._exports: dict[str, _Export] = {}
        self._places: dict[int, Place] = {}
        self._numbers = count(1)
        self._known: dict[bytes, list[int]] = {}
        """Key of a block -> minus the number of the place of each group, of the newest ticket."""
        self._expected: dict[str, _Expected] = {}
        self._pulls: dict[int, tuple[int, list[Place]]] = {}
        """Ticket number of a transfer -> how many pages it pulls, and their places."""

    # --- the engine that computed a prompt --------------------------------------------------------------------------

    def offer(self, name: str, chain: Sequence[bytes], index: PrefixIndex, pool: BlockPool) -> Ticket | None:
        """Keep the blocks of a prompt that are computed since the last offer, while others are not. Blocks behind a window wait for
        `export`: most of them will not be needed. None: there are no new ones, few blocks are free, or the transport does not send
        them early."""
        export = self._exports.get(name) or _Export(0.0)
        first = export.rows
        if not (self._transport.early and self._whole and first < len(chain)) or pool.spare < pool.total * FREE_SHARE:
            return None
        rows = [(entry := index.get(key)) and [entry[group] for group in self._whole] for key in chain[first:]]
        rows = list(takewhile(lambda row: row and all(row), rows))
        if not rows or not self._keep(name, export, [block for row in rows for block in row], pool):
            return None
        export.rows += len(rows)
        tables = [[0] * len(rows) for _ in range(self._groups)]
        for group, table in zip(self._whole, zip(*rows, strict=True), strict=True):
            tables[group] = list(table)
        return self._ticket(export, chain[first : export.rows], tables)

    def export(self, name: str, chain: Sequence[bytes], index: PrefixIndex, pool: BlockPool) -> Ticket:
        """Keep the blocks of a prompt for another engine until `release(name)` or the deadline. chain: of its full blocks. The
        ticket is empty if the blocks are not in the index, or if the transport has no room for them."""
        length, tables = index.match(chain, len(chain))
        blocks = [block for table in tables for block in table if block]
        export = self._exports.get(name) or _Export(0.0)
        if not self._keep(name, export, [block for block in blocks if block not in export.places], pool):
            self.release(name, index, pool)
            return Ticket(self._local, (), (), ())
        return self._ticket(export, chain[:length], tables)

    def _keep(self, name: str, export: _Export, blocks: Sequence[int], pool: BlockPool) -> bool:
        """Add blocks to an export, whose deadline begins again. False: there are none, or no room for them."""
        exported = self._transport.export(blocks)
        if not exported and (blocks or not export.places):
            return False
        for block in blocks:
            pool.share(block)
        export.places.update(zip(blocks, exported, strict=True))
        export.until = self._clock() + self._deadline_s
        self._exports.pop(name, None)  # in order of their deadlines
        self._exports[name] = export
        self.counts.stored += len(blocks)
        return True

    def _ticket(self, export: _Export, keys: Sequence[bytes], tables: Sequence[Sequence[int]]) -> Ticket:
        """tables: for each group its blocks, one for each key."""
        place_of = export.places | {0: (0, 0)}
        rows = [[place_of[block] for block in row] for row in zip(*tables, strict=True)]
        pages, checks = (tuple(tuple(place[part] for place in row) for row in rows) for part in (0, 1))
        return Ticket(self._local, tuple(keys), pages, checks, self._transport.address)

    def release(self, name: str, index: PrefixIndex, pool: BlockPool) -> None:
        """The blocks of an export were pulled or are not needed any more. Unknown names are ignored."""
        if (export := self._exports.pop(name, None)) is None:
            return
        self._transport.release(list(export.places))
        for block in reversed(export.places):
            pool.release(block, keep=index.holds(block))

    def expire(self, index: PrefixIndex, pool: BlockPool) -> None:
        """Release exports and forget tickets that are past their deadline."""
        now = self._clock()
        for name, export in list(self._exports.items()):
            if export.until > now:
                break  # in order of their deadlines
            self.counts.dropped += len(export.places)
            self.release(name, index, pool)
        for name, expected in list(self._expected.items()):
            if expected.until > now:
                break
            self.forget(name)

    # --- the engine that goes on ------------------------------------------------------------------------------------

    def offered(self, name: str, ticket: Ticket, index: PrefixIndex) -> None:
        """Another engine keeps pages of a prompt of which it computes more: those that the index lacks may travel now."""
        expected = self._expected.pop(name, None) or _Expected(0.0)
        expected.until = self._clock() + self._deadline_s
        expected.fetched += self._fetch(ticket, index)
        self._expected[name] = expected

    def expect(self, name: str, ticket: Ticket, index: PrefixIndex) -> None:
        """Another engine keeps the pages of a prompt, until `forget(name)` or the deadline."""
        before = self._expected.pop(name, None) or _Expected(0.0)
        fetched = self._fetch(ticket, index)
        entries = {
            key: [self._place(ticket, *part) for part in zip(pages, checks, strict=True)]
            for key, pages, checks in zip(ticket.keys, ticket.pages, ticket.checks, strict=True)
        }
        self._drop(before, fetched)
        self._expected[name] = _Expected(self._clock() + self._deadline_s, entries, fetched)
        self._known |= entries

    def _fetch(self, ticket: Ticket, index: PrefixIndex) -> list[Place]:
        """Fetch the pages of a ticket that the index lacks."""
        places = []
        for key, pages, checks in zip(ticket.keys, ticket.pages, ticket.checks, strict=True):
            held = index.get(key) or [0] * self._groups
            for page, check, block in zip(pages, checks, held, strict=True):
                if page and not block:
                    places.append(Place(ticket.engine, page, check, ticket.address))
        self._transport.fetch(places)
        return places

    def _place(self, ticket: Ticket, page: int, check: int) -> int:
        if not page:
            return 0
        number = next(self._numbers)
        self._places[number] = Place(ticket.engine, page, check, ticket.address)
        return -number

    def forget(self, name: str) -> None:
        """The ticket of a request is no longer used. Unknown names are ignored."""
        if (expected := self._expected.pop(name, None)) is not None:
            self._drop(expected, ())

    def _drop(self, expected: _Expected, still: Sequence[Place]) -> None:
        """still: places that go on to be fetched."""
        kept = set(still)
        self._transport.drop(place for place in expected.fetched if place not in kept)
        for key, numbers in expected.entries.items():
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
        self._pulls[ticket] = len(places), (pulled := self.places(places))
        self._transport.fetch(pulled)

    def ended(self, ticket: int, arrived: bool) -> None:
        pages, places = self._pulls.pop(ticket, (0, []))
        self._transport.drop(places)
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
        self._transport.close()

    def tiers(self) -> list[TierCounts]:
        self.counts.blocks = sum(len(export.places) for export in self._exports.values())
        return [self.counts]
