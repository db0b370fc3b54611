"""Follows the prompts that a replica was sent, also by other routers: `service/prompt_log.py` at the other end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

import aiohttp

from ridgeline.core.loop_time import LoopTimeout
from ridgeline.service.prompt_log import SILENCE_S, unpack

PATH = "/admin/prompts"
_LOST_S = 3 * SILENCE_S
_AGAIN_S = 1.0
"""Seconds until a connection that ended is made again."""
_ASK_S = 30.0
"""Seconds until a server that has no such events is asked again: it may be replaced by one that has."""
_MAX_EVENT = 1 << 22

log = logging.getLogger(__name__)


class Follower:
    """take: called with the chunks of a prompt, and with None when the replica has forgotten all."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        headers: Sequence[tuple[str, str]],
        take: Callable[[Sequence[int] | None], None],
    ) -> None:
        self._url, self._session, self._headers, self._take = url + PATH, session, headers, take
        self._last = ""
        """Id of the last event."""

    async def run(self) -> None:
        """Follow until cancelled. A lost connection goes on after its last event."""
        while True:
            pause = _AGAIN_S
            try:
                query = {"after": self._last}
                async with await self._ask(query) as reply:
                    if reply.status == 200:
                        await self._read(reply)
                    elif reply.status != 503:
                        pause = _ASK_S
            except (aiohttp.ClientError, OSError, ValueError) as error:
                log.debug("the prompts of %s: %s", self._url, error)
            await asyncio.sleep(pause)

    async def _ask(self, query: Mapping[str, str]) -> aiohttp.ClientResponse:
        async with LoopTimeout(_LOST_S):
            return await self._session.get(self._url, params=query, headers=self._headers, allow_redirects=False)

    async def _read(self, reply: aiohttp.ClientResponse) -> None:
        async for text in _events(reply.content):
            fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line and line[0] != ":")
            if "event" not in fields:
                continue
            self._take(None if fields["event"] == "cleared" else unpack(fields.get("data", "")))
            self._last = fields.get("id", "")


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[str]:
    """The text of each event. Raises ValueError for one that is too long, TimeoutError after a silence of _LOST_S."""
    rest = b""
    while chunk := await _part(content):
        *whole, rest = (rest + chunk).split(b"\n\n")
        if len(rest) > _MAX_EVENT:
            raise ValueError("an event is too long")
        for event in whole:
            yield event.decode(errors="replace")


async def _part(content: aiohttp.StreamReader) -> bytes:
    async with LoopTimeout(_LOST_S):
        return await content.readany()
