"""The LoRA adapters that requests may name as their model."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ridgeline.core.errors import RequestError, Unavailable
from ridgeline.metrics.exposition import gauge, head, labelled, sample
from ridgeline.metrics.metrics import PREFIX
from ridgeline.service.operations import Operations
from ridgeline.wire.client import Client

_LOOK_S = 0.01
"""Seconds between two questions whether the engine has read an adapter."""
_ORDER_S = 900.0
"""Seconds in which an engine must answer."""


@dataclass(frozen=True, slots=True)
class AdapterCard:
    """An adapter as the API shows it. root: its folder. created: unix seconds."""

    name: str
    root: str
    created: int


class AdapterBook:
    """The adapters that are loaded, by name. client: of the current engine. changed: called when one was loaded or unloaded."""

    def __init__(self, client: Callable[[], Client] | None = None, changed: Callable[[], None] = lambda: None) -> None:
        self._client, self._changed = client, changed
        self._operations = Operations()
        self._cards: dict[str, AdapterCard] = {}
        self._begun = False
        self.requests: Counter[str] = Counter()
        """Requests of each adapter that was ever loaded."""
        self._changing = asyncio.Lock()

    def __iter__(self) -> Iterator[AdapterCard]:
        return iter(self._cards.values())

    def find(self, name: str | None) -> AdapterCard | None:
        return None if name is None else self._cards.get(name)

    async def restored(self, client: Client) -> None:
        """An engine is ready, which has the adapters of the start: load those that were loaded since, and unload the others.

        Raises Unavailable or RequestError if one cannot be read any more.
        """
        given = {entry["name"]: entry["root"] for entry in client.facts.get("adapters") or ()}
        if not self._begun:
            self._begun = True
            self._take(given)
            return
        wanted = {card.name: card.root for card in self}
        for name in given:
            if wanted.get(name) != given[name]:
                await _order(client, "unload_adapter", name)
        for name, root in wanted.items():
            if given.get(name) != root:
                await _order(client, "load_adapter", f"{name}={root}")

    async def load(self, name: str, folder: str) -> None:
        """Raises RequestError that says what is wrong with the adapter, Unavailable if the engine cannot load it."""
        if "=" in name:
            raise RequestError(f"lora_name is {name[:80]!r}: give a name without =.", param="lora_name")
        await self._operations.run(self._change("load_adapter", f"{name}={folder}"))

    async def unload(self, name: str) -> None:
        """Requests that run go on. Raises RequestError for an unknown name."""
        await self._operations.run(self._change("unload_adapter", name))

    async def _change(self, order: str, argument: str) -> None:
        async with self._changing:
            assert self._client is not None
            reply = await _order(self._client(), order, argument)
            self._take({entry["name"]: entry["root"] for entry in reply["adapters"]})
            self._changed()

    def _take(self, roots: Mapping[str, str]) -> None:
        now = int(time.time())
        self._cards = {
            name: card if (card := self._cards.get(name)) and card.root == root else AdapterCard(name, root, now)
            for name, root in roots.items()
        }

    def render(self, model_name: str) -> str:
        """The metrics of adapters, in the text format of Prometheus; none if there never was an adapter."""
        if not self._cards and not self.requests:
            return ""
        loaded = [(labelled({"model_name": model_name}), float(len(self._cards)))]
        text = gauge(f"{PREFIX}:adapters_loaded", "LoRA adapters that are loaded.", loaded)
        name = f"{PREFIX}:adapter_requests_total"
        counts = {card.name: 0 for card in self} | self.requests
        text += head(name, "counter", "Requests of each LoRA adapter.")
        return text + "".join(
            sample(name, labelled({"model_name": model_name, "lora_name": adapter}), float(count))
            for adapter, count in counts.items()
        )


NO_ADAPTERS = AdapterBook()
"""Of a service that is given none."""


async def _order(client: Client, order: str, argument: str) -> dict[str, Any]:
    """Send an order until the engine has read what it needs."""
    while (reply := await client.control(order, _ORDER_S, argument)).get("busy"):
        await asyncio.sleep(_LOOK_S)
    if (problem := reply.get("error")) is not None:
        if reply.get("status") == 400:
            raise RequestError(str(problem), param="lora_path" if order == "load_adapter" else "lora_name")
        raise Unavailable(str(problem))
    return reply
