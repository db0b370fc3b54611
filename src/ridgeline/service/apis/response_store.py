"""Responses that later requests can go on from. They live in memory, within a limit; the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ridgeline.core.errors import NotFound, RequestError


@dataclass(frozen=True, slots=True)
class Stored:
    """A response, the items of its own input, and the id of the response that it goes on from."""

    response: Mapping[str, Any]
    items: list[dict[str, Any]]
    previous: str | None


class ResponseStore:
    """Stored responses of all API keys. owner: name of a key; nobody sees the responses of another one."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._held = limit_bytes, 0
        self._kept: OrderedDict[tuple[str, str], tuple[Stored, int]] = OrderedDict()

    def put(self, owner: str, stored: Stored) -> None:
        """Keep a response, unless it is larger than all that may be kept."""
        size = len(msgspec.json.encode((stored.response, stored.items)))
        if size > self._limit:
            return
        self._kept[owner, stored.response["id"]] = stored, size
        self._held += size
        while self._held > self._limit:
            self._held -= self._kept.popitem(last=False)[1][1]

    def get(self, owner: str, response_id: str) -> Stored:
        """Raises NotFound."""
        if (entry := self._kept.get((owner, response_id))) is None:
            raise NotFound(f"The response {response_id[:80]!r} is not stored, or no longer.", param="id")
        return entry[0]

    def delete(self, owner: str, response_id: str) -> None:
        self._held -= self._kept.pop((owner, response_id))[1]

    def conversation(self, owner: str, response_id: str | None) -> list[dict[str, Any]]:
        """All items of a response and of those before it, in order; none without an id. Raises RequestError if one is gone."""
        chain: list[Stored] = []
        while response_id is not None:
            entry = self._kept.get((owner, response_id))
            if entry is None:
                raise RequestError(
                    f"previous_response_id: the response {response_id[:80]!r} is not stored, or no longer. Send the whole "
                    "conversation as input.",
                    param="previous_response_id",
                )
            chain.append(entry[0])
            response_id = entry[0].previous
        return [item for stored in reversed(chain) for item in (*stored.items, *stored.response["output"])]
