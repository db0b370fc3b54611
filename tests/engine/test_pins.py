"""Breakpoints in the scheduler: prefixes stay for their lifetime, and running requests come before them."""

from __future__ import annotations

import pytest

from ridgeline.core.events import PinOutcome
from ridgeline.core.spec import KvLayout
from tests.engine.helpers import PLAIN, WINDOWED, Bench, oracle
from tests.engine.late import LateBench, at_once

BOOK = list(range(40))


@pytest.mark.parametrize("layout", [PLAIN, WINDOWED], ids=["plain", "windowed"])
@pytest.mark.parametrize("depth", [0, 1])
def test_a_breakpoint_keeps_its_prefix_through_other_requests(layout: KvLayout, depth: int) -> None:
    bench = Bench(layout=layout, blocks=64, depth=depth, pin_share=0.5)
    bench.submit("first", BOOK, max_tokens=3, breakpoints=[(36, 300.0)])
    bench.run()
    assert [outcome[:4] for outcome in bench.pins["first"]] == [(36, "written", "", "")]
    for number in range(20):
        bench.submit(f"other {number}", [50 + number] * 30, max_tokens=2)
        bench.run()
    bench.submit("again", BOOK, max_tokens=3, breakpoints=[(36, 300.0)])
    bench.run()
    assert bench.cached["again", 0] == 36
    assert bench.pins["again"][0].state == "renewed"
    assert bench.tokens["again", 0] == oracle(BOOK, 3)
    assert set(bench.pins) == {"first", "again"}


def test_breakpoints_end_where_they_say_and_a_lost_one_is_told() -> None:
    bench = Bench(blocks=64, pin_share=0.5)
    breakpoints = [(2, 300.0), (10, 3600.0), (40, 5.0)]
    bench.submit("first", [*BOOK, 1], max_tokens=1, breakpoints=breakpoints)
    bench.run()
    assert [(pin.tokens, pin.state, pin.reason) for pin in bench.pins["first"]] == [
        (0, "refused", "short"),
        (8, "written", ""),
        (40, "written", ""),
    ]
    bench.clock.now += 6.0
    bench.submit("second", [*BOOK, 1], max_tokens=1, breakpoints=breakpoints[1:])
    bench.run()
    assert [(pin.state, pin.lost) for pin in bench.pins["second"]] == [("renewed", ""), ("written", "lifetime")]


def test_choices_of_one_request_pin_once() -> None:
    bench = Bench(blocks=64, pin_share=0.5)
    bench.submit("many", BOOK, n=3, max_tokens=4, breakpoints=[(36, 300.0)])
    bench.run()
    assert len(bench.pins["many"]) == 1
    assert bench.leases.pins.counts == {("written", ""): 1}


def test_running_requests_are_never_starved_by_pins() -> None:
    """Three requests grow until they need the pinned half of the cache: they take it, and nobody is preempted for it."""
    bench = Bench(blocks=20, pin_share=0.5)
    bench.submit("pinned", BOOK, max_tokens=1, breakpoints=[(40, float("inf"))])
    bench.run()
    assert bench.leases.pins.blocks == 10
    for name in ("a", "b", "c"):
        bench.submit(name, [ord(name)] * 4, max_tokens=20)
    bench.run()
    for name in ("a", "b", "c"):
        assert bench.tokens[name, 0] == oracle([ord(name)] * 4, 20)
    assert bench.leases.pins.counts["lost", "pressure"] == 1
    assert bench.loop.take_counts().preempted == 0
    bench.submit("again", BOOK, max_tokens=1, breakpoints=[(40, 300.0)])
    bench.run()
    assert bench.pins["again"][0].lost == "pressure"


def test_an_admission_leaves_pins_alone_while_requests_run() -> None:
    bench = Bench(blocks=20, pin_share=0.5)
    bench.submit("pinned", BOOK, max_tokens=1, breakpoints=[(40, 300.0)])
    bench.run()
    bench.submit("runs", [60] * 8, max_tokens=12)
    bench.submit("waits", [70] * 32, max_tokens=2)
    bench.turn()
    bench.turn()
    assert [request.id for request in bench.scheduler.running] == ["runs"]
    bench.run()
    assert bench.tokens["waits", 0] == oracle([70] * 32, 2)
    assert bench.leases.pins.blocks == 10, "both fit beside the pins, one after the other"


def test_a_request_on_a_pinned_prefix_needs_room_for_the_rest_only() -> None:
    bench = Bench(blocks=20, pin_share=0.5)
    bench.submit("pinned", BOOK, max_tokens=1, breakpoints=[(40, 300.0)])
    bench.run()
    bench.submit("runs", [60] * 8, max_tokens=12)
    bench.submit("shares", [*BOOK, 5, 6, 7, 8], max_tokens=4)
    bench.turn()
    assert [request.id for request in bench.scheduler.running] == ["runs", "shares"]
    bench.run()


def test_a_preempted_request_pins_once() -> None:
    bench = Bench(blocks=12, pin_share=0.5)
    bench.submit("urgent", [60] * 8, max_tokens=30, priority=-1)
    bench.submit("late", BOOK[:24], max_tokens=12, breakpoints=[(16, 300.0)])
    bench.run()
    assert bench.loop.take_counts().preempted > 0
    assert bench.leases.pins.counts["written", ""] == 1
    assert bench.tokens["late", 0] == oracle(BOOK[:24], 12)


def test_without_a_share_every_breakpoint_is_refused() -> None:
    bench = Bench(blocks=20)
    bench.submit("asks", BOOK, max_tokens=1, breakpoints=[(40, 300.0)])
    bench.run()
    assert bench.pins["asks"] == [PinOutcome(40, "refused", "budget")]


def test_a_reset_forgets_pins_and_tells_why() -> None:
    bench = Bench(blocks=32, pin_share=0.5)
    bench.submit("first", BOOK, max_tokens=1, breakpoints=[(40, 300.0)])
    bench.run()
    bench.leases.reset_prefix_cache()
    assert bench.leases.pool.cached == bench.leases.pins.blocks == 0
    bench.submit("second", BOOK, max_tokens=1, breakpoints=[(40, 300.0)])
    bench.run()
    assert bench.pins["second"][0].lost == "reset"


@pytest.mark.parametrize("layout", [PLAIN, WINDOWED], ids=["plain", "windowed"])
def test_blocks_that_come_from_a_tier_are_pinned(layout: KvLayout) -> None:
    bench = LateBench(layout=layout, ends=at_once, pin_share=0.5)
    bench.host.keep(BOOK)
    bench.submit("loads", BOOK, max_tokens=3, breakpoints=[(36, 300.0)])
    bench.run()
    assert bench.cached["loads", 0] == 36
    assert bench.pins["loads"][0].state == "written"
    assert bench.leases.pins.blocks > 0


@pytest.mark.parametrize("layout", [PLAIN, WINDOWED], ids=["plain", "windowed"])
def test_a_request_without_the_prefix_cache_pins_nothing(layout: KvLayout) -> None:
    for options in ({"prefix_cache": False}, {}):
        bench = Bench(layout=layout, pin_share=0.5, **options)
        bench.submit("asks", BOOK, max_tokens=2, cache=False, breakpoints=[(36, 300.0)])
        bench.run()
        assert bench.leases.pins.blocks == 0 and not bench.pins
