"""Measure a server with OpenAI's API under load: latencies from the scheduled time, throughput, goodput.

`ridgeline bench run URL --rate 4 --slo ttft=200ms,tpot=100ms` writes run.json, requests.jsonl and report.html.
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from rich.console import Console, RenderableType
from rich.table import Table

from ridgeline.bench import show
from ridgeline.bench.compare import compare, paired
from ridgeline.bench.figures import invalid_reason, run_json, too_short_reason
from ridgeline.bench.folder import REPORT_FILE, default_folder, save, summary
from ridgeline.bench.mock import Speed, serve_mock
from ridgeline.bench.options import CurveConfig, LoadConfig, ResultConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.progress import RunProgress
from ridgeline.bench.record import read_run
from ridgeline.bench.report import Outcome
from ridgeline.bench.search import SearchResult, doubling, levelled, saturated, search, sweep
from ridgeline.bench.server_process import serving
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.bench.traces import read_trace
from ridgeline.bench.workload import describe
from ridgeline.cli.flags import Given, Parser, add_options, check_places, parser_for
from ridgeline.core.config import option
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import split_options
from ridgeline.core.slo import Slo

CONFIGS = (TargetConfig, WorkloadConfig, LoadConfig, ResultConfig)
SECONDS_PER_RUN = 30.0
"""How long each run of a sweep, a search or a curve lasts when neither time nor number of requests is given."""


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """Which rates are tried."""

    rates: str = option(
        "", "rates of the runs in requests per second, as in 1,2,4 (default: --rate or 1, then doubled)"
    )


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """When the SLO counts as met, and how precise the search is."""

    attain: float = option(0.9, "share of all offered requests that must meet the SLO, if --slo has no attain")
    precision: float = option(0.05, "the search ends when the highest rate is known to this share")


@dataclass(frozen=True, slots=True)
class PoliciesConfig:
    """Servers that this command starts, one per batching policy."""

    policies: str = option(
        "static:8 dynamic:8,100 continuous", "values of `ridgeline serve --batching`, separated by spaces"
    )
    serve: str = option("", "further options for `ridgeline serve`, as one quoted text")


@dataclass(frozen=True, slots=True)
class MockConfig:
    """Address and speed of the mock server."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one")
    ttft_ms: float = option(200.0, "milliseconds from a request to its first chunk")
    itl_ms: float = option(50.0, "milliseconds between chunks")
    per_chunk: int = option(1, "tokens in a chunk")
    slots: int | None = option(None, "most requests served at once; others wait")
    failing: float = option(0.0, "share of requests answered with an error")


# --- the actions --------------------------------------------------------------------------------------------------------


async def run_once(
    asked: BenchConfig, progress: RunProgress, rest: Mapping[str, Any]
) -> tuple[Outcome, RenderableType]:
    """Measure a server once."""
    async with Session(asked, rest.get("target"), progress) as session:
        found = await session.measure()
        whys = await session.whys(found)
    return Outcome(f"Benchmark of {found.name}", [found], whys=whys), show.run_table(found)


async def run_sweep(
    asked: BenchConfig, progress: RunProgress, rest: Mapping[str, Any]
) -> tuple[Outcome, RenderableType]:
    """Raise the rate until the server is saturated."""
    (config,) = split_options(_mine(rest, SweepConfig), SweepConfig, origin="flag")
    told_rates = SweepConfig(**config).rates
    if told_rates and asked.load.rate is not None:
        raise ConfigError(
            "--rates lists all rates, and --rate starts the doubling: leave one of them out.", param="rate"
        )
    rates = _numbers("rates", told_rates) if told_rates else doubling(asked.load.rate or 1.0)
    async with Session(asked, rest.get("target"), progress) as session:
        runs = await sweep(lambda rate: session.measure(_at(asked, rate)), rates, progress.print_run)
    last = runs[-1]
    ended = "the server was not saturated at any rate"
    if saturated(last):
        ended = f"the server was saturated at {last.facts['rate']:g} requests/s"
    elif levelled(runs):
        ended = f"throughput did not rise from {runs[-2].facts['rate']:g} to {last.facts['rate']:g} requests/s"
    return Outcome("Sweep over rates", runs, note=f"{ended.capitalize()}."), show.runs_table(runs)


async def run_search(
    asked: BenchConfig, progress: RunProgress, rest: Mapping[str, Any]
) -> tuple[Outcome, RenderableType]:
    """Find the highest rate that meets the SLO."""
    (values,) = split_options(_mine(rest, SearchConfig), SearchConfig, origin="flag")
    config = SearchConfig(**values)
    if not asked.result.slo:
        raise ConfigError("A search needs --slo, as in --slo ttft=200ms,tpot=100ms.", param="slo")
    if not 0 < config.attain <= 1 or not 0 < config.precision < 1:
        raise ConfigError("--attain must be above 0 and at most 1, --precision between 0 and 1.", param="attain")
    async with Session(asked, rest.get("target"), progress) as session:
        start = asked.load.rate or 1.0
        found = await search(
            lambda rate: session.measure(_at(asked, rate)), start, config.attain, config.precision, progress.print_run
        )
    progress.console.print(f"\n{_answer(found, asked, config)}", markup=False, soft_wrap=True)
    return Outcome("Highest rate within the SLO", found.runs, note=_answer(found, asked, config)), show.runs_table(
        found.runs
    )


def _answer(found: SearchResult, asked: BenchConfig, config: SearchConfig) -> str:
    slo = Slo.parse(asked.result.slo)
    goal = f"{slo} was met" if slo.of_windows else f"{config.attain:.0%} of offered requests met {slo}"
    if found.best is None:
        return f"{goal} at none of the measured rates; the lowest was {min(run.facts['rate'] for run in found.runs):g} requests/s."
    good = len(found.best.good) / max(found.best.seconds, 1e-9)
    edge = "" if found.bounded else "; no higher rate was measured"
    if found.stopped:
        edge = f" (the search stopped: {found.stopped})"
    doubt = f" Warning: {words}." if (words := too_short_reason(found.best)) else ""
    met = f"Up to {found.rate:.4g} requests/s, {goal}{edge}: {good:.4g} good requests/s"
    return f"{met}, {found.best.attainment:.1%} of offered.{doubt}"


async def run_compare(
    asked: BenchConfig, progress: RunProgress, rest: Mapping[str, Any]
) -> tuple[Outcome, RenderableType]:
    """Two runs, or two servers one after the other."""
    runs = []
    for name in (rest["first"], rest["second"]):
        if Path(name).exists():
            found = read_run(Path(name))
        else:
            async with Session(asked, name, progress) as session:
                found = await session.measure(label=name)
            progress.print_run(found)
        runs.append(replace(found, facts={**found.facts, "label": found.facts.get("label") or name}))
    changes = compare(*runs)
    outcome = Outcome(f"{runs[0].name} and {runs[1].name}", runs, differences=changes)
    return outcome, show.differences_table(changes, (runs[0].name, runs[1].name), pairs=paired(*runs))


async def run_policies(
    asked: BenchConfig, progress: RunProgress, rest: Mapping[str, Any]
) -> tuple[Outcome, RenderableType]:
    """The same load on servers of our own that batch in different ways."""
    (values,) = split_options(_mine(rest, PoliciesConfig), PoliciesConfig, origin="flag")
    config = PoliciesConfig(**values)
    if not config.policies.split():
        raise ConfigError(
            "--policies is empty: give values of `ridgeline serve --batching`, as in --policies 'static:8 continuous'.",
            param="policies",
        )
    model = [rest["target"]] if "target" in rest else []
    runs = []
    for policy in config.policies.split():
        async with (
            serving([*model, *shlex.split(config.serve), "--batching", policy]) as url,
            Session(asked, url, progress) as session,
        ):
            runs.append(await session.measure(label=policy))
        progress.print_run(runs[-1])
    return Outcome("Batching policies", runs, differences=compare(runs[0], runs[-1])), show.runs_table(runs)


async def run_trace(asked: BenchConfig, progress: RunProgress, rest: Mapping[str, Any]) -> int:
    """Describe a trace."""
    if idle := [name for name in ("slo", "out", "label") if name in rest]:
        raise ConfigError(f"--{idle[0]} belongs to a run, and `bench trace` makes none: leave it out.", param=idle[0])
    figures = describe(read_trace(Path(rest["target"])))
    if asked.result.json:
        _print_json(figures)
        return 0
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
    Console().print(table, highlight=False)
    return 0


async def run_mock(asked: BenchConfig, progress: RunProgress, rest: Mapping[str, Any]) -> int:
    """Serve at a known speed until interrupted."""
    (values,) = split_options(_mine(rest, MockConfig), MockConfig, origin="flag")
    config = MockConfig(**values)
    if not (0 <= config.ttft_ms < math.inf and 0 <= config.itl_ms < math.inf):
        raise ConfigError("--ttft-ms and --itl-ms must be finite and not below 0.", param="ttft_ms")
    if config.per_chunk < 1 or (config.slots is not None and config.slots < 1) or not 0 <= config.failing <= 1:
        raise ConfigError("--per-chunk and --slots must be at least 1, --failing from 0 to 1.", param="per_chunk")
    speed = Speed(config.ttft_ms / 1e3, config.itl_ms / 1e3, config.per_chunk, config.slots, config.failing)
    await serve_mock(
        speed,
        config.host,
        config.port,
        lambda url: progress.console.print(f"listening on {url}", markup=False, soft_wrap=True),
    )
    return 0


def _at(asked: BenchConfig, rate: float) -> LoadConfig:
    return replace(asked.load, rate=rate)


def _numbers(name: str, text: str) -> list[float]:
    try:
        found = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise ConfigError(f"--{name} is {text!r}: give numbers above 0, as in 1,2,4.", param=name)
    return found


# --- the command line ---------------------------------------------------------------------------------------------------

Action = Callable[[BenchConfig, RunProgress, Mapping[str, Any]], Coroutine[Any, Any, tuple[Outcome, RenderableType]]]
_SERVER = ("target", "URL", "address of the server (default: http://127.0.0.1:8000)")
_MODEL = ("target", "MODEL", "folder or hub name to serve (default: the shipped model)")
ACTIONS: Mapping[str, tuple[str, tuple[type, ...], tuple[tuple[str, str, str], ...]]] = {
    "run": ("measure a server once", CONFIGS, (_SERVER,)),
    "sweep": ("raise the rate until the server is saturated", (*CONFIGS, SweepConfig), (_SERVER,)),
    "search": ("find the highest rate that meets an SLO", (*CONFIGS, SearchConfig), (_SERVER,)),
    "compare": (
        "compare two saved runs or two servers",
        CONFIGS,
        (("first", "A", "folder of a run, or URL of a server"), ("second", "B", "folder of a run, or URL of a server")),
    ),
    "policies": (
        "compare static, dynamic and continuous batching under one load",
        (*CONFIGS, PoliciesConfig),
        (_MODEL,),
    ),
    "curve": ("measure throughput, latency, MFU and MBU at several concurrencies", (*CONFIGS, CurveConfig), (_SERVER,)),
    "trace": ("describe a trace", (ResultConfig,), (("target", "FILE", "file of the trace"),)),
    "mock": ("start a mock server of known speed", (MockConfig,), ()),
}
"""Action -> its help, its options, its words (name, how it is shown, help)."""
_OPTIONAL_WORDS = (_SERVER, _MODEL)
_RUNS: Mapping[str, Action] = {
    "run": run_once,
    "sweep": run_sweep,
    "search": run_search,
    "compare": run_compare,
    "policies": run_policies,
}


def parser() -> Parser:
    found = parser_for("bench", __doc__ or "", (), model=False)
    actions = found.add_subparsers(dest="action", metavar=f"{{{','.join(ACTIONS)}}}", required=True)
    for name, (text, configs, words) in ACTIONS.items():
        one = actions.add_parser(
            name, help=text, description=text, argument_default=argparse.SUPPRESS, allow_abbrev=False
        )
        for word in words:
            one.add_argument(word[0], nargs="?" if word in _OPTIONAL_WORDS else None, metavar=word[1], help=word[2])
        add_options(one, configs)
    return found


def run(given: Given) -> int:
    rest = {**vars(given.rest), **given.flags}
    action = str(rest["action"])
    if "url" in rest and ("target" in rest or action in ("compare", "policies")):
        raise ConfigError("The server or model is given as an argument: leave --url out.", param="url")
    asked = read_asked(rest)
    if action in ("sweep", "search", "curve") and asked.load.duration is None and asked.workload.max_requests is None:
        asked = replace(asked, load=replace(asked.load, duration=SECONDS_PER_RUN))
    with RunProgress() as progress:
        if action in ("trace", "mock"):
            return uvloop.run((run_mock if action == "mock" else run_trace)(asked, progress, rest))
        check_places({"out": asked.result.out or default_folder()}, "out", folder=True)
        # By name, because a model's formulas bring torch, and a load generator should be light.
        act: Action = import_module("ridgeline.cli.bench_curve").run_curve if action == "curve" else _RUNS[action]
        outcome, table = uvloop.run(act(asked, progress, rest))
    return _end(asked, outcome, table)


def read_asked(rest: Mapping[str, Any]) -> BenchConfig:
    """The four configurations from what was given; what an action does not take was not given."""
    values = split_options({name: rest[name] for name in _names(CONFIGS) if name in rest}, *CONFIGS, origin="flag")
    target, workload, load, result = values
    return BenchConfig(TargetConfig(**target), WorkloadConfig(**workload), LoadConfig(**load), ResultConfig(**result))


def _end(asked: BenchConfig, outcome: Outcome, table: RenderableType) -> int:
    """Write, print, and say by the exit status whether the figures can be believed."""
    folder = save(outcome, asked.result.out)
    if asked.result.json:
        _print_json(run_json(outcome.runs[0]) if len(outcome.runs) == 1 else summary(outcome))
    else:
        Console().print(table, highlight=False)
    print(f"\nreport: {folder / REPORT_FILE}", file=sys.stderr)
    invalid = [why for one in outcome.runs if (why := invalid_reason(one))]
    if not any(one.completed for one in outcome.runs):
        invalid.append("no request was answered")
    for why in invalid:
        print(f"ridgeline: not valid: {why}.", file=sys.stderr)
    return 1 if invalid else 0


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


def _names(configs: Sequence[type]) -> list[str]:
    return [name for config in configs for name in config.__dataclass_fields__]  # type: ignore[attr-defined]


def _mine(rest: Mapping[str, Any], config: type) -> dict[str, Any]:
    """The given options of one configuration."""
    return {name: rest[name] for name in _names([config]) if name in rest}


__all__ = ["ACTIONS", "parser", "run"]
