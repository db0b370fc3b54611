"""The first frame down the pipe: what the engine process is to serve, as JSON so that a person can read it in a trace."""

from __future__ import annotations

import socket

import msgspec

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.wire.frames import LENGTH, body_length


class EngineOrder(msgspec.Struct, frozen=True):
    """Everything the engine process needs to begin."""

    model: ModelConfig
    engine: EngineConfig


def encode_config(model: ModelConfig, engine: EngineConfig) -> bytes:
    """The frame, length word included."""
    body = msgspec.json.encode(EngineOrder(model, engine))
    return LENGTH.pack(len(body)) + body


def receive_config(sock: socket.socket) -> EngineOrder:
    """Read the frame from a blocking socket, and not a byte more. Raises ConfigError when it is none."""
    length = body_length(_exactly(sock, LENGTH.size))
    try:
        return msgspec.json.decode(_exactly(sock, length), type=EngineOrder)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"The engine cannot read its configuration: {error}") from error


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        part = sock.recv(count - len(data))
        if not part:
            raise ConfigError("The service closed the connection before it had sent the configuration.")
        data += part
    return bytes(data)
