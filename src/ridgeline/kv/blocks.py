"""BlockPool: reference counts of KV blocks. Pure Python; every operation is O(1), except `check`.

Ownership: the pool owns block numbers, the store owns their memory. A block is *used* while its reference count is above zero, and
*free* otherwise. Free blocks with a cached prefix are taken only when no blank block is left, the least recently used first, and
pinned ones (kv/pins.py) last. Block 0 is the scratch block and is never taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Reference-counted blocks 1 .. total. Invariant: free + used == total.

    on_evict: called with a cached block that is about to be reused.
    """

    def __init__(self, total: int, on_evict: Callable[[int], None]) -> None:
        self.total = total
        self.number_after(0)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._pinned: OrderedDict[int, None] = OrderedDict()
        """Free blocks with a cached prefix that are pinned. The others are in _cached."""
        self._pins: set[int] = set()
        self._on_evict = on_evict

    def number_after(self, before: int) -> None:
        """Number the blocks before + 1 .. before + total. All of them are blank afterwards."""
        self._refs = [0] * (before + self.total + 1)
        self._blank = list(range(before + self.total, before, -1))

    @property
    def free(self) -> int:
        return self.spare + len(self._pinned)

    @property
    def spare(self) -> int:
        """Number of free blocks that are not pinned."""
        return len(self._blank) + len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def cached(self) -> int:
        """Number of free blocks with a cached prefix."""
        return len(self._cached) + len(self._pinned)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take(self) -> int:
        """Take a block with one reference; a cached block is evicted if none is blank. The caller must check `free > 0`."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = (self._cached or self._pinned).popitem(last=False)
            self._on_evict(block)
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a used block or to a free cached block."""
        if self._refs[block] == 0:
            del self._kept(block)[block]
        self._refs[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """Remove a reference. With the last one the block becomes free: cached if `keep`, else blank."""
        refs = self._refs[block] - 1
        if refs < 0:
            raise AssertionError(f"block {block} was released more often than taken")
        self._refs[block] = refs
        if refs == 0:
            if keep:
                self._kept(block)[block] = None
            else:
                self._blank.append(block)

    def forget(self, block: int) -> None:
        """The prefix of a block was dropped: a free cached block becomes blank. A used block is not changed."""
        if self._refs[block] == 0 and block in (kept := self._kept(block)):
            del kept[block]
            self._blank.append(block)

    def is_pinned(self, block: int) -> bool:
        return block in self._pins

    def pin(self, block: int) -> None:
        """Take a cached block after all others while it is free."""
        self._pins.add(block)
        if block in self._cached:
            del self._cached[block]
            self._pinned[block] = None

    def unpin(self, block: int) -> None:
        """A free block is the next of the cached ones that is taken."""
        self._pins.discard(block)
        if block in self._pinned:
            del self._pinned[block]
            self._cached[block] = None
            self._cached.move_to_end(block, last=False)

    def _kept(self, block: int) -> OrderedDict[int, None]:
        """The list of a free block with a cached prefix."""
        return self._pinned if block in self._pins else self._cached

    def check(self) -> None:
        """Raise AssertionError if free lists and reference counts are inconsistent."""
        free = set(self._blank) | set(self._cached) | set(self._pinned)
        if len(free) != self.free:
            raise AssertionError("a block is free twice")
        for block in range(len(self._refs) - self.total, len(self._refs)):
            if (self._refs[block] == 0) != (block in free):
                raise AssertionError(f"block {block} has {self._refs[block]} references but is free={block in free}")
