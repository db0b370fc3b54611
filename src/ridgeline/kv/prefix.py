"""Prefix index: maps the hash of a prefix to the blocks that hold its last full block of tokens. Hashes are a SHA-256 chain.

A key covers the salt, the fingerprint of model and KV format, and all tokens up to the end of the block, so equal keys mean equal
KV. An entry has one block for each KV group. A group with a window may have lost its block while other groups still have theirs.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Protocol

from ridgeline.core.spec import KvGroup


def extend_chain(chain: list[bytes], tokens: array[int], block_tokens: int, root: bytes) -> None:
    """Append the missing keys of the full blocks of `tokens` to `chain`."""
    for index in range(len(chain), len(tokens) // block_tokens):
        parent = chain[-1] if chain else root
        part = tokens[index * block_tokens : (index + 1) * block_tokens]
        chain.append(hashlib.sha256(parent + part.tobytes()).digest())


def chain_root(salt: str, fingerprint: str) -> bytes:
    return hashlib.sha256(f"{fingerprint}\0{salt}".encode()).digest()


class Source(Protocol):
    """External memory with blocks of prefixes: host memory or another engine."""

    origin: str
    """Its name in transfers (Transfer.origin)."""

    def find(self, chain: Sequence[bytes], first: int) -> Sequence[Sequence[int]]:
        """Pages of the blocks of the prefix from index `first` on, as far as the source has them: for each block one page per
        group. The pages must keep their content until the transfer that reads them ends."""


class PrefixIndex:
    """Key -> one block per group (0: the group has lost its block)."""

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
        """Store `block` as the part of `group` of `key`. False if the entry already has a block for the group."""
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
        """Remove all entries. Returns the blocks that had a prefix."""
        blocks = list(self._key_of)
        self._entries.clear()
        self._key_of.clear()
        return blocks

    def match(self, chain: Sequence[bytes], most: int) -> tuple[int, list[list[int]]]:
        """The longest hit of at most `most` blocks that is valid in all groups: (blocks, table of each group).

        A group without a window needs every block. A group with a window needs only the blocks that the next token attends to; the
        others are 0 in its table.
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
        """Index of the first block that the token after `blocks` blocks attends to."""
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
