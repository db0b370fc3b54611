"""Mesh: the rank of this process among those that share each layer, its collectives, and its stage of the pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, cast

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
        x = x.contiguous()
        self._run(lambda group: group.allreduce([x]))
        return x

    def all_gather(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """The parts x [..., n] of all ranks side by side, cut to [..., length]. With one rank x as it is. Raises as all_reduce."""
        if self.size == 1:
            return x
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._run(lambda group: group.allgather([parts], [x]))
        return torch.cat(parts, dim=-1)[..., :length]

    def _run(self, collective: Callable[[torch.distributed.ProcessGroup], torch.distributed.Work]) -> None:
        if self.group is None:
            raise ConfigError(f"Rank {self.rank} of {self.size} is not connected to the other ranks.")
        try:
            collective(self.group).wait()
        except RuntimeError as error:
            raise EngineFailed(f"Rank {self.rank} of {self.size} lost the other ranks: {error}") from error


ONE_DEVICE = Mesh()


@dataclass(frozen=True, slots=True)
class Meeting:
    """How ranks find one another.

    store: a FileStore on one host, a TCPStore between hosts. timeout_s: of connecting, and of each collective. address: of this
    host, at which the other ranks reach this one.
    """

    store: torch.distributed.Store
    timeout_s: float
    address: str = "127.0.0.1"

    def within(self, prefix: str) -> Meeting:
        """A meeting of some of the ranks, whose keys in the store have a prefix."""
        return replace(self, store=torch.distributed.PrefixStore(prefix, self.store))


def open_store(place: str, size: int) -> torch.distributed.Store:
    """The store of `size` ranks: at a path of this host, or at host:port, where the first rank has started it."""
    if place.startswith("/"):
        return torch.distributed.FileStore(place, size)
    host, _, port = place.rpartition(":")
    return torch.distributed.TCPStore(host, int(port))


def start_store(host: str) -> tuple[torch.distributed.Store, str]:
    """A store for ranks on several hosts, at a free port of this address of the host; and its place for `open_store`."""
    store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    return store, f"{host}:{store.port}"


def connect(rank: int, size: int, meeting: Meeting) -> Mesh:
    """Connect `size` CPU processes that share each layer, with gloo.

    Every rank must call it; it returns when all have called. The default group of torch.distributed stays unset. Raises
    EngineFailed.
    """
    return Mesh(rank, size, _group(rank, size, meeting))


def connect_stages(rank: int, stages: Sequence[slice], size: int, meeting: Meeting) -> Mesh:
    """Connect CPU processes that are stages of a pipeline, each of `size` ranks that share its layers.

    rank: of this process among all, len(stages) * size. The first ranks are the last stage, which draws the tokens. stages: the
    layers of each. Otherwise as `connect`.
    """
    count, place = len(stages), rank % size
    index = count - 1 - rank // size
    mesh = connect(place, size, meeting.within(f"stage {index}"))
    if count == 1:
        return mesh
    everyone = _group(rank, count * size, meeting.within("all"))
    ranks = [(count - 1 - stage) * size + place for stage in range(count)]
    return replace(mesh, stage=Stage(index, count, stages[index], ranks, everyone))


def _group(rank: int, size: int, meeting: Meeting) -> torch.distributed.ProcessGroup:
    gloo = cast(Any, torch.distributed.ProcessGroupGloo)  # torch's stubs do not declare its options and its base class
    options = gloo._Options()
    options._timeout = timedelta(seconds=meeting.timeout_s)
    meeting.store.set_timeout(options._timeout)
    try:
        # Without an address, gloo asks for that of the host's name, which need not be one that other hosts reach.
        options._devices = [gloo.create_device(hostname=meeting.address)]
        group = gloo(meeting.store, rank, size, options)
    except RuntimeError as error:
        raise EngineFailed(f"Rank {rank} of {size} could not reach the other ranks: {error}") from error
    return cast(torch.distributed.ProcessGroup, group)
