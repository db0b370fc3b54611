"""Measure a server of the OpenAI API under load: latencies from the scheduled time, throughput, goodput.

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
from ridgeline.cli.flags import Arguments, Parser, add_options, check_output_paths, parser_for
from ridgeline.core.config import option
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import split_options
from ridgeline.core.slo import Slo
from ridgeline.core.workload import describe

CONFIGS = (TargetConfig, WorkloadConfig, LoadConfig, ResultConfig)
SECONDS_PER_RUN = 30.0
"""How long each run of a sweep, a search or a curve lasts when neither time nor number of requests is given."""

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """Rates of a sweep."""

    rates: str = option(
        "", "rates of the runs in requests per second, as in 1,2,4 (default: --rate or 1, then doubled)"
    )


@dataclass(frozen=True, slots=True)
class SearchConfig:
    """When the SLO counts as met, and how precise the result is."""

    attain: float = option(0.9, "share of all offered requests that must meet the SLO, if --slo has no attain")
    precision: float = option(0.05, "end the search when the highest rate is known to this relative precision")


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
    slots: int | None = option(None, "maximum number of concurrent requests; others wait")
    failing: float = option(0.0, "share of requests answered with an error")


# --- the actions --------------------------------------------------------------------------------------------------------


async def run_once(
    settings: BenchConfig, progress: RunProgress, options: Mapping[str, Any]
) -> tuple[Outcome, RenderableType]:
    """Measure a server once."""
    async with Session(settings, options.get("target"), progress) as session:
        run = await session.measure(partial=True)
        whys = await session.whys(run)
    return Outcome(f"Benchmark of {run.name}", [run], single=True, whys=whys), show.run_table(run)


async def run_sweep(
    settings: BenchConfig, progress: RunProgress, options: Mapping[str, Any]
) -> tuple[Outcome, RenderableType]:
    """Raise the rate until the server is saturated."""
    (config,) = split_options(_options_of(options, SweepConfig), SweepConfig, origin="flag")
    listed_rates = SweepConfig(**config).rates
    if listed_rates and settings.load.rate is not None:
        raise ConfigError(
            "--rates lists all rates, and --rate starts the doubling: leave one of them out.", param="rate"
        )
    rates = _numbers("rates", listed_rates) if listed_rates else doubling(settings.load.rate or 1.0)
    async with Session(settings, options.get("target"), progress) as session:
        runs = await sweep(
            lambda rate: session.measure(_with_rate(settings, rate), partial=True), rates, progress.print_run
        )
    last = runs[-1]
    ended = "the server was not saturated at any rate"
    if last.interrupted:
        ended = "the sweep was interrupted"
    elif saturated(last):
        ended = f"the server was saturated at {last.facts['rate']:g} requests/s"
    elif levelled(runs):
        ended = f"throughput did not rise from {runs[-2].facts['rate']:g} to {last.facts['rate']:g} requests/s"
    return Outcome("Sweep over rates", runs, note=f"{ended.capitalize()}."), show.runs_table(runs)


async def run_search(
    settings: BenchConfig, progress: RunProgress, options: Mapping[str, Any]
) -> tuple[Outcome, RenderableType]:
    """Find the highest rate that meets the SLO."""
    (values,) = split_options(_options_of(options, SearchConfig), SearchConfig, origin="flag")
    config = SearchConfig(**values)
    if not settings.result.slo:
        raise ConfigError("A search needs --slo, as in --slo ttft=200ms,tpot=100ms.", param="slo")
    if not 0 < config.attain <= 1 or not 0 < config.precision < 1:
        raise ConfigError("--attain must be above 0 and at most 1, --precision between 0 and 1.", param="attain")
    async with Session(settings, options.get("target"), progress) as session:
        start = settings.load.rate or 1.0
        result = await search(
            lambda rate: session.measure(_with_rate(settings, rate), partial=True),
            start,
            config.attain,
            config.precision,
            progress.print_run,
        )
    progress.console.print(f"\n{_answer(result, settings, config)}", markup=False, soft_wrap=True)
    return Outcome("Highest rate within the SLO", result.runs, note=_answer(result, settings, config)), show.runs_table(
        result.runs
    )


def _answer(result: SearchResult, settings: BenchConfig, config: SearchConfig) -> str:
    slo = Slo.parse(settings.result.slo)
    goal = f"{slo} was met" if slo.of_windows else f"{config.attain:.0%} of offered requests met {slo}"
    if result.best is None:
        return f"{goal} at none of the measured rates; the lowest was {min(run.facts['rate'] for run in result.runs):g} requests/s."
    good = len(result.best.good) / max(result.best.seconds, 1e-9)
    edge = "" if result.bounded else "; no higher rate was measured"
    if result.stopped:
        edge = f" (the search stopped: {result.stopped})"
    warning = f" Warning: {trouble_text}." if (trouble_text := too_short_reason(result.best)) else ""
    sentence = f"Up to {result.rate:.4g} requests/s, {goal}{edge}: {good:.4g} good requests/s"
    return f"{sentence}, {result.best.attainment:.1%} of offered.{warning}"


async def run_compare(
    settings: BenchConfig, progress: RunProgress, options: Mapping[str, Any]
) -> tuple[Outcome, RenderableType]:
    """Compare two saved runs, or measure two servers one after the other and compare them."""
    runs = []
    for name in (options["first"], options["second"]):
        if Path(name).exists():
            run = read_run(Path(name))
        else:
            async with Session(settings, name, progress) as session:
                run = await session.measure(label=name)
            progress.print_run(run)
        # Prices of this command also apply to saved runs.
        facts = {**run.facts, **settings.result.prices, "label": run.facts.get("label") or name}
        runs.append(replace(run, facts=facts))
    changes = compare(*runs)
    outcome = Outcome(f"{runs[0].name} and {runs[1].name}", runs, differences=changes)
    return outcome, show.differences_table(changes, (runs[0].name, runs[1].name), pairs=paired(*runs))


async def run_policies(
    settings: BenchConfig, progress: RunProgress, options: Mapping[str, Any]
) -> tuple[Outcome, RenderableType]:
    """Start one server per batching policy and measure all of them under the same load."""
    (values,) = split_options(_options_of(options, PoliciesConfig), PoliciesConfig, origin="flag")
    config = PoliciesConfig(**values)
    if not config.policies.split():
        raise ConfigError(
            "--policies is empty: give values of `ridgeline serve --batching`, as in --policies 'static:8 continuous'.",
            param="policies",
        )
    model = [options["target"]] if "target" in options else []
    runs = []
    for policy in config.policies.split():
        async with (
            serving([*model, *shlex.split(config.serve), "--batching", policy]) as url,
            Session(settings, url, progress) as session,
        ):
            runs.append(await session.measure(label=policy))
        progress.print_run(runs[-1])
    return Outcome("Batching policies", runs, differences=compare(runs[0], runs[-1])), show.runs_table(runs)


async def run_trace(settings: BenchConfig, progress: RunProgress, options: Mapping[str, Any]) -> int:
    """Print statistics of a trace."""
    if unused := [name for name in ("slo", "out", "label", "usd_hour", "watts") if name in options]:
        raise ConfigError(
            f"--{unused[0]} applies to runs, and `bench trace` sends no requests: leave it out.", param=unused[0]
        )
    figures = describe(read_trace(Path(options["target"])))
    if settings.result.json:
        _print_json(figures)
        return 0
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), f"{value:,.4g}" if isinstance(value, float) else f"{value:,}")
    Console().print(table, highlight=False)
    return 0


async def run_mock(settings: BenchConfig, progress: RunProgress, options: Mapping[str, Any]) -> int:
    """Run the mock server until interrupted."""
    (values,) = split_options(_options_of(options, MockConfig), MockConfig, origin="flag")
    config = MockConfig(**values)
    if not (0 <= config.ttft_ms < math.inf and 0 <= config.itl_ms < math.inf):
        raise ConfigError("--ttft-ms and --itl-ms must be finite: give milliseconds of at least 0.", param="ttft_ms")
    if config.per_chunk < 1 or (config.slots is not None and config.slots < 1) or not 0 <= config.failing <= 1:
        raise ConfigError(
            "--per-chunk and --slots must be at least 1, and --failing a share from 0 to 1.", param="per_chunk"
        )
    speed = Speed(config.ttft_ms / 1e3, config.itl_ms / 1e3, config.per_chunk, config.slots, config.failing)
    await serve_mock(
        speed,
        config.host,
        config.port,
        lambda url: progress.console.print(f"listening on {url}", markup=False, soft_wrap=True),
    )
    return 0


def _with_rate(settings: BenchConfig, rate: float) -> LoadConfig:
    return replace(settings.load, rate=rate)


def _numbers(name: str, text: str) -> list[float]:
    try:
        numbers = [float(word) for word in text.replace(",", " ").split()]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0:
        raise ConfigError(f"--{name} is {text!r}: give numbers above 0, as in 1,2,4.", param=name)
    return numbers


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
"""Action -> help, configurations whose fields are its options, positional arguments (name, metavar, help)."""
_OPTIONAL_ARGUMENTS = (_SERVER, _MODEL)
_RUNS: Mapping[str, Action] = {
    "run": run_once,
    "sweep": run_sweep,
    "search": run_search,
    "compare": run_compare,
    "policies": run_policies,
}


def parser() -> Parser:
    parser = parser_for("bench", __doc__ or "", (), model=False)
    actions = parser.add_subparsers(dest="action", metavar=f"{{{','.join(ACTIONS)}}}", required=True)
    for name, (text, configs, arguments) in ACTIONS.items():
        subparser = actions.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            usage=" ".join(
                [
                    "ridgeline bench",
                    name,
                    *(f"[{it[1]}]" if it in _OPTIONAL_ARGUMENTS else it[1] for it in arguments),
                    "[options]",
                ]
            ),
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
        )
        for argument in arguments:
            subparser.add_argument(
                argument[0],
                nargs="?" if argument in _OPTIONAL_ARGUMENTS else None,
                metavar=argument[1],
                help=argument[2],
            )
        add_options(subparser, configs)
    return parser


def run(args: Arguments) -> int:
    options = {**vars(args.options), **args.flags}
    action = str(options["action"])
    if "url" in options and ("target" in options or action in ("compare", "policies")):
        raise ConfigError("The server or model is given as an argument: leave --url out.", param="url")
    settings = read_settings(options)
    if (
        action in ("sweep", "search", "curve")
        and settings.load.duration is None
        and settings.workload.max_requests is None
    ):
        settings = replace(settings, load=replace(settings.load, duration=SECONDS_PER_RUN))
    with RunProgress() as progress:
        if action in ("trace", "mock"):
            return uvloop.run((run_mock if action == "mock" else run_trace)(settings, progress, options))
        check_output_paths({"out": settings.result.out or default_folder()}, "out", folder=True)
        # Imported on demand: the formulas of a model import torch, which the other actions do not need.
        act: Action = import_module("ridgeline.cli.bench_curve").run_curve if action == "curve" else _RUNS[action]
        outcome, table = uvloop.run(act(settings, progress, options))
    return _end(settings, outcome, table)


def read_settings(options: Mapping[str, Any]) -> BenchConfig:
    """Build the four configurations. Fields that an action does not offer keep their defaults."""
    values = split_options(
        {name: options[name] for name in _names(CONFIGS) if name in options}, *CONFIGS, origin="flag"
    )
    target, workload, load, result = values
    return BenchConfig(TargetConfig(**target), WorkloadConfig(**workload), LoadConfig(**load), ResultConfig(**result))


def _end(settings: BenchConfig, outcome: Outcome, table: RenderableType) -> int:
    """Write and print the results. Returns the exit status: 1 if a run is not valid, 130 after Ctrl-C."""
    folder = save(outcome, settings.result.out)
    if settings.result.json:
        _print_json(run_json(outcome.runs[0]) if outcome.single else summary(outcome))
    else:
        Console().print(table, highlight=False)
    print(f"\nreport: {folder / REPORT_FILE}", file=sys.stderr)
    problems = [reason for run in outcome.runs if (reason := invalid_reason(run))]
    if not any(run.completed for run in outcome.runs):
        problems.append("no request was answered")
    for reason in problems:
        print(f"ridgeline: The result is not valid: {reason}.", file=sys.stderr)
    return INTERRUPTED if any(run.interrupted for run in outcome.runs) else 1 if problems else 0


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


def _names(configs: Sequence[type]) -> list[str]:
    return [name for config in configs for name in config.__dataclass_fields__]  # type: ignore[attr-defined]


def _options_of(options: Mapping[str, Any], config: type) -> dict[str, Any]:
    """Select the options that belong to fields of `config`."""
    return {name: options[name] for name in _names([config]) if name in options}


__all__ = ["ACTIONS", "parser", "run"]
