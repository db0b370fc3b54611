"""Sending a workload: open loop (each request at its time, whatever became of the others) or closed loop (so many at
once), with every latency counted from the moment a request was due.

Counting from the moment of sending instead would hide what a slow server does to the requests behind a slow one
(coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
import math
import resource
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from ridgeline.bench.clock import Clock
from ridgeline.bench.prompts import Prompts
from ridgeline.bench.record import Row
from ridgeline.bench.stream import Reply
from ridgeline.bench.target import Address, Dialect
from ridgeline.bench.workload import Ask, Workload, chains

LEAD_S = 0.05
"""Seconds between the decision to start and the first request, so that it is not late already."""
_AHEAD = 256
"""Requests whose bytes are made before they are due."""
_IDLE_S = 0.005
"""Time to the next request that is enough to write one that comes later."""
_LOOK_S = 0.01
"""Seconds between two looks at the event loop's lag."""


class Sender(Protocol):
    """Sends one request's bytes and returns its reply when it has ended; target.Client is one."""

    async def send(self, data: bytes) -> Reply: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How a workload is sent. concurrency: most requests at once; for a workload whose times mean nothing this is a
    closed loop, in which no request begins after `seconds`. label: begins the ids of its requests."""

    workload: Workload
    concurrency: int | None = None
    seconds: float | None = None
    label: str = "bench"


@dataclass(frozen=True, slots=True)
class Sent:
    """What a plan came to: rows in the order of the workload, and how the load generator did."""

    rows: tuple[Row, ...]
    seconds: float
    loop_lag_s: tuple[float, ...]
    cpu_s: float


class Writer:
    """Turns asks into bytes, ahead of their time."""

    def __init__(self, address: Address, dialect: Dialect, prompts: Prompts) -> None:
        self._address = address
        self._dialect = dialect
        self._prompts = prompts

    def write(self, ask: Ask, index: int, name: str) -> tuple[bytes, int]:
        """(the request, characters of its prompt, 0 for token ids)."""
        prompt = self._prompts.make(ask, index)
        characters = (
            sum(map(len, prompt)) if isinstance(prompt, tuple) else len(prompt) if isinstance(prompt, str) else 0
        )
        body = self._dialect.body(prompt, ask.output)
        return self._address.request(self._dialect.path, body, name), characters


async def send_all(
    plan: Plan, sender: Sender, writer: Writer, clock: Clock, progress: Callable[[int], None] | None = None
) -> Sent:
    """Send a whole workload and wait for all answers. progress: told how many requests have ended."""
    raise_file_limit()
    run = _Sending(plan, sender, writer, clock, progress or (lambda done: None))
    with uncollected():
        return await _send_all(run, clock)


async def _send_all(run: _Sending, clock: Clock) -> Sent:
    async with _watched(clock) as lags:
        busy = time.process_time()
        await run.work()
        busy = time.process_time() - busy
    rows = tuple(row for row in run.rows if row is not None)
    return Sent(rows, max((row.ended_s for row in rows), default=0.0), tuple(lags), busy)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection within the block: a full one among thousands of streams takes longer than most latencies."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def raise_file_limit() -> None:
    """Let this process open as many connections as it is allowed to at all."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class _Sending:
    """One run under way."""

    def __init__(
        self, plan: Plan, sender: Sender, writer: Writer, clock: Clock, progress: Callable[[int], None]
    ) -> None:
        self._plan = plan
        self._sender = sender
        self._writer = writer
        self._clock = clock
        self._progress = progress
        self._start = 0.0
        self._done = 0
        self._ready: deque[tuple[list[int], bytes, int]] = deque()
        self._chains = chains(plan.workload.asks)
        self._written = 0
        """Chains whose first request stands in _ready, or did."""
        self.rows: list[Row | None] = [None] * len(plan.workload.asks)

    async def work(self) -> None:
        self._write_ahead(_AHEAD)
        self._start = self._clock.now() + LEAD_S
        await self._clock.until(self._start)
        await (self._open() if self._plan.workload.timed else self._closed())

    async def _open(self) -> None:
        """Each request at its time; a limit on concurrency holds it back, and the wait counts in its latency."""
        limit = self._plan.concurrency
        gate = None if limit is None else asyncio.Semaphore(limit)
        async with asyncio.TaskGroup() as group:
            for chain in self._chains:
                due = self._start + self._plan.workload.asks[chain[0]].at_s
                while self._clock.now() < due - _IDLE_S and self._write_ahead(len(self._ready) + 1):
                    await asyncio.sleep(0)  # what arrives meanwhile is read in time
                await self._clock.until(due)
                group.create_task(self._chain(due, gate))

    async def _closed(self) -> None:
        """As soon as one answer has ended, the next request is due."""

        last = self._start + (math.inf if self._plan.seconds is None else self._plan.seconds)

        async def user() -> None:
            while (now := self._clock.now()) <= last and (self._ready or self._write_ahead(1)):
                await self._chain(now, None, last)

        count = min(self._plan.concurrency or 1, len(self._chains))
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(user())

    async def _chain(self, due: float, gate: asyncio.Semaphore | None, last: float = math.inf) -> None:
        """The next request, and where it begins a conversation the turns behind it. A turn is due at its own time after the
        first one, or when the answer before it has ended, whichever is later; none begins after `last`."""
        asks = self._plan.workload.asks
        chain, data, characters = self._next()
        await self._one((chain[0], data, characters), due, gate)
        for index in chain[1:]:
            when = max(self._clock.now(), due + asks[index].at_s - asks[chain[0]].at_s)
            if when > last:
                return
            data, characters = self._writer.write(asks[index], index, self._name(index))
            await self._clock.until(when)
            await self._one((index, data, characters), when, gate)

    async def _one(self, written: tuple[int, bytes, int], due: float, gate: asyncio.Semaphore | None) -> None:
        """Send one request. written: its place, its bytes, the characters of its prompt."""
        index, data, characters = written
        held = 0.0
        if gate is not None:
            waited = self._clock.now()
            await gate.acquire()
            held = self._clock.now() - waited
        issued = self._clock.now()
        try:
            reply = await self._sender.send(data)
        finally:
            if gate is not None:
                gate.release()
        ask = self._plan.workload.asks[index]
        times = due - self._start, held, issued - self._start
        self.rows[index] = make_row(ask, reply, self._start, (self._name(index), index, *times, characters))
        self._done += 1
        self._progress(self._done)

    def _next(self) -> tuple[list[int], bytes, int]:
        if not self._ready:
            self._write_ahead(1)
        return self._ready.popleft()

    def _write_ahead(self, most: int) -> bool:
        """Make the bytes of chains' first requests until `most` are ready, or _AHEAD, or none is left; whether any was made."""
        asks, before = self._plan.workload.asks, self._written
        while len(self._ready) < min(most, _AHEAD) and self._written < len(self._chains):
            chain = self._chains[self._written]
            self._ready.append((chain, *self._writer.write(asks[chain[0]], chain[0], self._name(chain[0]))))
            self._written += 1
        return self._written > before

    def _name(self, index: int) -> str:
        return f"{self._plan.label}-{index}"


def make_row(ask: Ask, reply: Reply, start: float, sending: tuple[str, int, float, float, float, int]) -> Row:
    """The ledger row of a reply. sending: id, index, scheduled_s, held_s, issued_s, characters of the prompt."""
    name, index, scheduled, held, issued, characters = sending
    times = reply.times
    counts, counted = divide(reply)
    return Row(
        id=name,
        index=index,
        scheduled_s=scheduled,
        held_s=held,
        issued_s=issued,
        sent_s=reply.sent - start,
        ended_s=reply.ended - start,
        asked_input=ask.input,
        asked_output=ask.output,
        input_tokens=reply.prompt_tokens or ask.input,
        first_s=times[0] - start if times else None,
        answered_s=None if reply.answered != reply.answered else reply.answered - start,
        last_s=times[-1] - start if times else None,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(times)),
        counts=counts,
        counted=counted,
        output_tokens=reply.output_tokens or sum(counts),
        cached_tokens=reply.cached_tokens,
        input_characters=characters,
        characters=reply.said,
        hidden_characters=reply.hidden,
        answer_id=reply.id,
        finish=reply.finish,
        status=reply.status,
        error=reply.error,
    )


def divide(reply: Reply) -> tuple[tuple[int, ...], str]:
    """(tokens of each arrival, how they are known): see `Row.counted`."""
    if not reply.times:
        return (), ""
    if reply.tokens[0] > 0:
        return _steps(reply.tokens), "server"
    told, total = reply.told, reply.output_tokens
    # A server that counts nothing tells one token per event; an end token has no event of its own.
    if total in (0, told, told + 1):
        return _steps(reply.events), "one"
    characters = max(1, reply.said)
    return _steps([*(round(total * said / characters) for said in reply.characters[:-1]), total]), "characters"


def _steps(cumulative: Sequence[int]) -> tuple[int, ...]:
    return tuple(later - earlier for earlier, later in pairwise((0, *cumulative)))


@asynccontextmanager
async def _watched(clock: Clock) -> AsyncIterator[list[float]]:
    """Looks at how late the event loop is, every hundredth of a second, until the block ends."""
    lags: list[float] = []

    async def look() -> None:
        while True:
            due = clock.now() + _LOOK_S
            await clock.until(due)
            lags.append(clock.now() - due)

    watching = asyncio.ensure_future(look())
    try:
        yield lags
    finally:
        watching.cancel()
