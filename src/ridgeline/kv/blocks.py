"""BlockPool: who holds which block. Pure Python, every operation O(1).

Ownership: the pool owns block numbers, the store owns their bytes. A block is *used* while its reference count is above
zero; at zero it is *free*. A free block that still carries a cached prefix is evicted last, least recently used first.
Block 0 is scratch and is never handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class BlockPool:
    """Reference-counted blocks 1 .. total. `free + used == total` always.

    on_evict: called with a block whose cached content is about to be overwritten.
    """

    def __init__(self, total: int, on_evict: Callable[[int], None]) -> None:
        self.total = total
        self._refs = [0] * (total + 1)
        self._blank = list(range(total, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._on_evict = on_evict

    @property
    def free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def cached(self) -> int:
        """Free blocks that still carry a prefix."""
        return len(self._cached)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take(self) -> int:
        """A blank block with one reference; the caller must have seen `free > 0`."""
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._on_evict(block)
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder of a used block, or the first holder of a cached one."""
        if self._refs[block] == 0:
            del self._cached[block]
        self._refs[block] += 1

    def release(self, block: int, *, keep: bool) -> None:
        """One holder less. The last one leaves the block cached (`keep`) or blank."""
        refs = self._refs[block] - 1
        if refs < 0:
            raise AssertionError(f"block {block} was released more often than taken")
        self._refs[block] = refs
        if refs == 0:
            if keep:
                self._cached[block] = None
            else:
                self._blank.append(block)

    def forget(self, block: int) -> None:
        """A free cached block becomes blank (its prefix was dropped); used blocks are left to their holders."""
        if self._refs[block] == 0 and block in self._cached:
            del self._cached[block]
            self._blank.append(block)

    def check(self) -> None:
        """Raise AssertionError if the books do not balance. Called when idle and by tests."""
        free = set(self._blank) | set(self._cached)
        if len(free) != self.free:
            raise AssertionError("a block is free twice")
        for block in range(1, self.total + 1):
            if (self._refs[block] == 0) != (block in free):
                raise AssertionError(f"block {block} has {self._refs[block]} references but is free={block in free}")
