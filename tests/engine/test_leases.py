"""Blocks whose content is still on its way: late, out of order or never, every request gets the tokens it would get alone,
those behind it go on, and every block returns."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.plan import StepPlan
from ridgeline.core.spec import KvLayout
from ridgeline.engine.request import Lease
from ridgeline.speculation.controller import Controller
from ridgeline.speculation.interface import NO_SPECULATION, Speculation
from ridgeline.speculation.speculator import DeviceTraits, Speculator
from tests.engine.helpers import PLAIN, WINDOWED, Guesser, oracle, prompts
from tests.engine.late import LateBench, at_once, never

LAYOUTS = pytest.mark.parametrize("layout", [PLAIN, WINDOWED], ids=["plain", "windowed"])
DEPTHS = pytest.mark.parametrize("depth", [0, 1, 3])
PROMPT = list(range(30))


def failed(tickets: Sequence[int]) -> dict[int, bool]:
    return dict.fromkeys(tickets, False)


def _turns(bench: LateBench, count: int) -> None:
    for _ in range(count):
        bench.turn()


@LAYOUTS
@DEPTHS
def test_a_request_waits_for_its_blocks_and_nobody_waits_for_it(layout: KvLayout, depth: int) -> None:
    bench = LateBench(layout=layout, depth=depth)
    bench.host.keep(PROMPT)
    bench.submit("loads", PROMPT, max_tokens=5)
    for index in range(3):
        bench.submit(f"behind {index}", [index, 50, 51], max_tokens=4)
    _turns(bench, 20)
    assert bench.scheduler.running[0].lease is Lease.FILLING
    assert not bench.tokens["loads", 0]
    for index in range(3):
        assert bench.tokens[f"behind {index}", 0] == oracle([index, 50, 51], 4)
    bench.ends = at_once
    bench.run()
    assert bench.tokens["loads", 0] == oracle(PROMPT, 5)
    assert bench.cached["loads", 0] == 28
    assert bench.loop.take_counts().prompt_tokens == 2 + 3 * 3, "two tokens of the prompt were not in host memory"


@DEPTHS
def test_the_later_ticket_may_end_first(depth: int) -> None:
    bench = LateBench(depth=depth)
    others = PROMPT[::-1]
    for name, prompt in (("first", PROMPT), ("second", others)):
        bench.host.keep(prompt)
        bench.submit(name, prompt, max_tokens=5)
    bench.ends = lambda tickets: {2: True} if 2 in tickets else {}
    _turns(bench, 15)
    assert bench.finish == {("second", 0): "length"}
    bench.ends = at_once
    bench.run()
    assert bench.tokens["first", 0] == oracle(PROMPT, 5)
    assert bench.tokens["second", 0] == oracle(others, 5)


def test_who_is_ready_enters_in_order() -> None:
    """With one free row, the first of those behind takes it, however long the request before them loads."""
    bench = LateBench(rows=2)
    bench.host.keep(PROMPT)
    bench.submit("loads", PROMPT, max_tokens=3)
    for name in ("a", "b", "c"):
        bench.submit(name, [1, 2, 3], max_tokens=3, cache=False)
    ended: list[str] = []
    while len(ended) < 3:
        bench.turn()
        ended += [name for name, _ in bench.finish if name not in ended]
    assert ended == ["a", "b", "c"]
    bench.ends = at_once
    bench.run()


@LAYOUTS
@DEPTHS
@pytest.mark.parametrize("alone", [True, False])
def test_a_ticket_that_never_ends_is_cancelled_with_its_request(layout: KvLayout, depth: int, alone: bool) -> None:
    """Its blocks stay reserved until the device has stopped writing, and then they return."""
    bench = LateBench(layout=layout, depth=depth)
    bench.host.keep(PROMPT)
    bench.submit("loads", PROMPT, max_tokens=5)
    if not alone:
        bench.submit("other", [4, 5], max_tokens=30)
    _turns(bench, 8)
    used = bench.leases.pool.used
    bench.scheduler.cancel("loads", "expired")
    assert bench.leases.pool.used == used and not bench.scheduler.idle
    bench.run()
    assert bench.finish["loads", 0] == "expired" and not bench.late.open
    assert not bench.leases.filling
    bench.submit("again", PROMPT, max_tokens=5)
    bench.ends = at_once
    bench.run()
    assert bench.tokens["again", 0] == oracle(PROMPT, 5)


@DEPTHS
@pytest.mark.parametrize("turns", range(6))
def test_cancel_at_every_point_of_a_transfer(depth: int, turns: int) -> None:
    bench = LateBench(depth=depth, ends=lambda tickets: at_once(tickets) if bench.scheduler.last_step >= 2 else {})
    bench.host.keep(PROMPT)
    bench.submit("gone", PROMPT, max_tokens=6, n=2)
    bench.submit("stays", PROMPT[::-1], max_tokens=6)
    _turns(bench, turns)
    bench.scheduler.cancel("gone")
    bench.run()
    assert bench.tokens["stays", 0] == oracle(PROMPT[::-1], 6)


@DEPTHS
def test_a_choice_that_the_service_ends_returns_its_blocks(depth: int) -> None:
    """Of an end by a stop string there is no news: the open ticket alone keeps the engine from being idle."""
    bench = LateBench(depth=depth)
    bench.host.keep(PROMPT)
    bench.submit("loads", PROMPT, max_tokens=5)
    _turns(bench, 3)
    bench.scheduler.end_choice("loads", 0, "stop", 0)
    bench.run()
    assert not bench.late.open


@LAYOUTS
@DEPTHS
def test_what_does_not_arrive_is_computed(layout: KvLayout, depth: int) -> None:
    bench = LateBench(layout=layout, depth=depth, ends=failed)
    bench.host.keep(PROMPT)
    bench.submit("first", PROMPT[:10], max_tokens=1)
    bench.run()
    bench.submit("loads", PROMPT, max_tokens=5)
    bench.run()
    assert bench.tokens["loads", 0] == oracle(PROMPT, 5)
    assert bench.cached["loads", 0] == 8, "the prefix hit remains"


@DEPTHS
def test_the_transfers_of_a_failed_step_are_not_waited_for(depth: int) -> None:
    bench = LateBench(depth=depth, fail_at=(1,))
    bench.host.keep(PROMPT)
    bench.submit("loads", PROMPT, max_tokens=5)
    bench.run()
    assert bench.tokens["loads", 0] == oracle(PROMPT, 5)


def test_nobody_spins_while_all_wait() -> None:
    """A step asks for transfers at most once in a while, and none does while rows are planned."""
    bench = LateBench()
    bench.host.keep(PROMPT)
    bench.submit("loads", PROMPT, max_tokens=5)
    bench.turn()
    assert (bench.late.empty, bench.scheduler.wait_seconds(0.0)) == (1, 0.0005)
    now = bench.clock.now
    asking = bench.scheduler.plan(now)
    assert asking is not None and not asking.rows
    assert bench.scheduler.plan(now + 1) is None, "that step is in flight"
    bench.runner.launch(asking)
    bench.scheduler.commit(bench.runner.collect(), now)
    assert bench.scheduler.plan(now + 0.0004) is None
    assert bench.scheduler.plan(now + 0.0006) is not None


def test_only_what_the_window_sees_is_transferred() -> None:
    """40 tokens: the group of the whole past needs nine blocks; of a window of six tokens the last two are seen."""
    bench = LateBench(layout=WINDOWED)
    bench.host.keep(list(range(40)))
    bench.submit("loads", list(range(40)), max_tokens=5)
    bench.turn()
    (transfer,) = bench.late.open.values()
    assert len(transfer.blocks) == 9 + 2 == bench.leases.pool.used
    bench.ends = at_once
    bench.run()
    assert bench.tokens["loads", 0] == oracle(range(40), 5)


def test_filled_blocks_become_a_prefix() -> None:
    bench = LateBench(ends=at_once)
    bench.host.keep(PROMPT)
    bench.submit("loads", PROMPT, max_tokens=1)
    bench.run()
    bench.ends = never
    bench.submit("again", PROMPT, max_tokens=3)
    bench.run()
    assert bench.cached["again", 0] == 28
    assert bench.tokens["again", 0] == oracle(PROMPT, 3)


def test_who_asks_for_no_cache_asks_no_source() -> None:
    bench = LateBench()
    bench.host.keep(PROMPT)
    bench.submit("private", PROMPT, max_tokens=2, cache=False)
    bench.submit("scored", PROMPT, max_tokens=2, prompt_logprobs=0)
    bench.submit("stranger", PROMPT, max_tokens=2, salt="other tenant")
    bench.run()
    assert set(bench.cached.values()) == {0}


def test_a_transfer_that_finds_too_few_blocks_is_not_begun() -> None:
    bench = LateBench(blocks=12)
    bench.host.keep(PROMPT)
    taken = [bench.leases.pool.take() for _ in range(6)]
    bench.submit("loads", PROMPT, max_tokens=5)
    bench.turn()
    assert not bench.late.open and bench.scheduler.running[0].planned == 16
    for block in taken:
        bench.leases.pool.release(block, keep=False)
    bench.run()
    assert bench.tokens["loads", 0] == oracle(PROMPT, 5)


def test_a_transfer_that_the_device_does_not_know_is_withdrawn() -> None:
    bench = LateBench()
    bench.host.keep(PROMPT)
    bench.submit("loads", PROMPT, max_tokens=5)
    (request,), plan = bench.scheduler.waiting, StepPlan(1)
    assert bench.leases.open(request, plan) == 28
    assert (request.lease, len(plan.transfers), bench.leases.pool.used) == (Lease.RESERVED, 1, 7)
    bench.leases.stop(request, plan)
    bench.leases.release(request)
    assert not (plan.transfers or plan.cancels or bench.leases.filling)
    assert (request.lease, bench.leases.pool.used) == (Lease.READY, 0)


@LAYOUTS
def test_a_loading_request_gives_way_like_any_other(layout: KvLayout) -> None:
    """A running request that finds no block preempts the last one, though its blocks are being filled."""
    bench = LateBench(layout=layout, blocks=26, step_tokens=64)
    bench.host.keep(PROMPT)
    bench.submit("runs", [9, 8, 7], max_tokens=90 if layout is PLAIN else 70, cache=False)
    bench.turn()
    bench.submit("loads", PROMPT, max_tokens=5)
    while ("runs", 0) not in bench.finish:
        bench.turn()
    assert bench.loop.take_counts().preempted > 0
    bench.ends = at_once
    bench.run()
    assert bench.tokens["loads", 0] == oracle(PROMPT, 5)


def _speculations() -> list[Speculation]:
    """None, host chains, device chains of a measured size."""
    return [
        NO_SPECULATION,
        Guesser(0.5, 3, seed=1),
        Speculator(None, DeviceTraits(3, reads_tokens=True), Controller((0, 3))),
    ]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_mix_of_arrivals_cancels_and_transfers(data: st.DataObject) -> None:
    """Random arrivals, cancels, priorities, n > 1, few blocks and rows, and tickets that end late, out of order, without
    content or never, until their requests are cancelled. The fake device fails on a block that is read before it is filled or
    written after it was given back; Bench.turn holds free + used = total."""
    layout = data.draw(st.sampled_from([PLAIN, WINDOWED]))
    bench = LateBench(
        layout=layout,
        depth=data.draw(st.integers(0, 2)),
        blocks=data.draw(st.integers(26, 60)),
        rows=data.draw(st.integers(1, 6)),
        step_tokens=data.draw(st.integers(1, 20)),
        batching=data.draw(st.sampled_from(["continuous", "static:3", "dynamic:2,50"])),
        fail_at=data.draw(st.sampled_from([(), (), (2,), (1, 3, 7)])),
        speculation=data.draw(st.sampled_from(_speculations())),
    )
    chance = data.draw(st.randoms(use_true_random=False))
    bench.ends = lambda tickets: {ticket: chance.random() < 0.8 for ticket in tickets if chance.random() < 0.2}
    wanted: dict[str, tuple[list[int], int, int]] = {}
    for index, prompt in enumerate(prompts(data.draw(st.integers(0, 99)), data.draw(st.integers(1, 7)))):
        name, n, most = f"r{index}", data.draw(st.sampled_from([1, 1, 3])), data.draw(st.integers(1, 12))
        bench.host.keep(prompt[: data.draw(st.integers(0, len(prompt)))])
        bench.submit(name, prompt, n=n, max_tokens=most, priority=data.draw(st.integers(0, 2)))
        wanted[name] = prompt, n, most
        _turns(bench, data.draw(st.integers(0, 4)))
        if data.draw(st.integers(0, 3)) == 0:
            bench.scheduler.cancel(f"r{data.draw(st.integers(0, index))}")
    if data.draw(st.booleans()):
        bench.ends = never
        _turns(bench, 300)
        for name in [request.id for request in bench.leases.filling.values()]:
            bench.scheduler.cancel(name, "expired")
        bench.ends = failed
    bench.run()
    assert not bench.leases.filling and not bench.late.open
    for name, (prompt, n, most) in wanted.items():
        for choice in range(n):
            right, got = oracle(prompt, most, choice=choice), bench.tokens[name, choice]
            assert got == (right if bench.finish[name, choice] == "length" else right[: len(got)])
