"""How many nodes are drafted, on a device whose step times and acceptance the test makes up."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ridgeline.engine.pace import Pace

SIZES = (0, 1, 2, 4, 8)


def run(
    pace: Pace, steps: int, kept: float, seconds: Callable[[int], float], *, rows: int = 1, seed: int = 0
) -> tuple[float, dict[int, int]]:
    """Tokens per second of chains kept with chance `kept` a node, and how often each size was used."""
    chance = random.Random(seed)
    tokens = total = 0.0
    used: dict[int, int] = {}
    for _ in range(steps):
        size = pace.choose(rows)
        used[size] = used.get(size, 0) + 1
        gained = rows
        for _ in range(rows if size else 0):
            right = next((node for node in range(size) if chance.random() >= kept), size)
            pace.learn(size, list(range(right)))
            gained += right
        took = seconds(size) * chance.uniform(0.97, 1.1)
        pace.settle(rows, size > 0, gained / rows, took)
        pace.measure(rows, size, gained / rows, took)
        tokens, total = tokens + gained / rows, total + took
    return tokens / total, used


def cheap(size: int) -> float:
    """Memory-bound: a further token costs 2 % of a step."""
    return 1 + 0.02 * size


def dear(size: int) -> float:
    """Compute-bound: twice the tokens, twice the time."""
    return 1.0 + size


@pytest.mark.parametrize("kept", [0.0, 0.05, 0.3, 0.6])
@pytest.mark.parametrize("rows", [1, 7, 128])
def test_what_does_not_pay_costs_next_to_nothing(kept: float, rows: int) -> None:
    rate, used = run(Pace(SIZES), 3000, kept, dear, rows=rows)
    plain, _ = run(Pace((0,)), 3000, kept, dear, rows=rows)
    assert rate > 0.97 * plain
    assert used[0] > 0.95 * 3000


@pytest.mark.parametrize(("kept", "best"), [(0.9, 8), (0.6, 4)])
def test_what_pays_is_used(kept: float, best: int) -> None:
    rate, used = run(Pace(SIZES), 2000, kept, cheap)
    fixed, _ = run(Pace((0, best), fixed=True), 2000, kept, cheap)
    assert rate > 0.93 * fixed
    assert used.get(0, 0) < 0.1 * 2000


def test_it_goes_off_and_on_again() -> None:
    """One look of three steps can miss that text has become easier; the next one is a thousand steps away."""
    idle = []
    for seed in range(5):
        pace = Pace(SIZES)
        run(pace, 500, 0.9, cheap, seed=seed)
        _, off = run(pace, 1500, 0.0, cheap, seed=seed + 10)
        assert off[0] > 1000
        _, again = run(pace, 3000, 0.9, cheap, seed=seed + 20)
        idle.append(again.get(0, 0))
    assert sum(idle) / 5 < 1500


def test_batches_of_other_sizes_are_others() -> None:
    pace = Pace(SIZES)
    run(pace, 600, 0.9, cheap, rows=1)
    _, used = run(pace, 600, 0.9, dear, rows=100)
    assert used[0] > 500
    _, used = run(pace, 600, 0.9, cheap, rows=1)
    assert used.get(0, 0) < 60


def test_fewer_rows_begin_with_what_pays_for_more() -> None:
    """As a batch runs dry, it is in each range of rows for a few steps only."""
    pace = Pace(SIZES)
    run(pace, 600, 0.9, cheap, rows=100)
    best = pace.choose(100)
    assert best >= 4
    assert pace.choose(30) == best, "not a look at plain steps first"
    pace.measure(30, best, 1.0, 0.3 * cheap(best))
    saved = pace.measure(30, best, 4.0, 0.3 * cheap(best))
    assert saved == pytest.approx(0.3 * (4 - cheap(best)), rel=0.1), (
        "a plain step is as much shorter as the first step seen"
    )
    _, used = run(pace, 600, 0.0, dear, rows=30)
    assert used[0] > 400
    assert pace.choose(120) == 0, "more rows may be another matter"


def test_a_new_request_is_looked_at_soon() -> None:
    pace = Pace(SIZES)
    run(pace, 4000, 0.0, cheap)
    pace.renew(1)
    _, used = run(pace, 400, 0.95, cheap)
    assert used.get(0, 0) < 200


def test_what_is_saved() -> None:
    pace = Pace((0, 4), fixed=True)
    assert pace.measure(2, 4, 3.0, 1.5) == 0.0, "nothing to compare with yet"
    pace.measure(2, 0, 1.0, 1.0)
    assert pace.measure(2, 4, 3.0, 1.5) == pytest.approx(1.5)


def test_nodes_worth_verifying_for_one_request() -> None:
    pace = Pace(SIZES)
    assert pace.worth(1, 0.95) == 8
    pace.measure(1, 0, 1.0, 1.0)
    for _ in range(50):
        pace.measure_host(1, 4, 2.0, 1.2)
    assert pace.worth(1, 0.95) == 8
    assert 1 <= pace.worth(1, 0.3) <= 3
    assert pace.worth(1, 0.0) == 1
    for _ in range(50):
        pace.measure_host(1, 4, 2.0, 9.0)
    assert pace.worth(1, 0.5) == 3


def replay(pace: Pace, steps: int, gained: float, seconds: float) -> tuple[float, int]:
    """Somebody drafts whenever it is allowed, and such a step takes `seconds` for `gained` tokens, a plain one 1 for 1. Tokens
    per second, and the steps that drafted."""
    tokens = total = 0.0
    drafted = 0
    for _ in range(steps):
        drafting = pace.affords(1)
        pace.settle(1, drafting, gained if drafting else 1.0, seconds if drafting else 1.0)
        tokens, total = tokens + (gained if drafting else 1.0), total + (seconds if drafting else 1.0)
        drafted += drafting
    return tokens / total, drafted


@pytest.mark.parametrize(("gained", "seconds"), [(1.0, 1.05), (1.1, 1.6), (1.0, 3.0), (1.3, 4.0)])
def test_what_loses_pauses(gained: float, seconds: float) -> None:
    pace = Pace(SIZES)
    pace.settle(1, False, 1.0, 1.0)
    rate, _ = replay(pace, 4000, gained, seconds)
    assert rate > 0.97


def test_what_gains_never_pauses_and_is_found_again() -> None:
    pace = Pace(SIZES)
    pace.settle(1, False, 1.0, 1.0)
    assert replay(pace, 1000, 1.5, 1.2)[1] == 1000
    replay(pace, 5000, 1.0, 2.0)
    assert replay(pace, 2000, 1.5, 1.2)[1] > 1400
    assert replay(pace, 500, 1.5, 1.2)[1] == 500


def test_nothing_is_drafted_in_a_pause() -> None:
    pace = Pace(SIZES)
    run(pace, 400, 0.95, cheap)
    pace.settle(1, False, 1.0, 1.0)
    for _ in range(20):
        pace.settle(1, True, 1.0, 2.0)
    assert not pace.affords(1)
    assert pace.choose(1) == 0
    assert pace.affords(100), "batches of other sizes are others"
    for _ in range(600):
        pace.settle(1, False, 1.0, 1.0)
    assert pace.affords(1)
    assert pace.choose(1) > 0


def test_what_is_not_in_use_drifts_with_what_is() -> None:
    """Contexts grow while nothing is drafted: steps with a draft, read long ago, would look cheap without it."""
    pace = Pace((0, 1))
    for _ in range(40):
        pace.measure(8, 0, 1.0, 1.0)
        pace.measure(8, 1, 1.5, 1.4)
    for step in range(200):
        pace.measure(8, 0, 1.0, 1.0 + step / 400)
    took = pace._of(8).took
    assert took[0].seconds > 1.35
    assert took[1].seconds / took[0].seconds == pytest.approx(1.4, rel=0.02)
