"""A router that is late itself takes no replica and no client for lost."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import AsyncExitStack
from unittest.mock import MagicMock, Mock

import pytest
from aiohttp import web

from ridgeline.core.loop_time import loop_clock
from ridgeline.service import answer as answer_module
from ridgeline.service.fleet import upstream as upstream_module
from ridgeline.service.fleet.proxy import Passing
from ridgeline.service.fleet.rows import ReplicaRows
from ridgeline.service.fleet.upstream import MOVE_S, ReplicaLost, Upstream, _number, error_message
from ridgeline.service.keys.keyring import UNKNOWN
from ridgeline.service.listen import waited_s
from ridgeline.service.routing import State

from .replicas import EVENTS, FakeReplica, Routed, begin, routed, starved, streams, thinks, waits


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


@pytest.mark.long
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


@pytest.mark.long
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


@pytest.mark.long
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


LATE_S = 30.0
"""The mean lateness, from which it falls in seconds."""


async def test_a_late_router_refuses_requests_before_it_reads_them() -> None:
    async with routed(waits) as fleet:
        running = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: fleet.replicas[0].running == 1)
        loop_clock().late_s = LATE_S
        for path in ("/v1/chat/completions", "/v1/responses", "/v1/files"):
            answer, error = await head_only(fleet, path)
            assert " 429 " in answer and "retry-after: 5\r\n" in answer and "x-request-id: req_" in answer
            assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error") and error[
                "param"
            ] is None
            assert "start more routers" in error["message"]
        assert (await fleet.get("/health")).status == (await fleet.get("/v1/models")).status == 200
        text = (await fleet.get("/metrics")).data.decode()
        late = float(text.partition("\nridgeline:router_late_seconds{} ")[2].partition("\n")[0])
        assert 0.5 < late <= LATE_S
        assert "\nridgeline:router_refused_total{} 3.0\n" in text
        fleet.replicas[0].gate.set()
        assert (await running).data == b"".join(EVENTS), "what runs goes on"
        loop_clock().late_s = 0.0
        assert (await fleet.chat()).status == 200


async def head_only(fleet: Routed, path: str) -> tuple[str, dict[str, str | None]]:
    """The answer's head in lower case, and its error, of a request whose body does not come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(fleet.server.url.rpartition(":")[2]))
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
    writer.write(head.encode())
    answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    body = await reader.readexactly(int(answer.partition("content-length: ")[2].partition("\r\n")[0]))
    writer.close()
    error: dict[str, str | None] = json.loads(body)["error"]
    return answer, error


async def test_rows_of_batches_pause_in_a_late_router() -> None:
    """Sooner than requests are refused."""
    async with routed(streams) as fleet:
        fleet.replicas[0].health[1]["batch_rows"] = 4
        rows = ReplicaRows(fleet.balancer, None)
        await fleet.until(lambda: fleet.balancer.row_limit == 4)
        loop_clock().late_s = 0.45
        assert not rows.take(1, None, UNKNOWN)
        fleet.balancer.admit()
        loop_clock().late_s = 0.0
        assert rows.take(1, None, UNKNOWN)


async def test_connections_that_wait_make_a_router_late() -> None:
    """The system holds them, while the turns of the loop are short."""
    waited: list[float] = []

    class Accepted(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            waited.append(waited_s(transport))
            transport.close()

    server = await asyncio.get_running_loop().create_server(Accepted, "127.0.0.1", 0)
    with socket.create_connection(server.sockets[0].getsockname()) as client:
        client.sendall(b"POST ")
        time.sleep(0.2)
        while not waited:
            await asyncio.sleep(0.001)
    server.close()
    assert hasattr(socket, "TCP_INFO") is (0.19 < waited[0] < 5)
    assert waited_s(Mock(get_extra_info=lambda name: None)) == 0.0


async def test_the_server_counts_what_its_connections_waited() -> None:
    async with routed(streams) as fleet:
        clock = loop_clock()
        address = ("127.0.0.1", int(fleet.server.url.rpartition(":")[2]))
        with socket.create_connection(address) as client:
            client.sendall(b"GET /health HTTP/1.1\r\n")
            time.sleep(0.3)  # no work of the loop: it is not late by itself
            await asyncio.sleep(0)
            seen = 0.0
            for _ in range(20):
                seen = max(seen, clock._saw)
                await asyncio.sleep(0)
            assert seen > 0.25 or not hasattr(socket, "TCP_INFO")


async def test_health_checks_go_on_after_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them a replica would keep its state, and a lost one its requests, for ever."""
    check, failures = Upstream._check, [RuntimeError("unexpected")]

    async def checked(self: Upstream) -> State:
        if failures:
            raise failures.pop()
        return await check(self)

    async with routed(streams) as fleet:
        (upstream,) = fleet.balancer.upstreams.values()
        monkeypatch.setattr(Upstream, "_check", checked)
        await fleet.until(lambda: fleet.state(0) == "down")
        assert upstream.trouble == "its health check failed (RuntimeError)"
        await fleet.until(lambda: fleet.state(0) == "up")
        assert (await fleet.chat()).status == 200


@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":"\xff\xfe"}', b'{"\xff":1}', b"", b"<html>", b"[1]"])
def test_nonsense_of_a_replica_is_no_error_of_the_router(body: bytes) -> None:
    assert _number(body, "step") is None and error_message(body) == ""


async def test_a_lost_replica_and_a_client_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error event waits no longer than other writes: the request would hang, and its replica's place with it."""
    monkeypatch.setattr(answer_module, "SLOW_WRITE_S", 0.1)

    async def full(data: bytes) -> None:
        await asyncio.sleep(3600)

    request, response = MagicMock(), Mock(content_type="text/event-stream", write=full)
    request.transport.get_write_buffer_size.return_value = 1 << 20
    passing = Passing(request, Mock(), Mock(), b"", AsyncExitStack())
    async with asyncio.timeout(5):
        assert await passing._broken(response, "replica-0", ReplicaLost("it is gone")) is response
    request.transport.abort.assert_called_once()
