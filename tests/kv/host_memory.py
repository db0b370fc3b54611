"""Memory of this process in the place of that of other GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

from ridgeline.kv.copies import Past
from ridgeline.ops.peer_memory import WORD_BYTES, Run


class HostMemory:
    """kv.peer_pools.Memory. refused: calls that fail, by name. meanwhile: called before the end of each copy."""

    def __init__(self, *refused: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.refused, self.meanwhile = refused, meanwhile
        self.opened: list[bytes] = []
        self.runs: list[Run] = []

    def share(self, address: int) -> bytes:
        self._check("share")
        return address.to_bytes(WORD_BYTES, "little")

    def open(self, word: bytes) -> int:
        self._check("open")
        self.opened.append(word)
        return int.from_bytes(word, "little")

    def close(self, word: bytes) -> None:
        self.opened.remove(word)

    def bind(self) -> None:
        pass

    def pin(self, address: int, size: int) -> None:
        self._check("pin")

    def copy(self, runs: Sequence[Run]) -> Past:
        self._check("copy")
        self.runs += runs
        for run in runs:
            ctypes.memmove(run.target, run.source, run.size)
        self.meanwhile()
        return Past()

    def _check(self, name: str) -> None:
        if name in self.refused:
            raise RuntimeError(f"{name} is refused")
