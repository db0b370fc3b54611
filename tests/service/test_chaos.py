"""Every request ends in its answer or in an error, whatever replicas do. tests/live/test_chaos.py breaks real ones."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
from aiohttp import web

from benchmarks.chaos_load import ANSWERED, ERROR, LOST, TWICE, WRONG, judge
from ridgeline.core.sampling import SamplingParams
from ridgeline.engine.loop import Loop
from ridgeline.engine.policy import admission
from ridgeline.service.call import Call
from ridgeline.service.fleet.balancer import probed_socket
from ridgeline.service.fleet.launcher import LocalLauncher
from ridgeline.service.listen import bind

from .replicas import EVENTS, FakeReplica, Script, breaks, drops, refuses, routed, streams

TEXT = "0123"
"""Of the answer that `streams` gives."""
HEAD = b"HTTP/1.1 200 OK\r\n"
EVENT_HEAD = HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
HEALTHY = HEAD + b'content-type: application/json\r\ncontent-length: 24\r\n\r\n{"status":"ok","step":0}'
FIRST_EVENT = EVENT_HEAD + b"%x\r\n%s\r\n" % (len(EVENTS[0]), EVENTS[0])
NO_LENGTH = b"\xff\xfe no length \r\n\r\n"
MALFORMED = {
    "not HTTP": b"\x16\x03\x01 hello \r\n\r\n",
    "a chunk without a length": EVENT_HEAD + b"zz\r\ndata",
    "a body that is too short": HEAD + b'content-type: application/json\r\ncontent-length: 999\r\n\r\n{"id":',
    "a head of 100 KB": HEAD + b"x-long: " + b"x" * 100_000 + b"\r\n\r\n",
    "nothing": b"",
}


@asynccontextmanager
async def speaks(*parts: bytes, ends: bool = True) -> AsyncIterator[str]:
    """The address of a server that answers what a router GETs, as health checks, and every request with these bytes. ends: then it
    closes the connection."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                for part in (HEALTHY,) if head.startswith(b"GET") else parts:
                    writer.write(part)
                    await asyncio.sleep(0.05)
                if ends and not head.startswith(b"GET"):
                    break
        writer.close()

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def mixed(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """A third of the requests is answered, the others meet one fault after the other."""
    scripts: list[Script] = [streams, drops, breaks, streams, refuses(503), refuses(500)]
    replica.gate.set()  # `breaks` closes at once
    return await scripts[len(replica.bodies) % len(scripts)](replica, request)


async def test_every_request_ends_once() -> None:
    async with routed(mixed, mixed, mixed, policy="round-robin") as fleet:
        answers = await asyncio.gather(*(fleet.chat() for _ in range(60)))
        ends = Counter(judge(TEXT, answer.status, answer.data, True)[0] for answer in answers)
        assert set(ends) == {ANSWERED, ERROR} and min(ends.values()) >= 5
        await fleet.at_rest()


@pytest.mark.parametrize("kind", MALFORMED)
async def test_a_malformed_answer_is_asked_for_elsewhere(kind: str) -> None:
    async with speaks(MALFORMED[kind]) as url, routed(streams, policy="round-robin") as fleet:
        fleet.balancer.add("malformed", url)
        async with asyncio.timeout(10.0):
            await fleet.balancer.until_up("malformed")
        answers = [await fleet.chat() for _ in range(4)]
        assert {judge(TEXT, answer.status, answer.data, True) for answer in answers} == {(ANSWERED, "")}
        assert fleet.balancer.router.totals.retried >= 1


@pytest.mark.parametrize("ends", [False, True])
async def test_a_stream_that_becomes_malformed_ends_with_an_error_at_once(ends: bool) -> None:
    async with speaks(FIRST_EVENT, NO_LENGTH, ends=ends) as url, routed() as fleet:
        fleet.balancer.add("malformed", url)
        await fleet.balancer.until_up("malformed")
        async with asyncio.timeout(5.0):
            answer = await fleet.chat()
        assert judge(TEXT, answer.status, answer.data, True)[0] == ERROR and answer.data.startswith(EVENTS[0])


def test_ends_are_told_apart() -> None:
    done, error = b"data: [DONE]\n\n", b'data: {"error":{"message":"m","type":"t"}}\n\n'
    whole = b"".join(EVENTS)
    assert judge(TEXT, 200, whole, True)[0] == ANSWERED
    assert judge(TEXT, 200, EVENTS[0] + error, True) == (ERROR, "m")
    assert judge(TEXT, 200, EVENTS[0] + EVENTS[1], True)[0] == LOST
    assert judge(TEXT, 200, EVENTS[1] + error, True)[0] == WRONG
    assert judge(TEXT, 200, EVENTS[0] + done, True)[0] == WRONG
    assert judge(TEXT, 200, whole + whole, True)[0] == judge(TEXT, 200, whole + error, True)[0] == TWICE
    assert judge(TEXT, 502, b"<html>", False)[0] == LOST
    assert judge(TEXT, 200, b'{"choices":[{"message":{"content":"0123"}}]}', False)[0] == ANSWERED


def test_durations_do_not_follow_the_wall_clock() -> None:
    call = Call("cmpl-1", time.time() - 5.0, ([1],), SamplingParams(), 4)
    assert 5.0 <= time.monotonic() - call.began < 6.0
    later = replace(call, arrival=time.time() + 3600.0)  # the clock was set back meanwhile
    assert 0.0 <= time.monotonic() - later.began < 1.0
    (submit,) = call.submits()
    assert submit.arrival == call.began


def test_a_batch_opens_by_a_clock_that_is_never_set() -> None:
    class Waiting:
        """A scheduler with one request that waits for its batch."""

        def wait_seconds(self, now: float) -> float:
            return admission("dynamic:2,60000").opens_in([self], now)

        id, arrival, followers = "a", time.monotonic(), ()

    assert 50.0 < Loop(Waiting(), None).wait_seconds() <= 60.0  # type: ignore[arg-type]


def test_each_place_has_a_folder_of_its_own_for_pages() -> None:
    launcher = LocalLauncher({"port": 0, "kv_disk": "/pages"}, (), {}, print)
    assert launcher.options(1) == {"port": 0, "kv_disk": "/pages/place-1"}
    assert LocalLauncher({"port": 0}, (), {}, print).options(1) == {"port": 0}


def test_silent_connections_are_probed() -> None:
    """Otherwise a request whose other end is gone without a word waits for hours: of a replica 30 s, of a client 2 min."""
    (listener,) = bind("127.0.0.1", 0)
    with listener, probed_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", listener.getsockname())) as made:
        listener.listen()
        made.connect(listener.getsockname())
        accepted, _ = listener.accept()
        with accepted:
            for sock, seconds in ((made, 30), (accepted, 120)):
                assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                options = socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT
                idle, pause, count = (sock.getsockopt(socket.IPPROTO_TCP, option) for option in options)
                assert idle + pause * count == seconds
