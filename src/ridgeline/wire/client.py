"""The service's end of the connection: one EngineClient per engine, one Subscription per request.

A subscription gets every delta of its request in order. A request that ends early gets a last delta with the reason. When the
engine fails, all open requests end with an error at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from ridgeline.core.errors import ConfigError, DoesNotFit, EngineFailed, RidgelineError, Unavailable, UnsupportedModel
from ridgeline.core.loop_time import LoopTimeout, loop_clock
from ridgeline.wire.frames import down_decoder, encode, read_body
from ridgeline.wire.messages import (
    Cancel,
    Control,
    Delta,
    Deltas,
    Down,
    Failed,
    Finish,
    Heartbeat,
    Loading,
    Ready,
    Reply,
    StepStats,
    Submit,
    Up,
)

MAX_UNREAD = 8192
"""Unread tokens that one request may hold. Each alternative (top log-probability) counts as a token."""

FAILURES = 3
"""Consecutive failed steps after which the engine is unhealthy until a step succeeds."""

SILENCE_S = 30.0
"""Seconds without a message after which an engine counts as stuck, in the time of the event loop, as all limits here."""

STALL_S = 300.0
"""Seconds that one iteration of the engine loop may take. A large step on a slow processor takes more than a minute."""

_LAST_WORDS_S = 1.0
_SHORTEST_WAIT_S = 0.1

_START_UP: dict[str, type[RidgelineError]] = {
    kind.__name__: kind for kind in (ConfigError, UnsupportedModel, DoesNotFit)
}
"""Errors that Failed.kind may name: configuration errors, as opposed to failures of the engine."""


class Receiver(Protocol):
    """What becomes of one request. `put` and `fail` may be called until the request has ended."""

    def put(self, delta: Delta) -> None:
        """Add a delta from the engine."""

    def fail(self, message: str, reason: str = "failed") -> None:
        """The engine will send no more deltas."""


class Requests(Protocol):
    """What a subscription needs of its client."""

    max_unread: int
    open_choices: int

    def send(self, message: Up) -> None: ...

    def forget(self, request_id: str) -> None: ...


class Client(Requests, Protocol):
    """An engine as the service sees it: one process (EngineClient), or several (service.split)."""

    ready: asyncio.Event

    @property
    def facts(self) -> dict[str, Any]: ...

    @property
    def loading(self) -> Loading | None: ...

    @property
    def failure(self) -> str | None: ...

    @property
    def trouble(self) -> str | None: ...

    @property
    def stats(self) -> StepStats | None: ...

    @property
    def last_step(self) -> int: ...

    async def wait_ready(self) -> dict[str, Any]: ...

    async def wait_lost(self) -> str: ...

    def submit(self, *requests: Submit) -> Subscription: ...

    async def control(self, order: str, timeout: float = 10.0, argument: str = "") -> dict[str, Any]: ...

    def end_all(self, message: str, reason: str) -> None: ...

    async def close(self) -> None: ...


class Subscription:
    """The deltas of one or more requests, in order. It is over when all their choices have ended.

    Closing it early cancels the choices that still run.
    """

    def __init__(self, client: Requests, requests: Sequence[Submit]) -> None:
        self._client = client
        self._running = {request.id: set(range(request.sampling.n)) for request in requests}
        self.choices = sum(map(len, self._running.values()))
        """Number of choices that still run."""
        self._weight = 1 + max(request.sampling.logprobs or 0 for request in requests)
        self._limit = client.max_unread + 256 * self.choices
        self._arrived: list[Delta] = []
        self._unread = 0
        self._waiter: asyncio.Future[None] | None = None
        self.cut = ""
        """Why the service ended it early: "slow_reader", "failed" or another reason given to `fail`; else ""."""

    @property
    def over(self) -> bool:
        """Every choice has ended and every delta has been taken."""
        return not self._running and not self._arrived

    async def take(self, timeout: float | None = None) -> list[Delta]:
        """Wait for a delta and return all that have arrived. Empty after `timeout` seconds without one, or when over."""
        if not self._arrived and self._running:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout is None else loop.call_later(timeout, self._wake)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        arrived, self._arrived = self._arrived, []
        self._unread = 0
        return arrived

    def finish(self, request_id: str, choice: int, reason: str, kept: int) -> None:
        """End a choice from the service's side: `kept` output tokens count, and later deltas of the choice are dropped."""
        if choice in self._running.get(request_id, ()):
            self._client.send(Finish(request_id, choice, reason, kept))
            self._end(request_id, choice)

    def close(self, reason: str = "cancelled") -> None:
        """Cancel the choices that still run and drop the deltas that were not taken. Idempotent."""
        self._cancel(reason)
        self._arrived.clear()
        self._wake()

    def put(self, delta: Delta) -> None:
        """Add a delta from the engine. Deltas of an ended choice are dropped."""
        if delta.choice not in self._running.get(delta.id, ()):
            return
        self._arrived.append(delta)
        self._unread += self._weight * len(delta.tokens)
        if delta.finish:
            self._end(delta.id, delta.choice)
        elif self._unread > self._limit:
            self.fail("The client reads too slowly: too many tokens are waiting for it.", "slow_reader")
        self._wake()

    def fail(self, message: str, reason: str = "failed") -> None:
        """Append an error delta for every running choice and cancel the choices in the engine."""
        for request_id, choices in self._running.items():
            self._arrived += [Delta(request_id, choice, finish="error", error=message) for choice in sorted(choices)]
        self.cut = reason
        self._cancel(reason)
        self._wake()

    def _cancel(self, reason: str) -> None:
        for request_id in self._running:
            self._client.send(Cancel(request_id, reason))
            self._client.forget(request_id)
        self._running.clear()
        self._count(-self.choices)

    def _count(self, change: int) -> None:
        self.choices += change
        self._client.open_choices += change

    def _end(self, request_id: str, choice: int) -> None:
        choices = self._running[request_id]
        choices.discard(choice)
        self._count(-1)
        if not choices:
            del self._running[request_id]
            self._client.forget(request_id)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """The connection to one engine. Create it inside a running event loop; it reads until the stream ends or `close`."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        on_step: Callable[[StepStats], None] | None = None,
        last_words: Callable[[], Awaitable[str]] | None = None,
        clock: Callable[[], float] | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """Start to read.

        Args:
            on_step: Called with the record of every step.
            last_words: Called when the stream has ended; returns the reason.
            clock: Monotonic time in seconds. None: that of the event loop, which does not count the time in which this process
                is late and has not read what the engine sent.
            silence_s: Seconds without a message after which the engine counts as stuck.
        """
        self._reader = reader
        self._writer = writer
        self._on_step = on_step
        self._last_words = last_words
        self.max_unread = MAX_UNREAD
        self._clock = clock or loop_clock().time
        self._silence_s = silence_s
        self.ready = asyncio.Event()
        """Set when the engine serves, and also when it has failed: check `failure`."""
        self.facts: dict[str, Any] = {}
        self.loading: Loading | None = None
        self.failure: str | None = None
        self.stats: StepStats | None = None
        self.last_heard = self.last_progress = self._clock()
        self.last_step = -1
        self.failed_steps = 0
        """Failed steps since the last successful one."""
        self.open_choices = 0
        """Submitted choices that have not ended."""
        self._turn = -1
        self._error: type[RidgelineError] = EngineFailed
        self._sequence: int | None = None
        self._open: dict[str, Receiver] = {}
        self._replies: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._lost = asyncio.Event()
        self._closing = False
        self._task = asyncio.get_running_loop().create_task(self._read(), name="engine-client")

    async def wait_ready(self) -> dict[str, Any]:
        """Wait until the engine serves and return its facts.

        Raises:
            ConfigError: The engine cannot serve this configuration. Also UnsupportedModel and DoesNotFit.
            EngineFailed: The engine fails.
        """
        await self.ready.wait()
        self._check()
        return self.facts

    def submit(self, *requests: Submit) -> Subscription:
        """Start requests whose deltas arrive in one subscription.

        Raises:
            Unavailable: The engine is lost.
            ValueError: A request id is in use.
        """
        if self.failure is not None:
            raise Unavailable(f"The engine is lost: {self.failure.rstrip('.')}. Send the request again.")
        for request in requests:
            if request.id in self._open:
                raise ValueError(f"request id {request.id!r} is in use")
        subscription = Subscription(self, requests)
        self.open_choices += subscription.choices
        for request in requests:
            self.start(request, subscription)
        return subscription

    def start(self, request: Submit, receiver: Receiver) -> None:
        """Start a request whose deltas go to `receiver`, until `forget`."""
        if not self._open:
            self.last_progress = self._clock()
        self._open[request.id] = receiver
        self.send(request)

    async def control(self, order: str, timeout: float = 10.0, argument: str = "") -> dict[str, Any]:
        """Send an order and return the reply. Raises EngineFailed if the engine ends, fails or does not reply in time."""
        self._check()
        name = f"control-{next(self._numbers)}"
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[name] = answer
        self.send(Control(name, order, argument))
        try:
            async with LoopTimeout(timeout):
                return await answer
        except TimeoutError:
            raise EngineFailed(
                f"The engine did not answer the command {order!r} within {timeout:g} s: check its log."
            ) from None
        finally:
            self._replies.pop(name, None)

    @property
    def trouble(self) -> str | None:
        """Why the engine is unhealthy (failed, loading, stuck, failing steps), or None.

        A step or a wait for a batch that is shorter than STALL_S is healthy.
        """
        if self.failure is not None:
            return self.failure
        if not self.ready.is_set():
            loading = self.loading
            return "the engine is loading" + (
                f": {loading.stage} {loading.done}/{loading.total}" if loading is not None else ""
            )
        if (reason := self._stuck()) is not None:
            return reason
        if self.failed_steps >= FAILURES:
            return f"the last {self.failed_steps} steps of the engine failed; its log contains the reason"
        return None

    async def wait_lost(self) -> str:
        """Wait until the serving engine has ended, is silent or is stuck; return the reason.

        All requests of a lost engine end with the reason. The caller ends the process.
        """
        await self.ready.wait()
        while self.failure is None:
            if (reason := self._stuck()) is not None:
                self._fail(reason)
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), self._wait_s())
        return self.failure

    def _stuck(self) -> str | None:
        """Why the serving engine is silent or makes no progress, or None."""
        now = self._clock()
        if now - self.last_heard > self._silence_s:
            return f"the engine has been silent for {now - self.last_heard:.0f} s"
        if self._open and now - self.last_progress > STALL_S:
            return f"requests wait, and the engine has not finished a step for {now - self.last_progress:.0f} s"
        return None

    def _wait_s(self) -> float:
        """Seconds until the earliest time at which the engine can count as stuck."""
        now = self._clock()
        stalled = (self.last_progress if self._open else now) + STALL_S
        return max(_SHORTEST_WAIT_S, min(self.last_heard + self._silence_s, stalled) - now)

    def end_all(self, message: str, reason: str) -> None:
        """End every open request with an error delta."""
        for receiver in set(self._open.values()):
            receiver.fail(message, reason)

    async def close(self) -> None:
        """Stop reading and close the stream. The engine stops at the end of the stream."""
        self._closing = True
        self._writer.close()
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._fail("the service is stopping.")

    def send(self, message: Up) -> None:
        """Send a message. The transport buffers bytes that the engine has not read yet."""
        if self.failure is None and not self._writer.is_closing():
            self._writer.write(encode(message))

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def _check(self) -> None:
        if self.failure is not None:
            raise self._error(self.failure)

    async def _read(self) -> None:
        decoder = down_decoder()
        try:
            while (body := await read_body(self._reader)) is not None:
                self._take(decoder.decode(body))
                await asyncio.sleep(0)  # let woken readers run before the next frame, also in a burst of frames
            self._writer.close()  # an engine that has ended its stream waits for this
            self._fail(await self._ask_why())
        except Exception as error:  # any error ends the open requests, because no later answer would be read
            self._fail(f"a message from the engine cannot be read: {error}")
            self._writer.close()

    async def _ask_why(self) -> str:
        if self._last_words is not None and self.failure is None:
            with contextlib.suppress(TimeoutError):
                async with LoopTimeout(_LAST_WORDS_S):
                    return await self._last_words()
        return "the engine process has ended."

    def _take(self, message: Down) -> None:
        self.last_heard = self._clock()
        match message:
            case Deltas():
                self._take_deltas(message)
            case Heartbeat():
                self._beat(message)
            case Ready():
                self.facts = message.facts
                self.last_progress = self.last_heard
                self.ready.set()
            case Loading():
                self.loading = message
            case Reply():
                self._take_reply(message)
            case Failed():
                self._error = _START_UP.get(message.kind, EngineFailed)
                self._fail(message.message)

    def _take_deltas(self, frame: Deltas) -> None:
        if self._sequence is not None and frame.sequence != self._sequence + 1:
            raise EngineFailed(f"frame {frame.sequence} followed frame {self._sequence}, so answers are missing")
        self._sequence = frame.sequence
        for delta in frame.each():
            receiver = self._open.get(delta.id)
            if receiver is not None:
                receiver.put(delta)
        self.last_progress = self.last_heard
        if frame.stats is not None:
            self.stats = frame.stats
            self.last_step = frame.stats.step
            if frame.stats.steps:
                self.failed_steps = self.failed_steps + frame.stats.failed if frame.stats.failed else 0
            if self._on_step is not None:
                self._on_step(frame.stats)

    def _take_reply(self, reply: Reply) -> None:
        answer = self._replies.get(reply.id)
        if answer is not None and not answer.done():
            answer.set_result(reply.facts)
        elif reply.id in self._open and "error" in reply.facts:
            self._open[reply.id].fail(str(reply.facts["error"]))

    def _beat(self, beat: Heartbeat) -> None:
        if beat.turn != self._turn:
            self._turn = beat.turn
            self.last_progress = self.last_heard

    def _fail(self, message: str) -> None:
        if self.failure is not None:
            return
        self.failure = message
        self.ready.set()
        self._lost.set()
        self.end_all(message, "failed")
        for answer in self._replies.values():
            if not answer.done():
                answer.set_exception(EngineFailed(message))
