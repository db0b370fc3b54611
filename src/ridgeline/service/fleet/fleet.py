"""Keeps a number of replicas running: starts, watches, replaces, drains and scales them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict

from ridgeline.core.errors import RidgelineError
from ridgeline.core.loop_time import LoopTimeout
from ridgeline.metrics.exposition import gauge, head, sample
from ridgeline.metrics.metrics import PREFIX
from ridgeline.service.autoscale import Arrivals, Autoscaler, Decision, Load
from ridgeline.service.fleet.balancer import Balancer
from ridgeline.service.fleet.file import FleetFile
from ridgeline.service.fleet.launcher import Launcher, Running

KEPT_DECISIONS = 1000
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
"""Seconds before a replica that ended is started again; the time doubles while it does not stay."""
_STAYED_S = 60.0
_HUNG_S = 30.0
"""Seconds without an answer to health checks after which a replica is replaced."""
_WATCH_S = 1.0
_WAKE_S = 0.1
_STOP_S = 10.0
"""Seconds beyond the drain in which a replica may end."""

log = logging.getLogger(__name__)


class Member:
    """A place of the fleet: its replica, and those that replace it when it ends by itself."""

    def __init__(self, name: str, place: int) -> None:
        self.name, self.place = name, place
        self.running: Running | None = None
        self.up = asyncio.Event()
        self.retiring = False
        self.task: asyncio.Task[None]


class Fleet:
    """Use it as an async context manager: at its end all replicas are stopped. failed: set if one fails before any is ready."""

    def __init__(
        self, file: FleetFile, launcher: Launcher, balancer: Balancer, say: Callable[[str], None] = log.info
    ) -> None:
        self.members: dict[str, Member] = {}
        self.decisions: deque[Decision] = deque(maxlen=KEPT_DECISIONS)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.wanted = 0
        self.restarts = 0
        """Replicas that ended by themselves and were started again."""
        self.cold_start_s = 0.0
        """Seconds from start to ready of the last replica."""
        self._file, self._launcher, self._balancer, self._say = file, launcher, balancer, say
        self._changing = asyncio.Lock()
        self._retirements: set[asyncio.Task[None]] = set()
        self._count = 0
        self._was_up = False
        self._clock = asyncio.get_running_loop().time

    async def __aenter__(self) -> Fleet:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(self._stop(member) for member in tuple(self.members.values())))
        await asyncio.gather(*self._retirements)
        await self._launcher.close()

    async def scale(self, wanted: int) -> None:
        """Start or stop replicas. Returns at once: new ones get requests when they are ready, others end when theirs have ended."""
        async with self._changing:
            self.wanted = wanted
            while len(self._current()) < wanted:
                self._begin()
            surplus = sorted(self._current(), key=lambda member: (member.up.is_set(), self._load(member)))
            for member in surplus[: len(surplus) - wanted]:
                self._retire_later(member)

    async def restart(self) -> None:
        """Replace every replica, one after the other, so that no request fails.

        A new one starts before an old one is drained, or afterwards if all places are taken. Raises RidgelineError if a new one
        does not become ready; the old ones then stay.
        """
        async with self._changing:
            for old in self._current():
                if self._free_place() is None:
                    await self._retire(old)
                    await self._until_up(self._begin())
                    continue
                new = self._begin()
                try:
                    await self._until_up(new)
                except RidgelineError:
                    await self._stop(new)
                    raise
                await self._retire(old)

    async def autoscale(self) -> None:
        """Decide again and again. Ends at once if the file has no section autoscale."""
        file, router = self._file, self._balancer.router
        if file.scaling is None:
            return
        scaler = Autoscaler(file.scaling)
        arrivals, last = Arrivals(router.totals), self._clock()
        router.expected += 1  # with zero replicas requests wait for the first
        try:
            while True:
                await self._pause(file.autoscale.every_s)
                now = self._clock()
                rates, last = arrivals.rates(max(1e-6, now - last)), now
                if self.cold_start_s:
                    scaler.cold_start_s = self.cold_start_s
                await self._follow(scaler.decide(self._measure(now, *rates)))
        finally:
            router.expected -= 1

    async def _pause(self, seconds: float) -> None:
        """Wait, but not while requests wait and no replica runs or starts."""
        deadline, router = self._clock() + seconds, self._balancer.router
        while (left := deadline - self._clock()) > 0 and (self._current() or not (router.queue or router.rows_waiting)):
            await asyncio.sleep(min(_WAKE_S, left))

    async def _follow(self, decision: Decision) -> None:
        self.decisions.append(decision)
        self._balancer.asleep = decision.wanted == 0
        if decision.wanted != self.wanted:
            self._say(f"{self.wanted} -> {decision.wanted} replicas: {decision.reason}")
            await self.scale(decision.wanted)
        log.info("autoscale %s", json.dumps(asdict(decision)))

    def render(self) -> str:
        """The fleet's metrics as Prometheus text."""
        name = f"{PREFIX}:fleet_restarts_total"
        return "".join(
            [
                gauge(f"{PREFIX}:fleet_replicas_wanted", "Replicas that should run.", [("", self.wanted)]),
                gauge(f"{PREFIX}:fleet_replicas", "Replicas that run or start.", [("", len(self._current()))]),
                gauge(
                    f"{PREFIX}:fleet_cold_start_seconds",
                    "Time from start to ready of the last replica.",
                    [("", self.cold_start_s)],
                ),
                head(name, "counter", "Replicas that ended by themselves and were started again."),
                sample(name, "", self.restarts),
            ]
        )

    def _measure(self, now: float, requests_s: float, prompt_tokens_s: float) -> Load:
        router, moment = self._balancer.router, time.localtime()
        window = self._file.off_peak
        return Load(
            now=now,
            requests_s=requests_s,
            prompt_tokens_s=prompt_tokens_s,
            running=sum(replica.running for replica in router.replicas.values()),
            waiting=len(router.queue),
            waiting_tokens=router.waiting_tokens,
            replicas=len(self._current()),
            off_peak=window is not None and window.open(60 * moment.tm_hour + moment.tm_min),
            speed=router.speed,
            rows=router.rows_waiting + sum(replica.rows for replica in router.replicas.values()),
        )

    def _current(self) -> list[Member]:
        return [member for member in self.members.values() if not member.retiring]

    def _load(self, member: Member) -> int:
        replica = self._balancer.router.replicas.get(member.name)
        return 0 if replica is None else replica.running

    def _free_place(self) -> int | None:
        """The lowest free place; None if all GPUs are taken."""
        taken = {member.place for member in self.members.values()}
        places = len(self._file.gpus) or len(taken) + 1
        return next((place for place in range(places) if place not in taken), None)

    def _begin(self) -> Member:
        place = self._free_place()
        if place is None:
            raise RidgelineError("All GPUs of the fleet are taken: wait until a replica has ended.")
        member = Member(f"replica-{self._count}", place)
        self._count += 1
        self.members[member.name] = member
        member.task = asyncio.get_running_loop().create_task(self._live(member))
        return member

    async def _live(self, member: Member) -> None:
        """Run replicas in a place, one after the other, until it retires."""
        pause = _FIRST_PAUSE_S
        while not member.retiring:
            began = self._clock()
            try:
                ended = await self._run(member)
                if member.retiring:
                    return
            except Exception as error:
                if not isinstance(error, RidgelineError | OSError):
                    log.exception("unexpected error in %s", member.name)
                ended = str(error) or type(error).__name__
                if not self._was_up:
                    if not self.failed.done():
                        self.failed.set_exception(RidgelineError(f"The fleet cannot start: {ended}"))
                    return
            if self._clock() - began > _STAYED_S:
                pause = _FIRST_PAUSE_S
            self._say(f"{member.name}: {ended.rstrip('.')}; it is started again in {pause:g} s")
            self.restarts += 1
            self._balancer.router.expected += 1
            try:
                await asyncio.sleep(pause)
            finally:
                self._balancer.router.expected -= 1
            pause = min(_LONGEST_PAUSE_S, 2 * pause)

    async def _run(self, member: Member) -> str:
        """One replica from its start to its end; returns how it ended. Raises RidgelineError if it does not become ready."""
        router, began = self._balancer.router, self._clock()
        running: Running | None = None
        try:
            router.expected += 1
            try:
                async with LoopTimeout(self._file.fleet.ready_s):
                    running = member.running = await self._launcher.start(member.name, member.place)
                    self._balancer.add(member.name, running.url)
                    await self._ready(member.name, running)
            except TimeoutError:
                raise RidgelineError(f"it was not ready within ready_s = {self._file.fleet.ready_s:g} s") from None
            finally:
                router.expected -= 1
            self.cold_start_s = self._clock() - began
            self._was_up = True
            self._say(f"{member.name} is ready after {self.cold_start_s:.1f} s: {running.url}")
            member.up.set()
            return await self._ended(member.name, running)
        finally:
            member.up.clear()
            member.running = None
            if member.name in self._balancer.upstreams:
                self._balancer.remove(member.name)
            if running is not None:
                await running.stop(_STOP_S)

    async def _ended(self, name: str, running: Running) -> str:
        """Wait until a replica has ended, or has not answered for _HUNG_S; returns which."""
        ended = asyncio.ensure_future(running.wait_ended())
        try:
            while not (await asyncio.wait({ended}, timeout=_WATCH_S))[0]:
                if self._balancer.upstreams[name].silent_s > _HUNG_S:
                    return f"it has not answered for {_HUNG_S:g} s"
            return ended.result()
        finally:
            ended.cancel()

    async def _ready(self, name: str, running: Running) -> None:
        """Wait until the replica is up. Raises RidgelineError if it ends before."""
        up = asyncio.ensure_future(self._balancer.until_up(name))
        ended = asyncio.ensure_future(running.wait_ended())
        try:
            await asyncio.wait({up, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not up.done():
                raise RidgelineError(ended.result())
        finally:
            up.cancel()
            ended.cancel()

    async def _until_up(self, member: Member) -> None:
        """Raises RidgelineError after ready_s."""
        try:
            async with LoopTimeout(self._file.fleet.ready_s):
                await member.up.wait()
        except TimeoutError:
            raise RidgelineError(f"The new replica {member.name} does not become ready: the old ones stay.") from None

    def _retire_later(self, member: Member) -> None:
        member.retiring = True
        retirement = asyncio.get_running_loop().create_task(self._retire(member))
        self._retirements.add(retirement)
        retirement.add_done_callback(self._retirements.discard)

    async def _retire(self, member: Member) -> None:
        """Give a replica no more requests, let it finish those that it has, and stop it."""
        member.retiring = True
        if member.up.is_set():
            await self._balancer.drain(member.name, self._file.service.drain_s)
        await self._stop(member)

    async def _stop(self, member: Member) -> None:
        """End a place and its replica."""
        member.retiring = True
        if member.running is not None and member.up.is_set():
            await member.running.stop(self._file.service.drain_s + _STOP_S)
        else:
            member.task.cancel()
        with suppress(asyncio.CancelledError):
            await member.task
        self.members.pop(member.name, None)
