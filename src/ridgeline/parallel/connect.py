"""How the processes that run a model together find one another, and connect."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import EngineFailed
from ridgeline.parallel import nccl
from ridgeline.parallel.axis import Axis
from ridgeline.parallel.gloo import GlooGroup
from ridgeline.parallel.gpu import GpuGroup
from ridgeline.parallel.group import Group
from ridgeline.parallel.mesh import Mesh
from ridgeline.parallel.pipeline import Stage
from ridgeline.parallel.wiring import Axes, Wiring, wiring

CPU = torch.device("cpu")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Meeting:
    """How ranks find one another.

    store: a FileStore on one host, a TCPStore between hosts. timeout_s: of connecting, and of each collective. address: of this
    host, at which the other ranks reach this one. device: of this rank. per_host: ranks of each host; None: all are on this one.
    Device and hosts decide how ranks are connected (parallel.wiring).
    """

    store: torch.distributed.Store
    timeout_s: float
    address: str = "127.0.0.1"
    device: torch.device = CPU
    per_host: int | None = None

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


def transport(device: torch.device) -> str:
    """What carries messages between ranks, with a version that must be equal on all hosts. Raises ConfigError without NCCL."""
    return "gloo" if device == CPU else f"NCCL {nccl.version_text()}"


def connect(rank: int, size: int, meeting: Meeting) -> Mesh:
    """Connect `size` processes that share each layer, with gloo on CPUs and NCCL on GPUs.

    Every rank must call it; it returns when all have called. The default group of torch.distributed stays unset. Raises
    EngineFailed.
    """
    return Mesh(rank, size, _group(rank, range(size), meeting))


def connect_mesh(rank: int, stages: Sequence[slice], config: EngineConfig, meeting: Meeting) -> Mesh:
    """Connect the processes that run a model together.

    rank: of this process among all, see Axes.of. stages: the layers of each. Otherwise as `connect`.
    """
    count = len(stages)
    axes = Axes.of(rank, config.layer_ranks, config.context_parallel_size, count)
    index, column, row = axes.stages.index(rank), axes.tensor.index(rank), axes.context.index(rank)
    if meeting.device != CPU and meeting.per_host is not None:
        nccl.use_network(meeting.address)
    layer = _group(rank, axes.tensor, meeting.within(f"stage {index} context {row}"))
    keys = _group(rank, axes.context, meeting.within(f"stage {index} of {column}"))
    mesh = Mesh(column, len(axes.tensor), layer, sequence=config.sequence_parallel)
    mesh = replace(mesh, context=Axis(row, len(axes.context), keys), divides_requests=config.data_parallel_size > 1)
    if count == 1:
        return mesh
    streams = _group(rank, axes.all, meeting.within("all"))
    host = streams if meeting.device == CPU else _group(rank, axes.all, replace(meeting.within("hosts"), device=CPU))
    return replace(mesh, stage=Stage(index, count, stages[index], axes.stages, streams, host))


def _group(rank: int, ranks: range, meeting: Meeting) -> Group | None:
    """Connect these ranks. rank: this one. None: it is the only one."""
    place, size, kind = ranks.index(rank), len(ranks), wiring(ranks, meeting.per_host, meeting.device.type)
    if size == 1:
        return None
    log.debug("rank %d: ranks %s are connected by %s", rank, list(ranks), kind.value)
    try:
        if kind is Wiring.GLOO:
            return GlooGroup(place, size, meeting.store, meeting.timeout_s, meeting.address)
        return GpuGroup(place, size, meeting.store, meeting.timeout_s, meeting.device, kind is Wiring.PEERS)
    except RuntimeError as error:
        remedy = (
            ". Every host must reach every other one at all ports; NCCL_SOCKET_IFNAME names the network interface, and "
            "NCCL_DEBUG=INFO shows what NCCL does"
        )
        reason = f"{error}{remedy if kind is Wiring.NCCL else ''}"
        raise EngineFailed(f"Rank {place} of {size} could not reach the other ranks: {reason}") from error
