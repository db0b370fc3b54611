"""Limits in the time of the event loop, with the loops of asyncio and uvloop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from ridgeline.core.loop_time import TURN_S, LoopClock, LoopTimeout, loop_clock

Run = Callable[[Callable[[], Awaitable[None]]], None]
BLOCK_S = 0.25


@pytest.fixture(params=[pytest.param("asyncio", marks=pytest.mark.long), "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    factory = uvloop.new_event_loop if request.param == "uvloop" else None

    def run(test: Callable[[], Awaitable[None]]) -> None:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(test())

    return run


def test_a_loop_on_time_has_the_time_of_the_system(run: Run) -> None:
    async def test() -> None:
        clock, began = loop_clock(), time.monotonic()
        assert clock is loop_clock()
        first = clock.time()
        await asyncio.sleep(0.3)
        counted, passed = clock.time() - first, time.monotonic() - began
        assert 0.2 < counted <= passed
        assert clock.late_s < 0.1

    run(test)


def test_a_turn_counts_little_however_long_it_takes(run: Run) -> None:
    """Callbacks and timers block the loop, between two looks at its sockets and across them."""

    async def test() -> None:
        loop, clock = asyncio.get_running_loop(), loop_clock()
        clock.begin()
        await asyncio.sleep(0.05)
        first = clock.time()
        for _ in range(3):
            time.sleep(BLOCK_S)
        assert clock.time() - first <= TURN_S
        for delay in (0.001, 0.002, 0.003):
            loop.call_later(delay, _block_and_set_a_timer)
        await asyncio.sleep(0.004)
        await asyncio.sleep(0)
        assert clock.time() - first < 5 * TURN_S
        assert clock.late_s < 0.1, "it had nothing to do"

    run(test)


def _block_and_set_a_timer() -> None:
    time.sleep(BLOCK_S)
    asyncio.get_running_loop().call_later(0.0, int)


def test_a_loop_with_much_to_do_is_late(run: Run) -> None:
    async def test() -> None:
        clock = loop_clock()
        clock.begin()
        end = time.thread_time() + BLOCK_S
        while time.thread_time() < end:
            pass
        await asyncio.sleep(0.03)
        assert 0.02 < clock.late_s < 1.0
        for _ in range(2):
            clock.saw(5.0)
            end = time.thread_time() + BLOCK_S
            while time.thread_time() < end:
                pass
            await asyncio.sleep(0.03)
        late = clock.late_s
        assert 0.2 < late < 1.0, "what was seen counts, but at most a second"
        await asyncio.sleep(0.2)
        assert clock.late_s < late, "it falls although nothing is done"

    run(test)


def test_the_clock_ticks_often_only_while_somebody_waits_with_a_short_limit(run: Run) -> None:
    async def test() -> None:
        clock = Ticks()
        await asyncio.sleep(0.1)
        clock.ticks, began = 0, time.monotonic()
        await asyncio.sleep(0.3)
        # On a busy machine it sleeps longer.
        assert clock.ticks <= (time.monotonic() - began) / 0.25 + 1
        clock.begin()
        clock.ticks = 0
        first, began = clock.time(), time.monotonic()
        while clock.ticks < 5:
            assert time.monotonic() - began < 30
            await asyncio.sleep(0.01)
        assert 0.08 < clock.time() - first <= time.monotonic() - began
        time.sleep(BLOCK_S)
        await asyncio.sleep(0)
        assert clock.time() - first < time.monotonic() - began - BLOCK_S + 2 * TURN_S
        clock.end()

    run(test)


class Ticks(LoopClock):
    """Counts its ticks."""

    ticks = 0

    def _tick(self) -> None:
        self.ticks += 1
        super()._tick()


def test_what_came_while_the_loop_was_blocked_comes_in_time(run: Run) -> None:
    """Again and again: 8 turns of 0.3 s are 2.4 s, and the limit is 0.5 s."""

    async def test() -> None:
        server = await asyncio.start_server(_echo, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        began = time.monotonic()
        async with LoopTimeout(0.5):
            for _ in range(4):
                writer.write(b"?")
                await asyncio.sleep(0)
                time.sleep(0.3)
                assert await reader.readexactly(1) == b"!"
        assert time.monotonic() - began > 1.2
        writer.close()
        server.close()

    async def _echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1):
            writer.write(b"!")
        writer.close()

    run(test)


def test_silence_ends_in_time(run: Run) -> None:
    async def test() -> None:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            async with LoopTimeout(0.3):
                await asyncio.sleep(60)
        assert 0.29 < time.monotonic() - began < 5

    run(test)


def test_silence_ends_although_the_loop_is_always_late(run: Run) -> None:
    async def test() -> None:
        async def block() -> None:
            while True:
                time.sleep(0.1)
                await asyncio.sleep(0)

        blocking = asyncio.create_task(block())
        with pytest.raises(TimeoutError):
            async with LoopTimeout(0.2):
                await asyncio.sleep(3600)
        blocking.cancel()

    run(test)


def test_an_error_and_a_cancellation_pass(run: Run) -> None:
    async def test() -> None:
        with pytest.raises(ValueError, match="mine"):
            async with LoopTimeout(1.0):
                raise ValueError("mine")

        async def wait() -> None:
            async with LoopTimeout(60.0):
                await asyncio.sleep(60)

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    run(test)
