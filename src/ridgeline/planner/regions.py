"""Region and hours for batch work, by price of electricity, carbon intensity and network latency.

Work takes whole hours in one region, in a window, with a limited number of pauses. An hour costs its electricity and, at a price of
carbon, its emissions; the hours of least cost are found by dynamic programming. Shifting work in time and place: Wiesner et al.,
"Let's Wait Awhile" (Middleware 2021).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from ridgeline.core.errors import ConfigError

HOUR = timedelta(hours=1)
COLUMNS = ("time", "region", "usd_mwh", "g_kwh")


@dataclass(frozen=True, slots=True)
class Grid:
    """Electricity of a region, hour by hour from `start` on. usd_kwh may be below 0. g_kwh: grams of CO2 per kWh."""

    region: str
    start: datetime
    usd_kwh: tuple[float, ...]
    g_kwh: tuple[float, ...]

    @property
    def end(self) -> datetime:
        return self.start + HOUR * len(self.usd_kwh)


@dataclass(frozen=True, slots=True)
class BatchWork:
    """Work that takes `hours` whole hours at `kilowatts` (of the site, with cooling), from `start` on within `within` hours.

    usd_tonne: what a tonne of CO2 is worth. 0: only electricity counts.
    """

    hours: int
    kilowatts: float
    start: datetime
    within: int
    pauses: int = 0
    usd_tonne: float = 0.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Hours of work in a region. usd: electricity. kg: emissions. cost: dollars with the price of carbon."""

    region: str
    hours: tuple[datetime, ...]
    usd: float
    kg: float
    cost: float


def at_once(grid: Grid, work: BatchWork) -> Schedule:
    """The work without waiting."""
    return _schedule(grid, work, range(work.hours))


def cheapest(grid: Grid, work: BatchWork) -> Schedule:
    """The hours of least cost in a region."""
    costs = [_cost(grid, work, hour) for hour in range(work.within)]
    return _schedule(grid, work, least_hours(costs, work.hours, work.pauses))


def least_hours(costs: Sequence[float], count: int, pauses: int) -> list[int]:
    """Indices of `count` hours of the least total cost, in at most `pauses` + 1 runs."""
    runs = min(pauses + 1, count)
    # best[done][runs so far]: cost if the last hour was worked, and in any case. Choices are kept to go back.
    worked = [[math.inf] * (runs + 1) for _ in range(count + 1)]
    least = [[0.0] + [math.inf] * runs] + [[math.inf] * (runs + 1) for _ in range(count)]
    choices = list[tuple[list[list[bool]], list[list[bool]]]]()
    for cost in costs:
        goes_on = [[False] * (runs + 1) for _ in range(count + 1)]
        works = [[False] * (runs + 1) for _ in range(count + 1)]
        for done in range(count, 0, -1):
            for run in range(runs, 0, -1):
                stay, begin = worked[done - 1][run], least[done - 1][run - 1]
                goes_on[done][run] = stay <= begin
                worked[done][run] = min(stay, begin) + cost
                if worked[done][run] < least[done][run]:
                    least[done][run], works[done][run] = worked[done][run], True
        worked[0] = [math.inf] * (runs + 1)
        choices.append((goes_on, works))
    run = min(range(runs + 1), key=lambda number: least[count][number])
    return _back(choices, count, run)


def _back(choices: Sequence[tuple[list[list[bool]], list[list[bool]]]], done: int, run: int) -> list[int]:
    """The hours that lead to a state."""
    hours, working = list[int](), False
    for hour in range(len(choices) - 1, -1, -1):
        goes_on, works = choices[hour]
        if done and (working or works[done][run]):
            hours.append(hour)
            working = goes_on[done][run]
            done, run = done - 1, run if working else run - 1
    return hours[::-1]


def _index(grid: Grid, work: BatchWork) -> int:
    return (work.start - grid.start) // HOUR


def _cost(grid: Grid, work: BatchWork, hour: int) -> float:
    """Dollars of an hour of the window."""
    index = _index(grid, work) + hour
    return work.kilowatts * (grid.usd_kwh[index] + grid.g_kwh[index] * work.usd_tonne / 1e6)


def _schedule(grid: Grid, work: BatchWork, hours: Iterable[int]) -> Schedule:
    chosen, first = list(hours), _index(grid, work)
    usd = work.kilowatts * sum(grid.usd_kwh[first + hour] for hour in chosen)
    kg = work.kilowatts * sum(grid.g_kwh[first + hour] for hour in chosen) / 1000
    return Schedule(
        grid.region, tuple(work.start + HOUR * hour for hour in chosen), usd, kg, usd + kg / 1000 * work.usd_tonne
    )


def covered(grid: Grid, work: BatchWork) -> bool:
    """Whether the curve of a region has the window of the work."""
    return grid.start <= work.start and work.start + HOUR * work.within <= grid.end


def within_latency(grids: Sequence[Grid], latency_ms: Mapping[str, float], most_ms: float) -> list[Grid]:
    """Regions whose latency is known and at most so much. Raises ConfigError for a region without a latency."""
    unknown = [grid.region for grid in grids if grid.region not in latency_ms]
    if unknown:
        raise ConfigError(
            f"--latency-ms has no {', '.join(unknown)}: give the round trip to every region, as in {unknown[0]}=40.",
            param="latency_ms",
        )
    return [grid for grid in grids if latency_ms[grid.region] <= most_ms]


def read_grids(lines: Iterable[str], name: str) -> list[Grid]:
    """Curves of a CSV with the columns time, region, usd_mwh and g_kwh, one row for an hour of a region.

    name: of the file, for messages. Raises ConfigError that names the line and the remedy.
    """
    reader = csv.DictReader(lines)
    missing = [column for column in COLUMNS if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"{name} has no column {missing[0]}: its header is {','.join(COLUMNS)}.", param="curves")
    hours: dict[str, dict[datetime, tuple[float, float]]] = {}
    for number, row in enumerate(reader, 2):
        try:
            time = _time(row["time"])
            values = float(row["usd_mwh"]) / 1000, float(row["g_kwh"])
        except (ValueError, TypeError):
            raise ConfigError(f"{name}, line {number}: write an ISO time and two numbers, as in 2024-06-10T00:00Z,DE-LU,42.5,310.",
                              param="curves") from None  # fmt: skip
        if not all(map(math.isfinite, values)) or values[1] < 0:
            raise ConfigError(f"{name}, line {number}: give finite numbers, and grams of at least 0.", param="curves")
        if time in hours.setdefault(row["region"], {}):
            raise ConfigError(
                f"{name}, line {number}: the hour {time:%Y-%m-%dT%H:%MZ} of {row['region']} appears twice: keep one.",
                param="curves",
            )
        hours[row["region"]][time] = values
    if not hours:
        raise ConfigError(f"{name} has no rows: give one for each hour and region.", param="curves")
    return [_grid(region, values, name) for region, values in hours.items()]


def _time(text: str) -> datetime:
    """An ISO time; UTC if it has no offset."""
    time = datetime.fromisoformat(text)
    return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)


def _grid(region: str, values: Mapping[datetime, tuple[float, float]], name: str) -> Grid:
    times = sorted(values)
    for before, after in pairwise(times):
        if after - before != HOUR:
            raise ConfigError(
                f"{name}: after {before:%Y-%m-%dT%H:%MZ} the next row of {region} is {after:%Y-%m-%dT%H:%MZ}: give every hour.",
                param="curves",
            )
    usd, grams = zip(*(values[time] for time in times), strict=True)
    return Grid(region, times[0], usd, grams)
