"""What a server tells routers of its prompts: numbered events, a bounded log, gaps, and routers that learn from each other."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.config import ServiceConfig
from ridgeline.service import prompt_log
from ridgeline.service.fleet import follower
from ridgeline.service.fleet.demand import read_demand
from ridgeline.service.fleet.options import RouterConfig
from ridgeline.service.fleet.server import RouterServer, routing
from ridgeline.service.listen import bind
from ridgeline.service.prefix_index import PrefixIndex
from ridgeline.service.prompt_log import PromptLog, pack, unpack

from .live import MODEL, Live, behaviour, live, says

LONG = "a long prefix of many prompts " * 160


def prompts(log: PromptLog, after: str = "") -> list[Any]:
    return [event.chunks for event in log.since(after)]


def test_a_follower_gets_what_it_does_not_have() -> None:
    log = PromptLog()
    for number in range(3):
        log.add((number,))
    assert prompts(log) == [(0,), (1,), (2,)]
    first, _, last = log.since("")
    assert prompts(log, first.id) == [(1,), (2,)]
    assert prompts(log, last.id) == []
    log.add(())
    assert prompts(log, last.id) == [], "a short prompt has no chunk"


def test_a_gap_and_a_cleared_cache_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_log, "MAX_CHUNKS", 4)
    log = PromptLog()
    log.add((1, 2))
    (first,) = log.since("")
    log.add((3, 4))
    assert prompts(log, first.id) == [(3, 4)]
    log.add((5, 6, 7))
    assert prompts(log, first.id) == [None, (5, 6, 7)], "the second one is lost"
    last = log.since("")[-1]
    log.clear()
    (cleared,) = log.since(last.id)
    assert cleared.chunks is None and log.since(cleared.id) == [] and log.since("") == []
    log.add((8,))
    assert prompts(log, last.id) == [None, (8,)] and prompts(log, cleared.id) == [(8,)]
    assert prompts(log, "of another process-2") == prompts(log, "-") == [None, (8,)]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=40), st.integers(1, 12), st.data())
def test_a_follower_that_looks_at_any_time_knows_what_the_log_has(
    acts: list[tuple[bool, int]], most: int, data: st.DataObject
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_log, "MAX_CHUNKS", most)
        log, last, known, number = PromptLog(), "", [], 0
        for clears, size in acts:
            if clears and size == 1:
                log.clear()
            else:
                log.add(tuple(range(number, number + size)))
                number += size
            if data.draw(st.booleans()):
                for event in log.since(last):
                    known = [] if event.chunks is None else [*known, event.chunks]
                    last = event.id
                held = [event.chunks for event in log.since("")]
                assert known[len(known) - len(held) :] == held


def test_chunks_pass_as_text() -> None:
    chunks = (0, 1, (1 << 64) - 1)
    assert unpack(pack(chunks)) == chunks and unpack("") == ()
    for text in ("00", "g" * 16):
        with pytest.raises(ValueError):
            unpack(text)


def test_a_replica_without_its_cache_has_no_hits() -> None:
    index = PrefixIndex(chunk_tokens=10)
    index.add_replica(0, 100)
    index.add_replica(1, 100)
    index.add(0, (1, 2))
    index.add(1, (1, 2))
    index.clear_replica(0)
    assert index.hits((1, 2)) == {1: 20}
    index.add(0, (1,))
    assert index.hits((1, 2)) == {0: 10, 1: 20}
    index.resize(1, 0)
    assert index.hits((1, 2)) == {0: 10}


@contextlib.asynccontextmanager
async def router(server: Live, **service: Any) -> AsyncIterator[RouterServer]:
    config = ServiceConfig(port=0, drain_s=0.2, **service)
    async with routing(config, RouterConfig(), bind("127.0.0.1", 0)) as running:
        running.balancer.add("one", f"http://127.0.0.1:{server.port}")
        async with asyncio.timeout(10):
            await running.balancer.until_up("one")
        yield running


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


def hits(running: RouterServer, text: str = LONG, **fields: Any) -> int:
    demand = read_demand({}, {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}).demand
    return max(running.balancer.router.index.hits(demand.chunks).values(), default=0)


@pytest.mark.parametrize("keys", [{}, {"api_key": "k"}, {"api_key": "k", "admin_api_key": "chief"}])
async def test_two_routers_and_one_that_starts_again_know_the_same_prompts(
    keys: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "_AGAIN_S", 0.05)
    headers = {"authorization": "Bearer k"} if keys else {}
    with live(behaviour(says("done"), max_len=1 << 16), drain_s=0.2, **keys) as server:
        front = server.server.front
        async with router(server, **keys) as first, router(server, **keys) as second:
            await until(lambda: front.prompts._followers == 2)
            messages = [{"role": "user", "content": LONG}]
            answer = await asyncio.to_thread(server.chat, headers=headers, messages=messages)
            assert answer.status == 200
            await until(lambda: hits(first) == hits(second) > 1000)
        async with router(server, **keys) as third:
            await until(lambda: hits(third) > 1000)
            reset = {"content-type": "application/json"} | (
                {"authorization": f"Bearer {list(keys.values())[-1]}"} if keys else {}
            )
            assert (await asyncio.to_thread(server.send, "POST", "/reset_prefix_cache", {}, reset)).status == 200
            await until(lambda: hits(third) == 0)


async def test_nothing_is_hashed_while_nobody_follows() -> None:
    with live(behaviour(says("done"), max_len=1 << 16)) as server:
        assert (await asyncio.to_thread(server.chat, messages=[{"role": "user", "content": LONG}])).status == 200
        assert server.server.front.prompts.since("") == []
        assert server.server.front.prompts.read({}, {"prompt": LONG}) == ()


async def test_a_replica_says_what_its_cache_holds() -> None:
    with live(behaviour(says("done"), max_len=1 << 16)) as server:
        async with router(server) as running:
            index = running.balancer.router.index
            health = (await asyncio.to_thread(server.get, "/health")).json
            assert health["cache_tokens"] == 100 * 16
            assert list(index._capacity.values()) == [100 * 16 / index.chunk_tokens]
