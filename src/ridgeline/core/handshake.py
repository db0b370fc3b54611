"""How two processes of different hosts prove, when a TCP connection opens, that they have the same secret.

    server: version word, nonce
    client: version word, nonce, HMAC-SHA256 of role, both nonces and topic
    server: HMAC-SHA256 of the other role, both nonces and topic; a client with another secret or topic gets a closed connection

Nonces are new for each connection, so that a recorded handshake is worth nothing, and roles differ, so that an answer cannot be
sent back. What follows is neither encrypted nor authenticated: hosts need a network of their own.
"""

from __future__ import annotations

import hmac
import os
import socket
import struct
import time

_VERSION = b"RIDGELN1"
_GREETING = struct.Struct("<8s16s")
_HELLO = struct.Struct("<8s16s32s")
_PROOF = struct.Struct("<32s")
_TIMEVAL = struct.Struct("@ll")
HANDSHAKE_S = 2.0
SILENCE_S = 5.0
"""Seconds without a byte after which the other end counts as lost."""
_KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
"""A connection to a host that is gone without a word ends after about 10 s."""


class PeerError(Exception):
    """The other end says what the protocol does not allow, is late, or has another secret."""


def receive(sock: socket.socket, target: memoryview, until: float) -> None:
    """Fill `target` before `until`, on the monotonic clock. Raises PeerError, OSError."""
    while target:
        left = until - time.monotonic()
        if left <= 0:
            raise PeerError("it is too slow")
        limit(sock, receive_s=min(left, SILENCE_S))
        try:
            count = sock.recv_into(target, flags=socket.MSG_WAITALL)
        except BlockingIOError:
            raise PeerError("it is silent") from None
        if not count:
            raise PeerError("it has closed the connection")
        target = target[count:]


def limit(sock: socket.socket, receive_s: float = 0.0, send_s: float = SILENCE_S) -> None:
    """Seconds that a call may wait; 0: for ever. The kernel waits, so that one call moves megabytes: with timeouts of Python, calls
    end with each part that has arrived, and each time the thread waits for the interpreter."""
    sock.settimeout(None)
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        sock.setsockopt(
            socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6) + (0 < seconds < 1e-6))
        )


def receive_bytes(sock: socket.socket, count: int, until: float) -> bytes:
    data = bytearray(count)
    receive(sock, memoryview(data), until)
    return bytes(data)


def greet(sock: socket.socket, secret: bytes, topic: bytes) -> None:
    """The server's part. Raises PeerError for a client with another secret or topic, OSError."""
    until, nonce = time.monotonic() + HANDSHAKE_S, os.urandom(16)
    _prepare(sock)
    sock.sendall(_GREETING.pack(_VERSION, nonce))
    version, other, proof = _HELLO.unpack(receive_bytes(sock, _HELLO.size, until))
    if version != _VERSION or not hmac.compare_digest(proof, _sign(secret, b"client", nonce + other + topic)):
        raise PeerError("it has another secret, model or version")
    sock.sendall(_PROOF.pack(_sign(secret, b"server", other + nonce + topic)))


def connect(address: str, secret: bytes, topic: bytes) -> socket.socket:
    """Open a connection to HOST:PORT, with the client's part. Raises PeerError, OSError."""
    host, _, port = address.rpartition(":")
    sock = socket.create_connection((host.strip("[]"), int(port)), timeout=HANDSHAKE_S)
    try:
        until, nonce = time.monotonic() + HANDSHAKE_S, os.urandom(16)
        _prepare(sock)
        version, other = _GREETING.unpack(receive_bytes(sock, _GREETING.size, until))
        if version != _VERSION:
            raise PeerError("it speaks another protocol")
        sock.sendall(_HELLO.pack(_VERSION, nonce, _sign(secret, b"client", other + nonce + topic)))
        (proof,) = _PROOF.unpack(receive_bytes(sock, _PROOF.size, until))
        if not hmac.compare_digest(proof, _sign(secret, b"server", nonce + other + topic)):
            raise PeerError("it has another secret")
    except BaseException:
        sock.close()
        raise
    return sock


def derive(secret: str, purpose: str) -> str:
    """A secret for one purpose, hexadecimal, from one that two hosts have."""
    return hmac.digest(secret.encode(), purpose.encode(), "sha256").hex()


def _sign(secret: bytes, role: bytes, rest: bytes) -> bytes:
    return hmac.digest(secret, _VERSION + role + rest, "sha256")


def _prepare(sock: socket.socket) -> None:
    limit(sock)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        sock.setsockopt(socket.IPPROTO_TCP, option, value)
