"""Which replica has computed which prefix: a bounded map from chunks of prompts to replicas. No clock, no asyncio.

A chunk is identified by a hash over itself and all chunks before it, so an equal chunk means an equal prefix. The index is
an estimate: it records what replicas were sent, by this router or another one, not what they keep. It forgets chunks in two ways:
the least recently used ones when it is full, and those of a replica that has been sent more new chunks since than its cache holds.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence

MAX_HOLDERS = 16
"""Replicas that are recorded for one chunk. The one that used the chunk longest ago is dropped."""
ENTRY_BYTES = 700
"""Bytes of an entry with `MAX_HOLDERS` replicas: key, number, dictionary, and its place in the index."""


class PrefixIndex:
    """max_bytes: bound of its memory. chunk_tokens: tokens of a chunk."""

    def __init__(self, max_bytes: int = 64 << 20, chunk_tokens: int = 128) -> None:
        self.chunk_tokens = chunk_tokens
        self._max_entries = max(1, max_bytes // ENTRY_BYTES)
        self._entries: OrderedDict[int, dict[int, int]] = OrderedDict()
        """Chunk -> replica -> chunks that the replica had been sent when it last used this one."""
        self._capacity: dict[int, float] = {}
        """Replica -> chunks that its cache holds."""
        self._sent: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """Upper bound of the memory in use."""
        return len(self._entries) * ENTRY_BYTES

    def add_replica(self, replica: int, cache_tokens: float) -> None:
        self._capacity[replica] = cache_tokens / self.chunk_tokens
        self._sent[replica] = 0

    def remove_replica(self, replica: int) -> None:
        """Forget a replica. Its entries are dropped when they are read next."""
        del self._capacity[replica], self._sent[replica]

    def resize(self, replica: int, cache_tokens: float) -> None:
        """The replica says how many tokens its cache holds."""
        self._capacity[replica] = cache_tokens / self.chunk_tokens

    def clear_replica(self, replica: int) -> None:
        """The replica has lost its cache: everything that it was sent so far counts as evicted."""
        self._sent[replica] += math.ceil(self._capacity[replica])

    def hits(self, chunks: Sequence[int]) -> dict[int, int]:
        """Replica -> tokens of the longest prefix of `chunks` that it has."""
        depths: dict[int, int] = {}
        holders: Mapping[int, int] | set[int] | None = None
        for depth, chunk in enumerate(chunks, 1):
            entry = self._entries.get(chunk)
            if entry is None:
                break
            holders = {
                replica
                for replica, mark in entry.items()
                if (holders is None or replica in holders) and self._keeps(replica, mark)
            }
            if not holders:
                break
            depths.update(dict.fromkeys(holders, depth))
        return {replica: depth * self.chunk_tokens for replica, depth in depths.items()}

    def add(self, replica: int, chunks: Sequence[int]) -> None:
        """Record that a replica is sent a prompt of these chunks."""
        for chunk in reversed(chunks):  # a prefix is then more recent than what follows it, and stays longer
            entry = self._entries.get(chunk)
            if entry is None:
                entry = self._entries[chunk] = {}
            else:
                self._entries.move_to_end(chunk)
            mark = entry.pop(replica, None)
            if mark is None or not self._keeps(replica, mark):
                self._sent[replica] += 1
            entry[replica] = self._sent[replica]
            if len(entry) > MAX_HOLDERS:
                del entry[next(iter(entry))]
        while len(self._entries) > self._max_entries:
            self._entries.popitem(last=False)

    def _keeps(self, replica: int, mark: int) -> bool:
        return replica in self._sent and self._sent[replica] - mark < self._capacity[replica]


def chunk_hashes(text: bytes, chunk_bytes: int, salt: bytes = b"") -> tuple[int, ...]:
    """The hashes of the whole chunks of a text, each over all bytes up to its end. salt: separates texts that share no cache."""
    state = hashlib.blake2b(salt, digest_size=8)
    hashes = []
    for end in range(chunk_bytes, len(text) + 1, chunk_bytes):
        state.update(text[end - chunk_bytes : end])
        hashes.append(int.from_bytes(state.digest(), "little"))
    return tuple(hashes)
