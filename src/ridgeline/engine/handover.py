"""Hand-over of prompts between engines: what the engine does with tickets beside its loop (kv.transfer).

An engine that computed a prompt keeps its blocks and states their ticket with the first token. The engine that goes on expects the
ticket's pages: at admission they are a source like any other (engine.leases), and what does not arrive is computed.
"""

from __future__ import annotations

from array import array
from contextlib import suppress

import torch

from ridgeline.core.config import EngineConfig
from ridgeline.core.ticket import Pools
from ridgeline.engine.leases import Leases
from ridgeline.engine.runner import Runner
from ridgeline.kv.copies import TierTransfers
from ridgeline.kv.peer_pools import Memory, PeerPools, PeerTransfers
from ridgeline.kv.prefix import chain_root, extend_chain
from ridgeline.kv.tcp_pools import TcpPools, TcpTransfers
from ridgeline.kv.transfer import HAND_OVER, HandOver, SharedPools
from ridgeline.ops.peer_memory import PeerMemory
from ridgeline.wire.messages import Delta, Offer, Submit


class HandOvers:
    """Tickets of an engine. This one hands nothing over."""

    def submitted(self, message: Submit) -> None:
        """A request arrives: its pages are expected, or will be kept."""

    def offered(self, message: Offer) -> None:
        """Pages of a request that will arrive may travel."""

    def cancelled(self, name: str) -> None:
        """Pages that are kept or expected for a request are not needed any more."""

    def add_tickets(self, deltas: list[Delta]) -> None:
        """Keep the pages of prompts that are computed, and state their tickets in the deltas that end their choices. Pages of
        prompts of which more is computed may be offered in deltas of their own."""

    def check(self) -> None:
        """Release what is past its deadline."""


class TicketHandOvers(HandOvers):
    """Tickets over a source. fingerprint: root of the keys of blocks."""

    def __init__(self, source: HandOver, leases: Leases, fingerprint: str) -> None:
        self._source, self._leases, self._fingerprint = source, leases, fingerprint
        self._asked: dict[str, list[bytes]] = {}
        """Requests whose pages will be kept -> keys of their full blocks."""

    def submitted(self, message: Submit) -> None:
        if message.ticket is not None:
            self._source.expect(message.id, message.ticket, self._leases.prefix)
        if message.hand_over:
            chain: list[bytes] = []
            root = chain_root(message.salt, self._fingerprint)
            with suppress(OverflowError):  # no token ids: the request will be refused
                extend_chain(chain, array("i", message.tokens), self._leases.layout.page_tokens, root)
            self._asked[message.id] = chain

    def offered(self, message: Offer) -> None:
        self._source.offered(message.id, message.ticket, self._leases.prefix)

    def cancelled(self, name: str) -> None:
        self._asked.pop(name, None)
        self._source.forget(name)
        self._source.release(name, self._leases.prefix, self._leases.pool)

    def add_tickets(self, deltas: list[Delta]) -> None:
        if not self._asked:
            return
        index, pool = self._leases.prefix, self._leases.pool
        for delta in deltas:
            if delta.finish == "length" and (chain := self._asked.pop(delta.id, None)) is not None:
                delta.ticket = self._source.export(delta.id, chain, index, pool)
        for name, keys in self._asked.items():
            if (ticket := self._source.offer(name, keys, index, pool)) is not None:
                deltas.append(Delta(name, 0, ticket=ticket))

    def check(self) -> None:
        self._source.expire(self._leases.prefix, self._leases.pool)


def open_hand_over(pools: Pools, leases: Leases, runner: Runner, fingerprint: str) -> HandOvers:
    """The hand-over of an engine. Its cache lies in its shared pool or on a GPU. It becomes the source of the leases and of the
    runner's transfers. Without pools nothing is changed."""
    if not pools.hands_over:
        return HandOvers()
    flat = runner.store.flat
    memory = PeerMemory(flat.device) if flat.is_cuda else None
    if pools.listen:
        return over_tcp(pools, leases, runner, fingerprint, memory)
    if memory is not None:
        return over_peers(pools, leases, runner, fingerprint, memory)
    transport = SharedPools(pools, leases.layout.page_bytes)
    transport.register(flat.numpy().data)
    leases.source = source = HandOver(leases.layout, transport, pools.local)
    runner.transfers = TierTransfers(runner.store, 0, source, origin=HAND_OVER)
    return TicketHandOvers(source, leases, fingerprint)


def over_tcp(pools: Pools, leases: Leases, runner: Runner, fingerprint: str, memory: Memory | None) -> HandOvers:
    """As `open_hand_over`, over TCP. memory: of a GPU; None: the cache is in host memory."""
    store = runner.store
    transport = TcpPools(pools, store.flat.view(store.pages, -1), memory)
    leases.source = source = HandOver(leases.layout, transport, pools.local)
    runner.transfers = TcpTransfers(store, source, transport)
    return TicketHandOvers(source, leases, fingerprint)


def over_peers(pools: Pools, leases: Leases, runner: Runner, fingerprint: str, memory: Memory) -> HandOvers:
    """As `open_hand_over`, by copies from the memory of other engines."""
    store = runner.store
    transport = PeerPools(pools, leases.layout.page_bytes, store.pages, store.flat.data_ptr(), memory)
    leases.source = source = HandOver(leases.layout, transport, pools.local)
    runner.transfers = PeerTransfers(store, source, transport)
    return TicketHandOvers(source, leases, fingerprint)


def take_gpu(pools: Pools, config: EngineConfig) -> None:
    """Make a GPU torch's current device. Engines take the GPUs in turn; more engines than GPUs share them."""
    if pools.hands_over and config.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(pools.local % torch.cuda.device_count())
