"""The first frame on a new border: what the engine is to serve, as JSON."""

from __future__ import annotations

import socket

import msgspec

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.wire.frames import body_length


class EngineOrder(msgspec.Struct):
    """Configuration of one engine process, resolved by the service's command."""

    model: ModelConfig
    engine: EngineConfig


def encode_config(order: EngineOrder) -> bytes:
    body = msgspec.json.encode(order)
    return len(body).to_bytes(4, "little") + body


def receive_config(sock: socket.socket) -> EngineOrder:
    """Read the first frame from a blocking socket. Raises ConnectionError if the service has gone."""
    body = _exactly(sock, body_length(_exactly(sock, 4)))
    return msgspec.json.decode(body, type=EngineOrder)


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConnectionError("the service closed the border before it sent the configuration")
        data += part
    return data
