"""What moving batch work in time and place saves on a real curve of prices and carbon intensity.

    python benchmarks/regions.py --out benchmarks/results/regions.json

Work of 6 hours on 8 GPUs of 700 W, with a PUE of 1.2, becomes ready at each hour of a week (7 x 24 cases) and must be done within
24 hours. Home is the first region. Rows: at once at home; best hours at home, without a pause and with as many as wanted; at
once in the best region; both. The best is what costs least at each price of a tonne of CO2. Prices are those of the
wholesale market, known in advance. Curves: workloads/README.md.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from common import HERE, cpu_name, provenance, write_rows

from ridgeline.planner.regions import BatchWork, Grid, Schedule, at_once, cheapest, read_grids

CURVES = HERE / "workloads" / "grid_2024_june.csv"
HOURS, WITHIN, WATTS = 6, 24, 700
KILOWATTS = 8 * WATTS / 1000 * 1.2


def ways(grids: list[Grid], work: BatchWork) -> dict[str, Schedule]:
    free = BatchWork(work.hours, work.kilowatts, work.start, work.within, work.hours, work.usd_tonne)
    return {
        "at once at home": at_once(grids[0], work),
        "best hours at home": cheapest(grids[0], work),
        "best hours at home, pauses": cheapest(grids[0], free),
        "best region at once": min((at_once(grid, work) for grid in grids), key=lambda way: way.cost),
        "best hours and region": min((cheapest(grid, work) for grid in grids), key=lambda way: way.cost),
    }


def rows(grids: list[Grid]) -> Iterator[dict[str, Any]]:
    for usd_tonne in (0.0, 100.0):
        cases = [
            ways(grids, BatchWork(HOURS, KILOWATTS, grids[0].start + timedelta(hours=hour), WITHIN, 0, usd_tonne))
            for hour in range(len(grids[0].usd_kwh) - WITHIN)
        ]
        for name in cases[0]:
            usd, kg = (statistics.fmean(getattr(case[name], unit) for case in cases) for unit in ("usd", "kg"))
            base_usd, base_kg = (
                statistics.fmean(getattr(case["at once at home"], unit) for case in cases) for unit in ("usd", "kg")
            )
            yield {
                "row": f"{name}, ${usd_tonne:g} a tonne", "cases": len(cases), "watts": WATTS, "within_hours": WITHIN,
                "kwh": round(HOURS * KILOWATTS, 2),
                "usd": round(usd, 4), "kg": round(kg, 4), "usd_saved": round(1 - usd / base_usd, 4),
                "kg_saved": round(1 - kg / base_kg, 4), **provenance(cpu_name()),
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="file of results")
    args = parser.parse_args()
    made = list(rows(read_grids(CURVES.read_text().splitlines(), CURVES.name)))
    for row in made:
        print({key: row[key] for key in ("row", "cases", "usd", "kg", "usd_saved", "kg_saved")})
    if args.out:
        write_rows(HERE.parent / args.out, made)


if __name__ == "__main__":
    main()
