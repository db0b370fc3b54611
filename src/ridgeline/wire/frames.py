"""Framing of messages over a stream socket: `length (uint32, little endian) + msgpack`, for asyncio and for plain bytes."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from ridgeline.core.errors import EngineFailed
from ridgeline.wire.messages import Down, Up

MAX_FRAME = 1 << 30
"""Bytes of the largest frame. A longer length word means that the stream is corrupt."""

LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def encode(message: Up | Down) -> bytes:
    """Encode one message as a frame, length word included."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def up_decoder() -> msgspec.msgpack.Decoder[Up]:
    return msgspec.msgpack.Decoder(Up)


def down_decoder() -> msgspec.msgpack.Decoder[Down]:
    return msgspec.msgpack.Decoder(Down)


def body_length(word: bytes | bytearray | memoryview, limit: int = MAX_FRAME) -> int:
    """Read a body's length from the frame's first four bytes. Raises EngineFailed above the limit."""
    (length,) = LENGTH.unpack_from(word)
    if length > limit:
        raise EngineFailed(f"a frame has {length} bytes, more than the limit of {limit}: the stream is corrupt")
    return int(length)


class FrameBuffer:
    """Reassembles frames: `feed` adds received bytes, `take` returns the bodies of complete frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> None:
        self._bytes += data

    def take(self) -> list[bytes]:
        """Remove and return the bodies of all complete frames, in order."""
        bodies: list[bytes] = []
        start = 0
        buffer = self._bytes
        while len(buffer) - start >= LENGTH.size:
            end = start + LENGTH.size + body_length(memoryview(buffer)[start : start + LENGTH.size])
            if end > len(buffer):
                break
            bodies.append(bytes(memoryview(buffer)[start + LENGTH.size : end]))
            start = end
        if start:
            del buffer[:start]
        return bodies


async def read_body(reader: asyncio.StreamReader) -> bytes | None:
    """Read the body of the next frame. None at the end of the stream, also in the middle of a frame."""
    try:
        word = await reader.readexactly(LENGTH.size)
        return await reader.readexactly(body_length(word))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
