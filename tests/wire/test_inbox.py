"""The engine's end never blocks, never dies of a message, and knows when the service has gone."""

from __future__ import annotations

import socket
import threading

import msgspec
import pytest

from ridgeline.core.errors import EngineFailed
from ridgeline.wire.frames import LENGTH, FrameBuffer, down_decoder, encode
from ridgeline.wire.inbox import Inbox
from ridgeline.wire.messages import Cancel, Delta, Deltas, Failed, Heartbeat, Loading, Reply


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    inbox = Inbox(theirs)
    yield ours, inbox
    ours.close()
    inbox.close()


def read(sock: socket.socket, count: int) -> list:
    held, frames = FrameBuffer(), []
    sock.settimeout(5)
    while len(frames) < count:
        data = sock.recv(1 << 16)
        if not data:
            break
        held.feed(data)
        frames += [down_decoder().decode(body) for body in held.take()]
    return frames


def test_drain_takes_what_is_there_and_does_not_wait(pair):
    sock, inbox = pair
    assert inbox.drain() == []
    frame = encode(Cancel("b"))
    sock.sendall(encode(Cancel("a")) + frame[:3])
    assert inbox.wait(5)
    assert inbox.drain() == [Cancel("a")]
    assert not inbox.wait(0)
    sock.sendall(frame[3:])
    assert inbox.wait(5)
    assert inbox.drain() == [Cancel("b")]


def test_send_never_blocks_and_loses_nothing(pair):
    sock, inbox = pair
    frames = [Deltas(number, [Delta("a", 0, list(range(20000)))]) for number in range(300)]
    for frame in frames:
        inbox.send(frame)  # far more than a socket takes, and nobody reads yet
    received: list = []
    reader = threading.Thread(target=lambda: received.extend(read(sock, len(frames))))
    reader.start()
    while reader.is_alive():
        inbox.wait(0.01)
    assert received == frames


def test_wait_wakes_up_for_the_end_of_the_service(pair):
    sock, inbox = pair
    sock.close()
    assert inbox.wait(5)
    assert inbox.drain() == []
    assert inbox.gone
    inbox.send(Heartbeat(1, False))
    assert inbox.wait(None)


def test_a_report_of_the_start_says_that_the_service_is_gone(pair):
    sock, inbox = pair
    inbox.report(Loading("hosts", 0, 1))
    assert read(sock, 1) == [Loading("hosts", 0, 1)]
    sock.close()
    with pytest.raises(EngineFailed, match="The service is gone"):
        inbox.report(Loading("hosts", 0, 1))


def test_messages_before_the_end_are_still_seen(pair):
    sock, inbox = pair
    sock.sendall(encode(Cancel("a")))
    sock.close()
    assert inbox.drain() == [Cancel("a")]
    assert inbox.gone


def test_what_is_no_message_is_answered_and_skipped(pair):
    sock, inbox = pair
    strange = msgspec.msgpack.encode(["submit", "r7", "no tokens"])
    bad_sampling = msgspec.msgpack.encode(["submit", "r8", [1], {"temperature": -1.0}, 0.0])
    for body in (strange, b"\xc1", bad_sampling):
        sock.sendall(LENGTH.pack(len(body)) + body)
    sock.sendall(encode(Cancel("a")))
    assert inbox.drain() == [Cancel("a")]
    first, second, third = read(sock, 3)
    assert isinstance(first, Reply) and first.id == "r7" and "error" in first.facts
    assert second.id == ""
    assert third.id == "r8" and "temperature" in third.facts["error"]


def test_close_lets_the_last_word_out():
    ours, theirs = socket.socketpair()
    with ours:
        inbox = Inbox(theirs)
        ours.sendall(encode(Cancel("never read")))
        inbox.send(Failed("out of memory"))
        closing = threading.Thread(target=inbox.close, args=(5.0,))
        closing.start()
        assert read(ours, 2) == [Failed("out of memory")]
        ours.close()
        closing.join(4)
        assert not closing.is_alive()
