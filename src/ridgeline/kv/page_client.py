"""Brings pages of other hosts here over TCP (kv.page_wire): a thread and a connection for each of them.

A batch of pages is asked for in one request and lands in memory of its own, which is pinned where the cache is on a GPU. Every
batch ends within FETCH_S, whatever its peer does: with its pages or without. The batch after an error opens another connection.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue

import torch

from ridgeline.core.handshake import SILENCE_S, PeerError, connect, receive, receive_bytes
from ridgeline.kv.page_wire import COUNT, PAGE, PIECE, send_all, topic

log = logging.getLogger(__name__)

FETCH_S = 10.0
"""Seconds for a batch, from when it is asked for: its pages exist then."""


class Arrival(Future["torch.Tensor | None"]):
    """A page on its way; None: it is lost. Several requests may wait for it, so that none can cancel it."""

    def cancel(self) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Batch:
    """Pages of a peer: number and stamp of each, and what becomes of it. until: on the monotonic clock."""

    pages: Sequence[tuple[int, int]]
    arrivals: Sequence[Arrival]
    until: float

    def fail(self) -> None:
        """What has not arrived does not arrive."""
        for arrival in self.arrivals:
            if not arrival.done():
                arrival.set_result(None)


@dataclass(frozen=True, slots=True)
class Landing:
    """Where batches land. memory: makes a buffer of so many bytes. bind: called once in each thread that fills them."""

    page_bytes: int
    memory: Callable[[int], torch.Tensor]
    bind: Callable[[], None] = lambda: None
    fetch_s: float = FETCH_S


@dataclass
class Peer:
    """The connection to the engine at an address."""

    address: str
    secret: bytes
    landing: Landing
    _sock: socket.socket | None = None
    _batches: SimpleQueue[Batch | None] = field(default_factory=SimpleQueue)
    _closed: bool = False

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kv-fetch", daemon=True)
        self._thread.start()

    def fetch(self, pages: Sequence[tuple[int, int]]) -> list[Arrival]:
        """Ask for pages, after those that were asked for before."""
        arrivals = [Arrival() for _ in pages]
        self._batches.put(Batch(pages, arrivals, time.monotonic() + self.landing.fetch_s))
        return arrivals

    def close(self) -> None:
        """End the connection. What has not arrived does not arrive."""
        self._closed = True
        self._batches.put(None)
        if (sock := self._sock) is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(SILENCE_S)

    def _run(self) -> None:
        self.landing.bind()
        while (batch := self._batches.get()) is not None:
            try:
                if not self._closed and time.monotonic() < batch.until:
                    self._receive(batch)
            except (PeerError, OSError, RuntimeError, ValueError) as error:
                log.warning("Pages of the engine at %s do not arrive (%s): they are computed.", self.address, error)
                self._disconnect()
            finally:
                batch.fail()
        self._disconnect()

    def _disconnect(self) -> None:
        if self._sock is not None:
            self._sock.close()
        self._sock = None

    def _receive(self, batch: Batch) -> None:
        if self._sock is None:
            self._sock = connect(self.address, self.secret, topic(self.landing.page_bytes))
        sock, size, count = self._sock, self.landing.page_bytes, len(batch.pages)
        send_all(sock, [COUNT.pack(count), b"".join(PAGE.pack(*page) for page in batch.pages)])
        memory = self.landing.memory(count * size).view(count, size)
        content, done = memory.numpy().data.cast("B"), 0
        while done < count:
            first, pages = PIECE.unpack(receive_bytes(sock, PIECE.size, batch.until))
            if first != done or not 0 < pages <= count - done:
                raise PeerError(f"it sends pages {first} to {first + pages} of {count}, not page {done}")
            receive(sock, content[done * size : (done + pages) * size], batch.until)
            for number, good in enumerate(receive_bytes(sock, pages, batch.until), start=done):
                batch.arrivals[number].set_result(memory[number] if good == 1 else None)
            done += pages
