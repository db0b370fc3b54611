"""Serves pages of the own pool over TCP (kv.page_wire): one thread listens, and each connection has a thread."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ridgeline.core.errors import ConfigError
from ridgeline.core.handshake import SILENCE_S, PeerError, greet, limit, receive_bytes
from ridgeline.kv.host_pages import is_pending
from ridgeline.kv.page_wire import COUNT, MOST_PAGES, PAGE, PIECE, PIECE_BYTES, send_all, topic

log = logging.getLogger(__name__)

MOST_PEERS = 64
"""Connections at a time; more are closed."""
IDLE_S = 3600.0
"""Seconds for which a connection may ask for nothing."""
_POLL_S = 0.0005


class Memory(NamedTuple):
    """Pages in memory of this process, and the stamp of each. A page is sent with a ticket's stamp or not at all."""

    pages: memoryview
    stamps: memoryview[int]
    page_bytes: int


class PageServer:
    """host: address to listen on, which is also the one that others are given. Raises ConfigError if it cannot be used."""

    def __init__(self, host: str, secret: bytes, memory: Memory) -> None:
        self._secret, self._memory = secret, memory
        self._nothing = memoryview(bytes(memory.page_bytes))
        try:
            family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server((host, 0), family=family, backlog=MOST_PEERS)
        except OSError as error:
            raise ConfigError(
                f"The engine cannot listen on {host} ({error.strerror}): give an address of its host (--engine-address).",
                param="engine_address",
            ) from error
        shown = f"[{host}]" if ":" in host else host
        self.address = f"{shown}:{self._listener.getsockname()[1]}"
        self._peers: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._listening = self._begin(self._listen, self._listener)

    def close(self) -> None:
        """Close all connections, and wait for their threads."""
        for find in (lambda: [self._listener], lambda: list(self._peers)):
            with self._lock:
                socks = find()
            for sock in socks:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            self._listening.join(SILENCE_S)
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(SILENCE_S)

    def _begin(self, work: Callable[[socket.socket], None], sock: socket.socket) -> threading.Thread:
        thread = threading.Thread(target=work, args=(sock,), name="kv-pages", daemon=True)
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()]
            self._threads.append(thread)
            thread.start()
        return thread

    def _listen(self, listener: socket.socket) -> None:
        with listener:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:  # closed
                    return
                with self._lock:
                    full = len(self._peers) >= MOST_PEERS
                    if not full:
                        self._peers.add(sock)
                if full:
                    log.warning("a connection for pages was closed: %d are open", MOST_PEERS)
                    sock.close()
                else:
                    self._begin(self._serve, sock)

    def _serve(self, sock: socket.socket) -> None:
        """Answer the requests of a connection until it ends."""
        try:
            greet(sock, self._secret, topic(self._memory.page_bytes))
            while True:
                self._answer(sock, self._request(sock))
        except (PeerError, OSError) as error:
            log.info("a connection for pages has ended: %s", error)
        finally:
            sock.close()
            with self._lock:
                self._peers.discard(sock)

    def _request(self, sock: socket.socket) -> list[tuple[int, int]]:
        limit(sock, receive_s=IDLE_S)
        first = sock.recv(1)
        if not first:
            raise PeerError("it has closed the connection")
        until = time.monotonic() + SILENCE_S
        (count,) = COUNT.unpack(first + receive_bytes(sock, COUNT.size - 1, until))
        if not 0 < count <= MOST_PAGES:
            raise PeerError(f"it asks for {count} pages")
        return list(PAGE.iter_unpack(receive_bytes(sock, count * PAGE.size, until)))

    def _answer(self, sock: socket.socket, asked: Sequence[tuple[int, int]]) -> None:
        size = max(1, PIECE_BYTES // self._memory.page_bytes)
        for first in range(0, len(asked), size):
            piece = asked[first : first + size]
            kept = [self._wait(*page) for page in piece]
            numbers = [number if good else -1 for (number, _), good in zip(piece, kept, strict=True)]
            send_all(sock, [PIECE.pack(first, len(piece)), *self._views(numbers)])
            send_all(sock, [bytes(good and self._has(*page) for page, good in zip(piece, kept, strict=True))])

    def _wait(self, number: int, stamp: int) -> bool:
        """Whether a page has its stamp, after the copy to its slot if that has begun."""
        until = time.monotonic() + SILENCE_S / 2
        while not self._has(number, stamp):
            pending = number < len(self._memory.stamps) and is_pending(self._memory.stamps[number], stamp)
            if not pending or time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True

    def _has(self, number: int, stamp: int) -> bool:
        return number < len(self._memory.stamps) and self._memory.stamps[number] == stamp

    def _views(self, numbers: Sequence[int]) -> Iterator[memoryview]:
        """The bytes of pages, neighbours together; zeros for -1."""
        size, first, count = self._memory.page_bytes, -1, 0
        for number in numbers:
            if count and number == first + count:
                count += 1
                continue
            if count:
                yield self._memory.pages[first * size : (first + count) * size]
            first, count = number, int(number >= 0)
            if number < 0:
                yield self._nothing
        if count:
            yield self._memory.pages[first * size : (first + count) * size]
