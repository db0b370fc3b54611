"""The engine's end of the connection: reads messages from the service without blocking the step loop."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time

import msgspec

from ridgeline.core.errors import EngineFailed, RidgelineError
from ridgeline.wire.frames import FrameBuffer, encode, up_decoder
from ridgeline.wire.messages import Down, Reply, Up

MAX_BACKLOG = 1 << 30
"""Unsent bytes above which a service that does not read counts as gone."""

_RECEIVE = 1 << 20
_SOCKET_BUFFER = 4 << 20


class Inbox:
    """Owns a connected stream socket.

    Call `drain` and `wait` from the step loop's thread only. Any thread may call `send`. Bytes that the socket does not accept
    at once stay in memory; the next call of any of the three sends them.
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
        """The service has closed its end. From then on `drain` returns nothing and `send` drops its message."""

    def drain(self) -> list[Up]:
        """Return all messages that have arrived, in order, without waiting."""
        self._flush()
        bodies: list[bytes] = []
        while not self.gone and (data := self._receive()):
            self._incoming.feed(data)
            bodies += self._incoming.take()
        return [message for body in bodies if (message := self._decode(body)) is not None]

    def wait(self, timeout: float | None) -> bool:
        """Sleep until a message arrives, the service is gone or `timeout` seconds have passed (None: no limit).

        Returns:
            False at the timeout, else True.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self.gone:
            remaining_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
            self._poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
            events = self._poll.poll(remaining_ms)
            self._flush()
            if events and events[0][1] & ~select.POLLOUT:
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def send(self, message: Down) -> None:
        """Queue a message without blocking."""
        frame = encode(message)
        with self._lock:
            self._outgoing += frame
        self._flush()

    def report(self, message: Down) -> None:
        """Send during the start. Raises EngineFailed if the service is gone: nobody waits for the engine any more."""
        self.send(message)
        if self.gone:
            raise EngineFailed("The service is gone.")

    def close(self, linger_s: float = 0.0) -> None:
        """Send the remaining bytes, wait until the service closes its end, and close. This takes at most `linger_s` seconds.

        Closing a socket that has unread input resets the connection, and the peer may lose bytes that were already sent. So
        this end shuts down its sending side and waits for the peer to close first.
        """
        deadline = time.monotonic() + linger_s
        self._flush()
        while self._outgoing and not self.gone and (remaining_s := deadline - time.monotonic()) > 0:
            self._poll.register(self._sock, select.POLLOUT)
            self._poll.poll(remaining_s * 1000)
            self._flush()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        while not self.gone and (remaining_s := deadline - time.monotonic()) > 0:
            self._poll.register(self._sock, select.POLLIN)
            self._poll.poll(remaining_s * 1000)
            self._receive()
        self.gone = True
        self._sock.close()

    def _receive(self) -> bytes:
        """Return the bytes that have arrived, or b"". Sets `gone` when the service has closed its end."""
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
        """Decode a message. An invalid one is answered with an error and gives None; the engine goes on."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, RidgelineError) as error:
            self.send(
                Reply(_message_id(body), {"error": f"The engine could not read a message of the service: {error}"})
            )
            return None


def _message_id(body: bytes) -> str:
    """The id of a message that could not be decoded, else "". Every message up is [tag, id, ...]."""
    try:
        fields = msgspec.msgpack.decode(body)
        return str(fields[1])
    except (msgspec.MsgspecError, TypeError, IndexError, KeyError):
        return ""
