"""Reads JSON bodies within limits of time and memory."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, TypeVar

import msgspec
from aiohttp import StreamReader, web

from ridgeline.core.errors import BodyTooLarge, BodyTooSlow, Overloaded, RequestError
from ridgeline.core.loop_time import LoopTimeout
from ridgeline.service.json_values import decode_json

_T = TypeVar("_T")
_MIB = 1 << 20
_BODY_S = 300.0
"""Seconds in which a body must arrive. Without a limit, half a body would keep a connection, and a drain, open for ever."""
_BUDGET_WAIT_S = 30.0
"""Seconds that a large body waits for memory."""
_ENCODINGS = ("identity", "gzip", "deflate")
"""Supported values of content-encoding."""
_PIECE = 1 << 18
"""Bytes that are decompressed at a time."""
_MEMBERS = 1024
"""Maximum members of a gzip body. An empty member has 20 bytes, and 4 MB of them take seconds of the event loop. bgzip writes a
member for each 64 KiB."""
LARGE = 1 << 18
"""Bytes from which a body counts as large: it is decoded and checked in a thread, so that streams go on."""
_LARGE_TOTAL = 48 * _MIB
"""Maximum bytes of all large bodies in memory."""
_DECODED = 48 * _MIB
"""Maximum bytes of the values of one decoded body, by `_COSTS`. It also bounds the time of decoding, which blocks other
threads, to some 50 ms."""
_COSTS = ((b",", 20), (b":", 150), (b"{", 80), (b"[", 80))
"""Bytes of Python objects for each such character of JSON outside of strings: an item of a list (8 for a small number, 40 for
a large one), a member of an object, an object, a list."""
_QUOTE = 30
"""Bytes of Python objects for each quote character: half of a short string."""
_SLICE = 1 << 18
"""Bytes that are counted at a time. Other threads run in between."""


class Bodies:
    """Reads bodies of at most `limit` bytes.

    Large bodies share `_LARGE_TOTAL` bytes (or `limit`, if that is more) and one decoding thread, so that their number does not
    determine the memory they take. Small bodies are decoded in the event loop. patience_s: seconds in which a body must arrive.
    piece: bytes that are decompressed at a time.
    """

    def __init__(self, limit: int, *, patience_s: float = _BODY_S, piece: int = _PIECE) -> None:
        self._limit, self._patience_s, self._piece = limit, patience_s, piece
        self._budget = _MemoryBudget(max(_LARGE_TOTAL, limit))
        self._decoder = ThreadPoolExecutor(1, "bodies")

    async def read(self, request: web.Request, read: Callable[[Any], _T]) -> _T:
        """The result of `read` for the decoded body. Raises as `held` does."""
        async with self.held(request, read) as (_, value):
            return value

    @asynccontextmanager
    async def held(
        self, request: web.Request, read: Callable[[Any], _T]
    ) -> AsyncIterator[tuple[bytes | bytearray, _T]]:
        """The body's bytes, decompressed, whose memory stays reserved, and the result of `read` for the decoded body.

        Raises RequestError for a body that is not JSON, BodyTooLarge for one that is too large or would be when decoded,
        BodyTooSlow for one that does not arrive, Overloaded when too many large bodies arrive at once.
        """
        async with AsyncExitStack() as reservation:
            try:
                async with LoopTimeout(self._patience_s):
                    body = await self._receive(request, reservation)
            except TimeoutError as error:
                raise BodyTooSlow(
                    f"The body did not arrive within {self._patience_s:g} seconds: send it faster."
                ) from error
            except web.RequestPayloadError as error:
                raise RequestError("The body does not match its headers: check transfer-encoding.") from error
            if not body.strip():
                raise RequestError("The body is empty: send a JSON object.")
            try:
                if len(body) <= LARGE:
                    value = read(decode_json(body))
                else:
                    loop = asyncio.get_running_loop()
                    value = await loop.run_in_executor(self._decoder, _decode_large, body, read)
            except RecursionError as error:
                raise RequestError("The body is nested too deeply: send fewer levels.") from error
            except UnicodeDecodeError as error:
                raise RequestError(f"The body is not valid JSON in UTF-8: {error.reason}.") from error
            except msgspec.MsgspecError as error:
                raise RequestError(f"The body is not valid JSON: {error}.") from error
            yield body, value

    async def _receive(self, request: web.Request, reservation: AsyncExitStack) -> bytearray:
        """The body's bytes, decompressed. Memory for a large body is reserved in `reservation`."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in _ENCODINGS:
            raise RequestError(
                f"content-encoding {encoding[:40]!r} is not supported: use one of {', '.join(_ENCODINGS)}.",
                param="content-encoding",
            )
        declared = request.content_length
        if declared is not None and declared > self._limit:
            raise _too_large(self._limit)
        size = declared if declared is not None and encoding == "identity" else self._limit
        body = bytearray()
        reserved = False
        async with aclosing(_pieces(request.content, encoding, self._limit, self._piece)) as pieces:
            async for piece in pieces:
                body += piece
                if len(body) > self._limit:
                    raise _too_large(self._limit)
                if len(body) > LARGE and not reserved:
                    await reservation.enter_async_context(self._budget.reserve(size))
                    reserved = True
        return body


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {limit / _MIB:g} MiB: send less, or raise --max-body-mb.")


async def _pieces(content: StreamReader, encoding: str, limit: int, piece: int) -> AsyncGenerator[bytes]:
    """The body as it arrives, decompressed, `piece` bytes at a time.

    When the caller stops reading, the remainder stays compressed, so that a body of 1 MB that expands to 1 GB costs no more than
    the limit. Raises BodyTooLarge when more than `limit` compressed bytes arrive, because empty blocks expand to nothing.
    """
    if encoding == "identity":
        while part := await content.readany():
            yield part
        return
    stream = None
    received = members = 0
    try:
        while part := await content.readany():
            received += len(part)
            if received > limit:
                raise _too_large(limit)
            while part:
                if stream is None or stream.eof:  # gzip may have several members
                    members += 1
                    if members > _MEMBERS:
                        raise RequestError(
                            f"The {encoding} body has more than {_MEMBERS} members: compress it as one.",
                            param="content-encoding",
                        )
                    stream = zlib.decompressobj(_window(encoding, part))
                yield stream.decompress(part, piece)
                await asyncio.sleep(0)
                part = stream.unconsumed_tail or stream.unused_data
        if stream is not None:
            yield stream.flush()
    except zlib.error as error:
        raise RequestError(f"The body is not valid {encoding}: {error}.", param="content-encoding") from error
    if stream is not None and not stream.eof:
        raise RequestError(f"The body is not valid {encoding}: it ends too early.", param="content-encoding")


def _window(encoding: str, start: bytes) -> int:
    """zlib's window parameter for the header: gzip, zlib, or raw deflate, which some clients send as deflate."""
    if encoding == "gzip":
        return 16 + zlib.MAX_WBITS
    return zlib.MAX_WBITS if start[0] & 15 == zlib.DEFLATED else -zlib.MAX_WBITS


class _MemoryBudget:
    """Memory for large bodies. Reservations are served in order and wait patience_s at most."""

    def __init__(self, size: int, patience_s: float = _BUDGET_WAIT_S) -> None:
        self._free, self._patience_s = size, patience_s
        self._queue = asyncio.Lock()
        self._released = asyncio.Event()

    @asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """Reserve `size` bytes. Raises Overloaded if they do not become free in time."""
        try:
            async with asyncio.timeout(self._patience_s), self._queue:
                while self._free < size:
                    self._released.clear()
                    await self._released.wait()
                self._free -= size
        except TimeoutError as error:
            raise Overloaded(
                "Too many large bodies arrive at once: send this one again later.", retry_after_s=5
            ) from error
        try:
            yield
        finally:
            self._free += size
            self._released.set()


def _decode_large(body: bytearray, read: Callable[[Any], _T]) -> _T:
    check_cost(body)
    return read(decode_json(body))


def check_cost(body: bytearray | bytes) -> None:
    """Raises BodyTooLarge if the decoded values would take more than `_DECODED` bytes: 30 MB of `[{},{},...]` take 800 MB."""
    if any(cost > _DECODED for cost in _costs(body)):
        raise BodyTooLarge(
            f"The body's values would take more than {_DECODED // _MIB} MiB of memory: send fewer values, or several requests."
        )


def _costs(body: bytearray | bytes, slice_bytes: int = _SLICE) -> Iterator[int]:
    """The cost of the body up to the end of each slice."""
    cost, start, in_string = 0, 0, False
    while start < len(body):
        end = start + slice_bytes
        part = bytes(body[start:end])
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # an escape stays in one slice
            part += body[end : end + 1]
        start += len(part)
        added, in_string = _slice_cost(part, in_string)
        cost += added
        yield cost


def _slice_cost(part: bytes, in_string: bool) -> tuple[int, bool]:
    """The cost of a slice of JSON, and whether it ends inside a string. in_string: whether it begins inside one."""
    pieces = part.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
    outside = b"".join(pieces[int(in_string) :: 2])
    quotes = len(pieces) - 1
    cost = quotes * _QUOTE + sum(outside.count(character) * size for character, size in _COSTS)
    return cost, in_string ^ (quotes % 2 == 1)
