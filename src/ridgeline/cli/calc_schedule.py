"""`ridgeline calc schedule`: region and hours for batch work, by price of electricity, carbon and latency."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from ridgeline.cli.calc_lines import Line, Option, count, flag, number
from ridgeline.cli.flags import Arguments, finite_number, whole_number
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.planner.regions import (
    HOUR,
    BatchWork,
    Grid,
    Schedule,
    at_once,
    cheapest,
    covered,
    read_grids,
    within_latency,
)

OPTIONS: dict[str, Option] = {
    "curves": (str, "CSV file with the columns time, region, usd_mwh and g_kwh, hourly"),
    "hours": (whole_number, "whole hours that the work takes"),
    "watts": (finite_number, "power of the machines that do it"),
    "pue": (finite_number, "PUE: power of the site divided by power of its machines (default: 1.2)"),
    "home": (str, "region to compare with (default: the first of the file)"),
    "start": (str, "ISO time from which on the work may run (default: the first hour that all regions have)"),
    "within": (whole_number, "hours from then on in which it must be done (default: 24)"),
    "pauses": (whole_number, "times that the work may be interrupted (default: 0)"),
    "usd_tonne": (finite_number, "worth of a tonne of CO2 in dollars (default: 0, only electricity counts)"),
    "latency_ms": (str, "round trips to the regions, as in DE-LU=8,CA-ON=110"),
    "most_latency_ms": (finite_number, "longest round trip that is accepted; needs --latency-ms"),
}


def schedule(args: Arguments, options: Mapping[str, Any]) -> list[Line]:
    """Cost and emissions of work at once at home, of better hours at home, of another region, and of both."""
    if "curves" not in options:
        raise ConfigError("--curves is missing: give a CSV file of prices and carbon intensity.", param="curves")
    with Path(options["curves"]).open(encoding="utf-8", newline="") as file:
        grids = read_grids(file, options["curves"])
    home = _home(grids, options)
    work = _work(grids, options)
    allowed = _allowed(grids, options)
    now = at_once(home, work)
    ways = {
        "home_now": ("at once at home", now),
        "home_best": ("best hours at home", cheapest(home, work)),
        "region_now": ("at once in the best region", min((at_once(grid, work) for grid in allowed), key=_cost)),
        "best": ("best hours and region", min((cheapest(grid, work) for grid in allowed), key=_cost)),
    }
    lines = [Line("kwh", "energy of the site", work.hours * work.kilowatts, f"{work.hours * work.kilowatts:,.4g} kWh")]
    for name, (label, way) in ways.items():
        saved = f"  saves ${now.usd - way.usd:,.2f} and {now.kg - way.kg:,.3g} kg" if way is not now else ""
        text = f"${way.usd:,.2f}, {way.kg:,.3g} kg of CO2 in {way.region}, {_runs(way)}{saved}"
        lines += [
            Line(f"{name}_usd", label, way.usd, text),
            Line(f"{name}_kg", "", way.kg, ""),
            Line(f"{name}_start", "", way.hours[0].timestamp(), ""),
        ]
    return lines


def _cost(way: Schedule) -> float:
    return way.cost


def _home(grids: list[Grid], options: Mapping[str, Any]) -> Grid:
    names = [grid.region for grid in grids]
    name = options.get("home", names[0])
    if name not in names:
        raise ConfigError(f"--home {name!r} is not in the file: use one of {', '.join(names)}.", param="home")
    return grids[names.index(name)]


def _work(grids: list[Grid], options: Mapping[str, Any]) -> BatchWork:
    start = max(grid.start for grid in grids)
    if "start" in options:
        try:
            start = datetime.fromisoformat(options["start"])
        except ValueError:
            raise ConfigError(
                f"--start {options['start']!r} is not a time: write it as 2024-06-10T00:00Z.", param="start"
            ) from None
        start = start.astimezone(UTC) if start.tzinfo else start.replace(tzinfo=UTC)
        if start.minute or start.second or start.microsecond:
            raise ConfigError(f"--start {options['start']}: give a full hour, as in 2024-06-10T00:00Z.", param="start")
    hours, within = count(options, "hours", None), count(options, "within", 24)
    if hours > within:
        raise ConfigError(f"--within is {within}: give at least --hours {hours}.", param="within")
    kilowatts = number(options, "watts", None) / 1000 * number(options, "pue", 1.2)
    work = BatchWork(hours, kilowatts, start, within, options.get("pauses", 0), options.get("usd_tonne", 0.0))
    for name in ("pauses", "usd_tonne"):
        if options.get(name, 0) < 0:
            raise ConfigError(f"{flag(name)} is {options[name]}: give 0 or more.", param=name)
    if late := next((grid for grid in grids if not covered(grid, work)), None):
        raise ConfigError(
            f"The curve of {late.region} has {late.start:%Y-%m-%dT%H:%MZ} to {late.end:%Y-%m-%dT%H:%MZ}, and the work runs within "
            f"{start:%Y-%m-%dT%H:%MZ} to {start + HOUR * within:%Y-%m-%dT%H:%MZ}: change --start or --within.",
            param="start",
        )
    return work


def _allowed(grids: list[Grid], options: Mapping[str, Any]) -> list[Grid]:
    """Regions that are near enough."""
    if "most_latency_ms" not in options:
        return grids
    trips = dict[str, float]()
    for part in filter(None, options.get("latency_ms", "").split(",")):
        name, _, text = part.partition("=")
        try:
            trips[name.strip()] = finite_number(text)
        except argparse.ArgumentTypeError:
            raise ConfigError(
                f"--latency-ms {part!r}: write region=milliseconds, as in DE-LU=8.", param="latency_ms"
            ) from None
    near = within_latency(grids, trips, options["most_latency_ms"])
    if not near:
        least = min(trips.values())
        raise ConfigError(
            f"--most-latency-ms is {options['most_latency_ms']:g}: give at least {least:g}, that of the nearest region.",
            param="most_latency_ms",
        )
    return near


def _runs(way: Schedule) -> str:
    """ "from 10 Jun 02:00 UTC", with the pauses."""
    pauses = sum(after - before > HOUR for before, after in pairwise(way.hours))
    return f"from {way.hours[0]:%d %b %H:%M} UTC" + (f" with {counted(pauses, 'pause')}" if pauses else "")
