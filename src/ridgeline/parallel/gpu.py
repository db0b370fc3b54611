"""Collectives between the GPUs of one host: NCCL."""

from __future__ import annotations

import torch
import torch.distributed

from ridgeline.parallel.group import Group
from ridgeline.parallel.nccl import Communicator


class GpuGroup(Group):
    """Ranks with a GPU each. Work is enqueued on the current stream, so CUDA graphs capture it.

    Start-up mutes the group while kernels are compiled: one rank may find a kernel on disk that another one has to compile, which
    then repeats its steps, so that the ranks would not call the same collectives.
    """

    def __init__(
        self, rank: int, size: int, store: torch.distributed.Store, timeout_s: float, device: torch.device
    ) -> None:
        """As nccl.Communicator."""
        self._nccl = Communicator(rank, size, store, timeout_s, device)
        self._muted = False
        # The first messages between two ranks connect them, which no capture may do.
        both = torch.zeros(2, size, 1, device=device)
        self._nccl.exchange(both[0], both[1])

    def all_reduce(self, x: torch.Tensor) -> None:
        if not self._muted:
            self._nccl.all_reduce(x)

    def all_gather(self, parts: torch.Tensor, x: torch.Tensor) -> None:
        if self._muted:
            parts.copy_(x)
        else:
            self._nccl.all_gather(parts, x)

    def exchange(self, received: torch.Tensor, x: torch.Tensor) -> None:
        if self._muted:
            received.copy_(x)
        else:
            self._nccl.exchange(received, x)

    def send(self, x: torch.Tensor, rank: int, tag: int) -> None:
        if not self._muted:
            self._nccl.send(x, rank)

    def receive(self, x: torch.Tensor, rank: int, tag: int) -> None:
        if self._muted:
            x.zero_()
        else:
            self._nccl.receive(x, rank)

    def mute(self, muted: bool) -> None:
        self._muted = muted

    def abort(self) -> None:
        self._nccl.abort()
