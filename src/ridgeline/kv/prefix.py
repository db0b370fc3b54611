"""Prefix index: maps the hash of a prefix to the blocks that hold its last full block of tokens. Hashes are a SHA-256 chain.

A key covers the salt, the fingerprint of model and KV format, and all tokens up to the end of the block, so equal keys mean equal
KV. An entry has one block for each KV group. A group with a window may have lost its block while other groups still have theirs.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

from ridgeline.core.events import TierCounts
from ridgeline.core.plan import Transfer
from ridgeline.core.spec import KvGroup


def extend_chain(chain: list[bytes], tokens: array[int], block_tokens: int, root: bytes) -> None:
    """Append the missing keys of the full blocks of `tokens` to `chain`."""
    for index in range(len(chain), len(tokens) // block_tokens):
        parent = chain[-1] if chain else root
        part = tokens[index * block_tokens : (index + 1) * block_tokens]
        chain.append(hashlib.sha256(parent + part.tobytes()).digest())


def chain_root(salt: str, fingerprint: str) -> bytes:
    return hashlib.sha256(f"{fingerprint}\0{salt}".encode()).digest()


class Source:
    """External memory with blocks of prefixes: host memory, files, another engine. This one has none.

    origin: its name in transfers (Transfer.origin).
    """

    origin = ""

    def find(self, chain: Sequence[bytes], first: int) -> Sequence[Sequence[int]]:
        """Places of the blocks of the prefix from index `first` on: for each block one per group, 0 if the source lacks it. Blocks
        beyond the end of the answer are lacking."""
        return ()

    def pays(self, start: int, end: int, places: Sequence[int]) -> bool:
        """Whether to copy these places is faster than to compute the tokens from `start` to `end`."""
        return True

    def begins(self, ticket: int, places: Sequence[int]) -> None:
        """A transfer will read these places: they keep their content until it has ended."""

    def ended(self, ticket: int, arrived: bool) -> None:
        """A transfer or a store has ended, or was withdrawn. arrived: the content was copied."""

    def evicted(self, key: bytes, group: int, block: int) -> None:
        """The pool reuses a block of a prefix. Its content stays as it is until the next plan is launched, after its stores."""

    def stores(self, tickets: Iterator[int]) -> list[Transfer]:
        """The copies of evicted blocks to this memory, for the plan that is launched now."""
        return []

    def clear(self) -> None:
        """Drop all prefixes."""

    def tiers(self) -> Sequence[TierCounts]:
        """The counts of each tier of this memory since the start."""
        return ()


class PrefixIndex:
    """Key -> one block per group (0: the group has lost its block)."""

    def __init__(self, groups: Sequence[KvGroup], block_tokens: int) -> None:
        self._windows = [group.window for group in groups]
        self._block_tokens = block_tokens
        self._entries: dict[bytes, list[int]] = {}
        self._key_of: dict[int, tuple[bytes, int]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def blocks(self) -> int:
        return len(self._key_of)

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

    def get(self, key: bytes) -> Sequence[int]:
        """The block of each group; empty without an entry."""
        return self._entries.get(key, ())

    def evict(self, block: int) -> tuple[bytes, int]:
        """Remove a block. Returns its key and group."""
        key, group = self._key_of.pop(block)
        entry = self._entries[key]
        entry[group] = 0
        if not any(entry):
            del self._entries[key]
        return key, group

    def items(self) -> Iterator[tuple[bytes, int, int]]:
        """Key, group and block of every block."""
        return ((key, group, block) for block, (key, group) in self._key_of.items())

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

    def extend(
        self, chain: Sequence[bytes], first: int, places: Sequence[Sequence[int]]
    ) -> tuple[int, list[Sequence[int]]]:
        """The longest prefix, from a hit of `first` blocks on, that is valid in all groups if `places` (Source.find) fill what the
        index lacks: its blocks, and for each block after the hit those of the index (0: lacking)."""
        nothing = [0] * len(self._windows)
        held, filled = list[Sequence[int]](), list[list[int]]()
        for index, key in enumerate(chain[first:]):
            held.append(self._entries.get(key, nothing))
            place = places[index] if index < len(places) else nothing
            filled.append([mine or other for mine, other in zip(held[-1], place, strict=True)])
            if not any(filled[-1]):
                break
        length = self._longest(filled, first)
        return length, held[: length - first]

    def _first_seen(self, blocks: int, window: int | None) -> int:
        """Index of the first block that the token after `blocks` blocks attends to."""
        if window is None:
            return 0
        return min(blocks, max(0, blocks * self._block_tokens - window + 1) // self._block_tokens)

    def _longest(self, entries: Sequence[Sequence[int]], first: int = 0) -> int:
        """first: blocks before the entries that are valid in all groups."""
        runs = [first] * len(self._windows)
        best = first
        for length, entry in enumerate(entries, start=first + 1):
            valid = True
            for group, window in enumerate(self._windows):
                runs[group] = runs[group] + 1 if entry[group] else 0
                if runs[group] < length - self._first_seen(length, window):
                    valid = False
            if valid:
                best = length
        return best
