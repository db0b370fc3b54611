"""The HTML report of an outcome: plots, figures with intervals and settings. It loads no external files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from ridgeline.bench import economics
from ridgeline.bench.compare import Difference
from ridgeline.bench.efficiency import Point
from ridgeline.bench.figures import LATENCIES, digits, invalid_reason, latency, spread, throughput, warnings
from ridgeline.bench.record import Run
from ridgeline.bench.sample import SHARES, Figure
from ridgeline.planner.svg import COLORS, Axis, Chart, Guide, Line, Points, figure, page, table

WIDTH, HEIGHT = 520.0, 360.0
"""Size of a plot in pixels. Two plots fit side by side on a laptop, and text stays readable on a phone."""
_MAX_DOTS = 1500
_STEPS = 200
_STYLE = (
    "body{max-width:72rem}.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1rem}"
    ".plots svg{width:100%}.tiles{display:flex;flex-wrap:wrap;gap:.5rem 2rem;margin:1rem 0}.tiles div{min-width:7rem}"
    ".tiles b{display:block;font-size:1.5rem;font-variant-numeric:tabular-nums}.tiles span{color:var(--muted)}"
    ".bad{border-left:4px solid var(--s1);padding:.25rem .75rem}"
)
_SHOWN_FACTS = (
    "url",
    "model",
    "workload",
    "seed",
    "rate",
    "burstiness",
    "concurrency",
    "prompts",
    "context",
    "version",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The content of a report."""

    title: str
    runs: Sequence[Run]
    """One run, or several. Of several, each is a line in the plots."""
    differences: Sequence[Difference] = ()
    """Of the first two runs."""
    points: Sequence[Point] = ()
    """A curve over concurrency."""
    note: str = ""
    """The result in a sentence."""
    single: bool = False
    """A run by itself: its files and its JSON are those of the run, not a list of runs."""
    whys: Sequence[Mapping[str, Any]] = ()
    """The server's explanations of slow requests."""


def html(outcome: Outcome) -> str:
    """Build the HTML page."""
    runs = outcome.runs
    parts = [f"<p>{escape(outcome.note)}</p>" if outcome.note else ""]
    parts += [
        f'<p class="bad"><b>{escape(run.name)} is not valid:</b> {escape(why)}.</p>'
        for run in runs
        if (why := invalid_reason(run))
    ]
    parts += [f'<p class="bad">{escape(run.name)}: {escape(line)}.</p>' for run in runs for line in warnings(run)]
    parts.append(tiles(runs[-1]) if len(runs) == 1 else _overview(runs))
    parts.append('<div class="plots">' + "".join(figure(chart) for chart in charts(outcome)) + "</div>")
    if outcome.differences:
        parts += ["<h2>Differences</h2>", _differences(outcome.differences)]
    if outcome.points:
        parts += ["<h2>Efficiency</h2>", _points(outcome.points)]
    for run in runs:
        parts += [f"<h2>{escape(run.name)}</h2>", _latencies(run), _facts(run)]
    if outcome.whys:
        rows = [(str(explanation.get("id", "")), _explanation(explanation)) for explanation in outcome.whys]
        parts += ["<h2>The slowest requests, as explained by the server</h2>", table(("request", "why"), rows)]
    parts.append(
        '<p class="note">Latencies count from the scheduled time of a request. Intervals are 95 % bootstrap intervals over '
        "requests. Goodput counts requests that met every limit. Its share is of all offered requests, failed ones too.</p>"
    )
    return page(outcome.title, "\n".join(parts), _STYLE)


def charts(outcome: Outcome) -> list[Chart]:
    """Build all plots that the outcome has data for."""
    runs = [run for run in outcome.runs if run.completed]
    hides_tokens = any(row.hidden_characters for run in runs for row in run.completed)  # else publish equals TTFT
    names = ("ttft", "publish", "tpot", "e2e") if hides_tokens else ("ttft", "tpot", "e2e")
    plots = [_cdf(runs, name) for name in names if any(len(latency(run.rows, name)) for run in runs)]
    if runs:
        plots.append(_against_length(runs))
    if len(runs) == 1:
        plots.append(_timeline(runs[0]))
    if len(runs) > 1:
        plots.append(_throughput_latency(runs))
        if all(math.isfinite(run.facts.get("rate") or math.nan) for run in runs):
            plots.append(_goodput(runs))
    if len(outcome.points) > 1:
        plots += _curves(outcome.points)
    return plots


def tiles(run: Run) -> str:
    """Build the tiles with the main figures of a run."""
    rates = throughput(run)
    shown = [
        (f"{rates['requests_per_s']:.3g}", "requests/s"),
        (digits(rates["output_tokens_per_s"]), "output tokens/s"),
        (digits(rates["input_tokens_per_s"]), "input tokens/s"),
        (_ms(spread(run, "ttft").percentiles[50].value), "TTFT median"),
        (_ms(spread(run, "ttft").percentiles[99].value), "TTFT p99"),
        (_ms(spread(run, "tpot").percentiles[50].value), "TPOT median"),
        (f"{rates['failed']:.0f}", "errors"),
        *((column[0], name) for name, column in economics.columns([run]).items()),
    ]
    if run.slo:
        shown.insert(
            0, (f"{rates['goodput_requests_per_s']:.3g}", f"good requests/s ({run.attainment:.1%} of offered)")
        )
    return (
        '<div class="tiles">'
        + "".join(f"<div><b>{value}</b><span>{unit}</span></div>" for value, unit in shown)
        + "</div>"
    )


# --- plots --------------------------------------------------------------------------------------------------------------


def _chart(title: str, axes: tuple[Axis, Axis], marks: Sequence[Line | Points | Guide]) -> Chart:
    return Chart(title, *axes, tuple(marks), WIDTH, HEIGHT)


def _names(runs: Sequence[Run]) -> list[str]:
    """Return the legend's names. They are empty for a single run, or if they do not fit."""
    names = [str(run.facts.get("label") or "")[:16] or run.name.rpartition(" ")[2] for run in runs]
    fits = sum(7 * len(name) + 30 for name in names) < WIDTH - 90
    return names if len(runs) > 1 and fits else [""] * len(runs)


def _cdf(runs: Sequence[Run], name: str) -> Chart:
    """Plot the share of offered requests with at most a given latency. Failed requests count as offered."""
    marks: list[Line | Points | Guide] = []
    values_shown: list[float] = []
    for color, (run, label) in enumerate(zip(runs, _names(runs), strict=True)):
        values = np.sort(latency(run.rows, name))
        at = np.unique(np.linspace(0, max(0, len(values) - 1), _STEPS).astype(int))
        points = tuple((float(values[index]), 100 * (index + 1) / len(run.rows)) for index in at if index < len(values))
        values_shown += [x for x, _ in points]
        marks.append(Line(label, points, color))
    limit = runs[-1].slo.limits().get(name)
    if limit is not None:
        values_shown.append(limit)
        marks.append(Guide(f"limit {_ms(limit)}", x=limit))
    log_scale = bool(values_shown) and min(values_shown) > 0 and max(values_shown) > 8 * min(values_shown)
    axes = (
        Axis.around(values_shown, LATENCIES[name], log=log_scale, unit="s"),
        Axis("share of offered requests", 0.0, 100.0, unit="%"),
    )
    return _chart(f"{name.upper()} of requests", axes, marks)


def _against_length(runs: Sequence[Run]) -> Chart:
    marks: list[Line | Points | Guide] = []
    for color, (run, label) in enumerate(zip(runs, _names(runs), strict=True)):
        rows = [row for row in run.completed if row.ttft_s is not None]
        step = max(1, len(rows) * len(runs) // _MAX_DOTS)
        points = tuple((float(row.input_tokens), row.ttft_s or 0.0, "") for row in rows[::step])
        marks.append(Points(label, points, color))
    dots = [dot for mark in marks if isinstance(mark, Points) for dot in mark.points]
    if (limit := runs[-1].slo.limits()["ttft"]) is not None:
        marks.append(Guide(f"limit {_ms(limit)}", y=limit))
        dots.append((dots[0][0], limit, ""))
    axes = Axis.around([x for x, _, _ in dots], "prompt tokens"), Axis.around([y for _, y, _ in dots], "TTFT", unit="s")
    return _chart("TTFT against prompt length", axes, marks)


def _timeline(run: Run) -> Chart:
    """Plot TTFT over the run's time, which shows drift."""
    rows = [row for row in run.completed if row.ttft_s is not None]
    rows = rows[:: max(1, len(rows) // _MAX_DOTS)]
    points = tuple((row.scheduled_s, row.ttft_s or 0.0, "") for row in rows)
    axes = (
        Axis.around([x for x, _, _ in points], "scheduled at", unit="s"),
        Axis.around([y for _, y, _ in points], "TTFT", unit="s"),
    )
    return _chart("TTFT over the run", axes, [Points("", points)])


def _throughput_latency(runs: Sequence[Run]) -> Chart:
    marks: list[Line | Points | Guide] = []
    for color, share in enumerate((50, 99)):
        points = []
        for run in runs:
            value = spread(run, "ttft").percentiles[share].value
            points.append((throughput(run)["output_tokens_per_s"], value, run.name[:24] if share == 50 else ""))
        marks += [Line(f"TTFT p{share}", tuple((x, y) for x, y, _ in points), color), Points("", tuple(points), color)]
    dots = [dot for mark in marks if isinstance(mark, Points) for dot in mark.points]
    axes = (
        Axis.around([x for x, _, _ in dots], "output tokens/s"),
        Axis.around([y for _, y, _ in dots], "TTFT", log=True, unit="s"),
    )
    return _chart("Latency against throughput", axes, marks)


def _goodput(runs: Sequence[Run]) -> Chart:
    """Plot good and completed requests per second against the offered rate. The dashed line is the offered rate."""
    ordered = sorted(runs, key=lambda run: float(run.facts["rate"]))
    rates = [float(run.facts["rate"]) for run in ordered]
    done = [throughput(run)["requests_per_s"] for run in ordered]
    good = [throughput(run)["goodput_requests_per_s"] for run in ordered]
    marks: list[Line | Points | Guide] = [
        Line("offered", ((0.0, 0.0), (max(rates), max(rates))), 3, True),
        Line("completed", tuple(zip(rates, done, strict=True)), 1),
        Line("good", tuple(zip(rates, good, strict=True)), 2),
        Points("", tuple((x, y, "") for x, y in zip(rates, good, strict=True)), 2),
    ]
    axes = Axis.around([0.0, *rates], "offered requests/s"), Axis.around([0.0, *rates], "requests/s")
    return _chart("Goodput against offered rate", axes, marks)


def _curves(points: Sequence[Point]) -> list[Chart]:
    """Plot throughput, latency, MFU and MBU against concurrency."""
    concurrencies = [float(point.concurrency) for point in points]
    x_axis = Axis.around(concurrencies, "requests at once", log=len(concurrencies) > 3)
    rates = [point.output_tokens_per_s for point in points]
    latencies = [point.tpot_s for point in points]
    plots = [
        _chart("Throughput", (x_axis, Axis.around(rates, "output tokens/s")), [_line("", concurrencies, rates, 0)]),
        _chart(
            "Latency",
            (x_axis, Axis.around(latencies, "TPOT median", unit="s")),
            [_line("", concurrencies, latencies, 1)],
        ),
    ]
    shares = [(name, [getattr(point, name.lower()) for point in points]) for name in ("MFU", "MBU")]
    lines = [
        _line(name, concurrencies, values, color) for color, (name, values) in enumerate(shares) if None not in values
    ]
    if lines:
        y_axis = Axis.around(
            [value for _, values in shares for value in values if value is not None], "share of the peak"
        )
        plots.append(_chart("MFU and MBU", (x_axis, y_axis), lines))
    return plots


def _line(name: str, xs: Sequence[float], ys: Sequence[float], color: int) -> Line:
    return Line(name, tuple(zip(xs, ys, strict=True)), color % COLORS)


# --- tables -------------------------------------------------------------------------------------------------------------


def _overview(runs: Sequence[Run]) -> str:
    head = (
        "run",
        "offered",
        "good",
        "req/s",
        "goodput/s",
        "in tok/s",
        "out tok/s",
        "TTFT p50",
        "TTFT p99",
        "TPOT p50",
        "errors",
    )
    money = economics.columns(runs)
    rows = []
    for number, run in enumerate(runs):
        rates, ttft, tpot = throughput(run), spread(run, "ttft"), spread(run, "tpot")
        rows.append((
            run.name, f"{len(run.rows)}", f"{run.attainment:.1%}" if run.slo else "-", f"{rates['requests_per_s']:.3g}",
            f"{rates['goodput_requests_per_s']:.3g}" if run.slo else "-", digits(rates["input_tokens_per_s"]),
            digits(rates["output_tokens_per_s"]), _ms(ttft.percentiles[50].value), _ms(ttft.percentiles[99].value),
            _ms(tpot.percentiles[50].value), f"{rates['failed']:.0f}", *(column[number] for column in money.values()),
        ))  # fmt: skip
    return table((*head, *money), rows)


def _latencies(run: Run) -> str:
    rows = []
    for name, description in LATENCIES.items():
        latency_spread = spread(run, name)
        shown = [_interval(latency_spread.percentiles[share]) for share in SHARES]
        rows.append((f"{name.upper()}: {description}", _interval(latency_spread.mean), *shown))
    return table(("latency, ms", "mean", *(f"p{share}" for share in SHARES)), rows)


def _interval(estimate: Figure) -> str:
    """Format as "12.3 (11.9 to 12.8)" in milliseconds."""
    if math.isnan(estimate.value):
        return "-"
    value = digits(estimate.value * 1e3)
    return (
        value
        if math.isnan(estimate.low)
        else f"{value} ({digits(estimate.low * 1e3)} to {digits(estimate.high * 1e3)})"
    )


def _differences(differences: Sequence[Difference]) -> str:
    rows = [(*difference.texts, difference.verdict) for difference in differences]
    return table(("measure", "first", "second", "second - first, 95 %", "verdict on second"), rows)


def _points(points: Sequence[Point]) -> str:
    rows = [
        (
            f"{point.concurrency}", digits(point.output_tokens_per_s), _ms(point.ttft_s), _ms(point.tpot_s),
            *map(_share, point.shares), point.note,
        )
        for point in points
    ]  # fmt: skip
    shares = ("MFU", "MBU", "MFU busy", "MBU busy", "MFU executed")
    return table(("concurrency", "out tok/s", "TTFT p50", "TPOT p50", *shares, ""), rows)


def _facts(run: Run) -> str:
    rates = throughput(run)
    rows = [(name, str(run.facts[name])) for name in _SHOWN_FACTS if run.facts.get(name) is not None]
    rows += [
        ("slo", "; ".join((str(run.slo) or "none", *run.broken))),
        ("requests dropped (longer than the context)", f"{run.dropped}"),
    ]
    if (counted := run.facts.get("counted")) and counted["joules"]:
        parts = (
            f"prompts {counted['prompt_joules']:.4g}, outputs {counted['output_joules']:.4g}, the remainder idle power"
        )
        rows.append(("energy of the device, J", f"{counted['joules']:.4g} ({parts})"))
    rows += economics.lines(run)
    rows += [("requests/minute", f"{rates['requests_per_minute']:.4g}"), ("seconds", f"{run.seconds:.2f}")]
    return table(("setting", "value"), rows)


def _explanation(why: Mapping[str, Any]) -> str:
    """Join summary and reasons of a server's explanation."""
    return " ".join([str(why.get("summary", "")), *map(str, why.get("reasons") or ())])


def _ms(seconds: float | None) -> str:
    if seconds is None or math.isnan(seconds):
        return "-"
    return f"{digits(seconds * 1e3)} ms" if seconds < 10 else f"{seconds:.4g} s"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
