"""Which blocks hold which prefix: a chain of SHA-256 hashes over full blocks, one entry per block of tokens.

A key covers (salt, model and KV-format fingerprint, all tokens up to the block's end), so equal keys mean equal KV. An
entry names one block per KV group; a group behind its window may have lost its block while others still hold theirs.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Protocol

from ridgeline.core.spec import KvGroup


def extend_chain(chain: list[bytes], tokens: array[int], block_tokens: int, root: bytes) -> None:
    """Append to `chain` the keys of all full blocks of `tokens` that it does not hold yet."""
    for index in range(len(chain), len(tokens) // block_tokens):
        parent = chain[-1] if chain else root
        part = tokens[index * block_tokens : (index + 1) * block_tokens]
        chain.append(hashlib.sha256(parent + part.tobytes()).digest())


def chain_root(salt: str, fingerprint: str) -> bytes:
    return hashlib.sha256(f"{fingerprint}\0{salt}".encode()).digest()


class Source(Protocol):
    """Memory beside the pool that keeps blocks of prefixes: the host's, another engine's."""

    origin: str
    """What the device knows it by (Transfer.origin)."""

    def find(self, chain: Sequence[bytes], first: int) -> Sequence[Sequence[int]]:
        """Pages of the prefix's blocks from number `first` on, as far as it has them: of each block one for each group. They
        must hold their content until the transfer that reads them has ended."""


class PrefixIndex:
    """key -> one block per group (0: this group's block is gone)."""

    def __init__(self, groups: Sequence[KvGroup], block_tokens: int) -> None:
        self._windows = [group.window for group in groups]
        self._block_tokens = block_tokens
        self._entries: dict[bytes, list[int]] = {}
        self._key_of: dict[int, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def holds(self, block: int) -> bool:
        return block in self._key_of

    def insert(self, key: bytes, group: int, block: int) -> bool:
        """Remember `block` as `group`'s part of `key`; False if another block already serves it."""
        entry = self._entries.setdefault(key, [0] * len(self._windows))
        if entry[group]:
            return False
        entry[group] = block
        self._key_of[block] = (key, group)
        return True

    def evict(self, block: int) -> None:
        key, group = self._key_of.pop(block)
        entry = self._entries[key]
        entry[group] = 0
        if not any(entry):
            del self._entries[key]

    def clear(self) -> list[int]:
        """Forget everything; returns the blocks that carried a prefix."""
        blocks = list(self._key_of)
        self._entries.clear()
        self._key_of.clear()
        return blocks

    def match(self, chain: Sequence[bytes], most: int) -> tuple[int, list[list[int]]]:
        """The longest hit of at most `most` blocks that is valid in all groups: (blocks, table of each group).

        A group without a window needs every block; a windowed group only those that the next token can still see, the
        others stand as 0 in its table.
        """
        entries = []
        for key in chain[:most]:
            entry = self._entries.get(key)
            if entry is None:
                break
            entries.append(entry)
        length = self._longest(entries)
        tables = []
        for group, window in enumerate(self._windows):
            first = self._first_seen(length, window)
            tables.append([0] * first + [entries[index][group] for index in range(first, length)])
        return length, tables

    def _first_seen(self, blocks: int, window: int | None) -> int:
        """Index of the first block that a token right behind `blocks` blocks can see."""
        if window is None:
            return 0
        return min(blocks, max(0, blocks * self._block_tokens - window + 1) // self._block_tokens)

    def _longest(self, entries: Sequence[Sequence[int]]) -> int:
        runs = [0] * len(self._windows)
        best = 0
        for length, entry in enumerate(entries, start=1):
            valid = True
            for group, window in enumerate(self._windows):
                runs[group] = runs[group] + 1 if entry[group] else 0
                if runs[group] < length - self._first_seen(length, window):
                    valid = False
            if valid:
                best = length
        return best
