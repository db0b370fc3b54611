"""Mesh: the place of this process among all that run a model, and how they find one another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineFailed
from ridgeline.parallel.axis import ALONE, Axis
from ridgeline.parallel.gloo import GlooGroup
from ridgeline.parallel.gpu import GpuGroup
from ridgeline.parallel.group import Group
from ridgeline.parallel.pipeline import WHOLE, Stage

CPU = torch.device("cpu")
_UNEVEN = 7
"""Rows by which a rank may exceed its share of any batch."""


@dataclass(frozen=True, slots=True)
class Mesh(Axis):
    """Rank of this process among the `size` ranks that share each layer (tensor parallelism), and its place on the other axes.

    context: ranks with the same share of each layer, each of which holds a part of every request's keys and values. stage: the
    layers that this rank holds. sequence: the ranks that share layers divide the residual stream by tokens. divides_requests: they
    divide it by requests, and each has whole attention (data parallelism); they share the other layers.
    """

    context: Axis = ALONE
    stage: Stage = WHOLE
    sequence: bool = False
    divides_requests: bool = False

    @property
    def stream(self) -> Axis:
        """The ranks that divide the residual stream."""
        divided = self.sequence or self.divides_requests
        return Axis(self.rank, self.size, self.group) if divided else ALONE

    def share(self, rows: int) -> int:
        """Most rows of a rank in a captured decode step of `rows` rows, if ranks divide requests: a quarter more than the mean,
        because ranks seldom have equally many. 0: they do not."""
        return min(rows, -(-5 * rows // (4 * self.size)) + _UNEVEN) * self.divides_requests

    @property
    def attention(self) -> Mesh:
        """The mesh of linears of attention."""
        return replace(self, rank=0, size=1, group=None) if self.divides_requests else self

    @property
    def peers(self) -> Callable[[], Any] | None:
        """Group.peers of the ranks that share each layer; None also if the tokens of a step are divided."""
        divided = self.group is None or self.stream.size > 1 or self.context.size > 1
        return None if divided or self.group is None else self.group.peers

    @property
    def groups(self) -> list[Group]:
        """The groups that this rank is connected by."""
        groups = self.group, self.context.group, self.stage.group, self.stage.host
        return [group for group in groups if group is not None]

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Within it this rank runs alone, see Group.mute."""
        for group in self.groups:
            group.mute(True)
        try:
            yield
        finally:
            for group in self.groups:
                group.mute(False)

    def abort(self) -> None:
        """End what waits for other ranks, see Group.abort."""
        for group in self.groups:
            group.abort()


ONE_DEVICE = Mesh()


@dataclass(frozen=True, slots=True)
class Meeting:
    """How ranks find one another.

    store: a FileStore on one host, a TCPStore between hosts. timeout_s: of connecting, and of each collective. address: of this
    host, at which the other ranks reach this one. device: of this rank, which decides how it is connected.
    """

    store: torch.distributed.Store
    timeout_s: float
    address: str = "127.0.0.1"
    device: torch.device = CPU

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
    """Connect `size` processes that share each layer, with gloo on CPUs and NCCL on GPUs.

    Every rank must call it; it returns when all have called. The default group of torch.distributed stays unset. Raises
    EngineFailed.
    """
    return Mesh(rank, size, _group(rank, size, meeting))


def connect_mesh(rank: int, stages: Sequence[slice], config: EngineConfig, meeting: Meeting) -> Mesh:
    """Connect the processes that run a model together.

    rank: of this process among all: those that share layers are neighbours, then those that share keys and values, then stages. The
    first ranks are the last stage, which draws the tokens. stages: the layers of each. Otherwise as `connect`.
    """
    tensor, context, count = config.layer_ranks, config.context_parallel_size, len(stages)
    size = tensor * context
    index, (row, column) = count - 1 - rank // size, divmod(rank % size, tensor)
    mesh = Mesh(column, tensor, _group(column, tensor, meeting.within(f"stage {index} context {row}")))
    mesh = replace(mesh, sequence=config.sequence_parallel, divides_requests=config.data_parallel_size > 1)
    keys = _group(row, context, meeting.within(f"stage {index} of {column}"))
    mesh = replace(mesh, context=Axis(row, context, keys))
    if count == 1:
        return mesh
    streams = _group(rank, count * size, meeting.within("all"))
    host = (
        streams if meeting.device == CPU else _group(rank, count * size, replace(meeting.within("hosts"), device=CPU))
    )
    ranks = [(count - 1 - stage) * size + rank % size for stage in range(count)]
    return replace(mesh, stage=Stage(index, count, stages[index], ranks, streams, host))


def _group(rank: int, size: int, meeting: Meeting) -> Group | None:
    if size == 1:
        return None
    try:
        if meeting.device == CPU:
            return GlooGroup(rank, size, meeting.store, meeting.timeout_s, meeting.address)
        return GpuGroup(rank, size, meeting.store, meeting.timeout_s, meeting.device)
    except RuntimeError as error:
        raise EngineFailed(f"Rank {rank} of {size} could not reach the other ranks: {error}") from error
