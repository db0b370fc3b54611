"""Messages between the first rank of a model and the ranks that follow it, and the socket that carries them.

Down: one order, then a frame per step. Up: Hello, Ready, then Done for each step and a Beat every BEAT_S seconds. Each frame names
the epoch of its group and the number of its step, so that a rank that missed one stops instead of computing something else.
"""

from __future__ import annotations

import socket
import threading
from array import array
from dataclasses import fields
from typing import Any
from zlib import crc32

import msgspec

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import EngineFailed
from ridgeline.core.plan import Compaction, Join, StepPlan, StepResult, Transfer
from ridgeline.wire.frames import LENGTH, MAX_FRAME, body_length

BEAT_S = 0.5
CONNECT_S = 60.0
"""Seconds for the ranks to connect, after all have said Hello; also the limit of one collective."""


class Attach(msgspec.Struct, frozen=True):
    """The first message of a rank on another host, which then gets its order."""

    rank: int


class RankOrder(msgspec.Struct, frozen=True):
    """What a following rank is started with. store: where the ranks find one another, a file or host:port (connect.open_store)."""

    model: ModelConfig
    engine: EngineConfig
    rank: int
    store: str
    epoch: str


class Hello(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank has read the model's config. identity: what must be equal on all ranks, by name."""

    identity: dict[str, str]


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank has loaded its share."""


class Done(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A step has ended. checksum: CRC-32 of the tokens that its rows gained."""

    number: int
    checksum: int


class Beat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The process runs, even if a step takes long."""


class Lost(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The rank ends."""

    reason: str


FromRank = Hello | Ready | Done | Beat | Lost

ARRAYS = {
    field.name: value.typecode
    for field in fields(StepPlan)
    if isinstance(value := getattr(StepPlan(0), field.name), array)
}
"""Arrays of a plan: name -> type code."""


class StepFrame(msgspec.Struct, frozen=True, array_like=True):
    """A plan on its way. collected: steps whose results the first rank has, and which its rows may continue. arrays: bytes in the
    order of ARRAYS."""

    epoch: str
    number: int
    collected: int
    arrays: list[bytes]
    joins: list[Join]
    measures: list[Compaction]
    compactions: list[Compaction]
    transfers: list[Transfer]
    cancels: list[int]
    masks: dict[int, bytes]
    biases: dict[int, list[tuple[int, int, float]]]
    score_ids: dict[int, list[int]]
    step: int
    bound: int
    ahead: int


_encoder = msgspec.msgpack.Encoder(enc_hook=lambda value: value.tolist())
_step_decoder = msgspec.msgpack.Decoder(StepFrame)
_up_decoder: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)
_REST = StepFrame.__struct_fields__[4:]


def encode_step(epoch: str, number: int, collected: int, plan: StepPlan) -> bytes:
    """The frame of a plan; `number` counts the plans of the epoch, `collected` the results."""
    arrays = [getattr(plan, name).tobytes() for name in ARRAYS]
    return _encoder.encode(StepFrame(epoch, number, collected, arrays, *(getattr(plan, name) for name in _REST)))


def decode_step(body: bytes, epoch: str, number: int) -> tuple[StepPlan, int]:
    """The plan of a frame, and how many results the first rank has. Raises EngineFailed unless it is the expected
    one."""
    frame = _step_decoder.decode(body)
    if (frame.epoch, frame.number) != (epoch, number):
        raise EngineFailed(f"step {frame.number} of group {frame.epoch} arrived instead of step {number} of {epoch}")
    values: dict[str, Any] = {name: getattr(frame, name) for name in _REST}
    for (name, code), data in zip(ARRAYS.items(), frame.arrays, strict=True):
        values[name] = array(code, data)
    return StepPlan(**values), frame.collected


def checksum(result: StepResult) -> int:
    """CRC-32 of the tokens that a step's rows gained."""
    return crc32(array("i", result.tokens).tobytes())


def encode(message: FromRank | RankOrder | Attach) -> bytes:
    return _encoder.encode(message)


def decode_attach(body: bytes) -> Attach:
    return msgspec.msgpack.decode(body, type=Attach)


def decode_order(body: bytes) -> RankOrder:
    return msgspec.msgpack.decode(body, type=RankOrder)


def decode_up(body: bytes) -> FromRank:
    return _up_decoder.decode(body)


class Link:
    """A connected stream socket that carries frames. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._lock = threading.Lock()

    def send(self, body: bytes) -> None:
        """Send a frame. Raises OSError if the other end is closed."""
        with self._lock:
            self.sock.sendall(LENGTH.pack(len(body)) + body)

    def receive(self, max_bytes: int = MAX_FRAME) -> bytes | None:
        """The next frame; waits for it. None if the other end is closed. Raises EngineFailed for a frame above max_bytes."""
        word = self._exactly(LENGTH.size)
        return None if word is None else self._exactly(body_length(word, max_bytes))

    def _exactly(self, count: int) -> bytes | None:
        data = bytearray()
        while len(data) < count:
            try:
                part = self.sock.recv(count - len(data))
            except OSError:
                part = b""
            if not part:
                return None
            data += part
        return bytes(data)

    def close(self) -> None:
        self.sock.close()
