"""Clients share the service when requests wait: Sheng et al. 2024, arXiv:2401.00588."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.engine.policy import OUTPUT_WEIGHT
from tests.engine.constrained import make, submit
from tests.engine.helpers import Bench, oracle


def entries(bench: Bench) -> list[str]:
    """Run to the end; returns the requests in the order in which they entered."""
    order: list[str] = []
    while not bench.scheduler.idle:
        bench.turn()
        order += [request.id for request in bench.scheduler.running if request.id not in order]
    return order


@pytest.mark.parametrize("depth", [0, 1])
def test_a_hundred_requests_of_one_client_do_not_delay_the_one_of_another(depth: int) -> None:
    bench = Bench(rows=4, depth=depth)
    for index in range(100):
        bench.submit(f"crowd{index}", [1, 2, 3], max_tokens=8, client="crowd")
    for _ in range(5):
        bench.turn()
    running = {request.id for request in bench.scheduler.running}
    bench.submit("single", [4, 5, 6], max_tokens=8, client="single")
    order = entries(bench)
    waited = [name for name in order[: order.index("single")] if name not in running]
    assert len(waited) <= 4  # those that left and entered before its first step, of 96 that came before it
    assert bench.tokens["single", 0] == oracle([4, 5, 6], 8)
    assert len(bench.finish) == 101


def test_a_message_says_whose_request_it_is() -> None:
    engine = make(depth=0)
    for client in ("shop", ""):
        message = submit(f"r{client}", [1, 2, 3], max_tokens=2)
        message.client = client
        engine.handle(message)
    assert [request.client for request in engine.loop.scheduler.waiting] == ["shop", ""]


def test_one_client_or_none_is_served_in_order_of_arrival() -> None:
    for clients in (("",), ("a",)):
        bench = Bench(rows=1)
        for index in range(6):
            bench.submit(f"r{index}", [index + 1] * (6 - index), max_tokens=3, client=clients[index % len(clients)])
        assert entries(bench) == [f"r{index}" for index in range(6)]


def test_a_priority_is_above_fairness() -> None:
    bench = Bench(rows=1)
    for index in range(4):
        bench.submit(f"urgent{index}", [1, 2], max_tokens=6, priority=-1, client="a")
        bench.submit(f"usual{index}", [1, 2], max_tokens=2, client="b")
    assert [name[:6] for name in entries(bench)] == ["urgent"] * 4 + ["usual0", "usual1", "usual2", "usual3"]


def test_service_is_counted_in_tokens_and_not_in_requests() -> None:
    """Long answers of one client against short ones of another, one row: equal tokens, not equal turns."""
    bench = Bench(rows=1, blocks=256)
    for index in range(30):
        bench.submit(f"long{index}", [1, 2], max_tokens=20, client="long")
        bench.submit(f"short{index}", [3, 4], max_tokens=4, client="short")
    first = entries(bench)[:24]
    assert sum(name.startswith("long") for name in first) in (4, 5), "2 + 2 * 20 tokens against 2 + 2 * 4"


def test_a_client_cannot_save_service_up() -> None:
    """One that was silent gets its share from now on, and no more."""
    bench = Bench(rows=1)
    bench.submit("b0", [1, 2], max_tokens=4, client="b")
    for index in range(40):
        bench.submit(f"a{index}", [1, 2], max_tokens=4, client="a")
    while bench.scheduler.queued > 20:
        bench.turn()
    for index in range(1, 11):
        bench.submit(f"b{index}", [1, 2], max_tokens=4, client="b")
    order = entries(bench)
    after = order[order.index("b1") :]
    assert sum(name.startswith("b") for name in after[:10]) in (5, 6)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 6), st.sampled_from([0, 1]))
def test_backlogged_clients_get_equal_service(seed: int, rows: int, depth: int) -> None:
    """The bound of the source: while both wait, services differ by at most twice the weight times the tokens that can run."""
    chance = random.Random(seed)
    bench = Bench(rows=rows, depth=depth, blocks=256, step_tokens=32)
    owner = {}
    for index in range(60):
        client = chance.choice("ab")
        name = f"{client}{index}"
        owner[name] = client
        bench.submit(name, [1] * chance.randint(1, 12), max_tokens=chance.randint(1, 12), client=client)
    prompts = dict.fromkeys(owner, 0)
    bound = 2 * OUTPUT_WEIGHT * rows * 24
    while {request.client for request in bench.scheduler.waiting} == {"a", "b"}:
        bench.turn()
        for request in bench.scheduler.running:
            prompts[request.id] = request.prompt_len
        got = {"a": 0, "b": 0}
        for name, client in owner.items():
            got[client] += prompts[name] + OUTPUT_WEIGHT * len(bench.tokens[name, 0])
        assert abs(got["a"] - got["b"]) <= bound
    bench.run()
    assert len(bench.finish) == 60


@pytest.mark.parametrize("batching", ["static:4", "dynamic:4,100"])
def test_batches_keep_their_members(batching: str) -> None:
    bench = Bench(batching=batching, rows=2)
    for index in range(6):
        bench.submit(f"a{index}", [1, 2], max_tokens=3, client="a")
    bench.submit("b0", [3, 4], max_tokens=3, client="b")
    order = entries(bench)
    assert set(order[:4]) == {"a0", "a1", "a2", "a3"} and set(order) == {*(f"a{index}" for index in range(6)), "b0"}


def test_preempted_requests_are_not_charged_twice() -> None:
    bench = Bench(rows=1)
    (victim,) = bench.submit("victim", [1, 2, 3], max_tokens=10, priority=5, client="a")
    for _ in range(5):
        bench.turn()
    bench.submit("urgent", [4], max_tokens=2, client="b")
    bench.run()
    assert victim.preempted == 1 and victim.charged == 3 + OUTPUT_WEIGHT * 10
