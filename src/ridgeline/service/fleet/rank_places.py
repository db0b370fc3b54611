"""Where the ranks of a replica run on a Ray cluster.

Ranks on CPUs have a bundle and an actor each, on nodes of their own as far as there are enough. Ranks on GPUs share one bundle on
one node, which connects them best. If no node has so many GPUs, they have the fewest equal bundles that the nodes have room for,
and an actor each. Actors are the hosts of `engine/hosts.py`.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import CONFIGS, split_options

_HOSTS = ("nnodes", "node_rank", "master_addr", "master_port")
_SIZES = ("tensor_parallel_size", "data_parallel_size", "context_parallel_size", "pipeline_parallel_size")
_SEVERAL_ENGINES = ("prefill_engines", "decode_engines", "remote_engines", "models")
"""Options with which a server has several engines; ranks of several hosts connect to one."""


@dataclass(frozen=True, slots=True)
class RankPlaces:
    """bundles: of the placement group, one for each actor. strategy: how Ray spreads them. cpus, gpus: of each actor."""

    actors: int
    cpus: float
    gpus: int
    strategy: str

    @property
    def bundles(self) -> list[dict[str, float]]:
        return [{"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}] * self.actors

    def options(self, serve: Mapping[str, Any], number: int, host: str, port: int) -> dict[str, Any]:
        """Options of `ridgeline serve` for an actor. host, port: of the first actor's node, where the other ranks connect."""
        if self.actors == 1:
            return {**serve, "host": host}
        ranks = {"nnodes": self.actors, "node_rank": number, "master_addr": host, "master_port": port}
        device = {} if self.gpus else {"device": "cpu"}
        return {"threads": max(1, int(self.cpus)), **serve, **device, "host": host, **ranks}


def rank_places(serve: Mapping[str, Any], cpus: float, gpus: int, nodes: Sequence[float] = ()) -> RankPlaces:
    """The places of a replica with these options. cpus, gpus: of the whole replica. nodes: GPUs of each node of the cluster."""
    ranks = _engine(serve).ranks
    hosts = _gpu_hosts(gpus, nodes) if _may_span(serve, gpus) else 1
    if ranks == 1 or (gpus and hosts == 1):
        return RankPlaces(1, cpus, gpus, "STRICT_PACK")
    actors, strategy = (hosts, "PACK") if gpus else (ranks, "SPREAD")
    share = cpus / actors
    # Ray counts in steps of 0.0001, and whole numbers above 1.
    share = math.floor(share) if share > 1 else math.floor(share * 1e4) / 1e4
    return RankPlaces(actors, share, gpus // actors, strategy)


def _gpu_hosts(gpus: int, nodes: Sequence[float]) -> int:
    """The fewest equal parts of the GPUs that the nodes have room for. A cluster that has too few so far may grow by nodes like the
    largest."""
    parts = [count for count in range(1, gpus + 1) if gpus % count == 0]
    largest = max(nodes, default=0) or gpus
    fitting = (count for count in parts if sum(node // (gpus // count) for node in nodes) >= count)
    return next(fitting, None) or next(count for count in parts if gpus // count <= max(1, largest))


def _may_span(serve: Mapping[str, Any], gpus: int) -> bool:
    """Whether the GPUs may be on several nodes: each is that of a rank, and the ranks are of one engine."""
    return gpus == _engine(serve).ranks and not any(serve.get(name) for name in _SEVERAL_ENGINES)


def check_ranks(serve: Mapping[str, Any], gpus: int, origin: str) -> None:
    """Raise ConfigError for options of a replica that the launcher ray cannot place. gpus: replica_gpus. origin: the file."""
    for name in _HOSTS:
        if name in serve:
            raise ConfigError(
                f"{name} (serve in {origin}) is chosen by the launcher ray, which places ranks: leave it out.",
                param=name,
            )
    engine = _engine(serve)
    if engine.ranks == 1:
        return
    sizes = " times ".join(f"{name} {getattr(engine, name)}" for name in _SIZES if getattr(engine, name) > 1)
    if 0 < gpus < engine.ranks or (not gpus and engine.device == "cuda"):
        raise ConfigError(
            f"replica_gpus ({origin}) is {gpus}, but a replica has {engine.ranks} ranks ({sizes}), which need a GPU each: give "
            f"{engine.ranks}{', or 0 for ranks on CPUs' if gpus else ''}.",
            param="replica_gpus",
        )
    for name in _SEVERAL_ENGINES:
        if serve.get(name) and not gpus:
            raise ConfigError(
                f"{name} (serve in {origin}) does not go with {sizes} on CPUs of a Ray cluster, whose ranks connect to one "
                "engine: leave one of them out.",
                param=name,
            )


def check_nodes(serve: Mapping[str, Any], gpus: int, nodes: Sequence[float]) -> None:
    """Raise ConfigError if the cluster has the GPUs of a replica, but on several nodes, which these options cannot use.

    nodes: the GPUs of each. A cluster with too few GPUs may still grow.
    """
    if not _may_span(serve, gpus) and sum(nodes) >= gpus > max(nodes, default=0):
        raise ConfigError(
            f"replica_gpus is {gpus}, and no node of the Ray cluster has more than {max(nodes):g}. Several nodes run the ranks of "
            f"one engine, with a GPU for each, and these options have {_engine(serve).ranks}: give as many GPUs as ranks and one "
            "engine, or add a node.",
            param="replica_gpus",
        )


def meeting_place() -> tuple[str, int]:
    """Runs on a node of the cluster: its address, by which other nodes reach it, and a free port."""
    import ray.util

    host = str(ray.util.get_node_ip_address())
    with socket.create_server((host, 0)) as listener:
        return host, int(listener.getsockname()[1])


def _engine(serve: Mapping[str, Any]) -> EngineConfig:
    return EngineConfig(**split_options(serve, *CONFIGS)[1])
