"""Ranks that are threads of one process, with the collectives of parallel.axis."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch


class Lockstep:
    """Collectives of `size` threads. sent: bytes that a rank sent to others."""

    def __init__(self, size: int) -> None:
        self.size, self.sent = size, 0
        self._barrier, self._parts = threading.Barrier(size, timeout=60), [torch.empty(0)] * size

    def swap(self, rank: int, x: torch.Tensor) -> torch.Tensor:
        """[size, ...], the parts of all ranks in order."""
        self._parts[rank] = x
        self._barrier.wait()
        parts = torch.stack(self._parts)
        self._barrier.wait()
        return parts

    def run(self, task: Callable[[Rank], Any]) -> list[Any]:
        """The results of the ranks."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(lambda rank: task(Rank(rank, self.size, self)), range(self.size)))


class Rank:
    def __init__(self, rank: int, size: int, group: Lockstep) -> None:
        self.rank, self.size, self._group = rank, size, group

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        self._count(x.nbytes * (self.size - 1))
        return self._group.swap(self.rank, x)

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        self._count(x.nbytes // self.size * (self.size - 1))
        return self._group.swap(self.rank, x)[:, self.rank]

    def _count(self, sent: int) -> None:
        if self.rank == 0:
            self._group.sent += sent
