"""Pages of other GPUs: they arrive as they were exported, or not at all."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.ticket import Pools
from ridgeline.kv.peer_pools import PeerPools
from ridgeline.kv.transfer import Place
from tests.kv.host_memory import HostMemory

PAGE, PAGES = 64, 12


class Side:
    """An engine with a pool of random bytes."""

    def __init__(self, files: tuple[int, ...], number: int, memory: HostMemory) -> None:
        self.pool = torch.randint(256, (PAGES, PAGE), dtype=torch.uint8)
        self.address = self.pool.data_ptr()
        self.pools = PeerPools(Pools(files, number), PAGE, PAGES, self.address, memory)

    def places(self, pages: list[int], engine: int = 0) -> list[Place]:
        return [Place(engine, page, check) for page, check in zip(pages, self.pools.export(pages), strict=True)]

    def pull(self, places: list[Place], blocks: list[int]) -> bool:
        """Copy and ask whether the pages have arrived."""
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


@given(seed=st.integers(0, 1 << 16))
def test_pages_arrive_while_a_ticket_keeps_them(seed: int) -> None:
    draw = random.Random(seed)
    with sides(memory := HostMemory()) as (first, second, _):
        tickets = [
            first.places(draw.sample(range(1, PAGES), draw.randint(1, PAGES - 1))) for _ in range(draw.randint(1, 4))
        ]
        while tickets:
            released = tickets.pop(draw.randrange(len(tickets)))
            first.pools.release([place.page for place in released])
            kept = {place.page for places in tickets for place in places}
            assert second.pull(released, [0] * len(released)) == (kept >= {place.page for place in released})
            for places in tickets:
                blocks = draw.sample(range(PAGES), len(places))
                assert second.pull(places, blocks)
                pages = [place.page for place in places]
                assert torch.equal(second.pool[blocks], first.pool[pages])
        assert len(memory.opened) == 1, "the pool is opened once"


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


@pytest.mark.parametrize("refused", ["share", "open"])
def test_memory_that_cannot_be_shared(refused: str) -> None:
    with sides(HostMemory(refused)) as (first, second, _):
        assert not second.pull(first.places([1]), [1])
