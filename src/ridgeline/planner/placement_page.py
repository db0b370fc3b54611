"""The HTML page of a placement: what it costs, what runs where, what binds, and how the answer depends on the assumptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from ridgeline.core.plural import counted
from ridgeline.core.sizing import GIB
from ridgeline.planner.cost import HOURS_PER_YEAR
from ridgeline.planner.place import attempt
from ridgeline.planner.placement import Fleet, Placement, Replica, split_device
from ridgeline.planner.svg import Axis, Chart, Guide, Line, figure, page, table

GPU_HEAD = ("GPUs", "names", "runs", "memory", "of its memory", "of its time", "$/hour")
SHOWN = 4
"""Names of GPUs in a row of the table."""
LOADS = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Loads of the chart, relative to those of the plan."""
CHANGE = 0.2
"""By how much each assumption changes in the table."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The objective when an assumption changes; None if the load is then not served."""

    assumption: str
    objective: float | None


def gpu_rows(placement: Placement) -> list[tuple[str, ...]]:
    """Cells of GPU_HEAD. GPUs with equal content are one row."""
    groups: dict[tuple[str, tuple[tuple[Replica, int], ...]], list[str]] = {}
    for device, replicas in placement.devices.items():
        copies = Counter(Replica(replica.model, (), replica.footprint) for replica in replicas)
        key = split_device(device)[0], tuple(sorted(copies.items(), key=lambda item: item[0].model))
        groups.setdefault(key, []).append(device)
    rows = list[tuple[str, ...]]()
    for (kind, content), devices in groups.items():
        gpu = placement.fleet.by_name[kind]
        taken, share = placement.usage(devices[0])
        names = ", ".join(devices[:SHOWN]) + (", ..." if len(devices) > SHOWN else "")
        runs = ", ".join(f"{times} x {_part(replica)}" if times > 1 else _part(replica) for replica, times in content)
        memory = f"{taken / GIB:.2f} of {gpu.memory_bytes / GIB:.2f} GiB"
        filled = f"{taken / gpu.memory_bytes:.0%}"
        rows.append(
            (str(len(devices)), names, runs, memory, filled, f"{share:.0%}" if share else "", f"{gpu.usd_hour:.3g}")
        )
    return rows


def _part(replica: Replica) -> str:
    gpus = replica.footprint.gpus if replica.footprint else 1
    return replica.model if gpus == 1 else f"{replica.model} (1/{gpus})"


def scaled(fleet: Fleet, factor: float) -> Fleet:
    """The fleet with another load of every model. Replicas keep their sizes."""
    return replace(fleet, models=tuple(replace(model, load=model.load * factor) for model in fleet.models))


def sensitivities(fleet: Fleet, solve: Callable[[Fleet], Placement]) -> Iterator[Sensitivity]:
    """What changes if each assumption is off by CHANGE, one at a time. What runs now, and moves, are left out."""
    fleet = replace(fleet, previous=())
    for sign in (-1, 1):
        factor, words = 1 + sign * CHANGE, f"{sign * CHANGE:+.0%}"
        cases = [(f"load of every model {words}", scaled(fleet, factor))]
        models = tuple(
            replace(model, footprints=tuple(replace(foot, bytes=int(foot.bytes * factor)) for foot in model.footprints))
            for model in fleet.models
        )
        cases.append((f"memory of every replica {words}", replace(fleet, models=models)))
        if fleet.goal == "cheapest":
            for gpu in fleet.gpus:
                dearer = replace(gpu, usd_hour=gpu.usd_hour * factor)
                gpus = tuple(dearer if other == gpu else other for other in fleet.gpus)
                cases.append((f"price of {gpu.name} {words}", replace(fleet, gpus=gpus)))
        for name, changed in cases:
            answer = solve(changed)
            served = not answer.short or fleet.goal == "most"
            yield Sensitivity(name, answer.objective if served else None)


def binding(placement: Placement) -> Iterator[tuple[str, ...]]:
    """Kind, GPUs in use, mean use of memory and time, and which of them is nearer to its limit."""
    for kind, count in placement.used.items():
        usage = [placement.usage(device) for device in placement.devices if split_device(device)[0] == kind]
        memory = sum(taken for taken, _ in usage) / count / placement.fleet.by_name[kind].memory_bytes
        time = sum(share for _, share in usage) / count
        yield kind, str(count), f"{memory:.0%}", f"{time:.0%}", "memory" if memory >= time else "time"


def placement_page(placement: Placement, notes: Sequence[str], seconds: float, solver: bool) -> str:
    """A self-contained page. seconds: for each of the answers that it compares."""
    fleet, cheapest = placement.fleet, placement.fleet.goal == "cheapest"

    def solve(changed: Fleet) -> Placement:
        return attempt(changed, seconds, solver)

    unit = "dollars per hour" if cheapest else "weighted load"
    month = placement.usd_hour * HOURS_PER_YEAR / 12
    better = f"No placement is more than {placement.gap:.2%} better: the bound is {placement.bound:,.4g} {unit}."
    parts = [
        f"<p>{counted(sum(placement.used.values()), 'GPU')} at <b>${placement.usd_hour:,.2f} per hour</b>, "
        f"${month:,.0f} per month, {placement.watts:,.0f} W of design power. {better} Loads and times are predictions.</p>",
        figure(_chart(fleet, solve, unit)),
        "<h2>What runs where</h2>",
        table(GPU_HEAD, gpu_rows(placement)),
        "<h2>Models</h2>",
        table(("model", "served", "wanted"), _models(placement)),
        "<h2>What binds</h2>",
        table(("kind", "GPUs", "memory in use", "time in use", "binds"), binding(placement)),
        "<h2>How the answer depends on the assumptions</h2>",
        table(("assumption", unit, "change"), _changes(placement, solve)),
    ]
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    return page(
        "Placement: " + ("the cheapest GPUs for a load" if cheapest else "the most load on given GPUs"),
        "\n".join(parts),
    )


def _models(placement: Placement) -> Iterator[tuple[str, ...]]:
    for model in placement.fleet.models:
        yield model.name, f"{placement.served[model.name]:,.4g}", f"{model.load:,.4g}"


def _changes(placement: Placement, solve: Callable[[Fleet], Placement]) -> Iterator[tuple[str, ...]]:
    base = solve(replace(placement.fleet, previous=())).objective
    for item in sensitivities(placement.fleet, solve):
        if item.objective is None:
            yield item.assumption, "not served", ""
        else:
            yield item.assumption, f"{item.objective:,.4g}", f"{item.objective / base - 1:+.1%}" if base else ""


def _chart(fleet: Fleet, solve: Callable[[Fleet], Placement], unit: str) -> Chart:
    answers = [(factor * 100, solve(scaled(replace(fleet, previous=()), factor))) for factor in LOADS]
    points = tuple((load, answer.objective) for load, answer in answers if fleet.goal == "most" or not answer.short)
    x, y = (
        Axis.around([load for load, _ in answers], "load of every model", unit=" %"),
        Axis.around([value for _, value in points], unit),
    )
    return Chart(f"{unit} against load", x, y, (Line("answer", points), Guide("this plan", x=100.0)))
