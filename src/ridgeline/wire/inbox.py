"""The engine's end of the border: messages from the service without ever blocking the step loop."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

import msgspec

from ridgeline.core.errors import RidgelineError
from ridgeline.wire.frames import FrameBuffer, encode, up_decoder
from ridgeline.wire.messages import Down, Reply, Up

MAX_BACKLOG = 1 << 30
"""Bytes that may wait for a service that does not read; beyond it the service counts as gone."""

_RECEIVE = 1 << 20
_SOCKET_BUFFER = 4 << 20


class Inbox:
    """Wraps a connected stream socket and owns it.

    `drain` and `wait` belong to one thread, the step loop's; `send` may be called from any. What the socket does not take
    at once waits in memory and goes out with the next call of any of the three. `gone` turns True for good when the
    service has closed its end, and then `drain` returns nothing and `send` drops its frame.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        self._sock = sock
        self._poll = select.poll()
        self._lock = threading.Lock()
        self._outgoing = bytearray()
        self._incoming = FrameBuffer()
        self._decoder = up_decoder()
        self.gone = False

    def drain(self) -> list[Up]:
        """Every message that has arrived, in order, without waiting."""
        self._flush()
        bodies: list[bytes] = []
        while not self.gone and (data := self._receive()):
            self._incoming.feed(data)
            bodies += self._incoming.take()
        return [message for body in bodies if (message := self._decode(body)) is not None]

    def wait(self, timeout: float | None) -> bool:
        """Sleep until a message has arrived, the service has gone or `timeout` seconds are over (None: no limit).

        True when `drain` has something to see (the end of the service is one such thing).
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.gone:
            left = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            self._poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
            seen = self._poll.poll(left)
            self._flush()
            if seen and seen[0][1] & ~select.POLLOUT:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def send(self, message: Down) -> None:
        """Queue a message; returns at once whatever the service does."""
        frame = encode(message)
        with self._lock:
            self._outgoing += frame
        self._flush()

    def close(self, linger_s: float = 0.0) -> None:
        """Close the socket, after giving what still waits up to `linger_s` seconds to leave and to be read.

        A socket that is closed with unread messages in it resets, and what it sent may be lost to its reader; so this
        end says that it is done and waits for the other one to close first.
        """
        deadline = time.monotonic() + linger_s
        self._flush()
        while self._outgoing and not self.gone and (left := deadline - time.monotonic()) > 0:
            self._poll.register(self._sock, select.POLLOUT)
            self._poll.poll(left * 1000)
            self._flush()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        while not self.gone and (left := deadline - time.monotonic()) > 0:
            self._poll.register(self._sock, select.POLLIN)
            self._poll.poll(left * 1000)
            self._receive()
        self.gone = True
        self._sock.close()

    def _receive(self) -> bytes:
        """What has arrived, b"" when nothing has; notices the end of the service."""
        try:
            data = self._sock.recv(_RECEIVE)
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError:
            data = b""
        self.gone = self.gone or not data
        return data

    def _flush(self) -> None:
        with self._lock:
            if self.gone:
                self._outgoing.clear()
                return
            try:
                while self._outgoing:
                    sent = self._sock.send(memoryview(self._outgoing)[:_SOCKET_BUFFER])
                    del self._outgoing[:sent]
            except (BlockingIOError, InterruptedError):
                self.gone = len(self._outgoing) > MAX_BACKLOG
            except OSError:
                self.gone = True

    def _decode(self, body: bytes) -> Up | None:
        """The message, or None for one that is no message: its sender hears of it, and the engine lives on."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RidgelineError) as error:
            self.send(Reply(_named(body), {"error": f"The engine could not read a message of the service: {error}"}))
            return None


def _named(body: bytes) -> str:
    """The id in a message that did not decode as one (every message up is [tag, id, ...])."""
    try:
        raw = msgspec.msgpack.decode(body)
        return str(raw[1])
    except (msgspec.MsgspecError, TypeError, IndexError, KeyError):
        return ""
