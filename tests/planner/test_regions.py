"""Region and hours for batch work: against exhaustive search, on a real curve, and bad files."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.cli.main import main
from ridgeline.core.errors import ConfigError
from ridgeline.planner.regions import BatchWork, Grid, at_once, cheapest, least_hours, read_grids, within_latency
from tests.cli.test_planning import run

CURVES = Path(__file__).resolve().parents[2] / "benchmarks" / "workloads" / "grid_2024_june.csv"
START = datetime(2024, 6, 10, tzinfo=UTC)
HEADER = "time,region,usd_mwh,g_kwh"


@given(
    costs=st.lists(st.integers(-5, 20), min_size=1, max_size=9),
    count=st.integers(1, 5),
    pauses=st.integers(0, 3),
)
@settings(max_examples=40)
def test_the_hours_are_those_of_exhaustive_search(costs: list[int], count: int, pauses: int) -> None:
    count = min(count, len(costs))
    chosen = least_hours(costs, count, pauses)

    def runs(hours: tuple[int, ...]) -> int:
        return 1 + sum(after - before > 1 for before, after in itertools.pairwise(hours))

    possible = [hours for hours in itertools.combinations(range(len(costs)), count) if runs(hours) <= pauses + 1]
    assert len(set(chosen)) == count and tuple(chosen) in possible
    assert sum(costs[hour] for hour in chosen) == min(sum(costs[hour] for hour in hours) for hours in possible)


def test_price_and_carbon_are_weighed() -> None:
    grid = Grid("a", START, (0.10, 0.05, 0.08), (100.0, 500.0, 50.0))
    work = BatchWork(1, 10.0, START, 3)
    assert cheapest(grid, work).hours == (START + timedelta(hours=1),)
    green = BatchWork(1, 10.0, START, 3, usd_tonne=100.0)
    best = cheapest(grid, green)
    assert best.hours == (START + timedelta(hours=2),)
    assert best.usd == pytest.approx(0.8) and best.kg == pytest.approx(0.5) and best.cost == pytest.approx(0.85)
    assert at_once(grid, green).hours == (START,)


def test_a_real_curve_has_cheaper_hours_and_a_cleaner_region() -> None:
    home, other = read_grids(CURVES.read_text().splitlines(), CURVES.name)
    assert (home.region, other.region, len(home.usd_kwh)) == ("DE-LU", "CA-ON", 192) and min(home.usd_kwh) < 0
    work = BatchWork(6, 6.72, START + timedelta(hours=16), 24)
    now, later, away = at_once(home, work), cheapest(home, work), cheapest(other, work)
    assert later.usd < 0.7 * now.usd and away.kg < 0.3 * later.kg
    assert cheapest(home, BatchWork(6, 6.72, work.start, 24, pauses=5)).usd <= later.usd


def test_far_regions_are_left_out() -> None:
    grids = [Grid(name, START, (0.1,), (1.0,)) for name in ("near", "far")]
    assert [grid.region for grid in within_latency(grids, {"near": 8.0, "far": 110.0}, 50.0)] == ["near"]
    with pytest.raises(ConfigError, match="--latency-ms has no far: give the round trip"):
        within_latency(grids, {"near": 8.0}, 50.0)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["time,region,price"], "has no column usd_mwh: its header is time,region,usd_mwh,g_kwh"),
        ([HEADER], "has no rows"),
        ([HEADER, "2024-06-10T00:00Z,a,1"], "line 2: write an ISO time and two numbers"),
        ([HEADER, "monday,a,1,2"], "line 2: write an ISO time"),
        ([HEADER, "2024-06-10T00:00Z,a,nan,2"], "line 2: give finite numbers"),
        ([HEADER, *["2024-06-10T00:00Z,a,1,2"] * 2], "line 3: the hour 2024-06-10T00:00Z of a appears twice"),
        (
            [HEADER, "2024-06-10T00:00Z,a,1,2", "2024-06-10T02:00Z,a,1,2"],
            "after 2024-06-10T00:00Z the next row of a is",
        ),
    ],
)
def test_bad_curves_are_named(lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_grids(lines, "curves.csv")


def test_the_calculator_prints_savings(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "calc",
        "schedule",
        "--curves",
        str(CURVES),
        "--hours",
        "6",
        "--watts",
        "5600",
        "--start",
        "2024-06-10T16:00Z",
    )
    out = run(capsys, *words)
    assert "40.32 kWh" in out and out.count("saves $") == 3 and "in CA-ON" in out
    facts = json.loads(run(capsys, *words, "--json"))
    assert facts["best_usd"] <= min(facts["home_best_usd"], facts["region_now_usd"]) <= facts["home_now_usd"]
    near = json.loads(run(capsys, *words, "--latency-ms", "DE-LU=8,CA-ON=110", "--most-latency-ms", "50", "--json"))
    assert near["best_usd"] == near["home_best_usd"] == facts["home_best_usd"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--hours", "30"), "--within is 24: give at least --hours 30."),
        (("--home", "FR"), "--home 'FR' is not in the file: use one of DE-LU, CA-ON."),
        (("--start", "2024-06-17T12:00Z"), "The curve of DE-LU has 2024-06-10T00:00Z to 2024-06-18T00:00Z"),
        (("--start", "noon"), "--start 'noon' is not a time"),
        (("--start", "2024-06-10T00:30Z"), "give a full hour"),
        (("--pauses", "-1"), "--pauses is -1: give 0 or more."),
        (("--latency-ms", "DE-LU", "--most-latency-ms", "5"), "--latency-ms 'DE-LU': write region=milliseconds"),
        (("--latency-ms", "DE-LU=8,CA-ON=9", "--most-latency-ms", "5"), "--most-latency-ms is 5: give at least 8"),
    ],
)
def test_the_calculator_names_bad_input(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--hours", "6") if "--hours" not in words else ()
    assert main(["calc", "schedule", "--curves", str(CURVES), "--watts", "5600", *given, *words]) == 2
    assert message in capsys.readouterr().err
