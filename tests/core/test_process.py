"""Settings of a process that keeps thousands of requests."""

import asyncio
import gc
import resource
import sys
import weakref

import pytest

from ridgeline.core import process
from ridgeline.core.process import with_rare_collections


class Cycle:
    """Only a garbage collection frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thresholds():
    """Those of Python, which the other tests have raised."""
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*before)


@pytest.mark.skipif((3, 14) <= sys.version_info < (3, 14, 5), reason="this Python has no full collections of its own")
async def test_requests_start_no_full_collection():
    """Objects that live on, as many as open requests have, and young garbage between them."""
    before, full = gc.get_threshold(), []

    def note(phase: str, facts: dict[str, int]) -> None:
        full.extend([phase] if facts["generation"] == 2 and phase == "start" else ())

    async def serving() -> tuple[int, list[list[int]]]:
        full.clear()
        young = weakref.ref(Cycle())
        held = [[number] for number in range(400_000)]
        assert young() is None
        return len(full), held

    gc.callbacks.append(note)
    try:
        count, held = await with_rare_collections(serving())
        assert (count, len(held)) == (0, 400_000)
        assert gc.get_threshold() == before
        full.clear()
        held += [[number] for number in range(400_000)]
        assert full, "as Python does it: the count above can be larger than zero"
    finally:
        gc.callbacks.remove(note)


async def test_old_garbage_is_collected_from_time_to_time(monkeypatch):
    monkeypatch.setattr(process, "FULL_COLLECTION_S", 0.01)
    monkeypatch.setattr(process, "YOUNG_COLLECTION_S", 0.01)

    async def serving() -> bool:
        cycle = Cycle()
        gc.collect(1)
        old = weakref.ref(cycle)
        del cycle
        for _ in range(500):
            await asyncio.sleep(0.01)
            if old() is None:
                return True
        return False

    assert await with_rare_collections(serving())


async def test_young_garbage_is_collected_though_nothing_counts_it():
    """As in a server in which as many requests end as begin: Python's count stays below its threshold."""

    async def serving() -> bool:
        gc.set_threshold(1 << 20, 10, 1 << 30)
        young = weakref.ref(Cycle())
        for _ in range(500):
            await asyncio.sleep(0.01)
            if young() is None:
                return True
        return False

    assert await with_rare_collections(serving())


async def test_an_error_is_passed_on_and_files_may_be_many():
    before = gc.get_threshold()

    async def serving() -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert soft == hard
        raise OSError("no socket")

    with pytest.raises(OSError, match="no socket"):
        await with_rare_collections(serving())
    assert gc.get_threshold() == before
