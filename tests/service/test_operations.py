"""Operations of operators go on to their end when their client disconnects, so that the service knows the state of the engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from ridgeline.core.config import ServiceConfig
from ridgeline.core.errors import Unavailable
from ridgeline.metrics import Metrics
from ridgeline.service.adapters import AdapterBook
from ridgeline.service.batches.admission import LaneAdmission
from ridgeline.service.batches.engine_rows import EngineRows
from ridgeline.service.batches.rows import ENDPOINTS, RowRequest
from ridgeline.service.debug import record
from ridgeline.service.keys.keyring import ANYONE
from ridgeline.service.sleep import Sleep


class SlowEngine:
    """A client whose engine obeys orders when `done` is set."""

    open_choices = 0

    def __init__(self) -> None:
        self.orders: list[str] = []
        self.done = asyncio.Event()
        self.reply: dict[str, object] = {"level": 0, "adapters": [{"name": "a", "root": "folder"}]}

    async def control(self, order: str, timeout: float = 10.0, argument: str = "") -> dict[str, object]:
        self.orders.append(order)
        await self.done.wait()
        return self.reply | ({"level": int(argument)} if order == "sleep" else {})


async def leave(operation: asyncio.Task[object]) -> None:
    """The client of an operation disconnects: aiohttp cancels its handler."""
    await asyncio.sleep(0.02)
    operation.cancel()
    await asyncio.wait({operation})
    assert operation.cancelled()


def test_a_sleep_goes_on_when_its_operator_leaves() -> None:
    async def check() -> None:
        engine, forgotten = SlowEngine(), []
        sleep = Sleep(ServiceConfig(), lambda: engine, forget=lambda: forgotten.append(True))
        sleep.users = 1  # a request still runs when the operator leaves
        await leave(asyncio.create_task(sleep.sleep(1)))
        assert sleep.away and not engine.orders
        sleep.users = 0
        await asyncio.sleep(0.02)
        assert engine.orders == ["sleep"] and forgotten
        engine.done.set()
        await asyncio.sleep(0.02)
        assert sleep.level == 1
        engine.done.clear()
        await leave(asyncio.create_task(sleep.wake()))
        engine.done.set()
        async with sleep.awake():
            assert sleep.level == 0 and engine.orders == ["sleep", "wake_up"]

    asyncio.run(check())


def test_a_failure_that_no_operator_waits_for_leaves_the_engine_awake(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        engine = SlowEngine()
        sleep = Sleep(ServiceConfig(), lambda: engine)
        sleep.users = 1
        operation = asyncio.create_task(sleep.sleep(1, wait_s=0.05))
        await leave(operation)
        await asyncio.sleep(0.1)
        assert not sleep.away and not engine.orders
        with pytest.raises(Unavailable, match="still run"):
            await sleep.sleep(1, wait_s=0.0)

    asyncio.run(check())
    assert "whose client has left failed: Requests still run" in caplog.text


def test_requests_that_wait_for_a_wake_do_not_enter_an_engine_that_sleeps_again() -> None:
    async def check() -> None:
        engine = SlowEngine()
        sleep = Sleep(ServiceConfig(), lambda: engine)
        engine.done.set()
        await sleep.sleep(1)
        engine.done.clear()

        async def use() -> int:
            async with sleep.awake():
                return sleep.level

        request = asyncio.create_task(use())
        await asyncio.sleep(0.02)
        again = asyncio.create_task(sleep.sleep(1))  # waits for the wake, and runs before the request does
        await asyncio.sleep(0.02)
        engine.done.set()
        assert await request == 0
        await again
        assert engine.orders == ["sleep", "wake_up", "sleep", "wake_up"]  # the request has woken it up again

    asyncio.run(check())


@pytest.mark.parametrize("order", ["load", "unload"])
def test_an_adapter_is_listed_although_its_operator_has_left(order: str) -> None:
    async def check() -> None:
        engine, changes = SlowEngine(), []
        book = AdapterBook(lambda: engine, changed=lambda: changes.append(True))
        await leave(asyncio.create_task(book.load("a", "folder") if order == "load" else book.unload("b")))
        assert book.find("a") is None
        engine.done.set()
        await asyncio.sleep(0.02)
        assert book.find("a") is not None and changes

    asyncio.run(check())


def test_a_profile_whose_client_leaves_at_its_start_is_stopped() -> None:
    async def check() -> None:
        engine = SlowEngine()
        recording = asyncio.create_task(record(engine, {}))
        await asyncio.sleep(0.02)
        recording.cancel()
        await asyncio.sleep(0.02)
        engine.done.set()
        await asyncio.wait({recording})
        assert recording.cancelled() and engine.orders == ["profile_start", "profile_stop"]

    asyncio.run(check())


def test_a_row_that_is_being_read_keeps_its_engine_awake() -> None:
    async def check() -> None:
        sleep = Sleep(ServiceConfig(), SlowEngine)
        card = SimpleNamespace(names=lambda model: ("m",))
        service = SimpleNamespace(card=card)
        service.named = lambda model: service
        front = SimpleNamespace(sleep=sleep, service=lambda: service)
        live = Metrics("m").live
        rows = EngineRows(lambda: front, live, LaneAdmission(live.slo, None))

        async def answer(*_: object) -> int:
            return sleep.users

        rows._answer = answer
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert await rows.run(RowRequest(ENDPOINTS[0], body, 1, ANYONE, "r")) == 1
        assert sleep.users == 0

    asyncio.run(check())
