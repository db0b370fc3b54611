"""Health checks of a router that is late itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from aiohttp import web

from ridgeline.service.fleet.upstream import Upstream, patience
from ridgeline.service.routing import State

from .replicas import EVENTS, FakeReplica, begin, routed, streams


async def test_time_in_which_the_loop_is_late_does_not_count() -> None:
    async def answer() -> str:
        for _ in range(5):  # connect, write, read, parse
            await asyncio.sleep(0.001)
        return "here"

    asyncio.get_running_loop().call_later(0.01, time.sleep, 0.3)
    async with patience(0.1):
        await asyncio.sleep(0.02)
        assert await answer() == "here"


async def test_silence_ends_in_time() -> None:
    started = time.perf_counter()
    with pytest.raises(TimeoutError):
        async with patience(0.1):
            await asyncio.sleep(60)
    assert 0.09 < time.perf_counter() - started < 5


async def test_a_late_router_keeps_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[State] = []
    check = Upstream._check

    async def checked(self: Upstream, clock: Callable[[], float]) -> State:
        asyncio.get_running_loop().call_later(0.001, time.sleep, 0.3)  # the whole router stands before the answer comes
        states.append(state := await check(self, clock))
        return state

    async with routed(streams, stall_s=0.1) as fleet:
        monkeypatch.setattr(Upstream, "_check", checked)
        await fleet.until(lambda: len(states) == 4)
        assert set(states) == {State.UP}
        assert (await fleet.chat()).status == 200


async def test_a_replica_whose_answers_go_on_is_not_lost() -> None:
    """It has so much to do that it answers no health check in time; without an answer that goes on, it is down."""

    async def slowly(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        while not replica.gate.is_set():
            await response.write(EVENTS[0])
            await asyncio.sleep(0.01)
        return response

    async with routed(slowly, stall_s=0.2) as fleet:
        upstream, replica = fleet.balancer.upstreams["replica-0"], fleet.replicas[0]
        long = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: upstream.received > 2)
        replica.deaf = True
        await asyncio.sleep(1.0)
        assert fleet.state(0) == "up"
        replica.gate.set()
        assert (await long).status == 200
        await fleet.until(lambda: fleet.state(0) == "down")


async def test_a_stalled_replica_whose_answers_go_on_is_up_again() -> None:
    """Bytes are progress, also where health checks are answered late: neither its state nor its trouble may say otherwise."""

    async def stands_then_streams(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await replica.gate.wait()
        while replica.deaf:
            await response.write(EVENTS[0])
            await asyncio.sleep(0.01)
        return response

    async with routed(stands_then_streams, stall_s=0.2) as fleet:
        upstream, replica = fleet.balancer.upstreams["replica-0"], fleet.replicas[0]
        long = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: fleet.state(0) == "stalled")
        assert upstream.trouble == "no step and no byte for 0.2 s"
        replica.deaf = True
        replica.gate.set()
        await fleet.until(lambda: fleet.state(0) == "up")
        assert replica.deaf and upstream.trouble == ""
        replica.deaf = False
        assert (await long).status == 200
