"""Collectives between GPUs: NCCL, and on one host small sums by a kernel of our own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed

from ridgeline.parallel.group import Group
from ridgeline.parallel.nccl import Communicator


class Sums(Protocol):
    """ops.triton.peers.PeerSums."""

    vectors: Any
    vectors_alone: Any

    def one_shot(self, x: torch.Tensor) -> bool: ...

    def two_shot(self, x: torch.Tensor) -> bool: ...

    def stop(self) -> None: ...


class Limits(NamedTuple):
    """Most bytes of a sum by each kernel of our own; larger ones go to NCCL."""

    one_shot: int
    two_shot: int


LIMITS: Mapping[int, Limits] = {
    2: Limits(1 << 20, 8 << 20),
    4: Limits(128 << 10, 2 << 20),
    8: Limits(64 << 10, 1 << 20),
}
"""By number of ranks. For two as benchmarks/multi_gpu.py measures them on H200s; estimated for more."""


class Store:
    """Words that all ranks give to one another, before their group exists."""

    def __init__(self, rank: int, size: int, store: torch.distributed.Store) -> None:
        self._rank, self._size, self._store, self._numbers = rank, size, store, count()

    def swap(self, word: str) -> Sequence[str]:
        """The words of all ranks, in order. Raises RuntimeError if one does not come within the timeout of the store."""
        number = next(self._numbers)
        self._store.set(f"word {number} of {self._rank}", f"={word}")
        return [self._store.get(f"word {number} of {rank}").decode()[1:] for rank in range(self._size)]


class GpuGroup(Group):
    """Ranks with a GPU each. Work is enqueued on the current stream, so CUDA graphs capture it.

    Start-up mutes the group while kernels are compiled: one rank may find a kernel on disk that another one has to compile, which
    then repeats its steps, so that the ranks would not call the same collectives.
    """

    def __init__(
        self, rank: int, size: int, store: torch.distributed.Store, timeout_s: float, device: torch.device, peers: bool
    ) -> None:
        """As nccl.Communicator. peers: the ranks are on one host, so they may map each other's memory."""
        self.nccl = Communicator(rank, size, store, timeout_s, device)
        self.limits = LIMITS.get(size, Limits(0, 0))
        self.sums = _peer_sums(Store(rank, size, store), rank, size, device) if peers else None
        """None: NCCL makes all sums."""
        self._muted, sums = False, self.sums
        if sums is not None:
            self.peers = lambda: sums.vectors_alone if self._muted else sums.vectors
        # The first messages between two ranks connect them, which no capture may do.
        both = torch.zeros(2, size, 1, device=device)
        self.nccl.exchange(both[0], both[1])

    def all_reduce(self, x: torch.Tensor) -> None:
        if not (self._muted or self._sum(x)):
            self.nccl.all_reduce(x)

    def _sum(self, x: torch.Tensor) -> bool:
        """Sum by a kernel of our own. Returns whether there is one for x."""
        sums = self.sums
        if sums is None:
            return False
        if x.nbytes <= self.limits.one_shot and sums.one_shot(x):
            return True
        return x.nbytes <= self.limits.two_shot and sums.two_shot(x)

    def all_gather(self, parts: torch.Tensor, x: torch.Tensor) -> None:
        if self._muted:
            parts.copy_(x)
        else:
            self.nccl.all_gather(parts, x)

    def exchange(self, received: torch.Tensor, x: torch.Tensor) -> None:
        if self._muted:
            received.copy_(x)
        else:
            self.nccl.exchange(received, x)

    def send(self, x: torch.Tensor, rank: int, tag: int) -> None:
        if not self._muted:
            self.nccl.send(x, rank)

    def receive(self, x: torch.Tensor, rank: int, tag: int) -> None:
        if self._muted:
            x.zero_()
        else:
            self.nccl.receive(x, rank)

    def mute(self, muted: bool) -> None:
        self._muted = muted

    def abort(self) -> None:
        sums, self.sums = self.sums, None  # NCCL refuses later sums
        if sums is not None:
            sums.stop()
        self.nccl.abort()

    def close(self) -> None:
        self.abort()
        self.nccl.wait()


def _peer_sums(store: Store, rank: int, size: int, device: torch.device) -> Sums | None:
    if find_spec("triton") is None:  # as all kernels, these need it, for their cache
        return None
    # Imported here: Triton is an optional dependency, for GPUs only.
    from ridgeline.ops.triton.peers import peer_sums

    return peer_sums(rank, size, device, store.swap)
