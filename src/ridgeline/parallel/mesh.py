"""Mesh: the rank of this process in a tensor-parallel replica, and its collectives."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed

from ridgeline.core.errors import ConfigError, EngineFailed


@dataclass(frozen=True, slots=True)
class Mesh:
    """Rank of this process among the `size` ranks of a replica. With one rank, collectives return their input.

    group: process group of the ranks, see connect. None: the rank can be built and loaded, but not run.
    """

    rank: int = 0
    size: int = 1
    group: torch.distributed.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"Rank {self.rank} does not exist in a mesh of {self.size} ranks.")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of x over all ranks, bitwise equal on each. The result may overwrite x.

        Raises EngineFailed if another rank has ended or does not answer within the timeout of the group.
        """
        if self.size == 1:
            return x
        if self.group is None:
            raise ConfigError(f"Rank {self.rank} of {self.size} is not connected to the other ranks.")
        x = x.contiguous()
        try:
            self.group.allreduce([x]).wait()
        except RuntimeError as error:
            raise EngineFailed(f"Rank {self.rank} of {self.size} lost the other ranks: {error}") from error
        return x


ONE_DEVICE = Mesh()


def connect(rank: int, size: int, store: torch.distributed.Store, timeout_s: float) -> Mesh:
    """Connect `size` CPU processes through `store` (a FileStore on one host, a TCPStore between hosts), with gloo.

    Every rank must call it; it returns when all have called. timeout_s: of this call and of each collective. The default group of
    torch.distributed stays unset. Raises EngineFailed.
    """
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    try:
        group = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    except RuntimeError as error:
        raise EngineFailed(f"Rank {rank} of {size} could not reach the other ranks: {error}") from error
    return Mesh(rank, size, cast(torch.distributed.ProcessGroup, group))  # torch's stubs do not declare the base class
