"""Records of the hand-over of keys and values between engines (kv.transfer). Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """The pages of a prompt that an engine keeps for another one.

    engine: number of the engine in `Pools`. keys: of the prompt's full blocks, in order (kv.prefix): they cover the salt, the
    fingerprint of model and KV format, and the tokens. pages: for each block one page of each KV group; 0: no later token needs it.
    checks: CRC-32 of each page.
    """

    engine: int
    keys: tuple[bytes, ...]
    pages: tuple[tuple[int, ...], ...]
    checks: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Pools:
    """Shared memory of engines that hand over to each other.

    descriptors: file descriptors (memfd_create), one for each engine, the same files in all of them. Empty: nothing is handed over.
    local: number of the engine that holds this record.
    """

    descriptors: tuple[int, ...] = ()
    local: int = 0

    @property
    def local_descriptor(self) -> int:
        """-1: the pool is in the memory of its process."""
        return self.descriptors[self.local] if self.descriptors else -1


NO_POOLS = Pools()
"""The engine hands nothing over."""
