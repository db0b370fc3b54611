"""The router's queue: classes of priority, and within a class fairness between tenants. No clock, no asyncio.

Tenants of a class share by cost, not by number of requests: start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). A
request starts, in virtual time, when the former request of its tenant has ended, and requests leave in the order of these times.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

_T = TypeVar("_T")


@dataclass(slots=True)
class _Class(Generic[_T]):
    """Requests of one priority."""

    heap: list[tuple[float, int, _T]] = field(default_factory=list)
    now: float = 0.0
    """Virtual time: the start of the request that left last."""
    ends: dict[str, float] = field(default_factory=dict)
    """Tenant -> virtual end of its last request."""


class FairQueue(Generic[_T]):
    """A queue of hashable items."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class[_T]] = {}
        self._order = count()
        self._waiting: dict[_T, int] = {}
        """Item -> its priority."""
        self._returned: list[_T] = []
        """Items that were taken and came back. They leave first."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[_T]:
        """The items in the order in which they came."""
        return iter(self._waiting)

    def push(self, item: _T, tenant: str, priority: int, cost: float) -> None:
        """Add an item. priority: lower leaves first. cost: what the tenant is charged."""
        group = self._classes.setdefault(priority, _Class())
        start = max(group.now, group.ends.get(tenant, 0.0))
        group.ends[tenant] = start + cost
        heapq.heappush(group.heap, (start, next(self._order), item))
        self._waiting[item] = priority

    def give_back(self, item: _T) -> None:
        """Add an item that was taken before, at the head."""
        self._returned.append(item)
        self._waiting[item] = 0

    def remove(self, item: _T) -> None:
        """Take an item out, wherever it is. Nothing happens if it does not wait."""
        self._waiting.pop(item, None)

    def head(self) -> _T | None:
        """The next item, which stays."""
        while self._returned:
            if self._returned[0] in self._waiting:
                return self._returned[0]
            self._returned.pop(0)
        for priority in sorted(self._classes):
            group = self._classes[priority]
            while group.heap:
                if group.heap[0][2] in self._waiting:
                    return group.heap[0][2]
                heapq.heappop(group.heap)
            del self._classes[priority]  # nothing of this class waits: no tenant is owed anything
        return None

    def pop(self) -> _T:
        """Take the next item. Raises IndexError if nothing waits."""
        item = self.head()
        if item is None:
            raise IndexError("nothing waits")
        if self._returned:
            self._returned.pop(0)
        else:
            group = self._classes[self._waiting[item]]
            group.now = heapq.heappop(group.heap)[0]
        del self._waiting[item]
        return item
