"""`ridgeline simulate --recorded`: what the percentiles of recorded requests would have been with other options."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.cli.diagnose import read_record, situation_of
from ridgeline.cli.flags import Arguments, Parser, whole_number
from ridgeline.core.errors import ConfigError
from ridgeline.core.resolve import Resolved
from ridgeline.planner.ranking import seconds_text
from ridgeline.planner.replay import COVERAGE, RESAMPLES, Case, Estimate, Interval, changed, replay
from ridgeline.planner.situation import Situation, newest, outcome_of
from ridgeline.service.routing import POLICIES

NOT_REPLAYED = (
    "gpu", "trace", "rate", "input_len", "output_len", "prefix_len", "autoscale", "cold_start_s", "lose", "limit", "slo",
    "surrogate",
)  # fmt: skip
"""Options of the command that say what the record says already, or that a replay does not have."""
MOST = 1000
"""Requests that are replayed, the newest ones: as many as a server keeps."""


def add_replay(parser: Parser) -> None:
    group = parser.add_argument_group("replay of recorded requests")
    group.add_argument(
        "--recorded", metavar="RUN|URL", help="result folder of `ridgeline bench run`, or address of a Ridgeline server"
    )
    group.add_argument(
        "--resamples", type=whole_number, metavar="N", help=f"samples for the intervals (default: {RESAMPLES}; 0: none)"
    )
    group.add_argument("--api-key", dest="key", metavar="TEXT", help="API key of the recorded server")


def replay_recorded(args: Arguments, resolved: Resolved) -> int:
    options = vars(args.options)
    for name in NOT_REPLAYED:
        if name in options:
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} does not go with --recorded, which has the requests: leave it out.", param=name
            )
    if args.config is not None:
        raise ConfigError("--config does not go with --recorded: give each changed option by itself.", param="config")
    case = _case(options)
    asked = {name: _value(resolved, name) for name in args.flags if name != "model"}
    if not asked and case == (1, "prefix"):
        raise ConfigError(
            "--recorded needs a change: --max-num-batched-tokens, --kv-cache-dtype, --replicas or others."
        )
    record = read_record(options["recorded"], options.get("key", ""))
    before = situation_of(record, resolved.model.model if "model" in args.flags else "", options.get("requests", MOST))
    after = changed(before, asked)
    recorded = [outcome_of(row) for row in newest(record.rows, options.get("requests", MOST))]
    estimates = replay(Case(before), Case(after, *case), recorded, options.get("resamples", RESAMPLES))
    words = _words(asked, *case)
    if "json" in options:
        print(json.dumps(_facts(estimates, before, words), indent=2))
    else:
        _show(Console(), estimates, before, words)
    return 0


def _case(options: Mapping[str, Any]) -> tuple[int, str]:
    """Replicas and policy of the router."""
    replicas, route = options.get("replicas", 1), options.get("route", "prefix")
    if replicas < 1:
        raise ConfigError(f"--replicas is {replicas}: give 1 or more.", param="replicas")
    if route not in POLICIES:
        raise ConfigError(f"--route is {route!r}: use {', '.join(POLICIES)}.", param="route")
    for name in ("requests", "resamples"):
        if options.get(name, 1) < (0 if name == "resamples" else 1):
            raise ConfigError(f"--{name} is {options[name]}: give a larger number.", param=name)
    return replicas, route


def _value(resolved: Resolved, name: str) -> Any:
    """The value of an option, with its type."""
    for config in (resolved.engine, resolved.model, resolved.service):
        if hasattr(config, name):
            return getattr(config, name)
    raise ConfigError(f"--{name.replace('_', '-')} cannot be replayed: leave it out.", param=name)


def _words(asked: Mapping[str, Any], replicas: int, route: str) -> str:
    words = [f"{name.replace('_', '-')} {value}" for name, value in asked.items()]
    return ", ".join(words + ([f"{replicas} replicas behind {route}"] if replicas > 1 else []))


def _show(console: Console, estimates: Sequence[Estimate], before: Situation, words: str) -> None:
    requests = len(before.workload.requests)
    load = (
        f"{before.concurrency} at a time"
        if before.concurrency is not None
        else f"{before.workload.rate:.3g} requests/s"
    )
    console.print(f"[bold]{requests:,} recorded requests[/bold], {load}; changed: {escape(words)}", highlight=False)
    basis = "calibrated" if before.server.cost.calibrated else "scaled to the recorded steps"
    console.print(f"step times: {basis}; intervals: {COVERAGE:.0%} of other runs of this traffic\n", highlight=False)
    head = ("", "recorded", "simulated as recorded", "simulated with the change", "change", "would have been")
    table = Table(*head, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for each in estimates:
        if not math.isnan(each.recorded.value):
            cells = _between(each.recorded), seconds_text(each.as_recorded), _between(each.simulated)
            table.add_row(each.name, *cells, f"{each.change:+.0%}", _between(each.expected))
    Console(width=max(console.width, 170)).print(table)
    for line in _doubts(estimates, before):
        console.print(f"\n[bold]Warning:[/bold] {escape(line)}", highlight=False)


def _doubts(estimates: Sequence[Estimate], before: Situation) -> list[str]:
    return before.doubts({each.name: (each.recorded.value, each.as_recorded) for each in estimates})


def _between(interval: Interval) -> str:
    text = seconds_text(interval.value)
    if interval.low == interval.high:
        return text
    return f"{text} ({seconds_text(interval.low)} to {seconds_text(interval.high)})"


def _facts(estimates: Sequence[Estimate], before: Situation, words: str) -> dict[str, Any]:
    """The estimates for JSON, in seconds."""
    return {
        "requests": len(before.workload.requests),
        "changed": words,
        "coverage": COVERAGE,
        "warnings": _doubts(estimates, before),
        "estimates": [
            {
                "name": each.name,
                "change": each.change,
                **{key: value for key, value in asdict(each).items() if key != "name"},
            }
            for each in estimates
            if not math.isnan(each.recorded.value)
        ],
    }
