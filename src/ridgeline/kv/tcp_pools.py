"""Hand-over of pages between hosts, over TCP (kv.page_wire).

Every engine serves its own pages and asks others for theirs. On a CPU they are sent from the pool; on a GPU they are first copied
to pinned host memory (kv.host_pages), while steps run. They arrive in host memory and are copied to blocks when their request is
admitted. So pages of a prompt travel while its later chunks are computed, and need no block of the engine that goes on.
"""

from __future__ import annotations

import logging
import mmap
import os
from array import array
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from ridgeline.core.plan import Transfer
from ridgeline.core.ticket import Pools
from ridgeline.kv import host_pages
from ridgeline.kv.copies import Load, Past, TierTransfers
from ridgeline.kv.host_pages import HOST_BYTES, HostPages
from ridgeline.kv.page_client import FETCH_S, Arrival, Landing, Peer
from ridgeline.kv.page_server import Memory, PageServer
from ridgeline.kv.page_wire import MOST_PAGES
from ridgeline.kv.peer_pools import KeptPages
from ridgeline.kv.store import KvStore, zeros
from ridgeline.kv.transfer import HAND_OVER, HandOver, Place, Transport

log = logging.getLogger(__name__)


class TcpPools(Transport):
    """Transport between hosts. The scheduler's thread calls everything but `pull`.

    pool: uint8 [pages, bytes of a page], the own one. memory: copies between it and host memory; None: it is in host memory itself.
    staging_bytes: most host memory for pages that have arrived; without room they are computed.
    """

    early = True

    def __init__(
        self,
        pools: Pools,
        pool: torch.Tensor,
        memory: host_pages.Memory | None = None,
        *,
        staging_bytes: int = HOST_BYTES,
        fetch_s: float = FETCH_S,
    ) -> None:
        self._secret, self._room = bytes.fromhex(pools.secret), staging_bytes
        pages, self._page_bytes = pool.shape
        self._pool = pool
        self._host: HostPages | None = None
        if memory is None:
            stamps = _stamps(pages)
            self._kept = KeptPages(stamps)
            served = Memory(pool.view(-1).numpy().data.cast("B"), stamps, self._page_bytes)
            bind = _nothing
        else:
            size, slots = self._page_bytes, 1 + min(pages, HOST_BYTES // self._page_bytes)  # a ticket's 0 is no page
            stamps, content = _stamps(slots), torch.frombuffer(mmap.mmap(-1, slots * size), dtype=torch.uint8)
            self._kept = KeptPages(_stamps(pages))
            self._host = HostPages(stamps[1:], content.data_ptr() + size, size, memory)
            served, bind = Memory(content.numpy().data, stamps, size), memory.bind
        self._landing = Landing(self._page_bytes, partial(_buffer, pool.is_cuda), bind, fetch_s)
        self._server = PageServer(pools.listen, self._secret, served)
        self.address = self._server.address
        self._peers: dict[str, Peer] = {}
        self._arrivals: dict[Place, Arrival] = {}

    def export(self, pages: Sequence[int]) -> list[tuple[int, int]]:
        kept = self._kept.keep(pages)
        if self._host is None:
            return kept
        exported = [(slot + 1, stamp) for slot, stamp in self._host.export(pages, self._pool.data_ptr())]
        if not exported:
            self._kept.release(pages)
        return exported

    def release(self, pages: Sequence[int]) -> None:
        free = self._kept.release(pages)
        if self._host is not None:
            self._host.release(free)

    def fetch(self, places: Iterable[Place]) -> None:
        asked: dict[str, list[Place]] = {}
        for place in dict.fromkeys(places):
            if place not in self._arrivals:
                asked.setdefault(place.address, []).append(place)
        for address, batch in asked.items():
            for first in range(0, len(batch), MOST_PAGES):
                self._ask(address, batch[first : first + MOST_PAGES])

    def _ask(self, address: str, places: Sequence[Place]) -> None:
        size = len(places) * self._page_bytes
        if not address or size > self._room:
            log.warning("%d pages of another engine have no room or no address: they are computed.", len(places))
            return
        if address not in self._peers:
            self._peers[address] = Peer(address, self._secret, self._landing)
        arrivals = self._peers[address].fetch([(place.page, place.check) for place in places])
        self._room -= size
        self._arrivals.update(zip(places, arrivals, strict=True))

    def drop(self, places: Iterable[Place]) -> None:
        for place in places:
            arrival = self._arrivals.pop(place, None)
            self._room += self._page_bytes * (arrival is not None)

    def arrivals(self, places: Sequence[Place]) -> list[Arrival]:
        """The pages of places that were fetched."""
        return [self._arrivals.get(place) or lost() for place in places]

    def pull(self, place: Place, target: memoryview) -> bool:
        self.fetch([place])
        (arrival,) = self.arrivals([place])
        page = arrival.result()
        if page is not None:
            target[:] = page.numpy().data
        return page is not None

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._server.close()


class TcpTransfers(TierTransfers):
    """Transfers from pages that have arrived, or will, to the own pool. source: knows the places of pages."""

    def __init__(self, store: KvStore, source: HandOver, pools: TcpPools) -> None:
        super().__init__(store, 0, source, origin=HAND_OVER)
        self._source, self._pools = source, pools

    def begin(self, transfer: Transfer) -> None:
        reads = self._pools.arrivals(self._source.places(transfer.pages)) or [lost()]
        self.loads[transfer.ticket] = Load(Past(), transfer.blocks, list(reads))


def lost() -> Arrival:
    """A page that does not arrive."""
    arrival = Arrival()
    arrival.set_result(None)
    return arrival


def _stamps(count: int) -> memoryview[int]:
    """Random ones: an engine that starts again has others."""
    return memoryview(array("I", os.urandom(4 * count)))


def _buffer(pinned: bool, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True) if pinned else zeros(size, torch.device("cpu"))


def _nothing() -> None:
    pass
