"""Placement against exhaustive search on small random fleets, the textbook's mix, moves, limits, and what to relax."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.errors import DoesNotFit
from ridgeline.planner.place import attempt, place
from ridgeline.planner.placement import Fleet, Footprint, Gpu, ModelLoad, Placement, Replica, split_device

GB = 10**9
SIZES = {"8b": 8, "13b": 13, "34b": 34, "70b": 70}
"""Gigabytes of weights at 8 bits."""
MEMORIES = {"24": 0.5, "40": 1.0, "48": 1.1, "80": 2.0}
"""Gigabytes of GPUs, and dollars per hour."""
WORKSPACE = 0.5


def footprint(gpu: Gpu, size: float) -> Footprint | None:
    """The fewest GPUs that hold the weights, a workspace and a cache of an eighth of the weights."""
    for gpus in (1, 2, 4):
        taken = int((size * 1.125 / gpus + WORKSPACE) * GB)
        if taken <= gpu.memory_bytes:
            return Footprint(gpu.name, taken, gpus)
    return None


def textbook(counts: dict[str, int | None], loads: dict[str, int], goal: str) -> Fleet:
    gpus = tuple(Gpu(name, int(name) * GB, counts.get(name, 0), price) for name, price in MEMORIES.items())
    models = tuple(
        ModelLoad(name, tuple(foot for gpu in gpus if (foot := footprint(gpu, SIZES[name]))), load)
        for name, load in loads.items()
    )
    return Fleet(gpus, models, goal)


def check(placement: Placement) -> None:
    """The rules of a placement, and that its bound is one."""
    fleet = placement.fleet
    for device, replicas in placement.devices.items():
        kind, number = split_device(device)
        gpu = fleet.by_name[kind]
        assert gpu.count is None or number < gpu.count
        feet = [replica.footprint for replica in replicas if replica.footprint]
        assert sum(foot.bytes for foot in feet) <= gpu.memory_bytes and sum(foot.share for foot in feet) <= 1 + 1e-6
        assert sum(foot.gpus > 1 for foot in feet) <= 1 and all(foot.gpu == kind for foot in feet)
        names = Counter(replica.model for replica in replicas)
        for model in fleet.models:
            assert not (model.spread and names[model.name] > 1)
            assert model.name not in names or not model.apart & set(names)
    for replica in placement.replicas:
        hosts = {
            split_device(device)[1] // fleet.by_name[split_device(device)[0]].per_host for device in replica.devices
        }
        assert len(hosts) == 1 and replica.footprint and len(set(replica.devices)) == replica.footprint.gpus
    better = placement.bound - placement.objective
    if not placement.short or fleet.goal == "most":
        assert (better if fleet.goal == "most" else -better) >= -1e-5 * max(1.0, abs(placement.objective))
    assert fleet.usd_hour is None or placement.usd_hour <= fleet.usd_hour + 1e-6


# --- against exhaustive search ------------------------------------------------------------------------------------------


def every(fleet: Fleet) -> Iterator[Placement]:
    """Every placement without replicas that no load needs, in which GPUs of a kind are used in order."""
    devices = [f"{gpu.name}:{number}" for gpu in fleet.gpus for number in range(gpu.count or 0)]

    def extend(first: int, made: tuple[Replica, ...]) -> Iterator[tuple[Replica, ...]]:
        yield made
        for number in range(first, len(fleet.models)):
            model = fleet.models[number]
            if sum(item.footprint.rate for item in made if item.footprint and item.model == model.name) >= model.load:
                continue
            for foot in model.footprints:
                kind = [device for device in devices if split_device(device)[0] == foot.gpu]
                for group in itertools.combinations(kind, foot.gpus):
                    more = (*made, Replica(model.name, group, foot))
                    if allowed(fleet, more):
                        yield from extend(number, more)

    return (Placement(fleet, made, 0.0, "") for made in extend(0, ()))


def allowed(fleet: Fleet, replicas: tuple[Replica, ...]) -> bool:
    try:
        placement = Placement(fleet, replicas, -math.inf if fleet.goal == "cheapest" else math.inf, "")
        check(placement)
    except AssertionError:
        return False
    return True


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    gpus = tuple(
        Gpu(
            name, draw(st.integers(20, 60)), draw(st.integers(1, 2)), draw(st.sampled_from((1.0, 1.5, 2.0))), per_host=2
        )
        for name in ("a", "b")
    )
    models = []
    for name in ("x", "y"):
        size, share = draw(st.integers(8, 50)), draw(st.sampled_from((0.0, 0.25, 0.5)))
        feet = [
            Footprint(gpu.name, size // gpus_each + 1, gpus_each, share, draw(st.sampled_from((1.0, 2.0))))
            for gpu in gpus
            for gpus_each in (1, 2)
            if size // gpus_each < gpu.memory_bytes
        ]
        models.append(
            ModelLoad(
                name, tuple(feet), draw(st.integers(1, 2)), draw(st.sampled_from((1.0, 1.7))), draw(st.booleans())
            )
        )
    if draw(st.booleans()):
        models[0] = replace(models[0], apart=frozenset("y"))
    goal = draw(st.sampled_from(("cheapest", "most")))
    return Fleet(gpus, tuple(models), goal, usd_hour=draw(st.sampled_from((None, 3.0))))


@given(fleet=fleets(), previous=st.randoms(use_true_random=False), moved=st.booleans())
@settings(max_examples=60)
def test_the_answer_is_that_of_exhaustive_search(fleet: Fleet, previous: object, moved: bool) -> None:
    pytest.importorskip("highspy")
    candidates = list(every(fleet))
    if moved:  # something runs already, and each load of weights costs
        before = previous.choice(candidates).replicas  # type: ignore[attr-defined]
        fleet = replace(fleet, previous=before, move_cost=0.3)
        candidates = [replace(candidate, fleet=fleet) for candidate in candidates]
    answer = attempt(fleet, 10.0, solver=True)
    check(answer)
    if fleet.goal == "most":
        best = max(candidate.objective for candidate in candidates)
    else:
        served = [candidate.objective for candidate in candidates if not candidate.short]
        assert bool(served) == (not answer.short)
        best = min(served, default=answer.objective)
    assert answer.objective == pytest.approx(best, abs=1e-6) and answer.method == "HiGHS, all patterns"
    if not answer.short:
        assert answer.gap < 1e-5


@given(fleet=fleets())
@settings(max_examples=60)
def test_first_fit_obeys_the_rules_and_its_bound_holds(fleet: Fleet) -> None:
    answer = attempt(fleet, 1.0, solver=False)
    if fleet.goal == "cheapest" and answer.short:
        return
    check(answer)
    best = max if fleet.goal == "most" else min
    optimum = best(item.objective for item in every(fleet) if fleet.goal == "most" or not item.short)
    assert (answer.bound >= optimum - 1e-9) if fleet.goal == "most" else (answer.bound <= optimum + 1e-9)


def test_first_fit_is_near_the_best_on_the_textbooks_mix() -> None:
    loads = dict.fromkeys(SIZES, 6)
    rented: dict[str, int | None] = dict.fromkeys(MEMORIES, None)
    answer = place(textbook(rented, loads, "cheapest"), solver=False)
    check(answer)
    assert answer.method == "first fit decreasing" and not answer.short and answer.gap < 0.35


# --- the textbook's mix -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [{"24": 1, "40": 1, "80": 1}, {"48": 2, "40": 1}, {"24": 2, "80": 1}])
def test_fixed_chips_hold_as_many_replicas_as_exhaustive_search_finds(counts: dict[str, int | None]) -> None:
    pytest.importorskip("highspy")
    fleet = textbook(counts, {"8b": 2, "13b": 1, "34b": 1, "70b": 1}, "most")
    answer = place(fleet)
    check(answer)
    assert answer.objective == max(item.objective for item in every(fleet)) == pytest.approx(answer.bound)


@pytest.mark.parametrize("loads", [{"8b": 1, "70b": 1}, {"13b": 2, "34b": 1}, {"8b": 1, "13b": 1, "34b": 1}])
def test_fixed_replicas_take_the_cheapest_chips_of_exhaustive_search(loads: dict[str, int]) -> None:
    pytest.importorskip("highspy")
    counts: dict[str, int | None] = {"24": 1, "40": 2, "48": 1, "80": 1}
    answer = place(textbook(counts, loads, "cheapest"))
    check(answer)
    best = min(item.objective for item in every(answer.fleet) if not item.short)
    assert answer.objective == pytest.approx(best) == pytest.approx(answer.bound)


def test_a_70b_runs_over_several_small_gpus() -> None:
    pytest.importorskip("highspy")
    answer = place(textbook({"48": 8}, {"70b": 4, "8b": 1}, "most"))
    check(answer)
    assert [len(replica.devices) for replica in answer.replicas if replica.model == "70b"] == [2] * 4
    assert answer.served == {"70b": 4, "8b": 0}  # beside a rank of 40 GB no 8B has room
    with_small = place(textbook({"48": 9}, {"70b": 4, "8b": 1}, "most"))
    assert not with_small.short and with_small.gap < 1e-6


@pytest.mark.parametrize("count", [None, 6])
def test_a_replica_stays_in_its_host(count: int | None) -> None:
    pytest.importorskip("highspy")
    fleet = Fleet((Gpu("g", 10, count, 1.0, per_host=3),), (ModelLoad("x", (Footprint("g", 8, 2),), 2),))
    answer = place(fleet)
    check(answer)
    assert len(answer.devices) == 4  # two hosts of three, of each two
    with pytest.raises(DoesNotFit):
        place(replace(fleet, models=(ModelLoad("x", (Footprint("g", 8, 4),), 1),)))


def test_many_patterns_are_generated_and_the_gap_is_small() -> None:
    pytest.importorskip("highspy")
    gpus = (Gpu("a", 80 * GB, 40, 2.0), Gpu("b", 40 * GB, None, 1.1))
    models = tuple(
        ModelLoad(
            str(size),
            tuple(Footprint(gpu.name, size * GB, 1, share) for gpu in gpus for share in (0.05 * (size % 4),)),
            3 + size % 3,
            spread=size % 5 == 0,
        )
        for size in range(5, 15)
    )
    answer = place(Fleet(gpus, models))
    check(answer)
    assert "HiGHS, " in answer.method and answer.method != "HiGHS, all patterns"
    assert not answer.short and answer.gap < 0.08


# --- moves, and what to relax -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [True, False])
def test_what_runs_stays_when_nothing_changes(solver: bool) -> None:
    if solver:
        pytest.importorskip("highspy")
    fleet = textbook({"40": 8, "80": 4}, {"8b": 4, "13b": 3, "34b": 2, "70b": 2}, "cheapest")
    before = place(fleet, solver=solver)
    again = place(replace(fleet, previous=before.replicas, move_cost=0.01), solver=solver)
    assert not again.moves and again.usd_hour == before.usd_hour


def test_a_replica_more_moves_nothing_else() -> None:
    pytest.importorskip("highspy")
    loads = {"8b": 4, "13b": 3, "34b": 2, "70b": 2}
    before = place(textbook({"40": 8, "80": 4}, loads, "cheapest"))
    more = textbook({"40": 8, "80": 4}, {**loads, "13b": 4}, "cheapest")
    after = place(replace(more, previous=before.replicas, move_cost=10.0))
    assert [model for model, _ in after.moves] == ["13b"]


def test_a_move_that_costs_more_than_it_saves_is_not_made() -> None:
    pytest.importorskip("highspy")
    foot = (Footprint("dear", 10, 1), Footprint("cheap", 10, 1))
    fleet = Fleet((Gpu("dear", 10, 1, 2.0), Gpu("cheap", 10, 1, 1.5)), (ModelLoad("x", foot, 1),))
    running = (Replica("x", ("dear:0",)), Replica("gone", ("cheap:0",)), Replica("x", ("dear:7",)))
    for cost, device in ((0.6, "dear:0"), (0.4, "cheap:0")):
        answer = place(replace(fleet, previous=running, move_cost=cost))
        assert list(answer.devices) == [device] and answer.gap < 1e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"40": 1, "80": 0}, "2 more GPUs of 40; "),
        ({"40": 3}, "the load, to 1 of 34b"),
    ],
)
def test_a_refusal_names_what_to_relax(change: dict[str, int | None], message: str) -> None:
    pytest.importorskip("highspy")
    loads = {"34b": 3} if change == {"40": 1, "80": 0} else {"34b": 2}
    fleet = textbook({"40": 1, **change}, loads, "cheapest")
    if message.startswith("the load"):
        fleet = replace(fleet, usd_hour=1.2)
    with pytest.raises(DoesNotFit, match=message) as refusal:
        place(fleet)
    assert refusal.value.message.startswith("No placement serves all load: at least ")
    assert "the limit of dollars per hour, from 1.2 to 2" in refusal.value.message or message.startswith("2 more")


def test_a_refusal_names_rules_between_models() -> None:
    pytest.importorskip("highspy")
    models = (
        ModelLoad("x", (Footprint("g", 4),), 2, spread=True),
        ModelLoad("y", (Footprint("g", 4),), 1, apart=frozenset("x")),
    )
    with pytest.raises(DoesNotFit, match="Relax one of: 1 more GPU of g; spread .*; apart .*; the load, to 1 of x"):
        place(Fleet((Gpu("g", 12, 2),), models))
    alone = (replace(models[0], spread=False), models[1])
    with pytest.raises(DoesNotFit, match="apart"):
        place(Fleet((Gpu("g", 12, 1),), alone))
    with pytest.raises(DoesNotFit, match="No GPU holds a replica of z"):
        place(Fleet((Gpu("g", 12, 1),), (ModelLoad("z", (), 1),)))
