"""Pinned prefixes: blocks that stay in the prefix cache until a lifetime ends, within a budget.

A pin is named by the key of the last full block of a prefix (kv/prefix.py), so tenants with different salts never share one. It
covers the blocks that a hit of this prefix needs. Pins of nested prefixes share blocks; the budget counts a block once.

A pinned block that no request holds is still free for running requests: the pool takes it after all other free blocks, and the
pin is then lost. So pins delay admissions, but they never stop a running request.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ridgeline.core.events import PinOutcome
from ridgeline.kv.blocks import BlockPool
from ridgeline.kv.prefix import PrefixIndex

MAX_LOST = 4096
"""Lost pins whose reason is kept until a request names them."""


@dataclass(slots=True)
class _Pin:
    blocks: frozenset[int]
    expires: float


class Pins:
    """Pins of one pool.

    Time is the argument of `advance`, in seconds. budget: maximum pinned blocks. block_tokens: tokens of a block.
    """

    def __init__(self, pool: BlockPool, prefix: PrefixIndex, budget: int, block_tokens: int) -> None:
        self.budget = budget
        self.counts: Counter[tuple[str, str]] = Counter()
        """Events since the start by (kind, reason): written, renewed, refused, lost."""
        self._pool, self._prefix, self._block_tokens = pool, prefix, block_tokens
        self._pins: dict[bytes, _Pin] = {}
        self._until: dict[int, float] = {}
        """Pinned block -> the latest end of its pins."""
        self._lost: OrderedDict[bytes, str] = OrderedDict()
        self._now = -math.inf
        self._due = math.inf
        """The earliest end of a pin."""

    def __len__(self) -> int:
        return len(self._pins)

    @property
    def blocks(self) -> int:
        return len(self._until)

    def readings(self) -> list[tuple[str, str, int]]:
        """What is pinned now, and the events since the start: kind, reason, count."""
        now = [("blocks", "", self.blocks), ("prefixes", "", len(self))]
        return now + [(*event, count) for event, count in self.counts.items()]

    def advance(self, now: float) -> None:
        """The time is `now`: drop the pins whose lifetime has ended."""
        self._now = now
        if now >= self._due:
            self._drop([key for key, pin in self._pins.items() if pin.expires <= now], "lifetime")

    def reach(
        self, chain: Sequence[bytes], breakpoints: Sequence[tuple[int, float]], full: int
    ) -> Iterator[PinOutcome]:
        """Pin the prefixes of a prompt that end within its first `full` blocks. They are in the prefix index.

        Args:
            chain: keys of the prompt's full blocks; empty for a request that does not use the prefix cache.
            breakpoints: (tokens, seconds of the lifetime) of each prefix, in the order of the prompt.
        """
        for tokens, ttl_s in breakpoints:
            if (count := tokens // self._block_tokens) > min(full, len(chain)):
                return
            yield self._pin(chain[:count], ttl_s) if count else self._refused(0, "short")

    def _pin(self, chain: Sequence[bytes], ttl_s: float) -> PinOutcome:
        """Pin a prefix, or renew its pin, until ttl_s from now. A later end stays."""
        key, tokens = chain[-1], len(chain) * self._block_tokens
        length, tables = self._prefix.match(chain, len(chain))
        lost = self._lost.pop(key, "")
        if length < len(chain):
            return self._refused(tokens, "window", lost)
        blocks = [block for table in tables for block in table if block]
        added = sum(block not in self._until for block in blocks)
        if len(self._until) + added > self.budget:
            return self._refused(tokens, "budget", lost)
        known = self._pins.get(key)
        expires = max(self._now + ttl_s, -math.inf if known is None else known.expires)
        bought_s = 0.0
        for block in blocks:
            until = self._until.get(block, self._now)
            if block not in self._until:
                self._pool.pin(block)
            if expires > until or block not in self._until:
                bought_s += expires - until
                self._until[block] = expires
        self._pins[key] = _Pin(frozenset(blocks), expires)
        self._due = min(pin.expires for pin in self._pins.values())
        state = "written" if known is None else "renewed"
        self.counts[state, ""] += 1
        # A token lies in a block of each group, of which a window needs only some: the mean counts.
        return PinOutcome(tokens, state, "", lost, bought_s * tokens / len(blocks))

    def _refused(self, tokens: int, reason: str, lost: str = "") -> PinOutcome:
        """The outcome for a prefix that is not pinned. reason: "budget", "short" (no full block), or "window" (a window has passed
        its blocks)."""
        self.counts["refused", reason] += 1
        return PinOutcome(tokens, "refused", reason, lost)

    def evicted(self, block: int) -> None:
        """The pool reuses a block: the pins that need it are lost."""
        if block in self._until:
            self._drop([key for key, pin in self._pins.items() if block in pin.blocks], "pressure")

    def clear(self, reason: str) -> None:
        """Drop all pins."""
        self._drop(list(self._pins), reason)

    def _drop(self, keys: Iterable[bytes], reason: str) -> None:
        """Drop pins, and unpin the blocks that no other pin covers. They are then the next ones that the pool takes."""
        for key in keys:
            del self._pins[key]
            self.counts["lost", reason] += 1
            self._lost[key] = reason
        while len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
        before, self._until = self._until, {}
        for pin in self._pins.values():
            for block in pin.blocks:
                self._until[block] = max(self._until.get(block, pin.expires), pin.expires)
        for block in before:
            if block not in self._until:
                self._pool.unpin(block)
        self._due = min((pin.expires for pin in self._pins.values()), default=math.inf)
