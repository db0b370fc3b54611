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

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import RidgelineError
from ridgeline.core.resolve import Resolved
from ridgeline.core.ticket import Pools
from ridgeline.metrics import Metrics
from ridgeline.service.launch import Begun, EngineProcess, begin_engines, connect, launch, sharing_cores
from ridgeline.service.split import Member, SplitClient
from ridgeline.service.supervisor import RunningEngine, Supervisor

log = logging.getLogger(__name__)


async def connect_engines(begun: Sequence[Begun], resolved: Resolved, metrics: Metrics) -> RunningEngine:
    """Connect to started engines."""
    if len(begun) == 1:
        return await connect(begun[0], metrics.on_step)
    processes: list[EngineProcess] = []
    members: list[Member] = []
    client = SplitClient(members, metrics)
    for number, started in enumerate(begun):
        processes.append(await connect(started, partial(client.on_step, number)))
        members.append(Member(number, number < resolved.service.prefill_engines, processes[-1].client))
    return Engines(resolved, client, processes, begun[0].pools.descriptors, metrics)


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
    """Several engine processes (supervisor.RunningEngine). descriptors: memory files of their pools, which it closes."""

    def __init__(
        self,
        resolved: Resolved,
        client: SplitClient,
        processes: Sequence[EngineProcess],
        descriptors: tuple[int, ...],
        metrics: Metrics,
    ) -> None:
        self.client, self._metrics, self._descriptors = client, metrics, descriptors
        engine = sharing_cores(resolved.engine, len(processes))
        self._supervisors = [
            Supervisor(process, partial(self._start, resolved, engine, number), resolved.service)
            for number, process in enumerate(processes)
        ]
        loop = asyncio.get_running_loop()
        self._keeping = [loop.create_task(self._keep(member)) for member in client.members]

    async def _start(self, resolved: Resolved, engine: EngineConfig, number: int) -> RunningEngine:
        """Start an engine in the place of one that has ended."""
        os.ftruncate(self._descriptors[number], 0)  # what it kept for others is free now
        pools = Pools(self._descriptors, number)
        process = await launch(resolved.model, engine, partial(self.client.on_step, number), pools=pools)
        self.client.members[number].client = process.client
        return process

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
            os.ftruncate(self._descriptors[member.number], 0)
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
        await self.client.close()
        running = [supervisor.engine for supervisor in self._supervisors]
        await asyncio.gather(*(engine.kill() if kill else engine.stop() for engine in running))
        descriptors, self._descriptors = self._descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
