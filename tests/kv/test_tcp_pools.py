"""Pages over TCP: they arrive as they were exported, or not at all and within a bounded time, whatever the other end does."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.handshake import PeerError, connect, greet
from ridgeline.core.ticket import Pools
from ridgeline.kv.page_wire import COUNT, PAGE, PIECE, topic
from ridgeline.kv.tcp_pools import TcpPools
from ridgeline.kv.transfer import Place
from tests.kv.host_memory import HostMemory

PAGE_BYTES, PAGES, SECRET = 4096, 24, "5e" * 32
FETCH_S = 0.4


def sockets() -> int:
    """Open sockets of this process."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            count += os.readlink(link).startswith("socket:")
    return count


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No thread and no socket."""
    opened = sockets()
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name in ("kv-pages", "kv-fetch")] == []
    assert sockets() == opened


@contextmanager
def side(memory: HostMemory | None = None, secret: str = SECRET, **options: float) -> Iterator[TcpPools]:
    pool = torch.randint(256, (PAGES, PAGE_BYTES), dtype=torch.uint8)
    settings = {"fetch_s": FETCH_S, **options}
    pools = TcpPools(Pools((), 0, "127.0.0.1", secret), pool, memory, **settings)  # type: ignore[arg-type]
    try:
        yield pools
    finally:
        pools.close()


def places(pools: TcpPools, pages: list[int]) -> list[Place]:
    return [Place(0, *exported, pools.address) for exported in pools.export(pages)]


def pull(pools: TcpPools, wanted: list[Place]) -> list[bytes | None]:
    """Each page; None: it did not arrive."""
    pools.fetch(wanted)
    pages = [arrival.result(30) for arrival in pools.arrivals(wanted)]
    pools.drop(wanted)
    return [None if page is None else bytes(page.numpy().data) for page in pages]


@pytest.mark.parametrize("memory", [None, HostMemory()])
def test_pages_arrive_while_a_ticket_keeps_them(memory: HostMemory | None) -> None:
    draw = random.Random(1)
    with side(memory) as keeper, side() as other:
        for _ in range(6):
            pages = draw.sample(range(1, PAGES), draw.randint(1, PAGES - 1))
            kept = places(keeper, pages)
            assert pull(other, kept) == [bytes(keeper._pool[page].numpy().data) for page in pages]
            assert other.pull(kept[0], memoryview(bytearray(PAGE_BYTES)))
            other.drop(kept)
            keeper.release(pages[:1])
            assert pull(other, kept)[0] is None, "released"
            assert pull(other, kept[1:]) == [bytes(keeper._pool[page].numpy().data) for page in pages[1:]]
            assert pull(other, [kept[-1]._replace(page=1 << 20), kept[-1]._replace(address="")]) == [None, None]
            keeper.release(pages[1:])
        assert other._room == 4 << 30, "no memory is held"


def test_without_room_nothing_is_fetched() -> None:
    with side() as keeper, side(staging_bytes=2 * PAGE_BYTES) as other:
        kept = places(keeper, [1, 2, 3])
        assert pull(other, kept) == [None] * 3
        assert None not in pull(other, kept[:2])


def test_who_does_not_know_the_secret_gets_nothing() -> None:
    with side() as keeper, side(secret="aa" * 32) as stranger:
        assert pull(stranger, places(keeper, [1])) == [None]
        for secret, size in (("bb" * 32, PAGE_BYTES), (SECRET, PAGE_BYTES + 1)):
            with pytest.raises((PeerError, OSError)):
                connect(keeper.address, bytes.fromhex(secret), topic(size)).close()
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(200)):
            with socket.create_connection(("127.0.0.1", int(keeper.address.rpartition(":")[2]))) as sock:
                sock.sendall(words)
        with side() as other:
            assert None not in pull(other, places(keeper, [1])), "others are still served"


@pytest.mark.parametrize("count", [0, 1 << 30])
def test_a_request_of_no_size_ends_its_connection(count: int) -> None:
    with side() as keeper, connect(keeper.address, bytes.fromhex(SECRET), topic(PAGE_BYTES)) as sock:
        sock.sendall(COUNT.pack(count))
        assert sock.recv(1) == b""


Misdeed = Callable[[socket.socket, int], None]


def slow(sock: socket.socket, pages: int) -> None:
    sock.sendall(PIECE.pack(0, pages))
    with suppress(OSError):
        while True:
            sock.sendall(b"x")
            time.sleep(0.02)


MISDEEDS: dict[str, Misdeed] = {
    "it dies before a page": lambda sock, pages: None,
    "it dies in a page": lambda sock, pages: sock.sendall(PIECE.pack(0, pages) + b"x" * 100),
    "it dies before the last word": lambda sock, pages: sock.sendall(PIECE.pack(0, pages) + b"x" * pages * PAGE_BYTES),
    "it hangs": lambda sock, pages: time.sleep(2 * FETCH_S),
    "it is slow": slow,
    "too many pages": lambda sock, pages: sock.sendall(PIECE.pack(0, pages + 1)),
    "no pages": lambda sock, pages: sock.sendall(PIECE.pack(0, 0)),
    "other pages": lambda sock, pages: sock.sendall(PIECE.pack(1, pages)),
    "pages that have changed": lambda sock, pages: sock.sendall(PIECE.pack(0, pages) + bytes(pages * (PAGE_BYTES + 1))),
    "nonsense": lambda sock, pages: sock.sendall(os.urandom(1000)),
}


@contextmanager
def villain(misdeed: Misdeed, handshakes: bool = True) -> Iterator[str]:
    """The address of an engine that does something else than to send pages."""

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            if handshakes:
                greet(sock, bytes.fromhex(SECRET), topic(PAGE_BYTES))
                (count,) = COUNT.unpack(sock.recv(COUNT.size))
                sock.recv(count * PAGE.size)
                misdeed(sock, count)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)


@pytest.mark.parametrize("name", [*MISDEEDS, "no handshake"])
def test_another_end_that_fails_costs_a_bounded_time(name: str) -> None:
    with side() as other, side() as keeper:
        with villain(MISDEEDS.get(name, MISDEEDS["it hangs"]), name in MISDEEDS) as address:
            began = time.monotonic()
            assert pull(other, [Place(0, 1, 7, address), Place(0, 2, 7, address)]) == [None, None]
            assert time.monotonic() - began < FETCH_S + 1
        assert pull(other, [Place(0, 1, 7, address)]) == [None], "nobody listens any more"
        assert None not in pull(other, places(keeper, [1, 2])), "others are not affected"


def test_an_engine_that_ends_leaves_no_reader_waiting() -> None:
    with side() as other:
        with side() as keeper:
            kept = places(keeper, [1, 2])
            assert None not in pull(other, kept)
        assert pull(other, kept) == [None, None]
        with side() as again:
            assert pull(other, [place._replace(address=again.address) for place in kept]) == [None, None], (
                "other stamps"
            )


def test_an_address_that_is_not_of_this_host_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1") as caught:
        TcpPools(Pools((), 0, "192.0.2.1", SECRET), torch.zeros(2, PAGE_BYTES, dtype=torch.uint8))
    assert caught.value.param in {field.name for field in fields(ServiceConfig)}
