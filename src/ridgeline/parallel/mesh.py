"""Mesh: the rank of this process among those that share each layer, its collectives, and its stage of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import cast

import torch
import torch.distributed

from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.parallel.pipeline import WHOLE, Stage


@dataclass(frozen=True, slots=True)
class Mesh:
    """Rank of this process among the `size` ranks that share each layer. With one rank, collectives return their input.

    group: process group of the ranks, see connect. None: the rank can be built and loaded, but not run. stage: the layers that they
    hold.
    """

    rank: int = 0
    size: int = 1
    group: torch.distributed.ProcessGroup | None = None
    stage: Stage = WHOLE

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
    """Connect `size` CPU processes that share each layer, with gloo, through `store` (a FileStore on one host, a TCPStore between
    hosts).

    Every rank must call it; it returns when all have called. timeout_s: of this call and of each collective. The default group of
    torch.distributed stays unset. Raises EngineFailed.
    """
    return Mesh(rank, size, _group(rank, size, store, timeout_s))


def connect_stages(
    rank: int, stages: Sequence[slice], size: int, store: torch.distributed.Store, timeout_s: float
) -> Mesh:
    """Connect CPU processes that are stages of a pipeline, each of `size` ranks that share its layers.

    rank: of this process among all, len(stages) * size. The first ranks are the last stage, which draws the tokens. stages: the
    layers of each. Otherwise as `connect`.
    """
    count, place = len(stages), rank % size
    index = count - 1 - rank // size
    within = torch.distributed.PrefixStore(f"stage {index}", store)
    mesh = connect(place, size, within, timeout_s)
    if count == 1:
        return mesh
    everyone = _group(rank, count * size, torch.distributed.PrefixStore("all", store), timeout_s)
    ranks = [(count - 1 - stage) * size + place for stage in range(count)]
    return replace(mesh, stage=Stage(index, count, stages[index], ranks, everyone))


def _group(rank: int, size: int, store: torch.distributed.Store, timeout_s: float) -> torch.distributed.ProcessGroup:
    timeout = timedelta(seconds=timeout_s)
    store.set_timeout(timeout)
    try:
        group = torch.distributed.ProcessGroupGloo(store, rank, size, timeout)
    except RuntimeError as error:
        raise EngineFailed(f"Rank {rank} of {size} could not reach the other ranks: {error}") from error
    return cast(torch.distributed.ProcessGroup, group)  # torch's stubs do not declare the base class
