"""`ridgeline plan --measured RUN`: plans for the requests of a run, and shows what it measured beside what is predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ridgeline.bench.record import Run, read_run
from ridgeline.core.errors import ConfigError
from ridgeline.core.workload import RequestSpec, Workload
from ridgeline.planner.plan_text import name
from ridgeline.planner.proposals import Proposal, Tail
from ridgeline.planner.ranking import seconds_text

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "whole answer"}


def read_measured(options: Mapping[str, Any]) -> Run | None:
    """The run of --measured. Raises ConfigError if the server set the times of its requests."""
    if "measured" not in options:
        return None
    for other in ("trace", "rate", "input_len", "output_len"):
        if other in options:
            flag = other.replace("_", "-")
            raise ConfigError(
                f"--{flag} does not go with --measured, which has the requests: leave it out.", param=other
            )
    run = read_run(Path(options["measured"]))
    if not math.isfinite(run.facts.get("rate") or math.inf) or len(run.completed) < 2:
        remedy = "in a closed loop the server sets the rate"
        raise ConfigError(
            f"--measured {options['measured']}: give a run with --rate and at least two answers; {remedy}.",
            param="measured",
        )
    return run


def workload_of_run(run: Run) -> Workload:
    """The answered requests at their scheduled times. What their prompts share is not recorded."""
    rows = sorted(run.completed, key=lambda row: row.scheduled_s)
    requests = (RequestSpec(row.scheduled_s, max(1, row.input_tokens), max(1, row.output_tokens)) for row in rows)
    return Workload(run.name, tuple(requests), timed=True)


def compared(proposal: Proposal, run: Run) -> dict[str, tuple[Tail, Tail]]:
    """(Predicted, measured) percentiles by latency."""
    columns = {part: [getattr(row, f"{part}_s") for row in run.completed] for part in LATENCIES}
    measured = {part: Tail.of([value for value in values if value is not None]) for part, values in columns.items()}
    return {part: (getattr(proposal, part), tail) for part, tail in measured.items()}


def measured_facts(proposal: Proposal, run: Run) -> dict[str, Any]:
    """For JSON, in seconds."""
    return {
        part: {"predicted": asdict(predicted), "measured": asdict(measured)}
        for part, (predicted, measured) in compared(proposal, run).items()
    }


def show_measured(console: Console, proposal: Proposal, run: Run) -> None:
    """Print predicted beside measured, for the best proposal."""
    console.print(
        f"\n[bold]predicted beside measured[/bold]: {escape(name(proposal))}, {escape(run.name)}", highlight=False
    )
    table = Table("", "predicted", "measured", "error", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for part, (predicted, measured) in compared(proposal, run).items():
        for share in ("p50", "p90", "p99"):
            values = getattr(predicted, share), getattr(measured, share)
            if not any(map(math.isnan, values)):
                table.add_row(
                    f"{LATENCIES[part]} {share}", *map(seconds_text, values), f"{values[0] / values[1] - 1:+.0%}"
                )
    console.print(table)
