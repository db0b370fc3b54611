"""Runs replicas on a Ray cluster. Ray places and supervises processes; requests and tokens go over HTTP from router to replica.

Each replica has a placement group, and an actor in it that runs `ridgeline serve` on its node with the GPUs that Ray assigned. If
the node is lost, so is the actor, and the fleet starts another one; the router's health checks notice it earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.service.fleet.file import FleetConfig
from ridgeline.service.fleet.launcher import LocalLauncher, LocalReplica

_STOP_S = 5.0
"""Seconds beyond the replica's own patience for an actor that does not answer."""


class Agent:
    """What runs in the actor. serve: options of the replica. host: the node's address."""

    def __init__(self, serve: Mapping[str, Any], keys: Mapping[str, str], host: str) -> None:
        self._launcher = LocalLauncher({**serve, "host": host}, (), keys, print)
        self._replica: LocalReplica

    async def start(self, name: str, place: int) -> str:
        """Start the replica; returns its address."""
        self._replica = await self._launcher.start(name, place)
        return self._replica.url

    async def wait_ended(self) -> str:
        return await self._replica.wait_ended()

    async def stop(self, patience_s: float) -> None:
        await self._replica.stop(patience_s)
        await self._launcher.close()


class RayReplica:
    """A replica on a node of the cluster. close: releases its actor and its place."""

    def __init__(self, url: str, agent: Any, close: Callable[[], None]) -> None:
        self.url = url
        self._agent, self._close = agent, close
        self._ended = asyncio.ensure_future(self._wait())
        self._closed = False

    async def wait_ended(self) -> str:
        return await asyncio.shield(self._ended)

    async def stop(self, patience_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            if not self._ended.done():
                with suppress(Exception):  # the actor may be lost, which is an end, too
                    async with asyncio.timeout(patience_s + _STOP_S):
                        await _result(self._agent.stop.remote(patience_s))
        finally:
            self._close()
            self._ended.cancel()

    async def _wait(self) -> str:
        try:
            return str(await _result(self._agent.wait_ended.remote()))
        except Exception as error:
            return f"its actor or its node is lost ({type(error).__name__})"


class RayLauncher:
    """Starts replicas as actors of a Ray cluster. serve, keys: as for `LocalLauncher`."""

    def __init__(self, fleet: FleetConfig, serve: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        """Connects to the cluster. Raises ConfigError if Ray is missing or there is no cluster."""
        try:
            import ray
            import ray.util
        except ModuleNotFoundError:
            remedy = "run `pip install 'ridgeline[cluster]'`, or use launcher: local."
            raise ConfigError(f"launcher is ray, but Ray is not installed: {remedy}", param="launcher") from None
        self._ray = ray
        self._fleet, self._serve, self._keys = fleet, serve, keys
        try:
            ray.init(address=fleet.ray_address, ignore_reinit_error=True, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            remedy = "start one with `ray start --head`, or give ray_address."
            raise ConfigError(
                f"There is no Ray cluster at {fleet.ray_address!r} ({error}): {remedy}", param="ray_address"
            ) from None

    async def start(self, name: str, place: int) -> RayReplica:
        ray, fleet = self._ray, self._fleet
        bundle = {"CPU": fleet.replica_cpus, **({"GPU": fleet.replica_gpus} if fleet.replica_gpus else {})}
        group = ray.util.placement_group([bundle], strategy="STRICT_PACK")
        agents: list[Any] = []

        def close() -> None:
            for agent in agents:
                ray.kill(agent)
            ray.util.remove_placement_group(group)

        try:
            await _result(group.ready())
            strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group)
            options = {"num_cpus": fleet.replica_cpus, "num_gpus": fleet.replica_gpus, "scheduling_strategy": strategy}
            find_host = ray.remote(num_cpus=0, scheduling_strategy=strategy)(_node_address)
            host = await _result(find_host.remote())
            agents.append(ray.remote(Agent).options(**options).remote(self._serve, self._keys, host))
            return RayReplica(await _result(agents[0].start.remote(name, place)), agents[0], close)
        except Exception as error:
            close()
            raise RidgelineError(f"The replica {name} did not start on the cluster: {error}") from error
        except BaseException:
            close()
            raise

    async def close(self) -> None:
        self._ray.shutdown()


def _node_address() -> str:
    """Runs on a node: the address by which other nodes reach it."""
    import ray.util

    return str(ray.util.get_node_ip_address())


def _result(reference: Any) -> asyncio.Future[Any]:
    """The value of a Ray reference in this event loop."""
    return asyncio.wrap_future(reference.future())
