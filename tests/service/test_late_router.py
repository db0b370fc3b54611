"""A router that is late itself takes no replica and no client for lost."""

from __future__ import annotations

import asyncio
import socket
import time
from unittest.mock import Mock

import pytest
from aiohttp import web

from ridgeline.service import answer as answer_module
from ridgeline.service.fleet import upstream as upstream_module
from ridgeline.service.fleet.upstream import MOVE_S, ReplicaLost, Upstream
from ridgeline.service.routing import State

from .replicas import EVENTS, FakeReplica, begin, routed, starved, streams, thinks, waits


async def test_a_late_router_keeps_its_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[State] = []
    check = Upstream._check

    async def checked(self: Upstream) -> State:
        asyncio.get_running_loop().call_later(0.001, time.sleep, 0.8)  # the whole router stands before the answer comes
        states.append(state := await check(self))
        return state

    async with routed(streams, stall_s=0.5) as fleet:
        monkeypatch.setattr(Upstream, "_check", checked)
        await fleet.until(lambda: len(states) == 4)
        assert set(states) == {State.UP}
        assert (await fleet.chat()).status == 200


async def test_a_late_router_makes_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes several turns, here more than CONNECT_S. No replica is said to be lost."""
    monkeypatch.setattr(upstream_module, "CONNECT_S", 0.4)
    async with routed(streams, streams) as fleet:
        async with starved(0.3):
            answers = await asyncio.gather(*(fleet.chat() for _ in range(4)))
        assert [answer.status for answer in answers] == [200] * 4
        assert sum(len(replica.bodies) for replica in fleet.replicas) == 4, "none was sent twice"
        assert fleet.state(0) == fleet.state(1) == "up"
        assert all(replica.breaker.closed for replica in fleet.balancer.router.replicas.values())


async def test_a_replica_that_accepts_no_connection_is_found_in_time() -> None:
    """A full backlog: the system answers nothing."""
    async with routed(streams) as fleet:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
            taken = [socket.socket() for _ in range(3)]
            for each in taken:
                each.setblocking(False)
                each.connect_ex(deaf.getsockname())
            began = time.monotonic()
            upstream = fleet.balancer.add("deaf", f"http://127.0.0.1:{deaf.getsockname()[1]}")
            with pytest.raises(ReplicaLost, match="it accepts no connection within 1 s") as lost:
                async with upstream.exchange("POST", "/v1/chat/completions", [], b"{}"):
                    pass
            assert not lost.value.reached and 0.9 < time.monotonic() - began < 5
            fleet.balancer.remove("deaf")
            for each in taken:
                each.close()


async def test_time_in_which_the_router_is_late_is_no_silence() -> None:
    """A replica misses two health checks. Between them the router stands for longer than MOVE_S."""
    async with routed(thinks, stall_s=0.5) as fleet:
        upstream, replica = fleet.balancer.upstreams["replica-0"], fleet.replicas[0]
        request = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: replica.running == 1)
        replica.deaf = True
        await fleet.until(lambda: fleet.state(0) == "down")
        time.sleep(MOVE_S + 0.5)
        await asyncio.sleep(0.9)  # the next check fails, too
        assert fleet.state(0) == "down" and upstream.silent_s < MOVE_S
        replica.deaf = False
        await fleet.until(lambda: fleet.state(0) == "up")
        replica.gate.set()
        assert (await request).status == 200
        assert len(replica.bodies) == 1, "it was not sent again"


async def test_a_late_router_finds_no_stream_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_module, "_SWEEP_CHECKS", 1)
    async with routed(waits, idle_s=0.8) as fleet:
        (upstream,) = fleet.balancer.upstreams.values()
        stream = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: upstream.received == 1)
        await asyncio.sleep(0.4)
        async with starved(0.5):
            for _ in range(4):
                await asyncio.sleep(0)
        await asyncio.sleep(0.4)  # health checks go on
        fleet.replicas[0].gate.set()
        assert (await stream).data == b"".join(EVENTS)


async def test_a_write_waits_for_the_client_and_not_for_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_module, "SLOW_WRITE_S", 0.3)
    turns = 0

    async def drain(data: bytes) -> None:
        nonlocal turns
        while turns < 4:
            await asyncio.sleep(0)
            turns += 1

    request, response = Mock(transport=None), Mock(write=drain)
    async with starved(0.2):
        await answer_module.write(request, response, b"data")
    assert turns == 4
    turns = -(10**9)
    with pytest.raises(TimeoutError):
        await answer_module.write(request, response, b"data")


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
