"""The first frame that the service sends: the engine's configuration, as JSON so that a person can read it in a trace."""

from __future__ import annotations

import socket

import msgspec

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.ticket import NO_POOLS, Pools
from ridgeline.wire.frames import LENGTH, body_length


class EngineOrder(msgspec.Struct, frozen=True):
    """The configuration of an engine process. pools: shared memory of the engines that it hands over to."""

    model: ModelConfig
    engine: EngineConfig
    pools: Pools = NO_POOLS


def encode_config(model: ModelConfig, engine: EngineConfig, pools: Pools = NO_POOLS) -> bytes:
    """Encode the configuration as one frame, length word included."""
    body = msgspec.json.encode(EngineOrder(model, engine, pools))
    return LENGTH.pack(len(body)) + body


def receive_config(sock: socket.socket) -> EngineOrder:
    """Read exactly one frame from a blocking socket. Raises ConfigError if it is not a configuration."""
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
