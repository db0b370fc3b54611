"""The interface of connected ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Group(Protocol):
    """Connected ranks: gloo between CPU processes (parallel.gloo), NCCL between GPUs (parallel.gpu).

    Every rank calls the same collectives in the same order. Tensors are contiguous and on the device of the group. On a GPU a call
    enqueues work on the current stream and returns. All raise RuntimeError if another rank has ended, where that is known.
    """

    peers: Callable[[], Any] | None = None
    """Memory in which kernels that run whole layers add vectors of all ranks (ops.triton.peers.Vectors); None: there is none."""

    def all_reduce(self, x: torch.Tensor) -> None:
        """Replace x by its sum over all ranks, bitwise equal on each."""

    def all_gather(self, parts: torch.Tensor, x: torch.Tensor) -> None:
        """Fill parts [size, ...] with the x [...] of all ranks."""

    def exchange(self, received: torch.Tensor, x: torch.Tensor) -> None:
        """Send x[r] to each rank r. Fill received [size, ...] with what each rank sent to this one."""

    def send(self, x: torch.Tensor, rank: int, tag: int) -> None:
        """Send x to a rank, without waiting for it. x must not change afterwards."""

    def receive(self, x: torch.Tensor, rank: int, tag: int) -> None:
        """Fill x with the oldest message of a rank that has this tag. NCCL ignores tags: messages arrive in order."""

    def mute(self, muted: bool) -> None:
        """While muted, this rank runs alone: others count as sending what this rank sends, and zeros as messages."""

    def abort(self) -> None:
        """End what waits for other ranks, now and later; does not wait."""

    def close(self) -> None:
        """Free the connections, which no graph uses any more. Waits for that, but not for ever."""
