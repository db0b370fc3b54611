"""Sending of a workload: open loop (each request at its scheduled time) or closed loop (fixed concurrency).

Every latency counts from the scheduled time. Counting from the time of sending would hide the delay that a slow server causes for
later requests (coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from ridgeline.bench.clock import Clock
from ridgeline.bench.prompts import Prompts
from ridgeline.bench.record import Row
from ridgeline.bench.stream import Reply
from ridgeline.bench.target import Address, Dialect
from ridgeline.core.process import raise_file_limit
from ridgeline.core.workload import RequestSpec, Workload, conversations

LEAD_S = 0.05
"""Seconds between the start and the first request, so that the first request is not late."""
_AHEAD = 256
"""Requests that may be encoded before they are due."""
_IDLE_S = 0.005
"""Seconds to the next request from which a later request is encoded meanwhile."""
_LAG_PROBE_S = 0.01
"""Seconds between two probes of the event loop's lag."""


class Sender(Protocol):
    """Sends a request and returns its complete reply. `target.Client` implements it."""

    async def send(self, data: bytes) -> Reply: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """How a workload is sent: open loop if the workload is timed, else closed loop."""

    workload: Workload
    concurrency: int | None = None
    """Most concurrent requests. None: no limit in an open loop, 1 in a closed loop."""
    seconds: float | None = None
    """A closed loop starts no request later than this."""
    label: str = "bench"
    """Prefix of the request ids."""
    run_ids: bool = False
    """Send the requests of one conversation as one agent run."""
    partial: bool = False
    """If the calling task is cancelled (Ctrl-C) after requests have ended, return those instead of raising."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Result of a plan."""

    rows: tuple[Row, ...]
    """In the order of the workload."""
    seconds: float
    loop_lag_s: tuple[float, ...]
    """Lag of the event loop at each probe."""
    cpu_s: float
    """CPU time of the load generator."""
    interrupted: bool = False
    """Ended by Ctrl-C: `rows` are the requests that had ended. Those in flight are not counted."""


class Writer:
    """Encodes requests."""

    def __init__(self, address: Address, dialect: Dialect, prompts: Prompts) -> None:
        self._address = address
        self._dialect = dialect
        self._prompts = prompts

    def write(self, request: RequestSpec, index: int, name: str, run_id: str = "") -> tuple[bytes, int]:
        """Return the encoded request and the number of characters of its prompt (0 for token ids).

        name, run_id: ids of the request and of its agent run ("": none).
        """
        prompt = self._prompts.make(request, index)
        characters = (
            sum(map(len, prompt)) if isinstance(prompt, tuple) else len(prompt) if isinstance(prompt, str) else 0
        )
        body = self._dialect.body(prompt, request.output)
        return self._address.request(self._dialect.path, body, name, run_id), characters


async def send_all(
    plan: Plan, sender: Sender, writer: Writer, clock: Clock, progress: Callable[[int], None] | None = None
) -> Sent:
    """Send all requests of a plan and wait for the answers. progress: called with the number of ended requests."""
    raise_file_limit()
    run = _Sending(plan, sender, writer, clock, progress or (lambda done: None))
    with gc_disabled():
        return await _send_all(run, clock, plan.partial)


async def _send_all(run: _Sending, clock: Clock, partial: bool) -> Sent:
    async with _loop_lags(clock) as lags:
        busy = time.process_time()
        interrupted = await _interrupted(run, partial)
        busy = time.process_time() - busy
    rows = tuple(row for row in run.rows if row is not None)
    return Sent(rows, max((row.ended_s for row in rows), default=0.0), tuple(lags), busy, interrupted)


async def _interrupted(run: _Sending, partial: bool) -> bool:
    """Do the work of a run. Returns whether it was interrupted (Plan.partial)."""
    try:
        await run.work()
    except asyncio.CancelledError:
        if not partial or not any(run.rows):
            raise
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        return True
    return False


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Disable garbage collection in the block. A full collection among thousands of streams takes longer than most latencies."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Sending:
    """The state of a running plan."""

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
        self._conversations = conversations(plan.workload.requests)
        self._n_written = 0
        """Conversations whose first request has been encoded."""
        self.rows: list[Row | None] = [None] * len(plan.workload.requests)

    async def work(self) -> None:
        self._write_ahead(_AHEAD)
        self._start = self._clock.now() + LEAD_S
        await self._clock.until(self._start)
        await (self._run_open_loop() if self._plan.workload.timed else self._run_closed_loop())

    async def _run_open_loop(self) -> None:
        """Send each request at its time. The wait for a concurrency limit counts in the latency."""
        limit = self._plan.concurrency
        gate = None if limit is None else asyncio.Semaphore(limit)
        async with asyncio.TaskGroup() as group:
            for turns in self._conversations:
                due = self._start + self._plan.workload.requests[turns[0]].at_s
                while self._clock.now() < due - _IDLE_S and self._write_ahead(len(self._ready) + 1):
                    await asyncio.sleep(0)  # let connections read
                await self._clock.until(due)
                group.create_task(self._run_conversation(due, gate))

    async def _run_closed_loop(self) -> None:
        """Keep a number of requests running: the end of an answer starts the next request."""

        last = self._start + (math.inf if self._plan.seconds is None else self._plan.seconds)

        async def user() -> None:
            while (now := self._clock.now()) <= last and (self._ready or self._write_ahead(1)):
                await self._run_conversation(now, None, last)

        count = min(self._plan.concurrency or 1, len(self._conversations))
        async with asyncio.TaskGroup() as group:
            for _ in range(count):
                group.create_task(user())

    async def _run_conversation(self, due: float, gate: asyncio.Semaphore | None, last: float = math.inf) -> None:
        """Send the next request and, if it begins a conversation, the later turns.

        A turn is due at its own time after the first turn, but not before the previous answer has ended. No turn starts after
        `last`.
        """
        requests = self._plan.workload.requests
        turns, data, characters = self._next()
        await self._send_request((turns[0], data, characters), due, gate)
        for index in turns[1:]:
            when = max(self._clock.now(), due + requests[index].at_s - requests[turns[0]].at_s)
            if when > last:
                return
            data, characters = self._write(index)
            await self._clock.until(when)
            await self._send_request((index, data, characters), when, gate)

    async def _send_request(self, prepared: tuple[int, bytes, int], due: float, gate: asyncio.Semaphore | None) -> None:
        """Send one request. prepared: its index, its bytes and the characters of its prompt."""
        index, data, characters = prepared
        held_s = 0.0
        if gate is not None:
            wait_start = self._clock.now()
            await gate.acquire()
            held_s = self._clock.now() - wait_start
        issued = self._clock.now()
        try:
            reply = await self._sender.send(data)
        finally:
            if gate is not None:
                gate.release()
        request = self._plan.workload.requests[index]
        times = due - self._start, held_s, issued - self._start
        row = make_row(request, reply, self._start, (self._name(index), index, *times, characters))
        self.rows[index] = replace(row, run_id=self._run_id(index))
        self._done += 1
        self._progress(self._done)

    def _next(self) -> tuple[list[int], bytes, int]:
        if not self._ready:
            self._write_ahead(1)
        return self._ready.popleft()

    def _write_ahead(self, count: int) -> bool:
        """Encode first turns until `count` or _AHEAD are ready or none is left. Return whether any was encoded."""
        n_before = self._n_written
        while len(self._ready) < min(count, _AHEAD) and self._n_written < len(self._conversations):
            turns = self._conversations[self._n_written]
            self._ready.append((turns, *self._write(turns[0])))
            self._n_written += 1
        return self._n_written > n_before

    def _write(self, index: int) -> tuple[bytes, int]:
        return self._writer.write(self._plan.workload.requests[index], index, self._name(index), self._run_id(index))

    def _name(self, index: int) -> str:
        return f"{self._plan.label}-{index}"

    def _run_id(self, index: int) -> str:
        session = self._plan.workload.requests[index].session
        return f"{self._plan.label}-run-{session}" if self._plan.run_ids and session >= 0 else ""


def make_row(
    request: RequestSpec, reply: Reply, start: float, send_record: tuple[str, int, float, float, float, int]
) -> Row:
    """Build the row of a reply. send_record: id, index, scheduled_s, held_s, issued_s, characters of the prompt."""
    request_id, index, scheduled_s, held_s, issued_s, characters = send_record
    times = reply.times
    counts, counted = divide(reply)
    return Row(
        id=request_id,
        index=index,
        scheduled_s=scheduled_s,
        held_s=held_s,
        issued_s=issued_s,
        sent_s=reply.sent - start,
        ended_s=reply.ended - start,
        asked_input=request.input,
        asked_output=request.output,
        input_tokens=reply.prompt_tokens or request.input,
        first_s=times[0] - start if times else None,
        answered_s=None if reply.answered != reply.answered else reply.answered - start,
        last_s=times[-1] - start if times else None,
        gaps_s=tuple(later - earlier for earlier, later in pairwise(times)),
        counts=counts,
        counted=counted,
        output_tokens=reply.output_tokens or sum(counts),
        cached_tokens=reply.cached_tokens,
        input_characters=characters,
        characters=reply.character_count,
        hidden_characters=reply.hidden,
        answer_id=reply.id,
        finish=reply.finish,
        status=reply.status,
        error=reply.error,
    )


def divide(reply: Reply) -> tuple[tuple[int, ...], str]:
    """Return the tokens of each arrival and how they were counted (`Row.counted`)."""
    if not reply.times:
        return (), ""
    if reply.tokens[0] > 0:
        return _increments(reply.tokens), "server"
    n_events, total = reply.event_count, reply.output_tokens
    # Most servers send one event per token. The end token has no event.
    if total in (0, n_events, n_events + 1):
        return _increments(reply.events), "one"
    characters = max(1, reply.character_count)
    return _increments([*(round(total * count / characters) for count in reply.characters[:-1]), total]), "characters"


def _increments(cumulative: Sequence[int]) -> tuple[int, ...]:
    return tuple(later - earlier for earlier, later in pairwise((0, *cumulative)))


@asynccontextmanager
async def _loop_lags(clock: Clock) -> AsyncIterator[list[float]]:
    """Measure the lag of the event loop every _LAG_PROBE_S seconds within the block."""
    lags: list[float] = []

    async def probe() -> None:
        while True:
            due = clock.now() + _LAG_PROBE_S
            await clock.until(due)
            lags.append(clock.now() - due)

    task = asyncio.ensure_future(probe())
    try:
        yield lags
    finally:
        task.cancel()
