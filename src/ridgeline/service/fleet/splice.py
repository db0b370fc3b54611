"""Passes the events of a replica's stream from its connection to that of the client, without a task and without parsing HTTP twice.

aiohttp reads the head of an answer and its first events. Its protocol is then set aside, at the end of a chunk (RFC 9112, section
7.1), and chunks go from one connection to the other as they come, frames included. aiohttp gets its connection back at the end of a
later chunk, for all that is not plain: the last chunk, a client that reads slowly or has left, bytes that are no chunk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from aiohttp import StreamReader

_END_OF_CHUNK = b"\n\n\r\n"
"""Of a chunk that ends with an event. In frames, "\\n\\n" does not occur."""
_LINE = b"\r\n"
_UNREAD_BYTES = 1 << 16
"""Bytes that the client has not taken, from which on it reads slowly."""


class Splice(asyncio.Protocol):
    """Stands between a replica's connection and aiohttp's protocol of it.

    source: the connection to the replica. target: that to the client, of an answer in chunks. body: the answer as aiohttp reads it;
    with its end the connection is free for another answer, which this client must not get. passed: called for each read of events
    that go to the client directly.
    """

    def __init__(
        self, source: asyncio.Transport, target: asyncio.Transport, body: StreamReader, passed: Callable[[], None]
    ) -> None:
        self._last = b""
        """Chunks that went directly, of the last read."""
        self._source, self._target, self._passed = source, target, passed
        self._reader = cast(asyncio.Protocol, source.get_protocol())
        self._at_end = False
        """Whether the last bytes that aiohttp read ended a chunk."""
        self._rest = b""
        """The begin of a chunk."""
        self._left: asyncio.Future[None] | None = None
        """Set when chunks no longer go directly. None: they do not yet."""
        source.set_protocol(self)
        body.on_eof(self.leave)

    async def run(self) -> bytes:
        """Let chunks go directly if what came so far ends a chunk. All of it must have been read from aiohttp and written.

        Returns the last of these chunks, when aiohttp reads again.
        """
        if not self._at_end or self._left is not None or self._source.get_protocol() is not self:
            return b""
        self._left = asyncio.get_running_loop().create_future()
        try:
            await self._left
        finally:
            self.leave()
        return self._last.removesuffix(_LINE)

    def leave(self) -> None:
        """Give the connection back to aiohttp."""
        if self._source.get_protocol() is not self:
            return
        self._source.set_protocol(self._reader)
        if self._rest:
            self._reader.data_received(self._rest)
        if self._left is not None and not self._left.done():
            self._left.set_result(None)

    def data_received(self, data: bytes) -> None:
        if self._left is None:
            self._at_end = data.endswith(_END_OF_CHUNK)
            self._reader.data_received(data)
            return
        data = self._rest + data if self._rest else data
        end, plain = whole_chunks(data)
        self._rest = data[end:]
        if end:
            self._last = data[:end]
            self._target.write(self._last)
            self._passed()
        if not plain or self._target.is_closing() or self._target.get_write_buffer_size() > _UNREAD_BYTES:
            self.leave()

    def eof_received(self) -> bool | None:
        self.leave()
        return self._reader.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self.leave()
        self._reader.connection_lost(exc)

    def pause_writing(self) -> None:
        self._reader.pause_writing()

    def resume_writing(self) -> None:
        self._reader.resume_writing()


def whole_chunks(data: bytes) -> tuple[int, bool]:
    """(bytes of the whole chunks with content at the begin of `data`, whether a chunk with content may follow)"""
    end = 0
    while (line := data.find(_LINE, end)) >= 0:
        try:
            size = int(data[end:line], 16)
        except ValueError:
            return end, False
        following = line + size + 2 * len(_LINE)
        if size <= 0 or following > len(data):
            return end, size > 0
        if data[following - 2 : following] != _LINE:
            return end, False
        end = following
    return end, True
