"""LoRA adapters of an engine: their names, and how they are loaded and unloaded between two steps.

A slot of the device holds an adapter. A name is forgotten at once when its adapter is unloaded, and the slot is used again when the
last request of the adapter has ended. Files are read in a thread beside the steps; only the copy to the slot stands between two.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.core.adapters import read_modules
from ridgeline.core.config import ModelConfig
from ridgeline.core.errors import ConfigError, RequestError, RidgelineError
from ridgeline.models.adapters import Adapter, Linears, read_adapter
from ridgeline.models.decoder import Decoder

ADAPTER_ORDERS = frozenset({"load_adapter", "unload_adapter"})
"""Orders of Control that Adapters obey."""
BUSY: dict[str, Any] = {"busy": True}
"""The reply while the files are read: send the order again."""

log = logging.getLogger(__name__)


class Adapters:
    """The adapters of an engine. This one has no slots for any."""

    def find(self, name: str) -> tuple[int, str]:
        """Slot and fingerprint of an adapter; (0, "") for none. Raises RequestError for one that is not loaded."""
        if name:
            raise RequestError(f"The adapter {name!r} is not loaded.", param="model")
        return 0, ""

    def listed(self) -> list[dict[str, Any]]:
        """Name, folder and rank of each adapter that is loaded."""
        return []

    def obey(self, order: str, argument: str, used: Collection[int]) -> dict[str, Any]:
        """Run one of ADAPTER_ORDERS. used: slots of requests. Returns the reply, with "error" if the order failed."""
        return {"error": "The server was started without --enable-lora: add it.", "status": 400}


class _Loaded(NamedTuple):
    slot: int
    adapter: Adapter


class LoadedAdapters(Adapters):
    """Adapters in the linears of a decoder."""

    def __init__(self, linears: Linears) -> None:
        weight = linears.weights[0][0]
        self._linears, self._bank, self._dtype = linears, weight.bank, weight.pairs.a.dtype
        self._shapes = linears.shapes()
        self._loaded: dict[str, _Loaded] = {}
        self._reader = ThreadPoolExecutor(1, "adapters")
        self._reading: dict[str, Future[Adapter]] = {}

    def find(self, name: str) -> tuple[int, str]:
        if not name:
            return 0, ""
        if name not in self._loaded:
            raise RequestError(f"The adapter {name!r} is not loaded any more: load it again.", param="model")
        slot, adapter = self._loaded[name]
        return slot, f" {adapter.fingerprint}"

    def listed(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "root": str(adapter.folder), "rank": adapter.rank}
            for name, (_, adapter) in self._loaded.items()
        ]

    def obey(self, order: str, argument: str, used: Collection[int]) -> dict[str, Any]:
        try:
            if order == "unload_adapter":
                self._unload(argument)
            else:
                name, _, folder = argument.partition("=")
                if not self._load(name, folder, used):
                    return BUSY
        except RidgelineError as error:
            return {"error": error.message, "status": 400}
        except Exception as error:
            log.exception("the order %s failed", order)
            return {"error": f"{order} failed: {type(error).__name__}: {error}", "status": 503}
        return {"adapters": self.listed()}

    def _load(self, name: str, folder: str, used: Collection[int]) -> bool:
        """Read the files of an adapter, and give it a slot. False while they are read."""
        if name in self._loaded:
            raise ConfigError(f"The adapter {name!r} is loaded already: unload it first.")
        slot = self._free_slot(used)
        if folder not in self._reading:
            self._reading[folder] = self._reader.submit(self.read, Path(folder))
        if not self._reading[folder].done():
            return False
        self.store(name, slot, self._reading.pop(folder).result())
        return True

    def _taken(self) -> set[int]:
        return {slot for slot, _ in self._loaded.values()}

    def _free_slot(self, used: Collection[int]) -> int:
        taken = self._taken()
        free = [slot for slot in range(1, self._bank.slots + 1) if slot not in taken and slot not in used]
        if free:
            return free[0]
        if len(taken) < self._bank.slots:
            raise ConfigError("Requests of an unloaded adapter still run: send the request again later.")
        raise ConfigError(
            f"{len(taken)} adapters are loaded, as many as --max-loras allows: unload one, or restart the server with more."
        )

    def _unload(self, name: str) -> None:
        if name not in self._loaded:
            raise ConfigError(f"The adapter {name!r} is not loaded; loaded are: {', '.join(self._loaded) or 'none'}.")
        del self._loaded[name]

    def read(self, folder: Path) -> Adapter:
        """Raises ConfigError."""
        return read_adapter(folder, self._shapes, self._bank.rank, self._dtype)

    def store(self, name: str, slot: int, adapter: Adapter) -> None:
        """Write an adapter to a slot that no request uses. Its factors in host memory are not kept."""
        self._linears.store(slot, adapter)
        self._loaded[name] = _Loaded(slot, adapter._replace(factors={}))
        log.info("The adapter %s of rank %d is loaded from %s", name, adapter.rank, adapter.folder)


class FixedAdapters(LoadedAdapters):
    """Adapters of several ranks: each rank has loaded its part at the start."""

    def obey(self, order: str, argument: str, used: Collection[int]) -> dict[str, Any]:
        remedy = "give them with --lora-modules, or leave the parallel sizes out."
        return {"error": f"Several ranks load adapters only at the start: {remedy}", "status": 400}


def open_adapters(decoder: Decoder, model: ModelConfig, ranks: int) -> Adapters:
    """The adapters of a decoder, those of the start loaded. ranks: that have a part of each linear. Raises ConfigError."""
    linears = Linears.of(decoder)
    if not linears.weights:
        return Adapters()
    adapters = LoadedAdapters(linears) if ranks == 1 else FixedAdapters(linears)
    for slot, (name, folder) in enumerate(read_modules(model.lora_modules).items(), 1):
        adapters.store(name, slot, adapters.read(Path(folder)))
    return adapters
