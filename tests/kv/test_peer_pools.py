"""Pages of other GPUs: they arrive as they were exported, or not at all."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.ticket import Pools
from ridgeline.kv.host_pages import HostPages
from ridgeline.kv.peer_pools import PeerPools
from ridgeline.kv.transfer import Place
from ridgeline.ops.peer_memory import Run
from tests.kv.host_memory import HostMemory

PAGE, PAGES = 64, 12


class Side:
    """An engine with a pool of random bytes."""

    def __init__(self, files: tuple[int, ...], number: int, memory: HostMemory) -> None:
        self.pool = torch.randint(256, (PAGES, PAGE), dtype=torch.uint8)
        self.address = self.pool.data_ptr()
        self.pools = PeerPools(Pools(files, number), PAGE, PAGES, self.address, memory)

    def places(self, pages: list[int], engine: int = 0) -> list[Place]:
        return [Place(engine, *exported) for exported in self.pools.export(pages)]

    def pull(self, places: list[Place], blocks: list[int]) -> bool:
        """Copy, or read from host memory; whether the pages have arrived."""
        if self.pools.in_host_memory(places):
            rows = [self.pool[block].numpy().data for block in blocks]
            return all(self.pools.pull(place, row) for place, row in zip(places, rows, strict=True))
        event = self.pools.copy(places, blocks, self.address)
        return event is not None and event.query() and self.pools.are_kept(places)


@contextmanager
def sides(memory: HostMemory) -> Iterator[tuple[Side, Side, tuple[int, ...]]]:
    """The engine that exports, the engine that pulls, and their files."""
    files = (os.memfd_create("test-peer-0"), os.memfd_create("test-peer-1"))
    try:
        yield Side(files, 0, memory), Side(files, 1, memory), files
    finally:
        for file in files:
            os.close(file)


@given(seed=st.integers(0, 1 << 16), refused=st.sampled_from(["", "share", "open", "pin"]))
def test_pages_arrive_while_a_ticket_keeps_them(seed: int, refused: str) -> None:
    """From the other device, or through host memory."""
    draw = random.Random(seed)
    with sides(memory := HostMemory(refused)) as (first, second, _):
        if refused == "open":
            assert not second.pull(places := first.places([1]), [1]), "the first one is lost"
            first.pools.release([1])
        tickets = [draw.sample(range(1, PAGES), draw.randint(1, PAGES - 1)) for _ in range(draw.randint(1, 4))]
        exported = [first.places(pages) for pages in tickets]
        while tickets:
            at = draw.randrange(len(tickets))
            pages, places = tickets.pop(at), exported.pop(at)
            first.pools.release(pages)
            kept = {page for other in tickets for page in other}
            assert second.pull(places, [0] * len(places)) == (kept >= set(pages))
            for others, places in zip(tickets, exported, strict=True):
                blocks = draw.sample(range(PAGES), len(others))
                assert second.pull(places, blocks)
                assert torch.equal(second.pool[blocks], first.pool[others])
        assert len(memory.opened) == (refused in ("", "pin")), "the pool is opened once"


def test_neighbours_are_copied_together() -> None:
    with sides(memory := HostMemory()) as (first, second, _):
        assert second.pull(first.places([3, 4, 5, 7, 8, 2]), [1, 2, 3, 4, 5, 9])
        assert [run.size // PAGE for run in memory.runs] == [3, 2, 1]


def test_a_page_that_is_released_during_the_copy_does_not_count() -> None:
    with sides(memory := HostMemory()) as (first, second, _):
        places = first.places([1, 2])
        memory.meanwhile = lambda: first.pools.release([1, 2])
        assert not second.pull(places, [1, 2])


def test_engines_that_end_and_start_again() -> None:
    with sides(memory := HostMemory()) as (first, second, files):
        places = first.places([1, 2, 3])
        assert second.pull(places, [4, 5, 6])
        os.ftruncate(files[0], 0)  # the service, when the engine is lost
        assert not second.pull(places, [4, 5, 6])
        again = Side(files, 0, memory)
        assert not second.pull(places, [4, 5, 6]), "a ticket of the engine before"
        assert second.pull(again.places([1, 2, 3]), [4, 5, 6])
        assert torch.equal(second.pool[4:7], again.pool[1:4])
        assert memory.opened == [again.address.to_bytes(len(memory.opened[0]), "little")]


@pytest.mark.parametrize("engine", [-1, 1, 7])
def test_an_engine_that_is_not_there(engine: int) -> None:
    with sides(HostMemory()) as (first, second, files):
        os.ftruncate(files[1], 0)
        assert not second.pull(first.places([1], engine), [1])


@pytest.mark.parametrize("page", [PAGES, 1 << 20])
def test_a_page_behind_the_end(page: int) -> None:
    with sides(HostMemory()) as (first, second, _):
        assert not second.pull([first.places([1])[0]._replace(page=page)], [1])


class Slow:
    """A copy that has not ended."""

    ended = False

    def query(self) -> bool:
        return self.ended

    def wait(self) -> None:
        raise AssertionError


class SlowMemory(HostMemory):
    """Copies end later."""

    def __init__(self) -> None:
        super().__init__("share")
        self.event = Slow()

    def copy(self, runs: Sequence[Run]) -> Slow:  # type: ignore[override]
        super().copy(runs)
        return self.event


def test_readers_wait_for_copies_to_host_memory() -> None:
    with sides(memory := SlowMemory()) as (first, second, _), ThreadPoolExecutor(1) as pool:
        pulled = pool.submit(second.pull, places := first.places([2, 3]), [5, 6])
        time.sleep(0.02)
        assert not pulled.done()
        memory.event.ended = True
        assert pulled.result() and torch.equal(second.pool[5:7], first.pool[2:4])
        memory.event.ended = False
        pulled = pool.submit(second.pull, first.places([4]), [7])
        first.pools.release([4])
        assert not pulled.result(), "it is not copied for nobody"
        assert second.pull(places, [8, 9])


def test_no_room_in_host_memory() -> None:
    with sides(HostMemory("share")) as (first, second, _):
        held = first.places([*range(PAGES)])
        assert second.pull(held, [*range(PAGES)])
        stamps = memoryview(bytearray(4)).cast("I")
        small = HostPages(stamps, torch.zeros(PAGE, dtype=torch.uint8).data_ptr(), PAGE, HostMemory("copy"))
        assert small.export([1, 2], first.address) == []
        assert small.export([1], first.address) == [], "an error of the device"
        assert [*stamps] == [3]
