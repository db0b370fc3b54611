"""Runs replicas on a Ray cluster. Ray places and supervises processes; requests and tokens go over HTTP from router to replica.

Each replica has a placement group, and an actor in it that runs `ridgeline serve` on its node with the GPUs that Ray assigned. A
replica of several ranks on CPUs has an actor for each rank, and one whose GPUs are on several nodes has an actor for each bundle of
them (`rank_places`): the first runs the service, the others run `ridgeline serve --node-rank`. Plans and sums go between the ranks'
processes, never through Ray. If a node is lost, so are its actors, and the fleet starts the replica again; the router's health
checks notice it earlier.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ridgeline.core.errors import ConfigError, RidgelineError
from ridgeline.service.fleet.file import FleetConfig
from ridgeline.service.fleet.launcher import LocalLauncher, LocalReplica
from ridgeline.service.fleet.rank_places import RankPlaces, check_nodes, meeting_place, rank_places

_STOP_S = 5.0
"""Seconds beyond an agent's own patience for an actor that does not answer."""
_LOST_S = 5.0
"""Patience with a replica that has lost a rank: its requests end with the reason within this time."""
_FOLLOWER_S = 2.0
"""Patience with a rank that has no more work."""


class Agent:
    """What runs in an actor, with one process. keys: as for `LocalLauncher`."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        self._keys = keys
        self._replica: LocalReplica

    async def meeting_place(self) -> tuple[str, int]:
        return meeting_place()

    async def start(self, serve: Mapping[str, Any], name: str, place: int) -> str:
        """Start the service with these options; returns its address."""
        self._replica = await LocalLauncher(serve, (), self._keys, print).start(name, place)
        return self._replica.url

    async def follow(self, serve: Mapping[str, Any], name: str, place: int) -> str:
        """Start a rank that follows the one with the service; returns no address."""
        self._replica = await LocalLauncher(serve, (), self._keys, print).spawn(name, place)
        return ""

    async def wait_ended(self) -> str:
        return await self._replica.wait_ended()

    async def stop(self, patience_s: float) -> None:
        await self._replica.stop(patience_s)


class RayReplica:
    """A replica on nodes of the cluster. agents: of its ranks, that with the service first. close: releases all of them."""

    def __init__(self, url: str, agents: Sequence[Any], close: Callable[[], None]) -> None:
        self.url = url
        self._agents, self._close = agents, close
        self._ended = asyncio.ensure_future(self._wait())
        self._closed = False

    async def wait_ended(self) -> str:
        return await asyncio.shield(self._ended)

    async def stop(self, patience_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        lost = self._ended.done()
        service = asyncio.ensure_future(_stop(self._agents[0], min(patience_s, _LOST_S) if lost else patience_s))
        try:
            if not lost:
                await service  # until its requests have ended it needs the other ranks
            await asyncio.gather(service, *(_stop(follower, _FOLLOWER_S) for follower in self._agents[1:]))
        finally:
            self._close()
            self._ended.cancel()

    async def _wait(self) -> str:
        """Wait until the service, a rank or an actor has ended; returns how."""
        ends = [asyncio.ensure_future(self._wait_agent(number)) for number in range(len(self._agents))]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return next(end.result() for end in ends if end.done())
        finally:
            for end in ends:
                end.cancel()

    async def _wait_agent(self, number: int) -> str:
        which = "" if len(self._agents) == 1 else f"rank {number}: "
        try:
            return which + str(await _result(self._agents[number].wait_ended.remote()))
        except Exception as error:
            return f"{which}its actor or its node is lost ({type(error).__name__})"


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
        self._serve, self._keys = serve, keys
        self._cpus, self._gpus = fleet.replica_cpus, fleet.replica_gpus
        try:
            ray.init(address=fleet.ray_address, ignore_reinit_error=True, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            remedy = "start one with `ray start --head`, or give ray_address."
            raise ConfigError(
                f"There is no Ray cluster at {fleet.ray_address!r} ({error}): {remedy}", param="ray_address"
            ) from None

    async def start(self, name: str, place: int) -> RayReplica:
        ray = self._ray
        nodes = [node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]]
        check_nodes(self._serve, self._gpus, nodes)
        places = rank_places(self._serve, self._cpus, self._gpus, nodes)
        group = ray.util.placement_group(places.bundles, strategy=places.strategy)
        agents: list[Any] = []

        def close() -> None:
            for agent in agents:
                ray.kill(agent)
            ray.util.remove_placement_group(group)

        try:
            await _result(group.ready())
            return RayReplica(await self._run(places, (name, place), group, agents), agents, close)
        except Exception as error:
            close()
            cause = getattr(error, "cause", error)  # Ray's own text has the actor's traceback
            raise RidgelineError(f"The replica {name} did not start on the cluster: {cause}") from error
        except BaseException:
            close()
            raise

    async def _run(self, places: RankPlaces, who: tuple[str, int], group: Any, agents: list[Any]) -> str:
        """Start the actors of a replica and their processes. who: its name and place. Adds the actors to agents; returns the
        replica's address."""
        ray = self._ray
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
        for number in range(places.actors):
            bundle = strategy(group, placement_group_bundle_index=number)
            options = {"num_cpus": places.cpus, "num_gpus": places.gpus, "scheduling_strategy": bundle}
            agents.append(ray.remote(Agent).options(**options).remote(self._keys))
        host, port = await _result(agents[0].meeting_place.remote())
        starts = []
        for number, agent in enumerate(agents):
            start = agent.follow if number else agent.start
            starts.append(_result(start.remote(places.options(self._serve, number, host, port), *who)))
        return str((await asyncio.gather(*starts))[0])

    async def close(self) -> None:
        self._ray.shutdown()


async def _stop(agent: Any, patience_s: float) -> None:
    """Stop what runs in an actor."""
    with suppress(Exception):  # the actor may be lost, which is an end, too
        async with asyncio.timeout(patience_s + _STOP_S):
            await _result(agent.stop.remote(patience_s))


def _result(reference: Any) -> asyncio.Future[Any]:
    """The value of a Ray reference in this event loop."""
    return asyncio.wrap_future(reference.future())
