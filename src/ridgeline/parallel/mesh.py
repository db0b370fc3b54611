"""The mesh: which share of the model this process holds, and the collectives between the shares, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import cast

import torch
import torch.distributed

from ridgeline.core.errors import ConfigError, EngineFailed


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's place among `size` ranks that hold one replica together. With one rank every collective is x.

    group: connects the ranks; see connect. Without one a rank can be built and loaded, but not run.
    """

    rank: int = 0
    size: int = 1
    group: torch.distributed.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"Rank {self.rank} does not exist in a mesh of {self.size} ranks.")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's x, same shape and bits on each. The caller gives x up: the result may lie in its memory.

        Raises EngineFailed when another rank has ended, or does not answer within the group's timeout.
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
    """The mesh of `size` CPU processes that meet at `store` (a FileStore on one host, a TCPStore between hosts), by gloo.

    Every rank calls it; it returns when all have. timeout_s: longest wait for the others here and in each collective.
    The group belongs to the mesh alone: torch.distributed's default group stays unset. Raises EngineFailed.
    """
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    try:
        group = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    except RuntimeError as error:
        raise EngineFailed(f"Rank {rank} of {size} could not reach the other ranks: {error}") from error
    return Mesh(rank, size, cast(torch.distributed.ProcessGroup, group))  # which it is, but not by torch's stubs
