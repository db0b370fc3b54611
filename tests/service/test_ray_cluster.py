"""Replicas on a local Ray cluster of several nodes, with a node killed under load."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ridgeline.core.errors import ConfigError
from ridgeline.service.fleet.file import FleetConfig, read_fleet
from ridgeline.service.fleet.fleet import Fleet
from ridgeline.service.fleet.ray_cluster import RayLauncher
from ridgeline.service.fleet.server import routing
from ridgeline.service.listen import bind

STORE = 80 << 20
PATIENCE_S = 120.0


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A cluster whose head runs no replica."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    cluster.shutdown()


@pytest.mark.long
async def test_a_node_is_killed_under_load(cluster: Any, tmp_path: Path) -> None:
    nodes = [cluster.add_node(num_cpus=1, object_store_memory=STORE) for _ in range(2)]
    path = tmp_path / "fleet.json"
    content = {
        "launcher": "ray", "replicas": 2, "ray_address": cluster.address,
        "serve": {"threads": 1, "max_num_seqs": 8}, "router": {"port": 0, "queue_s": PATIENCE_S},
    }  # fmt: skip
    path.write_text(json.dumps(content))
    file = read_fleet(path, {})
    async with (
        routing(file.service, file.router, bind("127.0.0.1", 0)) as server,
        aiohttp.ClientSession() as client,
        Fleet(file, RayLauncher(file.fleet, file.serve, {}), server.balancer) as fleet,
        asyncio.timeout(4 * PATIENCE_S),
    ):
        await fleet.scale(2)
        await until_up(fleet, 2)
        cluster.add_node(num_cpus=1, object_store_memory=STORE)  # a spare: both others are taken
        addresses = {upstream.url for upstream in server.balancer.upstreams.values()}
        assert len(addresses) == 2 and not any("127.0.0.1" in url for url in addresses)
        answers: list[tuple[int, bytes]] = []
        stop = asyncio.Event()

        async def load() -> None:
            body = {"prompt": "Once upon a time", "max_tokens": 20, "stream": True}
            while not stop.is_set():
                async with client.post(f"{server.url}/v1/completions", json=body) as reply:
                    answers.append((reply.status, (await reply.read())[-200:]))

        clients = [asyncio.create_task(load()) for _ in range(4)]
        while len(answers) < 20:
            await asyncio.sleep(0.05)
        killed = time.monotonic()
        await asyncio.to_thread(cluster.remove_node, nodes[0], allow_graceful=False)
        while sum(replica.serves for replica in server.balancer.router.replicas.values()) > 1:
            await asyncio.sleep(0.01)
        print(f"the router avoids the node after {time.monotonic() - killed:.1f} s")
        seen = len(answers)
        while len(answers) < seen + 20:
            await asyncio.sleep(0.05)
        await until_up(fleet, 2)
        stop.set()
        await asyncio.gather(*clients)
    assert {status for status, _ in answers} == {200}
    ends = [data.endswith(b"data: [DONE]\n\n") for _, data in answers]
    assert all(end or b'"engine_failed"' in data for end, (_, data) in zip(ends, answers, strict=True))
    assert ends.count(False) <= 4, "at most the streams that ran on the node"


async def until_up(fleet: Fleet, count: int) -> None:
    while sum(member.up.is_set() for member in fleet.members.values()) < count:
        if fleet.failed.done():
            fleet.failed.result()
        await asyncio.sleep(0.1)


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_remedy_is_named() -> None:
    with pytest.raises(ConfigError, match=r"Ray is not installed: run `pip install 'ridgeline\[cluster\]'`"):
        RayLauncher(FleetConfig(launcher="ray"), {}, {})
