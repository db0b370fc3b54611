"""Pages of other pools: they arrive as they were exported, or not at all, and nothing stays of a process that was killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.spec import KV_FORMATS, KvGroup, KvLayout
from ridgeline.core.ticket import Pools
from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.prefix import PrefixIndex
from ridgeline.kv.transfer import HandOver, Place, SharedPools

PAGE = 64
GROUPS = (KvGroup((0, 1), None, 8), KvGroup((2,), 6, 8))
LAYOUT = KvLayout(GROUPS, 4, PAGE, KV_FORMATS["float32"])


@contextmanager
def memory_files(count: int) -> Iterator[tuple[int, ...]]:
    files = tuple(os.memfd_create(f"test-pool-{number}") for number in range(count))
    try:
        yield files
    finally:
        for file in files:
            os.close(file)


@given(
    contents=st.lists(st.binary(min_size=PAGE, max_size=PAGE), min_size=1, max_size=5),
    blow=st.sampled_from(["nothing", "bit", "cut", "empty", "engine", "page"]),
    seed=st.integers(0, 1 << 16),
)
def test_a_page_arrives_as_it_was_exported_or_not_at_all(contents: list[bytes], blow: str, seed: int) -> None:
    draw = random.Random(seed)
    with memory_files(2) as files:
        exporter, importer = (SharedPools(Pools(files, number), PAGE) for number in range(2))
        pool = b"".join(contents)
        os.pwrite(files[0], pool, 0)
        exporter.register(memoryview(pool))
        pages = draw.sample(range(len(contents)), draw.randint(1, len(contents)))
        places = [Place(0, *exported) for exported in exporter.export(pages)]
        if blow == "bit":
            where = draw.randrange(len(pool))
            os.pwrite(files[0], bytes([pool[where] ^ 1 << draw.randrange(8)]), where)
        elif blow in ("cut", "empty"):
            os.ftruncate(files[0], 0 if blow == "empty" else draw.randrange(len(pool)))
        elif blow == "engine":
            places = [place._replace(engine=draw.choice([1, 2, -1])) for place in places]
        elif blow == "page":
            places = [place._replace(page=len(contents) + draw.randrange(1 << 20)) for place in places]
        for place in places:
            target = bytearray(PAGE)
            arrived = importer.pull(place, memoryview(target))
            now = os.pread(files[0], PAGE, place.page * PAGE)
            assert arrived == (blow not in ("engine", "page") and now == contents[place.page])
            assert not arrived or bytes(target) == contents[place.page]


WRITER = """
import os, sys, time
file = int(sys.argv[1])
os.ftruncate(file, 4096)
os.pwrite(file, b"x" * 4096, 0)
print("written", flush=True)
time.sleep(60)
"""


def holders(name: str) -> set[str]:
    """Processes with an open memory file of this name."""
    processes = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # it may be closed between two looks
            if name in os.readlink(link):
                processes.add(link.parts[2])
    return processes


@pytest.mark.parametrize("emptied", [False, True])
def test_nothing_stays_of_an_engine_that_was_killed(emptied: bool) -> None:
    """Its pages can be read while someone holds the file, and are lost once the service has emptied it."""
    name = f"ridgeline-test-{os.getpid()}-{emptied}"
    file = os.memfd_create(name)
    command = [sys.executable, "-I", "-c", WRITER, str(file)]
    with subprocess.Popen(command, pass_fds=[file], stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None and engine.stdout.readline() == b"written\n"
        both = holders(name)
        engine.send_signal(signal.SIGKILL)
        engine.wait()
        assert both == {str(os.getpid()), str(engine.pid)}
    transport = SharedPools(Pools((file,), 0), PAGE)
    transport.register(memoryview(b"x" * PAGE))
    ((_, check),) = transport.export([0])
    if emptied:
        os.ftruncate(file, 0)
        assert os.fstat(file).st_blocks == 0, "the memory is free"
    assert transport.pull(Place(0, 3, check), memoryview(bytearray(PAGE))) is not emptied
    assert holders(name) == {str(os.getpid())}
    os.close(file)
    assert not holders(name)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@given(seed=st.integers(0, 1 << 16))
def test_exports_hold_their_blocks_until_they_are_released(seed: int) -> None:
    """Under any order of exports, releases, deadlines and evictions, a block has as many references as exports hold it."""
    draw = random.Random(seed)
    index = PrefixIndex(GROUPS, 4)
    pool = BlockPool(24, lambda block: index.evict(block) and None)
    clock = Clock()
    with memory_files(1) as files:
        transport = SharedPools(Pools(files, 0), PAGE)
        transport.register(memoryview(bytes(PAGE * 25)))
        source = HandOver(LAYOUT, transport, 0, deadline_s=10, clock=clock)
        chains = [[bytes([number, place]) for place in range(3)] for number in range(4)]
        kept: dict[str, tuple[float, int]] = {}
        for step in range(40):
            clock.now += draw.random() * 3
            chain, what = draw.choice(chains), draw.random()
            if what < 0.4 and pool.free >= 6:
                for key in chain:
                    for group in range(2):
                        if not (entry := index.get(key)) or not entry[group]:
                            block = pool.take()
                            pool.release(block, keep=index.insert(key, group, block))
                ticket = source.export(str(step), chain, index, pool)
                assert len(ticket.keys) == len(ticket.pages) == len(ticket.checks) == 3
                kept[str(step)] = clock.now + 10, sum(page > 0 for pages in ticket.pages for page in pages)
            elif what < 0.6 and kept:
                name = draw.choice(list(kept))
                source.release(name, index, pool)
                del kept[name]
            elif what < 0.8:
                source.expire(index, pool)
                kept = {name: (until, blocks) for name, (until, blocks) in kept.items() if until > clock.now}
            elif pool.free:
                pool.release(pool.take(), keep=False)
            pool.check()
            assert source.tiers()[0].blocks == sum(blocks for _, blocks in kept.values())
            assert (pool.used > 0) == bool(kept)
        clock.now += 11
        source.expire(index, pool)
        assert pool.used == 0


def test_a_ticket_is_forgotten_after_its_deadline() -> None:
    index = PrefixIndex(GROUPS[:1], 4)
    pool = BlockPool(4, lambda block: None)
    clock = Clock()
    with memory_files(1) as files:
        transport = SharedPools(Pools(files, 0), PAGE)
        transport.register(memoryview(bytes(PAGE * 5)))
        source = HandOver(KvLayout(GROUPS[:1], 4, PAGE, KV_FORMATS["float32"]), transport, 0, clock=clock)
        block = pool.take()
        index.insert(b"key", 0, block)
        ticket = source.export("a", [b"key", b"other"], index, pool)
        assert ticket.keys == (b"key",), "as far as the blocks go"
        source.expect("a", ticket, index)
        (((number,),)) = source.find([b"key"], 0)
        os.pwrite(files[0], bytes(PAGE), block * PAGE)
        os.ftruncate(files[0], PAGE * 5)
        assert number < 0 and source.read(-number, memoryview(bytearray(PAGE)))
        source.expect("b", ticket, index)
        source.forget("a")
        (((number,),)) = source.find([b"key"], 0)
        assert source.read(-number, memoryview(bytearray(PAGE))), (
            "another request with the same prefix still expects it"
        )
        clock.now = 31.0
        source.expire(index, pool)
        assert source.find([b"key"], 0) == [] and not source.read(-number, memoryview(bytearray(PAGE)))
