"""Which ranks are connected, and how: data that follow from sizes, hosts and device."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.engine.hosts import per_host
from ridgeline.parallel import nccl
from ridgeline.parallel.wiring import Axes, Wiring, wiring

PEERS, NCCL, GLOO = Wiring.PEERS, Wiring.NCCL, Wiring.GLOO


def wired(config: EngineConfig, device: str) -> dict[str, set[Wiring]]:
    """How the groups of each axis with several ranks are connected."""
    sizes = config.tensor_parallel_size, config.context_parallel_size, config.pipeline_parallel_size
    kinds: dict[str, set[Wiring]] = {}
    for rank in range(config.ranks):
        axes = Axes.of(rank, *sizes)
        for name in ("tensor", "context", "all"):
            if len(ranks := getattr(axes, name)) > 1:
                kinds.setdefault(name, set()).add(wiring(ranks, per_host(config), device))
    return kinds


@pytest.mark.parametrize(
    ("sizes", "hosts", "expected"),
    [
        ((4, 1, 1), 1, {"tensor": {PEERS}, "all": {PEERS}}),
        ((4, 1, 1), 2, {"tensor": {NCCL}, "all": {NCCL}}),
        ((2, 1, 2), 2, {"tensor": {PEERS}, "all": {NCCL}}),
        ((8, 1, 4), 4, {"tensor": {PEERS}, "all": {NCCL}}),
        ((8, 1, 2), 4, {"tensor": {NCCL}, "all": {NCCL}}),
        ((1, 1, 2), 2, {"all": {NCCL}}),
        ((2, 2, 1), 2, {"tensor": {PEERS}, "context": {NCCL}, "all": {NCCL}}),
        ((2, 2, 2), 2, {"tensor": {PEERS}, "context": {PEERS}, "all": {NCCL}}),
        ((2, 4, 1), 2, {"tensor": {PEERS}, "context": {NCCL}, "all": {NCCL}}),
        ((6, 1, 1), 3, {"tensor": {NCCL}, "all": {NCCL}}),
    ],
)
def test_ranks_of_one_host_share_memory_and_others_do_not(
    sizes: tuple[int, int, int], hosts: int, expected: dict[str, set[Wiring]]
) -> None:
    tensor, context, stages = sizes
    config = EngineConfig(
        tensor_parallel_size=tensor, context_parallel_size=context, pipeline_parallel_size=stages, nnodes=hosts
    )
    assert wired(config, "cuda") == expected
    assert wired(config, "cpu") == {axis: {GLOO} for axis in expected}


def test_a_host_with_parts_of_two_groups() -> None:
    """Three hosts of two ranks, groups of three: the middle host has ranks of both groups, so no group is on one host."""
    config = EngineConfig(tensor_parallel_size=3, pipeline_parallel_size=2, nnodes=3)
    assert wired(config, "cuda")["tensor"] == {NCCL}
    assert wired(replace(config, nnodes=2), "cuda")["tensor"] == {PEERS}


@pytest.mark.parametrize(("tensor", "context", "stages"), list(product((1, 2, 3), repeat=3)))
def test_each_rank_is_in_groups_that_agree(tensor: int, context: int, stages: int) -> None:
    count = tensor * context * stages
    axes = [Axes.of(rank, tensor, context, stages) for rank in range(count)]
    for rank, mine in enumerate(axes):
        for name in ("tensor", "context", "stages", "all"):
            ranks = getattr(mine, name)
            assert rank in ranks and all(getattr(axes[other], name) == ranks for other in ranks)
        assert (len(mine.tensor), len(mine.context), len(mine.stages)) == (tensor, context, stages)
        assert set(mine.tensor) & set(mine.context) & set(mine.stages) == {rank}
    assert set(axes[0].tensor) | set(axes[0].context) <= set(range(tensor * context)), "the first ranks draw the tokens"
    assert axes[0].stages[-1] == 0


def test_the_interface_of_an_address_is_found() -> None:
    assert nccl.interface_of("127.0.0.1") == "lo"
    assert nccl.interface_of("localhost") == "lo"
    assert nccl.interface_of("192.0.2.1") == "", "a documentation address, which no interface has"
    if Path("/proc/net/if_inet6").exists() and "lo" in Path("/proc/net/if_inet6").read_text():
        assert nccl.interface_of("::1") == "lo"


def test_nccl_uses_the_network_of_the_hosts_unless_the_user_says_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    nccl.use_network("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    nccl.use_network("192.0.2.1")
    assert "NCCL_SOCKET_IFNAME" not in os.environ
    nccl.use_network(socket.gethostbyname("localhost"))
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
