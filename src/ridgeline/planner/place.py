"""Answers the two questions of `planner.placement`, and says which constraint to relax where no placement exists."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ridgeline.core.errors import DoesNotFit
from ridgeline.core.plural import counted
from ridgeline.planner.assignment import assigned
from ridgeline.planner.first_fit import first_fit, volume_bound
from ridgeline.planner.packing import available, pack
from ridgeline.planner.placement import Fleet, Placement, trimmed

SECONDS = 20.0
"""Default time to look for patterns, and again to combine them."""


def place(fleet: Fleet, *, seconds: float = SECONDS, solver: bool | None = None) -> Placement:
    """The best placement that was found, with a bound.

    solver: use HiGHS; None: if it is installed.
    Raises DoesNotFit for the goal "cheapest" if no placement serves all load, with what to relax.
    """
    placement = attempt(fleet, seconds, available() if solver is None else solver)
    if fleet.goal == "cheapest" and placement.short:
        raise DoesNotFit(_refusal(placement, seconds))
    return placement


def attempt(fleet: Fleet, seconds: float, solver: bool) -> Placement:
    """A placement, which may leave load unserved."""
    simple = trimmed(fleet, first_fit(fleet))
    quick = Placement(fleet, simple, volume_bound(fleet), "first fit decreasing")
    if not solver:
        return quick
    packing = pack(fleet, simple, seconds)
    bound = packing.bound if fleet.goal == "cheapest" else -packing.bound
    method = "HiGHS, all patterns" if packing.optimal else f"HiGHS, {packing.patterns:,} patterns"
    exact = Placement(fleet, trimmed(fleet, assigned(fleet, packing)), bound, method)
    return min((exact, replace(quick, bound=bound, method=method)), key=_loss)


def _loss(placement: Placement) -> tuple[float, float]:
    """Smaller is better: load that is not served, then the objective."""
    if placement.fleet.goal == "most":
        return 0.0, round(-placement.objective, 9)
    return round(sum(placement.short.values()), 9), round(placement.objective, 9)


# --- what to relax ------------------------------------------------------------------------------------------------------


def _refusal(placement: Placement, seconds: float) -> str:
    fleet, exact = placement.fleet, placement.method == "HiGHS, all patterns"
    without = [model.name for model in fleet.models if not model.footprints]
    if without:
        return f"No GPU holds a replica of {', '.join(without)}: add larger GPUs, more tensor-parallel sizes, or a smaller format."
    missing = ", ".join(
        f"{load:g} of {fleet.models[fleet.numbers[name]].load:g} of {name}" for name, load in placement.short.items()
    )
    claim = "No placement serves all load" if exact else "No placement was found that serves all load"
    return f"{claim}: at least {missing} is left. Relax one of: {'; '.join(_remedies(placement, seconds / 4))}."


def _remedies(placement: Placement, seconds: float) -> Iterator[str]:
    """Constraints without which, each alone, all load is served."""
    fleet, solver = placement.fleet, placement.method != "first fit decreasing"

    def served(relaxed: Fleet) -> Placement | None:
        tried = attempt(relaxed, seconds, solver)
        return None if tried.short else tried

    for gpu in fleet.gpus:
        if gpu.count is None:
            continue
        # Only GPUs of this kind cost something, so that the fewest are added.
        priced = [
            replace(other, count=None, usd_hour=1.0) if other == gpu else replace(other, usd_hour=0.0)
            for other in fleet.gpus
        ]
        if (tried := served(replace(fleet, gpus=tuple(priced), usd_hour=None, previous=()))) is not None:
            yield f"{counted(tried.used[gpu.name] - gpu.count, 'more GPU')} of {gpu.name}"
    for name, words in (
        ("spread", "spread (replicas of a model on one GPU)"),
        ("apart", "apart (models that share no GPU)"),
    ):
        if any(getattr(model, name) for model in fleet.models):
            models = tuple(replace(model, **{name: type(getattr(model, name))()}) for model in fleet.models)
            if served(replace(fleet, models=models)) is not None:
                yield words
    if fleet.usd_hour is not None and (tried := served(replace(fleet, usd_hour=None))) is not None:
        yield f"the limit of dollars per hour, from {fleet.usd_hour:g} to {tried.usd_hour:g}"
    if fleet.watts is not None and (tried := served(replace(fleet, watts=None))) is not None:
        yield f"the limit of watts, from {fleet.watts:g} to {tried.watts:g}"
    most = replace(fleet, goal="most", models=tuple(replace(model, weight=1 / model.load) for model in fleet.models))
    less = attempt(most, seconds, solver)
    loads = ", ".join(f"{less.served[name]:g} of {name}" for name in less.short)
    yield f"the load, to {loads}"
