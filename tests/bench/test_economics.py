"""Cost and energy per request, and goodput per dollar and per watt: known, unknown with a remedy, saved, compared."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console, RenderableType

from ridgeline.bench.compare import compare
from ridgeline.bench.economics import ENERGY_REMEDY, PRICE_REMEDY, SLO_REMEDY, economics, lines
from ridgeline.bench.figures import run_json
from ridgeline.bench.folder import save
from ridgeline.bench.options import LoadConfig, WorkloadConfig
from ridgeline.bench.record import Run, read_run
from ridgeline.bench.report import Outcome, html
from ridgeline.bench.session import BenchConfig
from ridgeline.bench.show import differences_table, run_table, runs_table
from ridgeline.cli.main import main

from ..live.served import Served, served
from ..service.live import behaviour, live, says
from .rows import failed, make_run, row
from .test_curve import COUNTED
from .test_measure import measured, mock

SERVER = {"ceilings": {"price": 3.6, "power": "nvml"}}


def a_run(slo: str = "ttft=150ms", **facts: Any) -> Run:
    """Ten seconds: six good requests, two late ones, two failed ones."""
    rows = [
        *(row(at) for at in range(6)),
        *(row(at, ttft=0.2) for at in range(6, 8)),
        *(failed(at) for at in range(8, 10)),
    ]
    return make_run(rows, slo, seconds=10.0, **facts)


def text(table: RenderableType) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize(
    "facts",
    [
        {"server": SERVER, "counted": COUNTED},
        {"usd_hour": 3.6, "watts": 90.0},
        {
            "usd_hour": 3.6,
            "watts": 90.0,
            "server": {"ceilings": {"price": 99.0}},
            "counted": {**COUNTED, "joules": 1.0},
        },
    ],
)
def test_the_bill_is_that_of_the_run_and_its_completed_requests(facts: dict[str, Any]) -> None:
    """3.60 dollars an hour and 900 J in ten seconds: a cent, shared by eight requests. What the user gave counts first."""
    figures = economics(a_run(**facts))
    assert figures.usd == pytest.approx(0.01) and figures.watts == pytest.approx(90)
    assert figures.usd_per_request == pytest.approx(0.01 / 8) and figures.joules_per_request == pytest.approx(900 / 8)
    assert figures.good_per_usd == pytest.approx(600)
    assert figures.goodput_per_watt == pytest.approx(0.6 / 90)  # requests per second, and watts


def test_the_source_is_shown() -> None:
    shown = dict(lines(a_run(server=SERVER, counted=COUNTED)))
    assert shown["cost per 1,000 requests"] == "$1.25 ($3.6 an hour as the server reports)"
    assert shown["energy per request"] == "112.5 J (NVML counter of the server's device)"
    assert shown["goodput per dollar"].startswith("600 requests (")
    assert shown["goodput per kilowatt"].startswith("6.667 requests/s (")


@pytest.mark.parametrize("counted", [None, {**COUNTED, "joules": 0.0}])
def test_what_is_unknown_says_so_and_how_to_mend_it(counted: dict[str, float] | None) -> None:
    run = a_run(server={"ceilings": {"price": 0.0, "power": ""}}, counted=counted)
    shown = dict(lines(run))
    assert shown["cost per 1,000 requests"] == f"unknown: {PRICE_REMEDY}"
    assert shown["energy per request"] == f"unknown: {ENERGY_REMEDY}"
    assert run_json(run)["ridgeline"]["economics"]["usd_per_request"] is None
    unjudged = dict(lines(a_run("", usd_hour=1.0)))
    assert unjudged["goodput per dollar"] == f"unknown: {SLO_REMEDY}" and "$" in unjudged["cost per 1,000 requests"]
    lost = dict(lines(make_run([failed()], usd_hour=1.0, watts=1.0)))
    assert lost["cost per 1,000 requests"] == "unknown: no request was completed"


def test_tables_and_report_show_them() -> None:
    run = a_run(usd_hour=3.6, watts=90.0)
    assert "$1.25 ($3.6 an hour as given)" in text(run_table(run)) and "112.5 J (90 W as given)" in text(run_table(run))
    several = text(runs_table([run, a_run()]))
    assert "per 1,000 requests" in several and "$1.25" in several and "unknown" in several
    assert "per 1,000 requests" not in text(runs_table([a_run()]))
    page = html(Outcome("a run", [run], single=True))
    assert "<b>$1.25</b><span>per 1,000 requests</span>" in page and "600 requests" in page
    assert f"unknown: {PRICE_REMEDY}" in html(Outcome("a run", [a_run()], single=True))


def test_a_comparison_of_saved_runs_has_them(tmp_path: Path) -> None:
    runs = [a_run(usd_hour=price, watts=90.0, label=name) for name, price in (("cheap", 3.6), ("dear", 7.2))]
    save(Outcome("two", runs), str(tmp_path))
    read = [read_run(tmp_path / number) for number in ("01", "02")]
    changes = {change.measure.name: change for change in compare(*read)}
    cost = changes["cost per 1,000 requests"]
    assert (cost.first, cost.second, cost.verdict) == (pytest.approx(1.25), pytest.approx(2.5), "no interval")
    assert changes["goodput per dollar"].change.value == pytest.approx(-300)
    assert changes["energy per request"].change.value == 0
    shown = text(differences_table(list(changes.values()), ("cheap", "dear"), pairs=True))
    assert "cost per 1,000 requests $" in shown and "+1.25 " in shown and "nan" not in shown


def test_a_record_of_an_older_version_is_read_and_compared(tmp_path: Path) -> None:
    """It has no prices among its facts and no economics among its figures."""
    old = a_run(server={"ceilings": {}}, counted=None)
    save(Outcome("old", [old], single=True), str(tmp_path))
    file = tmp_path / "run.json"
    content = msgspec.json.decode(file.read_bytes())
    del content["ridgeline"]["economics"]
    file.write_bytes(msgspec.json.encode(content))
    read = read_run(tmp_path)
    assert "cost per 1,000 requests" not in {change.measure.name for change in compare(read, read)}
    (cost,) = [c for c in compare(read, a_run(usd_hour=3.6)) if c.measure.name == "cost per 1,000 requests"]
    assert cost.verdict == "unknown" and cost.texts[1:] == ("unknown", "1.25", "-")


def test_a_run_against_a_mock_shows_dollars_and_joules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--num-prompts", "6", "--output-len", "4", "--slo", "ttft=5s"]
    prices = ["--usd-hour", "2", "--watts", "300"]
    with mock() as url:
        for name, options in (("known", prices), ("unknown", [])):
            main(["bench", "run", url, *load, *options, "--out", str(tmp_path / name)])
    _, known, unknown = " ".join(capsys.readouterr().out.split()).split("requests 6 offered")
    assert "$2 an hour as given" in known and "J (300 W as given)" in known
    assert PRICE_REMEDY in unknown and ENERGY_REMEDY in unknown
    saved = msgspec.json.decode((tmp_path / "known" / "run.json").read_bytes())
    figures, seconds = saved["ridgeline"]["economics"], saved["duration"]
    assert figures["usd_per_request"] == pytest.approx(2 * seconds / 3600 / 6)
    assert figures["joules_per_request"] == pytest.approx(300 * seconds / 6)
    folders = [str(tmp_path / name) for name in ("known", "unknown")]
    main(["bench", "compare", *folders, "--usd-hour", "4", "--json", "--out", str(tmp_path / "both")])
    changes = {change["measure"]: change for change in msgspec.json.decode(capsys.readouterr().out)["differences"]}
    assert changes["cost per 1,000 requests"]["first"] == pytest.approx(2 * 1e3 * figures["usd_per_request"])
    assert changes["cost per 1,000 requests"]["second"] > 0 and changes["energy per request"]["second_is"] == "unknown"
    assert main(["bench", "run", "http://127.0.0.1:1", "--usd-hour", "-1"]) == 2
    assert "--usd-hour is -1" in capsys.readouterr().err


@pytest.fixture(scope="module")
def priced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--device", "cpu", "--max-num-seqs", "4", "--max-model-len", "512", "--threads", "1")
    with served(tmp_path_factory.mktemp("priced"), *flags, "--price-per-hour", "1.5") as server:
        yield server


def test_a_run_takes_the_price_of_a_server_of_ridgeline(
    priced: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--num-prompts", "4", "--input-len", "16", "--output-len", "8"]
    main(["bench", "run", priced.url, *load, "--json", "--out", str(tmp_path / "run")])
    run = msgspec.json.decode(capsys.readouterr().out)
    figures = run["ridgeline"]["economics"]
    assert figures["usd_per_request"] == pytest.approx(1.5 * run["duration"] / 3600 / 4)
    assert figures["price_source"] == "$1.5 an hour as the server reports"


def test_a_run_takes_the_joules_of_the_servers_counter() -> None:
    """Half a joule per output token; warm-up requests before the run are not its energy."""
    load = BenchConfig(
        workload=WorkloadConfig(input_len="5", output_len="6", max_requests=4), load=LoadConfig(warmup=2)
    )
    with live(behaviour(says("a long answer of many words"), joules=0.5), price_per_hour=7.2) as server:
        figures = economics(measured(load, f"http://127.0.0.1:{server.port}"))
    assert figures.joules_per_request == pytest.approx(0.5 * 6) and figures.energy_source == "counter of the server"
    assert figures.usd_per_request == pytest.approx(7.2 * figures.seconds / 3600 / 4)


def test_prices_of_a_recorded_run(priced: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Prompts share half of their tokens: the three prices times their tokens are the bill."""
    folder = str(tmp_path / "run")
    load = "--num-prompts 8 --input-len 128 --prefix-len 64 --output-len 16 --concurrency 2".split()
    main(["bench", "run", priced.url, *load, "--out", folder])
    capsys.readouterr()
    assert main(["calc", "cost", "--run", folder, "--usd-hour", "2", "--json"]) == 0
    figures = msgspec.json.decode(capsys.readouterr().out)
    run = read_run(Path(folder))
    rows = run.completed
    counts = {
        "input": sum(row.input_tokens - row.cached_tokens for row in rows),
        "cached": sum(row.cached_tokens for row in rows),
        "output": sum(row.output_tokens for row in rows),
    }
    assert counts["cached"] >= 64 * 4
    paid = sum(figures[f"usd_million_{name}"] * n_tokens for name, n_tokens in counts.items()) / 1e6
    assert paid == pytest.approx(figures["bill_usd"]) == pytest.approx(2 * run.seconds / 3600)
    assert 0 < figures["usd_million_cached"] < figures["usd_million_input"] < figures["usd_million_output"]
    assert figures["cached_to_input"] < 0.5 and 0 < figures["busy_share"] <= 1
    main(["calc", "cost", "--run", folder, "--usd-hour", "2", "--paid-share", "0.5", "--json"])
    half = msgspec.json.decode(capsys.readouterr().out)
    assert half["usd_million_output"] == pytest.approx(figures["usd_million_output"] / 2)
    assert main(["calc", "cost", "--run", folder, "--usd-hour", "2"]) == 0
    assert f"x {counts['cached']:,} tokens = $" in capsys.readouterr().out
    assert main(["calc", "cost", "--run", folder, "--usd-hour", "2", "--paid-share", "2"]) == 2
    assert "--paid-share is 2: give a share of at most 1" in capsys.readouterr().err
    file = Path(folder, "run.json")
    content = msgspec.json.decode(file.read_bytes())
    del content["ridgeline"]["facts"]["server"]["ceilings"]["price"]
    file.write_bytes(msgspec.json.encode(content))
    assert main(["calc", "cost", "--run", folder]) == 2 and "--usd-hour" in capsys.readouterr().err


def test_prices_need_a_run_of_ridgeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(Outcome("mock", [a_run(usd_hour=1.0)], single=True), str(tmp_path / "mock"))
    assert main(["calc", "cost", "--run", str(tmp_path / "mock")]) == 2
    assert "against a Ridgeline server" in capsys.readouterr().err
    old = a_run(usd_hour=1.0, counted=COUNTED, server={"requests": [{"prompt_tokens": 9}], "facts": {}})
    save(Outcome("old", [old], single=True), str(tmp_path / "old"))
    assert main(["calc", "cost", "--run", str(tmp_path / "old")]) == 2
    assert "against a Ridgeline server" in capsys.readouterr().err
    assert main(["calc", "cost", "--run", str(tmp_path / "none"), "--usd-hour", "1"]) == 2
    assert "Cannot read the run" in capsys.readouterr().err
    for words, message in (
        (["--run", "x", "--tokens-s", "5"], "leave one of them out"),
        (["--usd-hour", "1", "--tokens-s", "5", "--paid-share", "0.5"], "give --run too"),
    ):
        assert main(["calc", "cost", *words]) == 2 and message in capsys.readouterr().err


def test_training_pays_by_the_saving_of_two_recorded_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A distilled model makes a request cheaper by 1.25 dollars in a thousand: 1,000 dollars are back after 800,000 requests."""
    for name, price in (("before", 7.2), ("after", 3.6), ("dearer", 9.0), ("unpriced", None)):
        prices = {} if price is None else {"usd_hour": price}
        save(Outcome(name, [a_run(**prices)], single=True), str(tmp_path / name))

    def calc(after: str, *more: str) -> int:
        folders = ["--before", str(tmp_path / "before"), "--after", str(tmp_path / after)]
        return main(["calc", "training", "--training-usd", "1000", *folders, *more])

    assert calc("after", "--requests", "1e6", "--json") == 0
    figures = msgspec.json.decode(capsys.readouterr().out)
    assert figures["saved_usd"] == pytest.approx(1.25e-3) and figures["payback_requests"] == pytest.approx(800_000)
    assert figures["pays"] == 1
    assert calc("dearer", "--requests", "1e6") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "never: requests do not become cheaper" in shown and "no: $1000 > -$625" in shown
    assert calc("unpriced") == 2 and "--usd-hour" in capsys.readouterr().err
