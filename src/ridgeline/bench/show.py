"""Tables of results for the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ridgeline.bench import economics
from ridgeline.bench.compare import Difference
from ridgeline.bench.efficiency import Point
from ridgeline.bench.figures import (
    LATENCIES,
    agent_runs,
    cpu_share,
    digits,
    errors,
    invalid_reason,
    lag_p99,
    missed,
    per_character,
    spread,
    throughput,
    warnings,
)
from ridgeline.bench.record import Run
from ridgeline.bench.sample import SHARES, Figure


def run_table(run: Run) -> RenderableType:
    """Show one run: latencies with intervals, throughput, failures and the client's load."""
    latencies = _table("ms, 95 %", "mean", *(f"p{share}" for share in SHARES))
    for name in LATENCIES:
        latency_spread = spread(run, name)
        shown = [latency_spread.mean, *(latency_spread.percentiles[share] for share in SHARES)]
        latencies.add_row(name.upper() if name != "chunk" else "between chunks", *(_number(figure) for figure in shown))
        latencies.add_row("", *(Text(_interval(figure), style="dim") for figure in shown))
    rates, characters = throughput(run), per_character(run)
    facts = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    counts = f"{rates['offered']:.0f} offered, {rates['completed']:.0f} completed, {rates['failed']:.0f} failed"
    facts.add_row("requests", f"{counts}, {run.dropped} dropped (longer than the context)")
    if run.slo:
        missed_limits = ", ".join(f"{name} {count}" for name, count in missed(run).items())
        facts.add_row(
            "goodput",
            f"{rates['goodput_requests_per_s']:.4g} requests/s, {run.attainment:.1%} of offered requests met {run.slo}",
        )
        facts.add_row("missed", missed_limits or "nothing")
        for message in run.broken:
            facts.add_row("not met", message)
    for label, text in economics.lines(run):
        facts.add_row(label, Text(text))
    facts.add_row(
        "completed",
        f"{rates['requests_per_s']:.4g}/s, {rates['requests_per_minute']:.4g}/min, at most {rates['most_at_once']} at once",
    )
    facts.add_row(
        "output",
        f"{digits(rates['output_tokens_per_s'])} tokens/s, {rates['tokens_per_s_per_user']:.4g} per user (median)",
    )
    facts.add_row(
        "input", f"{digits(rates['input_tokens_per_s'])} tokens/s, {rates['cached_input_share']:.1%} from the cache"
    )
    facts.add_row(
        "characters",
        f"{digits(rates['characters_per_s'])}/s, {characters['characters_per_s_per_user']:.4g}/s per user, "
        f"{characters['e2e_ms_per_character']:.4g} ms each, {characters['characters_per_output_token']:.3g} per token",
    )
    if (runs := agent_runs(run)) is not None:
        median, p95 = (runs.publish.percentiles[share].value for share in (50, 95))
        facts.add_row(
            "agent runs",
            f"{runs.offered} offered, {runs.completed} completed, {runs.calls:.3g} requests each, time to publish {_ms(median)} "
            f"(median), {_ms(p95)} (p95)",
        )
    facts.add_row("reader", f"{rates['late_for_reader']:.1%} of tokens came late for a reader of one token per 120 ms")
    send, loop = lag_p99(run)
    lag = f"requests sent {send * 1e3:.2f} ms late, event loop {loop * 1e3:.2f} ms late (p99), {cpu_share(run):.0%} of a core"
    facts.add_row("client", lag)
    parts: list[RenderableType] = [latencies, Text(), facts]
    for message, count in sorted(errors(run).items(), key=lambda latency_spread: -latency_spread[1])[:5]:
        facts.add_row("error", Text(f"{count} x {message}"))
    parts += [Text(f"\nWarning: {line}.", style="bold") for line in warnings(run)]
    if why := invalid_reason(run):
        parts.append(Text(f"\nNOT VALID: {why}.", style="bold red"))
    return Group(*parts)


def line(run: Run) -> str:
    """Format a run in one line."""
    rates = throughput(run)
    good = f", good {run.attainment:.1%}" if run.slo else ""
    ttft, tpot = (spread(run, name).percentiles for name in ("ttft", "tpot"))
    return (
        f"{run.name}: {rates['requests_per_s']:.3g} req/s, {digits(rates['output_tokens_per_s'])} tok/s out, "
        f"TTFT p50 {_ms(ttft[50].value)} p99 {_ms(ttft[99].value)}, TPOT p50 {_ms(tpot[50].value)}{good}"
    )


def runs_table(runs: Sequence[Run]) -> RenderableType:
    """Show several runs, one row each."""
    money = economics.columns(runs)
    table = _table(
        "run",
        "req/s",
        "out tok/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "TPOT p99",
        "e2e p50",
        "good",
        "goodput/s",
        *money,
    )
    for number, run in enumerate(runs):
        rates = throughput(run)
        ttft, tpot, e2e = (spread(run, name).percentiles for name in ("ttft", "tpot", "e2e"))
        good = (f"{run.attainment:.1%}", f"{rates['goodput_requests_per_s']:.3g}") if run.slo else ("-", "-")
        table.add_row(
            run.name + (" (not valid)" if invalid_reason(run) else ""),
            f"{rates['requests_per_s']:.3g}",
            f"{digits(rates['output_tokens_per_s'])}",
            *(_ms(value.value) for value in (ttft[50], ttft[99], tpot[50], tpot[99], e2e[50])),
            *good,
            *(column[number] for column in money.values()),
        )
    return table


def differences_table(differences: Sequence[Difference], names: tuple[str, str], *, pairs: bool) -> RenderableType:
    """Show all measures of two runs."""
    rows = _table("", *names, "difference (95 %)", "verdict on second")
    styles = {"better": "green", "worse": "red", "other": ""}
    for difference in differences:
        rows.add_row(*difference.texts, Text(difference.verdict, style=styles.get(difference.verdict, "dim")))
    how = (
        "Both runs sent the same requests: compared pair by pair."
        if pairs
        else "The two runs sent different requests: not compared pair by pair."
    )
    return Group(rows, Text(how, style="dim"))


def points_table(points: Sequence[Point]) -> RenderableType:
    """Show a curve over concurrency."""
    table = _table(
        "at once", "out tok/s", "TTFT p50", "TPOT p50", "MFU", "MBU", "MFU busy", "MBU busy", "MFU executed", ""
    )
    for point in points:
        shares = ("-" if value is None else f"{value:.2%}" for value in point.shares)
        table.add_row(
            f"{point.concurrency}",
            f"{digits(point.output_tokens_per_s)}",
            _ms(point.ttft_s),
            _ms(point.tpot_s),
            *shares,
            point.note,
        )
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _number(value: Figure) -> str:
    """Format a figure in milliseconds."""
    return digits(value.value * 1e3)


def _interval(value: Figure) -> str:
    """Format an interval as "11.9-12.8", in milliseconds."""
    return "" if math.isnan(value.low) else f"{digits(value.low * 1e3)}-{digits(value.high * 1e3)}"


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{digits(seconds * 1e3)} ms"
