"""Hand-over of pages between the GPUs of one host: an engine copies them from the memory of the other one's GPU.

The memory file of an engine (kv.transfer) has no pages here, but where they are and whether they are still kept:

    epoch (8 bytes, random) | shared address of the pool (ops.peer_memory) | from HEADER on: a stamp of each page, uint32

A ticket has the stamps of its pages. When the last ticket of a page is released, the page gets another stamp before its block may
be written again. The other engine copies first and compares stamps afterwards: if they are those of the ticket, the page was kept
until the copy had ended. That is a sequence lock (Hemminger, "Fast reader/writer lock for gettimeofday", Linux 2.5.60) without the
waiting. An engine that starts again has another epoch and other stamps; the file of an engine that is lost is empty.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import struct
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

from ridgeline.core.plan import Transfer
from ridgeline.core.ticket import Pools
from ridgeline.kv.copies import Event, Load, Past, TierTransfers
from ridgeline.kv.store import KvStore
from ridgeline.kv.transfer import HAND_OVER, HandOver, Place
from ridgeline.ops.peer_memory import WORD_BYTES, Run

log = logging.getLogger(__name__)

HEADER = 4096
_HEAD = struct.Struct(f"<Q{WORD_BYTES}s")
_STAMP = 4


class Memory(Protocol):
    """ops.peer_memory.PeerMemory."""

    def share(self, address: int) -> bytes: ...

    def open(self, word: bytes) -> int: ...

    def close(self, word: bytes) -> None: ...

    def copy(self, runs: Sequence[Run]) -> Event: ...


class _Opened(NamedTuple):
    """The pool of another engine. address: of its page 0; None: it cannot be opened."""

    epoch: int
    word: bytes
    address: int | None


class PeerPools:
    """Transport between GPUs of one host (kv.transfer.Transport). The engine's thread calls everything but `pull`.

    address: of the own pool, `pages` pages of `page_bytes`. memory: of the other GPUs.
    """

    def __init__(self, pools: Pools, page_bytes: int, pages: int, address: int, memory: Memory) -> None:
        self._files, self._page_bytes, self._memory = pools.descriptors, page_bytes, memory
        self._kept: Counter[int] = Counter()
        """Tickets of each own page that are not released."""
        self._opened: dict[int, _Opened] = {}
        file, size = self._files[pools.local], HEADER + _STAMP * pages
        for length in (0, size):  # what an engine before this one has left is dropped
            os.ftruncate(file, length)
        self._stamps = memoryview(mmap.mmap(file, size))[HEADER:].cast("I")
        self._stamps[:] = memoryview(os.urandom(_STAMP * pages)).cast("I")
        try:
            word = memory.share(address)
        except RuntimeError as error:
            log.warning(
                "The KV cache of this GPU cannot be shared (%s): other engines compute its prompts again.", error
            )
            word = b""
        os.pwrite(file, _HEAD.pack(random.SystemRandom().getrandbits(64) | 1, word), 0)

    def export(self, pages: Sequence[int]) -> list[int]:
        self._kept.update(pages)
        return [self._stamps[page] for page in pages]

    def release(self, pages: Sequence[int]) -> None:
        self._kept.subtract(pages)
        for page in set(pages):
            if not self._kept[page]:
                del self._kept[page]
                self._stamps[page] = (self._stamps[page] + 1) & 0xFFFF_FFFF

    def pull(self, place: Place, target: memoryview) -> bool:
        """Pages do not pass through this memory."""
        return False

    def copy(self, places: Sequence[Place], blocks: Sequence[int], target: int) -> Event | None:
        """Enqueue copies to blocks of the pool at address `target`.

        Returns:
            The event after them; then `are_kept` says whether their content counts. None: the pages cannot be copied.
        """
        bases = {engine: self._address(engine) for engine in {place.engine for place in places}}
        if not self.are_kept(places):
            return None
        known = {engine: address for engine, address in bases.items() if address is not None}
        if len(known) < len(bases):
            return None
        return self._memory.copy(list(self._runs(places, blocks, known, target)))

    def are_kept(self, places: Iterable[Place]) -> bool:
        """Whether all pages have the content that they had when their ticket was made."""
        stamps = {place.engine: self._read_stamps(place.engine) for place in places}
        return all(
            place.page < len(stamps[place.engine]) and stamps[place.engine][place.page] == place.check
            for place in places
        )

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

    def _read_stamps(self, engine: int) -> array[int]:
        """Empty for an engine that is lost or unknown."""
        stamps = array("I")
        if 0 <= engine < len(self._files):
            length = os.fstat(self._files[engine]).st_size - HEADER
            content = os.pread(self._files[engine], max(0, length), HEADER)
            stamps.frombytes(content[: len(content) // _STAMP * _STAMP])
        return stamps

    def _address(self, engine: int) -> int | None:
        """Of an engine's page 0 as this GPU sees it; None: there is none."""
        if not 0 <= engine < len(self._files):
            return None
        head = os.pread(self._files[engine], _HEAD.size, 0)
        epoch, word = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, b"")
        opened = self._opened.get(engine)
        if opened is not None and opened.epoch == epoch:
            return opened.address
        if opened is not None and opened.address is not None:  # that engine has ended
            self._memory.close(opened.word)
        address = None
        if any(word):
            try:
                address = self._memory.open(word)
            except RuntimeError as error:
                log.warning("The KV cache of engine %d cannot be opened (%s): its prompts are computed.", engine, error)
        self._opened[engine] = _Opened(epoch, word, address)
        return address


class PeerTransfers(TierTransfers):
    """Transfers from the pools of other engines to the own one. source: knows the places of pages."""

    def __init__(self, store: KvStore, source: HandOver, pools: PeerPools) -> None:
        super().__init__(store, 0, source, origin=HAND_OVER)
        self._source, self._pools, self._target = source, pools, store.flat.data_ptr()

    def begin(self, transfer: Transfer) -> None:
        places = self._source.places(transfer.pages)
        event = None
        try:
            event = self._pools.copy(places, transfer.blocks, self._target) if places else None
        except RuntimeError:  # an error does not fail the step
            log.exception("pages of another engine are not copied")
        arrived = partial(self._pools.are_kept, places) if event is not None else lambda: False
        self.loads[transfer.ticket] = Load(event or Past(), has_arrived=arrived)
