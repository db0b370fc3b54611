"""The engine processes of a server: one, or with --prefill-engines and --decode-engines several that hand prompts over.

Several engines look like one to the server: one client (service.split), which is lost when all of them are. Each has a supervisor,
so that a lost engine is replaced while the others serve.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from ridgeline.core.errors import RidgelineError
from ridgeline.core.resolve import Resolved
from ridgeline.core.ticket import Pools
from ridgeline.metrics import Metrics
from ridgeline.service.launch import Begun, EngineProcess, begin_engines, connect, launch, sharing_cores
from ridgeline.service.remote_engines import RemoteEngine, RemoteEngines
from ridgeline.service.split import Member, SplitClient
from ridgeline.service.supervisor import RunningEngine, Supervisor

log = logging.getLogger(__name__)


async def connect_engines(begun: Sequence[Begun], resolved: Resolved, metrics: Metrics) -> RunningEngine:
    """Connect to started engines, and wait for those of other hosts."""
    service = resolved.service
    if not service.prefill_engines:
        return await connect(begun[0], metrics.on_step)
    members: list[Member] = []
    client = SplitClient(members, metrics)
    engines = Engines(resolved, client, [started.pools for started in begun], metrics)
    try:
        here = {started.pools.local: started for started in begun}
        for number in range(service.prefill_engines + service.decode_engines):
            await engines.add(number, here.get(number))
    except BaseException:
        await engines.kill()
        raise
    return engines


async def launch_engines(resolved: Resolved, metrics: Metrics) -> RunningEngine:
    """Start the engines of a configuration and connect to them. If this is cancelled or fails, the processes are killed."""
    begun = begin_engines(resolved)
    try:
        return await connect_engines(begun, resolved, metrics)
    except BaseException:
        for started in begun:
            started.process.kill()
            started.pipe.close()
            started.process.wait()
        raise


class Engines:
    """Several engine processes (supervisor.RunningEngine). pools: of the engines of this host; their memory files are closed with
    it."""

    def __init__(self, resolved: Resolved, client: SplitClient, pools: Sequence[Pools], metrics: Metrics) -> None:
        self.client, self._metrics, self._resolved = client, metrics, resolved
        self._pools = {each.local: each for each in pools}
        self._descriptors = pools[0].descriptors if pools else ()
        self._engine = sharing_cores(resolved.engine, len(pools))
        self._remote = RemoteEngines(resolved.service)
        self._supervisors: list[Supervisor] = []
        self._keeping: list[asyncio.Task[None]] = []

    async def add(self, number: int, begun: Begun | None) -> None:
        """Add the engine `number`, begun on this host or on another one."""
        first = await self._start(number, begun)
        self.client.members.append(Member(number, number < self._resolved.service.prefill_engines, first.client))
        self._take(number, first)
        self._supervisors.append(Supervisor(first, partial(self._restart, number), self._resolved.service))
        self._keeping.append(asyncio.get_running_loop().create_task(self._keep(self.client.members[number])))

    async def _start(self, number: int, begun: Begun | None = None) -> EngineProcess | RemoteEngine:
        on_step = partial(self.client.on_step, number)
        if begun is not None:
            return await connect(begun, on_step)
        if number not in self._pools:
            return await self._remote.take(self._resolved.model, self._resolved.engine, number, on_step)
        return await launch(self._resolved.model, self._engine, on_step, pools=self._pools[number])

    async def _restart(self, number: int) -> RunningEngine:
        """Start an engine in the place of one that has ended."""
        self._empty(number)
        engine = await self._start(number)
        self._take(number, engine)
        return engine

    def _take(self, number: int, engine: EngineProcess | RemoteEngine) -> None:
        self.client.members[number].client = engine.client
        self.client.members[number].shift = engine.shift if isinstance(engine, RemoteEngine) else 0.0

    def _empty(self, number: int) -> None:
        """What an engine that has ended kept for others is free now."""
        if self._descriptors:
            os.ftruncate(self._descriptors[number], 0)

    async def _keep(self, member: Member) -> None:
        """Replace a member's process whenever it is lost."""
        supervisor = self._supervisors[member.number]
        await self.client.ready.wait()
        try:
            while True:
                await supervisor.wait_lost()
                self._metrics.engine_restarted()
                member.stats = None
                client = await supervisor.restart()
                with suppress(RidgelineError):  # wait_lost reports an engine that does not start
                    await client.wait_ready()
        except (RidgelineError, OSError) as error:
            member.gone = str(error)
            log.error("Engine %d is not replaced: %s", member.number, error)
            self._empty(member.number)
        if all(other.gone for other in self.client.members):
            self.client.lost.set()

    async def stop(self) -> None:
        """Let the engines exit; kill those that do not."""
        await self._end(kill=False)

    async def kill(self) -> None:
        """Kill the engines."""
        await self._end(kill=True)

    async def _end(self, *, kill: bool) -> None:
        for task in self._keeping:
            task.cancel()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await self._remote.close()
        await self.client.close()
        running = [supervisor.engine for supervisor in self._supervisors]
        await asyncio.gather(*(engine.kill() if kill else engine.stop() for engine in running))
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
