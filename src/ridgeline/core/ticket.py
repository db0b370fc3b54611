"""Records of the hand-over of keys and values between engines (kv.transfer). Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ticket:
    """The pages of a prompt that an engine keeps for another one.

    engine: number of the engine in `Pools`. keys: of the prompt's full blocks, in order (kv.prefix): they cover the salt, the
    fingerprint of model and KV format, and the tokens. pages: for each block one page of each KV group; 0: no later token needs it.
    checks: of each page, by which its transport sees that the page has changed. address: at which the engine serves its pages; "":
    they are in its pool.
    """

    engine: int
    keys: tuple[bytes, ...]
    pages: tuple[tuple[int, ...], ...]
    checks: tuple[tuple[int, ...], ...]
    address: str = ""


@dataclass(frozen=True, slots=True)
class Pools:
    """How engines hand over to each other.

    descriptors: file descriptors (memfd_create), one for each engine, the same files in all of them: shared memory of one host.
    local: number of the engine that holds this record. listen: address of this host at which the engine serves its pages over TCP;
    "": by shared memory. secret: hexadecimal, known to the engines that may ask for pages. sharing: engines on this host.
    """

    descriptors: tuple[int, ...] = ()
    local: int = 0
    listen: str = ""
    secret: str = ""
    sharing: int = 1

    @property
    def hands_over(self) -> bool:
        return bool(self.descriptors or self.listen)

    @property
    def engines_here(self) -> int:
        return len(self.descriptors) or self.sharing

    @property
    def local_descriptor(self) -> int:
        """-1: the pool is in the memory of its process."""
        return self.descriptors[self.local] if self.descriptors else -1


NO_POOLS = Pools()
"""The engine hands nothing over."""
