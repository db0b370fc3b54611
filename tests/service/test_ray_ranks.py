"""Ranks of one replica on a local Ray cluster of several nodes; a rank, an actor and a node are killed under load."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.service.fleet.file import FleetConfig, read_fleet
from ridgeline.service.fleet.fleet import Fleet
from ridgeline.service.fleet.launcher import LocalLauncher
from ridgeline.service.fleet.rank_places import check_nodes, rank_places
from ridgeline.service.fleet.ray_cluster import RayLauncher
from ridgeline.service.fleet.server import routing
from ridgeline.service.listen import bind

from ..live.served import MARK
from ..live.test_death import alive
from .test_ray_cluster import PATIENCE_S, STORE, cluster, until_up

__all__ = ["cluster"]  # a fixture

SERVE = {"dtype": "float32", "threads": 1, "max_num_seqs": 8, "max_model_len": 4096, "kv_cache_memory": "64M"}
ENDS_S = 8.0
"""5 s and the pace of a busy machine."""


class Run:
    """A fleet of one replica behind its router."""

    def __init__(self, url: str, client: aiohttp.ClientSession, fleet: Fleet) -> None:
        self.url, self.client, self.fleet = url, client, fleet

    async def complete(self, **fields: Any) -> bytes:
        """The body of an answer with status 200; asks again while no replica is up."""
        body = {"prompt": "Once upon a time", "max_tokens": 24, **fields}
        while True:
            async with self.client.post(f"{self.url}/v1/completions", json=body) as reply:
                data = await reply.read()
            if reply.status != 503:
                assert reply.status == 200, data
                return data
            await asyncio.sleep(0.1)

    async def texts(self) -> list[str]:
        """Greedy and drawn answers, several at a time."""
        asked = [{"temperature": 0}, {"temperature": 1, "seed": 7}, {"temperature": 0, "prompt": "The dog " * 60}]
        return [
            json.loads(data)["choices"][0]["text"]
            for data in await asyncio.gather(*(self.complete(**a) for a in asked))
        ]


@asynccontextmanager
async def running(tmp_path: Path, content: dict[str, Any]) -> AsyncIterator[Run]:
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps({"router": {"port": 0, "queue_s": PATIENCE_S}, **content}))
    file = read_fleet(path, {})
    ray = file.fleet.launcher == "ray"
    launcher = RayLauncher(file.fleet, file.serve, {}) if ray else LocalLauncher(file.serve, (), {}, print)
    async with (
        routing(file.service, file.router, bind("127.0.0.1", 0)) as server,
        aiohttp.ClientSession() as client,
        Fleet(file, launcher, server.balancer, print) as fleet,
        asyncio.timeout(4 * PATIENCE_S),
    ):
        await fleet.scale(1)
        await until_up(fleet, 1)
        yield Run(server.url, client, fleet)


def on_ray(cluster: Any, **sizes: int) -> dict[str, Any]:
    """A fleet file whose ranks take a CPU each."""
    return {"launcher": "ray", "ray_address": cluster.address, "replica_cpus": 2, "serve": {**SERVE, **sizes}}


@pytest.mark.long
@pytest.mark.parametrize("size", ["tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size"])
async def test_ranks_on_two_nodes_say_what_one_process_says(cluster: Any, tmp_path: Path, size: str) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    async with running(tmp_path, {"serve": SERVE}) as single:
        expected = await single.texts()
    async with running(tmp_path, on_ray(cluster, **{size: 2})) as several:
        assert await several.texts() == expected


# --- what is killed -----------------------------------------------------------------------------------------------------


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """An environment variable of all processes of this test."""
    monkeypatch.setenv(MARK, str(tmp_path))
    return f"{MARK}={tmp_path}".encode()


def processes(mark: bytes, module: str = "ridgeline") -> Iterator[int]:
    """Processes with the mark that run a module whose name begins like this."""
    for folder in Path("/proc").iterdir():
        with suppress(OSError):  # it may be ending
            if folder.name.isdecimal() and mark in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes()
                if f"-m\0{module}".encode() in command and alive(int(folder.name)):
                    yield int(folder.name)


def ancestors(pid: int) -> list[int]:
    """Its parent first."""
    parents = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        parents.append(pid)
    return parents


def follower(mark: bytes) -> int:
    (pid,) = processes(mark, "ridgeline.engine.follower")
    return pid


def kill(what: str, mark: bytes, cluster: Any) -> None:
    """End rank 1, its actor, or its node."""
    parents = ancestors(follower(mark))
    if what == "rank":
        os.kill(follower(mark), signal.SIGKILL)
    elif what == "actor":
        os.kill(parents[1], signal.SIGKILL)  # the first is `ridgeline serve`
    else:
        nodes = {entry.process.pid: node for node in cluster.worker_nodes for entry in node.all_processes["raylet"]}
        (raylet,) = nodes.keys() & set(parents)
        cluster.remove_node(nodes[raylet], allow_graceful=False)


async def no_process_is_left(mark: bytes) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while left := list(processes(mark)):
        assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        await asyncio.sleep(0.1)


@pytest.mark.long
async def test_a_rank_its_actor_and_its_node_are_killed_under_load(mark: bytes, cluster: Any, tmp_path: Path) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    async with running(tmp_path, on_ray(cluster, tensor_parallel_size=2)) as run:
        print(f"ready after {run.fleet.cold_start_s:.1f} s")
        expected = await run.texts()
        cluster.add_node(num_cpus=1, object_store_memory=STORE)  # a spare: both others are taken
        for what in ("rank", "actor", "node"):
            lost = follower(mark)
            streams = [
                asyncio.create_task(run.complete(max_tokens=4000, ignore_eos=True, stream=True)) for _ in range(3)
            ]
            await asyncio.sleep(1.0)
            assert not any(stream.done() for stream in streams)
            began = time.monotonic()
            await asyncio.to_thread(kill, what, mark, cluster)
            ends = await asyncio.gather(*streams)
            took = time.monotonic() - began
            assert all(b'"engine_failed"' in end and b"[DONE]" not in end for end in ends), ends
            print(f"{what} killed: requests have ended after {took:.1f} s with {ends[0][-300:]!r}")
            assert took < ENDS_S
            assert await run.texts() == expected
            print(f"{what} killed: answers again after {time.monotonic() - began:.1f} s")
            assert follower(mark) != lost
        assert run.fleet.restarts == 2, "of the actor and the node; a rank comes back within its replica"
    await no_process_is_left(mark)


@pytest.mark.long
async def test_ranks_end_with_a_fleet_that_is_killed(mark: bytes, cluster: Any, tmp_path: Path) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=STORE)
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps({"router": {"port": 0}, **on_ray(cluster, tensor_parallel_size=2)}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    fleet = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ridgeline", "up", str(path)), stderr=asyncio.subprocess.PIPE, env=environment
    )
    assert fleet.stderr is not None
    async with asyncio.timeout(PATIENCE_S):
        while b"is ready after" not in (line := await fleet.stderr.readline()):
            assert line, "it has ended"
    assert len(list(processes(mark))) == 5  # the fleet, the service and its engine, the other rank and its host
    fleet.kill()
    await no_process_is_left(mark)
    await fleet.wait()


@pytest.mark.long
@pytest.mark.parametrize(("size", "gpus"), [("tensor_parallel_size", (1, 1)), ("pipeline_parallel_size", (2, 2))])
async def test_ranks_with_gpus_of_two_nodes_say_what_one_process_says(
    cluster: Any, tmp_path: Path, size: str, gpus: tuple[int, ...]
) -> None:
    """Ray counts GPUs that this machine does not have, so the ranks run on CPUs; places and processes are those of GPUs."""
    for count in gpus:
        cluster.add_node(num_cpus=1, num_gpus=count, object_store_memory=STORE)
    ranks = sum(gpus)
    async with running(tmp_path, {"serve": SERVE}) as single:
        expected = await single.texts()
    content = on_ray(cluster, **{size: ranks, "device": "cpu"})
    async with running(tmp_path, {**content, "replica_cpus": 2, "replica_gpus": ranks}) as several:
        assert await several.texts() == expected
        import ray

        used = [node["Resources"]["GPU"] for node in ray.nodes() if node["Alive"] and "GPU" in node["Resources"]]
        assert sorted(used) == sorted(gpus) and not ray.available_resources().get("GPU"), "every GPU is taken"


@pytest.mark.long
async def test_what_a_cluster_cannot_run_is_named(cluster: Any) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=STORE)
    config = FleetConfig(launcher="ray", ray_address=cluster.address, replica_gpus=2)
    with pytest.raises(ConfigError, match=r"no node of the Ray cluster has more than 1\."):
        await RayLauncher(config, {}, {}).start("a", 0)
    launcher = RayLauncher(replace(config, replica_gpus=0), {"model": "/nowhere", "port": 0}, {})
    with pytest.raises(
        RidgelineError, match=r"^The replica a did not start on the cluster: The replica a did not start: .*nowhere"
    ):
        await launcher.start("a", 0)
    await launcher.close()


# --- placement and refusals ---------------------------------------------------------------------------------------------


def test_places_of_ranks() -> None:
    serve = {"tensor_parallel_size": "2", "pipeline_parallel_size": 2, "host": "127.0.0.1"}
    places = rank_places(serve, 10.0, 0)
    assert (places.bundles, places.strategy) == ([{"CPU": 2}] * 4, "SPREAD")
    options = places.options(serve, 3, "10.0.0.1", 4000)
    assert (options["nnodes"], options["node_rank"], options["master_addr"], options["master_port"]) == (
        4,
        3,
        "10.0.0.1",
        4000,
    )
    assert (options["threads"], options["device"], options["host"]) == (2, "cpu", "10.0.0.1")
    assert rank_places(serve, 1.0, 0).bundles == [{"CPU": 0.25}] * 4
    together = rank_places(serve, 1.0, 4, [8.0, 8.0])
    assert (together.bundles, together.strategy) == ([{"CPU": 1.0, "GPU": 4}], "STRICT_PACK")
    assert together.options(serve, 0, "10.0.0.1", 4000) == {**serve, "host": "10.0.0.1"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"serve": {"nnodes": 2}}, "nnodes (serve in fleet.json) is chosen by the launcher ray"),
        (
            {"serve": {"tensor_parallel_size": 2, "context_parallel_size": 2}, "replica_gpus": 2},
            "replica_gpus (fleet.json) is 2, but a replica has 4 ranks (tensor_parallel_size 2 times context_parallel_size 2), "
            "which need a GPU each: give 4, or 0 for ranks on CPUs.",
        ),
        (
            {"serve": {"tensor_parallel_size": 2, "device": "cuda"}},
            "replica_gpus (fleet.json) is 0, but a replica has 2 ranks (tensor_parallel_size 2), which need a GPU each: give 2.",
        ),
        (
            {"serve": {"pipeline_parallel_size": 2, "prefill_engines": 1}},
            "prefill_engines (serve in fleet.json) does not go with pipeline_parallel_size 2 on CPUs of a Ray cluster",
        ),
    ],
)
def test_ranks_that_ray_cannot_place_are_refused(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    path = tmp_path / "fleet.json"
    path.write_text(json.dumps({"launcher": "ray", **content}))
    with pytest.raises(ConfigError) as refused:
        read_fleet(path, {})
    assert message in refused.value.message


@pytest.mark.parametrize(
    ("nodes", "actors"),
    [
        ([16], 1),
        ([8, 16], 1),
        ([8, 8], 2),
        ([0, 8, 8], 2),
        ([8, 4, 4], 4),
        ([4, 4, 4, 4], 4),
        ([15, 1], 16),
        ([8], 2),
        ([6, 6], 4),
        ([], 1),
        ([0], 1),
    ],
)
def test_gpus_of_several_nodes_are_taken_in_the_fewest_equal_parts(nodes: list[float], actors: int) -> None:
    """Too few GPUs are awaited on nodes like the largest."""
    serve = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    places = rank_places(serve, 32.0, 16, nodes)
    each = {"CPU": 32 / actors, "GPU": 16 // actors}
    assert (places.bundles, places.strategy) == ([each] * actors, "STRICT_PACK" if actors == 1 else "PACK")
    if actors > 1:
        options = places.options(serve, 1, "10.0.0.1", 4000)
        assert (options["nnodes"], options["node_rank"], options["master_addr"]) == (actors, 1, "10.0.0.1")
        assert "device" not in options, "the engine finds the GPUs that Ray assigned"


def test_gpus_of_several_nodes_are_those_of_ranks_of_one_engine() -> None:
    serve = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    check_nodes(serve, 4, [0, 2, 2])
    for options, gpus in (({}, 4), ({"tensor_parallel_size": 2}, 4), ({**serve, "models": "models.toml"}, 4)):
        with pytest.raises(
            ConfigError, match=r"no node of the Ray cluster has more than 2\. Several nodes run the ranks of one"
        ):
            check_nodes(options, gpus, [0, 2, 2])
        check_nodes(options, gpus, [0, 4])
        check_nodes(options, gpus, [2])  # it may grow
    assert rank_places({**serve, "models": "models.toml"}, 4.0, 4, [2, 2]).actors == 1
