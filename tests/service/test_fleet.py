"""A fleet of scripted replicas behind the router: starts, ends, restarts, scaling; and its file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.service.fleet.file import FleetFile, read_fleet
from ridgeline.service.fleet.fleet import Fleet
from ridgeline.service.fleet.launcher import LocalLauncher
from ridgeline.service.fleet.server import routing
from ridgeline.service.fleet.up import extension
from ridgeline.service.listen import bind

from .replicas import EVENTS, Answer, FakeReplica, Routed, Script, streams, thinks, waits


class FakeRunning:
    """A scripted replica as the fleet sees it."""

    def __init__(self, replica: FakeReplica) -> None:
        self.replica, self.url = replica, replica.url
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.lost = False
        """Whether it was stopped with requests."""

    async def wait_ended(self) -> str:
        return await asyncio.shield(self.ended)

    async def stop(self, patience_s: float) -> None:
        if not self.ended.done():
            self.lost = self.replica.running > 0
            await self.die("it was stopped")

    async def die(self, how: str = "it died") -> None:
        self.ended.set_result(how)
        await self.replica.__aexit__()


class FakeLauncher:
    """Starts scripted replicas. failing: starts that fail. unhealthy: new ones are not ready."""

    def __init__(self, script: Script = streams) -> None:
        self.script = script
        self.started: list[FakeRunning] = []
        self.places: list[int] = []
        self.failing = 0
        self.unhealthy = False

    @property
    def running(self) -> list[FakeRunning]:
        return [running for running in self.started if not running.ended.done()]

    async def start(self, name: str, place: int) -> FakeRunning:
        if self.failing:
            self.failing -= 1
            raise RidgelineError("no memory.")
        replica = FakeReplica(self.script)
        if self.unhealthy:
            replica.health = (503, {})
        await replica.__aenter__()
        self.places.append(place)
        self.started.append(FakeRunning(replica))
        return self.started[-1]

    async def close(self) -> None:
        assert not self.running


def fleet_file(folder: Path, **content: Any) -> FleetFile:
    path = folder / "fleet.json"
    path.write_text(json.dumps(content))
    return read_fleet(path, {})


class Running(Routed):
    fleet: Fleet
    launcher: FakeLauncher

    async def ready(self, count: int) -> None:
        """Wait until so many replicas are up, and no other."""
        await self.until(
            lambda: (
                len(self.launcher.running) == count
                and all(member.up.is_set() for member in self.fleet.members.values())
                and len(self.balancer.router.replicas) == count
                and all(replica.state.value == "up" for replica in self.balancer.router.replicas.values())
            )
        )


@asynccontextmanager
async def fleet_of(folder: Path, launcher: FakeLauncher, **content: Any) -> AsyncIterator[Running]:
    file = fleet_file(folder, **{"router": {"port": 0, "drain_s": 5.0}, **content})
    manager: list[Fleet] = []
    async with (
        routing(file.service, file.router, bind("127.0.0.1", 0), extension(manager)) as server,
        aiohttp.ClientSession() as client,
        Fleet(file, launcher, server.balancer) as fleet,
    ):
        manager.append(fleet)
        running = Running(server, [], client)
        running.fleet, running.launcher = fleet, launcher
        await fleet.scale(file.fleet.replicas)
        yield running


async def test_replicas_start_and_answer(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, FakeLauncher(), replicas=3) as fleet:
        await fleet.ready(3)
        assert {(await fleet.chat()).status for _ in range(10)} == {200}
        assert fleet.launcher.places == [0, 1, 2]
        assert "ridgeline:fleet_replicas_wanted{} 3.0" in (await fleet.get("/metrics")).data.decode()


async def test_requests_wait_for_the_first_replica(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    launcher.unhealthy = True
    async with fleet_of(tmp_path, launcher) as fleet:
        request = asyncio.create_task(fleet.chat())
        await fleet.until(lambda: len(fleet.balancer.router.queue) == 1)
        assert (await fleet.get("/health")).status == 503
        launcher.started[0].replica.health = (200, {"step": 1})
        assert (await request).status == 200


async def test_a_dead_replica_is_replaced(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, FakeLauncher(), replicas=2) as fleet:
        await fleet.ready(2)
        await fleet.launcher.started[0].die()
        await fleet.until(lambda: len(fleet.launcher.started) == 3)
        await fleet.ready(2)
        assert fleet.launcher.places == [0, 1, 0] and fleet.fleet.restarts == 1
        assert (await fleet.chat()).status == 200


async def test_a_rolling_restart_fails_no_request(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, FakeLauncher(), replicas=2) as fleet:
        await fleet.ready(2)
        answers: list[Answer] = []
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                answers.append(await fleet.chat())

        clients = [asyncio.create_task(load()) for _ in range(4)]
        await fleet.until(lambda: len(answers) > 20)
        url = f"{fleet.server.url}/admin/restart"
        async with fleet.client.post(url, json={}) as reply:
            assert (await reply.json())["replicas"] == ["replica-2", "replica-3"]
        seen = len(answers)
        await fleet.until(lambda: len(answers) > seen + 20)
        stop.set()
        await asyncio.gather(*clients)
        assert {(answer.status, answer.data) for answer in answers} == {(200, b"".join(EVENTS))}
        assert [running.ended.done() for running in fleet.launcher.started] == [True, True, False, False]
        assert not any(running.lost for running in fleet.launcher.started)
        assert fleet.fleet.restarts == 0


async def test_a_restart_without_a_free_gpu_lets_requests_wait(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, FakeLauncher(), replicas=1, gpus=[7]) as fleet:
        await fleet.ready(1)
        restart = asyncio.create_task(fleet.fleet.restart())
        answers = []
        while not restart.done():
            answers.append((await fleet.chat()).status)
        await restart
        assert set(answers) == {200} and fleet.launcher.places == [0, 0]


async def test_a_restart_that_fails_keeps_the_old_replicas(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, FakeLauncher(), replicas=2, ready_s=0.5) as fleet:
        await fleet.ready(2)
        fleet.launcher.unhealthy = True
        with pytest.raises(RidgelineError, match="does not become ready: the old ones stay"):
            await fleet.fleet.restart()
        await fleet.ready(2)
        assert sorted(fleet.fleet.members) == ["replica-0", "replica-1"]


async def test_scaling_down_loses_nothing(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, FakeLauncher(waits), replicas=2) as fleet:
        await fleet.ready(2)
        requests = [asyncio.create_task(fleet.chat()) for _ in range(4)]
        await fleet.until(lambda: sum(running.replica.running for running in fleet.launcher.started) == 4)
        await fleet.fleet.scale(0)
        assert (await fleet.chat()).status == 503
        for running in fleet.launcher.started:
            running.replica.gate.set()
        assert {(await request).data for request in requests} == {b"".join(EVENTS)}
        await fleet.until(lambda: not fleet.fleet.members)
        assert not any(running.lost for running in fleet.launcher.started)


async def test_to_zero_and_back(tmp_path: Path) -> None:
    autoscale = {"least": 0, "most": 2, "every_s": 0.05, "idle_s": 0.2, "calm_s": 0.1, "cold_start_s": 0.1}
    async with fleet_of(tmp_path, FakeLauncher(), replicas=1, autoscale=autoscale) as fleet:
        scaling = asyncio.create_task(fleet.fleet.autoscale())
        await fleet.until(lambda: len(fleet.launcher.started) == 1 and not fleet.launcher.running)
        assert (await fleet.get("/health")).json["replicas"] == {"up": 0, "total": 0}
        answer = await fleet.chat()
        assert answer.status == 200, "it waited for a replica"
        rows = (await fleet.get("/admin/decisions")).json["data"]
        assert {row["wanted"] for row in rows} >= {0, 1} and rows[0]["inputs"]["cold_start_s"] > 0
        await fleet.until(lambda: not fleet.launcher.running)
        fleet.balancer.router.rows_waiting = 3
        await fleet.ready(1)
        await asyncio.sleep(0.3)
        assert fleet.launcher.running, "rows of batches keep it beyond idle_s"
        scaling.cancel()


async def test_a_backlog_brings_more_replicas(tmp_path: Path) -> None:
    autoscale = {"least": 1, "most": 3, "every_s": 0.05, "idle_s": 60, "calm_s": 60}
    router = {"port": 0, "replica_limit": 2}
    async with fleet_of(tmp_path, FakeLauncher(thinks), replicas=1, autoscale=autoscale, router=router) as fleet:
        await fleet.ready(1)
        requests = [asyncio.create_task(fleet.chat()) for _ in range(20)]
        await fleet.until(lambda: len(fleet.balancer.router.queue) == 18)
        scaling = asyncio.create_task(fleet.fleet.autoscale())
        await fleet.ready(3)
        for running in fleet.launcher.started:
            running.replica.gate.set()
        assert {(await request).status for request in requests} == {200}
        scaling.cancel()


async def test_a_fleet_that_cannot_start_says_why(tmp_path: Path) -> None:
    launcher = FakeLauncher()
    launcher.failing = 100
    async with fleet_of(tmp_path, launcher) as fleet:
        with pytest.raises(RidgelineError, match=r"The fleet cannot start: no memory."):
            await asyncio.wait_for(asyncio.shield(fleet.fleet.failed), 10)


async def test_a_start_that_fails_later_is_repeated(tmp_path: Path) -> None:
    async with fleet_of(tmp_path, FakeLauncher()) as fleet:
        await fleet.ready(1)
        fleet.launcher.failing = 1
        await fleet.fleet.scale(2)
        await fleet.ready(2)
        assert not fleet.fleet.failed.done()


def test_a_file_in_full(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "replicas: 2\ngpus: [0, '1,2', 3, 4]\nready_s: 60\n"
        "serve:\n  model: some/model\n  max-num-seqs: 32\n  kv_cache_memory: 2G\n"
        "router:\n  host: 0.0.0.0\n  port: 9000\n  policy: least-work\n  replica_limit: 32\n  api_key: secret\n"
        "autoscale:\n  least: 0\n  most: 4\n  slo: p99(ttft)<=500ms\n  off_peak: 22:00-06:00\n  off_peak_most: 1\n"
    )
    file = read_fleet(path, {"RIDGELINE_MAX_QUEUE": "7"})
    assert (file.fleet.replicas, file.gpus) == (2, ("0", "1,2", "3", "4"))
    assert file.serve["model"] == "some/model" and file.serve["max_num_seqs"] == 32 and file.serve["port"] == 0
    assert (file.service.port, file.service.api_key, file.service.max_queue) == (9000, "secret", 7)
    assert file.router.policy == "least-work"
    assert file.scaling.bounds(off_peak=True) == (0, 1) and file.scaling.bounds(off_peak=False) == (0, 4)
    assert (file.scaling.ttft_s, file.scaling.quantile, file.scaling.limit) == (0.5, 0.99, 32)
    assert file.off_peak.open(0) and not file.off_peak.open(12 * 60)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"replcas": 2}, r"Unknown key replcas (fleet.json): did you mean replicas?"),
        ({"replicas": "two"}, "replicas (fleet.json) is 'two': give a whole number"),
        ({"replicas": -1}, "replicas (fleet.json) is -1: give 0 to 10000."),
        ({"launcher": "moon"}, "launcher (fleet.json) is 'moon': give one of local, ray."),
        ({"serve": [1]}, "serve (fleet.json) is [1]: give a mapping of options."),
        ({"serve": {"max_num_seq": 3}}, "Unknown option max_num_seq (serve in fleet.json): did you mean max_num_seqs"),
        ({"serve": {"max_num_seqs": 0}}, "max_num_seqs (serve in fleet.json) is 0: give 1 to 65536."),
        ({"serve": {"port": 8000}}, "port (serve in fleet.json) is set by the fleet: give it in the section router."),
        (
            {"serve": {"batch_dir": "/b"}},
            "batch_dir (serve in fleet.json) is set by the fleet: give it in the section router.",
        ),
        ({"serve": {"join": "a:1"}}, "join (serve in fleet.json) runs no server"),
        (
            {"replicas": 2, "serve": {"remote_engines": "prefill"}},
            "remote_engines (serve in fleet.json) has one address: give replicas: 1 and no section autoscale.",
        ),
        ({"router": {"polcy": "x"}}, "Unknown key polcy (router in fleet.json): did you mean policy?"),
        (
            {"router": {"policy": "x"}},
            "router in fleet.json: policy is 'x': give one of prefix, least-work, round-robin.",
        ),
        ({"router": {"slo": "ttft=1s"}}, "Unknown key slo (router in fleet.json)"),
        ({"router": {"port": 99999}}, "port (router in fleet.json) is 99999: give 0 to 65535."),
        ({"autoscale": {"most": 0}}, "most (autoscale in fleet.json) is 0: give at least 1."),
        (
            {"autoscale": {"slo": "tpot=5ms"}},
            "slo (autoscale in fleet.json) is 'tpot=5ms': give a limit on the first token",
        ),
        ({"autoscale": {"slo": "x"}}, "autoscale in fleet.json: --slo 'x' is not a known limit"),
        ({"autoscale": {"off_peak": "x"}}, "off_peak (autoscale in fleet.json) is 'x': give two different times"),
        ({"serve": {"api_keys": "k.yaml"}}, "give admin_api_key in the section router, and no api_key."),
        ({"gpus": ["a"]}, "gpus (fleet.json) is 'a': give a list with the GPUs of each replica"),
        ({"gpus": [0], "launcher": "ray"}, "gpus (fleet.json): Ray assigns GPUs, give their number as replica_gpus."),
        ({"gpus": [0], "replicas": 2}, "gpus (fleet.json) has 1 entries for up to 2 replicas: give one for each."),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        fleet_file(tmp_path, **content)
    assert message in error.value.message


async def test_the_environment_of_a_local_replica(tmp_path: Path) -> None:
    launcher = LocalLauncher({"port": 0}, ("0", "1,2"), {"api_key": "secret"}, print)
    environment = launcher.environment(1)
    assert environment["CUDA_VISIBLE_DEVICES"] == "1,2" and environment["RIDGELINE_API_KEY"] == "secret"
    await launcher.close()
