"""Profiles whose client leaves or whose engine does not obey: the engine must not go on recording."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ridgeline.core.errors import EngineFailed, Unavailable
from ridgeline.service.batches.objects import Conflict
from ridgeline.service.debug import record


class Recorder:
    """An engine that records, as a client has it. answers: what it replies to an order, or raises."""

    last_step = 0

    def __init__(self, **answers: Any) -> None:
        self.answers = {"profile_start": {}, "profile_stop": {}, **answers}
        self.orders: list[tuple[str, str]] = []
        self.may_start = asyncio.Event()
        self.records = False

    async def control(self, order: str, timeout: float = 10.0, argument: str = "") -> dict[str, Any]:
        self.orders.append((order, argument))
        if order == "profile_start":
            await self.may_start.wait()
        answer = self.answers[order]
        if isinstance(answer, Exception):
            raise answer
        if "error" not in answer:
            self.records = order == "profile_start"
        if order == "profile_stop" and argument:
            Path(argument).write_text("{}")
        return dict(answer)


def start(engine: Recorder, **values: Any) -> asyncio.Task[bytes]:
    return asyncio.get_running_loop().create_task(record(engine, values))  # type: ignore[arg-type]


async def leave(recording: asyncio.Task[bytes]) -> None:
    """The client closes its connection."""
    recording.cancel()
    await asyncio.wait({recording}, timeout=1)


async def test_a_client_that_leaves_before_the_profile_begins() -> None:
    engine = Recorder()
    recording = start(engine)
    await asyncio.sleep(0.01)
    recording.cancel()
    await asyncio.sleep(0.01)
    engine.may_start.set()
    await asyncio.wait({recording}, timeout=1)
    assert recording.cancelled() and not engine.records
    assert engine.orders == [("profile_start", ""), ("profile_stop", "")]


async def test_a_client_that_leaves_meanwhile() -> None:
    engine = Recorder()
    engine.may_start.set()
    recording = start(engine, seconds=60.0)
    await asyncio.sleep(0.01)
    assert engine.records
    await leave(recording)
    assert recording.cancelled() and not engine.records


async def test_an_engine_that_does_not_answer_in_time_is_told_to_stop() -> None:
    engine = Recorder(profile_start=EngineFailed("The engine did not answer."))
    engine.may_start.set()
    with pytest.raises(EngineFailed):
        await start(engine)
    assert engine.orders[-1] == ("profile_stop", "")


async def test_the_profile_of_another_client_goes_on() -> None:
    engine = Recorder(profile_start={"error": "A profile is being recorded.", "status": 409})
    engine.may_start.set()
    with pytest.raises(Conflict):
        await start(engine)
    assert [order for order, _ in engine.orders] == ["profile_start"]


async def test_a_trace_that_cannot_be_written() -> None:
    engine = Recorder(profile_stop={"error": "No space left on device", "status": 503})
    engine.may_start.set()
    with pytest.raises(Unavailable, match="No space"):
        await start(engine, seconds=0.01)
