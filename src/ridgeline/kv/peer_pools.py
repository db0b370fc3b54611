"""Hand-over of pages between the GPUs of one host: an engine copies them from the memory of the other one's GPU.

The memory file of an engine (kv.transfer) says where its pages are and whether they are still kept:

    epoch (random) | pages | engines whose pool this one cannot open (bits) | shared address of the pool (ops.peer_memory)
    from HEADER on: a stamp of each page, then of each slot, uint32; then the slots (kv.host_pages)

A ticket has the stamps of its pages. When the last ticket of a page is released, the page gets another stamp before its block may
be written again. The other engine copies first and compares stamps afterwards: if they are those of the ticket, the page was kept
until the copy had ended. That is a sequence lock (Hemminger, "Fast reader/writer lock for gettimeofday", Linux 2.5.60) without the
waiting. An engine that starts again has another epoch and other stamps; the file of an engine that is lost is empty.

Without a shared address, and when an engine says that it cannot open it, pages pass through host memory: a ticket then names slots,
whose numbers follow those of the pages.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import struct
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ridgeline.core.plan import Transfer
from ridgeline.core.ticket import Pools
from ridgeline.kv import host_pages
from ridgeline.kv.copies import Event, Load, Past, TierTransfers
from ridgeline.kv.host_pages import HOST_BYTES, HostPages, is_pending
from ridgeline.kv.store import KvStore
from ridgeline.kv.transfer import HAND_OVER, HandOver, Place, Transport
from ridgeline.ops.peer_memory import WORD_BYTES, Run

log = logging.getLogger(__name__)

HEADER = 4096
_HEAD = struct.Struct(f"<QQQ{WORD_BYTES}s")
_REFUSED = struct.Struct("<Q")
_REFUSED_AT = 16
_STAMP = 4
WAIT_S = 5.0
"""Seconds that a reader waits for the copy of a page to host memory."""
_POLL_S = 0.0005


class KeptPages:
    """Own pages that are kept for other engines. stamps: of all own pages; others compare them."""

    def __init__(self, stamps: memoryview[int]) -> None:
        self._stamps = stamps
        self._kept: Counter[int] = Counter()
        """Tickets of each page that are not released."""

    def keep(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        """For each page its number and stamp."""
        self._kept.update(pages)
        return [(page, self._stamps[page]) for page in pages]

    def release(self, pages: Sequence[int]) -> list[int]:
        """Returns the pages that no ticket has any more: their stamps have changed."""
        self._kept.subtract(pages)
        free = [page for page in dict.fromkeys(pages) if not self._kept[page]]
        for page in free:
            del self._kept[page]
            self._stamps[page] = (self._stamps[page] + 1) & 0xFFFF_FFFF
        return free


class Memory(host_pages.Memory, Protocol):
    """ops.peer_memory.PeerMemory."""

    def share(self, address: int) -> bytes: ...

    def open(self, word: bytes) -> int: ...

    def close(self, word: bytes) -> None: ...


class _Head(NamedTuple):
    """What an engine says of its pool. refused: bits of engines whose pool it cannot open."""

    epoch: int = 0
    pages: int = 0
    refused: int = 0
    word: bytes = b""


class _Opened(NamedTuple):
    """The pool of another engine. address: of its page 0; None: it cannot be opened."""

    head: _Head
    address: int | None


class PeerPools(Transport):
    """Transport between GPUs of one host (kv.transfer.Transport). The engine's thread calls everything but `pull`.

    address: of the own pool, `pages` pages of `page_bytes`. memory: of the other GPUs.
    """

    def __init__(self, pools: Pools, page_bytes: int, pages: int, address: int, memory: Memory) -> None:
        self._files, self._local, self._page_bytes, self._memory = pools.descriptors, pools.local, page_bytes, memory
        self._pages, self._address = pages, address
        self._opened: dict[int, _Opened] = {}
        self._refused = 0
        file, slots = self._files[self._local], min(pages, HOST_BYTES // page_bytes)
        first, size = slots_at(pages, page_bytes), slots_at(pages, page_bytes) + slots * page_bytes
        for length in (0, size):  # what an engine before this one has left is dropped
            os.ftruncate(file, length)
        self._file = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
        stamps = self._file.numpy().data[HEADER : HEADER + _STAMP * (pages + slots)].cast("I")
        stamps[:] = memoryview(os.urandom(_STAMP * (pages + slots))).cast("I")
        self._kept, self._host = (
            KeptPages(stamps[:pages]),
            HostPages(stamps[pages:], self._file.data_ptr() + first, page_bytes, memory),
        )
        try:
            word = memory.share(address)
        except RuntimeError as error:
            log.warning("The KV cache of this GPU cannot be shared (%s): pages pass through host memory.", error)
            word = bytes(WORD_BYTES)
        self._head = _Head(random.SystemRandom().getrandbits(64) | 1, pages, 0, word)
        os.pwrite(file, _HEAD.pack(*self._head), 0)

    def export(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        if self._is_readable():
            return self._kept.keep(pages)
        exported = [(self._pages + slot, stamp) for slot, stamp in self._host.export(pages, self._address)]
        if exported:
            self._kept.keep(pages)
        return exported

    def release(self, pages: Sequence[int]) -> None:
        self._host.release(self._kept.release(pages))

    def _is_readable(self) -> bool:
        """Whether the own pool is shared, and no other engine has said that it cannot open it."""
        heads = (self._read_head(engine) for engine in range(len(self._files)))
        return any(self._head.word) and not any(head.refused >> self._local & 1 for head in heads)

    def pull(self, place: Place, target: memoryview) -> bool:
        """Read a page from a slot; waits for its copy."""
        deadline = time.monotonic() + WAIT_S
        while True:
            (stamp,) = self._read_stamps(place.engine, place.page, 1) or (None,)
            if stamp == place.check:
                break
            if stamp is None or not is_pending(stamp, place.check) or time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        pages = self._read_head(place.engine).pages
        at = slots_at(pages, self._page_bytes) + (place.page - pages) * self._page_bytes
        length = os.preadv(self._files[place.engine], [target], at) if place.page >= pages else 0
        return length == self._page_bytes and self.are_kept([place])

    def in_host_memory(self, places: Iterable[Place]) -> bool:
        """Whether some of the pages are in slots."""
        pages = {engine: self._read_head(engine).pages for engine in {place.engine for place in places}}
        return any(place.page >= pages[place.engine] for place in places)

    def copy(self, places: Sequence[Place], blocks: Sequence[int], target: int) -> Event | None:
        """Enqueue copies to blocks of the pool at address `target`.

        Returns:
            The event after them; then `are_kept` says whether their content counts. None: the pages cannot be copied.
        """
        bases = {engine: self._address_of(engine) for engine in {place.engine for place in places}}
        if not self.are_kept(places):
            return None
        known = {engine: address for engine, address in bases.items() if address is not None}
        if len(known) < len(bases):
            return None
        return self._memory.copy(list(self._runs(places, blocks, known, target)))

    def are_kept(self, places: Iterable[Place]) -> bool:
        """Whether all pages have the content that they had when their ticket was made."""
        of_engine: dict[int, list[Place]] = {}
        for place in places:
            of_engine.setdefault(place.engine, []).append(place)
        for engine, group in of_engine.items():
            first, last = min(place.page for place in group), max(place.page for place in group)
            stamps = self._read_stamps(engine, first, last - first + 1)
            if len(stamps) <= last - first or any(stamps[place.page - first] != place.check for place in group):
                return False
        return True

    def _runs(
        self, places: Sequence[Place], blocks: Sequence[int], bases: Mapping[int, int], target: int
    ) -> Iterator[Run]:
        """Copies of neighbours, as few as possible."""
        size = self._page_bytes
        run: Run | None = None
        for place, block in zip(places, blocks, strict=True):
            page = Run(target + block * size, bases[place.engine] + place.page * size, size)
            if run is not None and (run.target + run.size, run.source + run.size) == page[:2]:
                run = run._replace(size=run.size + size)
                continue
            if run is not None:
                yield run
            run = page
        if run is not None:
            yield run

    def _read_stamps(self, engine: int, first: int, count: int) -> array[int]:
        """Stamps of an engine's pages and slots from `first` on; fewer if its file ends, none for one that is lost or unknown."""
        stamps = array("I")
        if 0 <= engine < len(self._files):
            content = os.pread(self._files[engine], _STAMP * count, HEADER + _STAMP * first)
            stamps.frombytes(content[: len(content) // _STAMP * _STAMP])
        return stamps

    def _read_head(self, engine: int) -> _Head:
        """Zeros for an engine that is lost or unknown."""
        content = os.pread(self._files[engine], _HEAD.size, 0) if 0 <= engine < len(self._files) else b""
        return _Head(*_HEAD.unpack(content)) if len(content) == _HEAD.size else _Head()

    def _address_of(self, engine: int) -> int | None:
        """Of an engine's page 0 as this GPU sees it; None: there is none."""
        head, opened = self._read_head(engine), self._opened.get(engine)
        if opened is not None and opened.head.epoch == head.epoch:
            return opened.address
        if opened is not None and opened.address is not None:  # that engine has ended
            self._memory.close(opened.head.word)
        address = None
        if any(head.word):
            try:
                address = self._memory.open(head.word)
            except RuntimeError as error:
                log.warning("The KV cache of engine %d cannot be opened (%s): host memory is used.", engine, error)
        refused = self._refused & ~(1 << engine) | (any(head.word) and address is None) << engine
        if refused != self._refused:
            self._refused = refused
            os.pwrite(self._files[self._local], _REFUSED.pack(refused), _REFUSED_AT)
        self._opened[engine] = _Opened(head, address)
        return address


def slots_at(pages: int, page_bytes: int) -> int:
    """First byte of the slots in the file of an engine with so many pages."""
    stamps = pages + min(pages, HOST_BYTES // page_bytes)
    return -(-(HEADER + _STAMP * stamps) // mmap.PAGESIZE) * mmap.PAGESIZE


class PeerTransfers(TierTransfers):
    """Transfers from the pools of other engines to the own one. source: knows the places of pages."""

    def __init__(self, store: KvStore, source: HandOver, pools: PeerPools) -> None:
        super().__init__(store, 0, source, origin=HAND_OVER)
        self._source, self._pools, self._target = source, pools, store.flat.data_ptr()

    def begin(self, transfer: Transfer) -> None:
        places = self._source.places(transfer.pages)
        if self._pools.in_host_memory(places):
            super().begin(transfer)
            return
        event = None
        try:
            event = self._pools.copy(places, transfer.blocks, self._target) if places else None
        except RuntimeError:  # an error does not fail the step
            log.exception("pages of another engine are not copied")
        arrived = partial(self._pools.are_kept, places) if event is not None else lambda: False
        self.loads[transfer.ticket] = Load(event or Past(), has_arrived=arrived)
