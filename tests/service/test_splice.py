"""Chunks that go from a replica's connection to the client's directly: none lost, in order, aiohttp in step."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.client_proto import ResponseHandler
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.service.fleet.splice import Splice, whole_chunks

from .replicas import CHAT, EVENTS, FakeReplica, begin, routed

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(text: str) -> bytes:
    return f"data: {text}\n\n".encode()


class Connection(asyncio.Transport):
    """Keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written, self.protocol, self.closing, self.unread = b"", None, False, 0

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def write(self, data: Any) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        return self.unread


def split(data: bytes, places: Sequence[int]) -> list[bytes]:
    ends = sorted({place % len(data) for place in places} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False) if end > start]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.text("ab\n\r1f", max_size=20), min_size=1, max_size=8),
    st.lists(st.integers(0, 1000), max_size=12),
    st.sets(st.integers(0, 12)),
)
def test_any_pieces_of_a_stream_arrive_once_and_in_order(texts: list[str], places: list[int], slow: set[int]) -> None:
    """The client gets all events, whether directly or through aiohttp, which reads the end. slow: pieces after which the client has
    not read what was sent."""
    events = [event(text) for text in texts]
    pieces = split(b"".join(map(chunk, events)) + b"0\r\n\r\n", places)

    async def run() -> bytes:
        source, target = Connection(), Connection()
        aiohttps = ResponseHandler(asyncio.get_running_loop())
        aiohttps.connection_made(source)
        source.protocol = aiohttps
        aiohttps.set_response_params()
        aiohttps.data_received(HEAD)
        _, content = await aiohttps.read()
        splice, got = Splice(source, target, content, lambda: None), b""

        async def read() -> None:
            nonlocal got
            while data := await content.readany():
                got += data
                while data := content.read_nowait():
                    got += data
                before = len(target.written)
                await splice.run()
                sent = target.written[before:]
                while sent:
                    size, _, sent = sent.partition(b"\r\n")
                    got, sent = got + sent[: int(size, 16)], sent[int(size, 16) + 2 :]

        reading = asyncio.create_task(read())
        for number, piece in enumerate(pieces):
            target.unread = (1 << 20) * (number in slow)
            source.protocol.data_received(piece)
            for _ in range(4):
                await asyncio.sleep(0)
        async with asyncio.timeout(1):
            await reading
        assert source.protocol is aiohttps and content.is_eof(), "the connection is free for another answer"
        return got

    assert asyncio.run(run()) == b"".join(events)


async def test_an_answer_that_has_ended_passes_nothing_more() -> None:
    """The connection may have another answer by the time at which a slow client has got this one."""
    source, target = Connection(), Connection()
    source.protocol = aiohttps = ResponseHandler(asyncio.get_running_loop())
    aiohttps.connection_made(source)
    aiohttps.set_response_params()
    aiohttps.data_received(HEAD)
    _, content = await aiohttps.read()
    splice = Splice(source, target, content, lambda: None)
    for piece in (chunk(event("a")), b"0\r\n", b"\r\n"):
        source.protocol.data_received(piece)
    assert content.is_eof() and source.protocol is aiohttps
    splice._at_end = True
    async with asyncio.timeout(1):
        assert await splice.run() == b""
    assert target.written == b""


def test_chunks_end_where_their_frames_say() -> None:
    whole = chunk(b"ab") + chunk(b"c")
    assert whole_chunks(whole) == (len(whole), True)
    assert whole_chunks(whole + b"1\r\nd\r") == (len(whole), True)
    assert whole_chunks(whole + b"0\r\n\r\n") == (len(whole), False)
    for broken in (b"x\r\n", b"-1\r\nab\r\n", b"1\r\nabc", b"\r\n"):
        assert whole_chunks(whole + broken) == (len(whole), False), broken


async def paced(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """An event at a time."""
    response = await begin(request)
    for event in EVENTS:
        await response.write(event)
        await asyncio.sleep(0.02)
    return response


async def breaks_late(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    """Three events and a part of the fourth one, in a chunk that does not end."""
    response = await begin(request)
    for event in EVENTS[:3]:
        await response.write(event)
        await asyncio.sleep(0.05)
    request.transport.write(b"%x\r\n%b" % (len(EVENTS[3]), EVENTS[3][:-4]))
    await asyncio.sleep(0.05)
    request.transport.abort()
    raise asyncio.CancelledError


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each time that chunks went directly."""
    counts: list[int] = []

    def counted(data: bytes) -> tuple[int, bool]:
        counts.append((ended := whole_chunks(data))[0])
        return ended

    monkeypatch.setattr("ridgeline.service.fleet.splice.whole_chunks", counted)
    return counts


async def test_streams_go_directly_and_connections_are_used_again(direct: list[int]) -> None:
    async with routed(paced) as fleet:
        for _ in range(3):
            answer = await fleet.chat()
            assert answer.status == 200 and answer.data == b"".join(EVENTS)
        assert sum(count > 0 for count in direct) >= 9, "most events go directly"
        assert (await fleet.get("/metrics")).data.decode().count('result="ok"} 3.0') == 1
        await fleet.at_rest()


async def test_a_stream_that_breaks_between_connections_ends_with_an_error_event(direct: list[int]) -> None:
    async with routed(breaks_late) as fleet:
        answer = await fleet.chat()
        assert answer.status == 200 and any(direct)
        assert answer.data.startswith(b"".join(EVENTS[:3]))
        last = answer.data.split(b"\n\n")[-2:]
        assert b"The replica was lost during the answer" in last[0] and last[1] == b""
        await fleet.at_rest()


async def test_a_client_that_leaves_ends_the_request_of_the_replica(direct: list[int]) -> None:
    async with routed(endless) as fleet:
        async with fleet.client.post(f"{fleet.server.url}/v1/chat/completions", json=CHAT) as reply:
            while not any(direct):
                await reply.content.readany()
        await fleet.until(lambda: fleet.replicas[0].left == 1)
        await fleet.at_rest()


async def test_a_client_that_does_not_read_stops_the_replica(direct: list[int]) -> None:
    """Else the router would keep all of its answer."""
    body = {**CHAT, "size": 1 << 17}
    async with routed(endless) as fleet, fleet.client.post(f"{fleet.server.url}/v1/chat/completions", json=body):
        await fleet.until(lambda: any(direct))
        await asyncio.sleep(0.3)
        sent = fleet.replicas[0].sent
        await asyncio.sleep(0.3)
        assert fleet.replicas[0].sent == sent, "it waits"


async def endless(replica: FakeReplica, request: web.Request) -> web.StreamResponse:
    response = await begin(request)
    data = event("x" * int((await request.json()).get("size", 1)))
    for replica.sent in range(1 << 30):
        await response.write(data)
        await asyncio.sleep(0.001)
    return response
