"""When requests leave, in virtual time, and what their latencies count from."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest

from ridgeline.bench.load import LEAD_S, Plan, Sent, Writer, send_all
from ridgeline.bench.target import Address
from ridgeline.core.workload import RequestSpec, Workload, arrivals

from .virtual import FakeServer, FakeWriter, LoopClock, run


def asks(times: list[float], output: int = 5) -> Workload:
    return Workload("w", tuple(RequestSpec(at, 5, output) for at in times), timed=True)


def send(plan: Plan, **server: float) -> tuple[Sent, FakeServer]:
    async def work() -> tuple[Sent, FakeServer]:
        fake = FakeServer(**server)  # type: ignore[arg-type]
        return await send_all(plan, fake, cast(Writer, FakeWriter()), LoopClock()), fake

    return run(work())


def test_open_loop_sends_at_the_scheduled_times_whatever_the_server_does() -> None:
    times = arrivals(200, 20.0, 1.0, 1)
    sent, server = send(Plan(asks(times)), ttft=3.0)
    assert [row.scheduled_s for row in sent.rows] == pytest.approx(times)
    assert [row.sent_s for row in sent.rows] == pytest.approx(times)
    assert all(row.ttft_s == pytest.approx(3.0) and row.tpot_s == pytest.approx(0.01) for row in sent.rows)
    assert server.most > 40
    assert max(row.lag_s for row in sent.rows) == pytest.approx(0.0, abs=1e-9)
    assert [row.index for row in sent.rows] == list(range(200))


def test_a_queue_at_the_server_counts() -> None:
    sent, _ = send(Plan(asks([0.0, 0.0, 0.0])), ttft=1.0, itl=0.25, slots=1)
    assert [row.ttft_s for row in sent.rows] == pytest.approx([1.0, 3.0, 5.0])
    assert [row.e2e_s for row in sent.rows] == pytest.approx([2.0, 4.0, 6.0])


def test_a_limit_on_concurrency_holds_back_and_the_wait_counts_but_is_no_lag() -> None:
    sent, server = send(Plan(asks([0.0, 0.0, 0.5]), concurrency=1), ttft=1.0, itl=0.25)
    assert server.most == 1
    assert [row.ttft_s for row in sent.rows] == pytest.approx([1.0, 3.0, 4.5])
    assert [row.held_s for row in sent.rows] == pytest.approx([0.0, 2.0, 3.5])
    assert [row.lag_s for row in sent.rows] == pytest.approx([0.0, 0.0, 0.0])


def test_closed_loop_keeps_so_many_under_way() -> None:
    plan = Plan(Workload("w", tuple(RequestSpec(0.0, 5, 5) for _ in range(10))), concurrency=3)
    sent, server = send(plan, ttft=1.0, itl=0.25)
    assert server.most == 3
    assert sorted(row.scheduled_s for row in sent.rows) == pytest.approx([0, 0, 0, 2, 2, 2, 4, 4, 4, 6])
    assert sent.seconds == pytest.approx(8.0)


def turns(times: list[float], sessions: list[int], *, timed: bool) -> Workload:
    specs = [RequestSpec(at, 5, 5, session=session) for at, session in zip(times, sessions, strict=True)]
    return Workload("w", tuple(specs), timed=timed)


def test_a_turn_waits_for_the_answer_before_it_and_counts_from_there() -> None:
    work = turns([0.0, 0.1, 0.2, 5.0], [7, -1, 7, 7], timed=True)
    sent, server = send(Plan(work), ttft=1.0, itl=0.25)  # two seconds each
    assert [row.scheduled_s for row in sent.rows] == pytest.approx([0.0, 0.1, 2.0, 5.0])
    assert [row.ttft_s for row in sent.rows] == pytest.approx([1.0] * 4)
    assert server.most == 2 and [row.index for row in sent.rows] == [0, 1, 2, 3]


def test_turns_of_a_conversation_share_a_run_id_if_asked() -> None:
    work = turns([0.0, 0.1, 0.2], [7, -1, 7], timed=True)
    sent, _ = send(Plan(work, label="b", run_ids=True), ttft=1.0)
    assert [row.run_id for row in sent.rows] == ["b-run-7", "", "b-run-7"]
    sent, _ = send(Plan(work, label="b"), ttft=1.0)
    assert {row.run_id for row in sent.rows} == {""}
    named = Address("http://host:1").request("/v1/completions", b"{}", "b-0", "b-run-7")
    assert b"\r\nx-run-id: b-run-7\r\n" in named
    assert b"x-run-id" not in Address("http://host:1").request("/v1/completions", b"{}", "b-0")


def test_users_of_a_closed_loop_hold_one_conversation_each() -> None:
    work = turns([0.0, 0.0, 0.0, 3.0, 0.0], [1, 2, 1, 2, 3], timed=False)
    sent, server = send(Plan(work, concurrency=2), ttft=1.0, itl=0.25)
    # The first user has turns 0 and 2, then 4; the second pauses, as its conversation did, before its second turn.
    assert [row.scheduled_s for row in sent.rows] == pytest.approx([0.0, 0.0, 2.0, 3.0, 4.0])
    assert server.most == 2
    cut, _ = send(Plan(work, concurrency=2, seconds=2.5), ttft=1.0, itl=0.25)
    assert [row.index for row in cut.rows] == [0, 1, 2, 4], "its turn comes too late: the user goes on to another"


def test_closed_loop_ends_by_time() -> None:
    plan = Plan(Workload("w", tuple(RequestSpec(0.0, 5, 5) for _ in range(100))), concurrency=2, seconds=5.0)
    sent, _ = send(plan, ttft=1.0, itl=0.25)
    assert len(sent.rows) == 6
    assert max(row.scheduled_s for row in sent.rows) <= 5.0


def test_a_client_that_is_late_says_so() -> None:
    class LateCompiles(LoopClock):
        async def until(self, when: float) -> None:
            await asyncio.sleep(max(0.0, when + 0.02 - self.now()))

    async def work() -> Sent:
        return await send_all(Plan(asks([0.0, 1.0, 2.0])), FakeServer(), cast(Writer, FakeWriter()), LateCompiles())

    sent = run(work())
    assert [row.lag_s for row in sent.rows] == pytest.approx([0.02, 0.02, 0.02], abs=1e-9)
    assert sent.rows[2].ttft_s == pytest.approx(0.12)  # the client's lag is in the latency, not taken out of it
    assert max(sent.loop_lag_s) == pytest.approx(0.02)


def test_the_same_workload_twice_is_the_same_run() -> None:
    plan = Plan(asks(arrivals(50, 30.0, 0.5, 4)))
    assert send(plan)[0].rows == send(plan)[0].rows


@pytest.mark.parametrize("plan", [Plan(asks([0.0, 0.1, 0.2, 5.0])), Plan(asks([0.0] * 9, output=100), concurrency=2)])
def test_an_interrupted_run_keeps_what_has_ended(plan: Plan) -> None:
    """If the plan says so, and once a request has ended."""

    async def work(partial: bool, after: float) -> Sent:
        clock = LoopClock()
        sending = asyncio.ensure_future(
            send_all(replace(plan, partial=partial), FakeServer(ttft=0.5), cast(Writer, FakeWriter()), clock)
        )
        await clock.until(clock.now() + after)
        sending.cancel()
        return await sending

    sent = run(work(True, 2.0))
    assert sent.interrupted and 0 < len(sent.rows) < len(plan.workload.requests) and sent.seconds < 2.0
    for partial, after in ((False, 2.0), (True, 0.1)):
        with pytest.raises(asyncio.CancelledError):
            run(work(partial, after))


def test_gaps_lead_from_the_first_token_to_the_last() -> None:
    (row,) = send(Plan(asks([0.0])), ttft=0.5, itl=0.1)[0].rows
    assert row.first_s is not None and row.last_s is not None
    assert sum(row.gaps_s) == pytest.approx(row.last_s - row.first_s)
    assert sum(row.counts) == row.output_tokens == 5
    assert LEAD_S > 0
    assert all(later > 0 for later, _ in pairwise(row.gaps_s))
