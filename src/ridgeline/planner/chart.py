"""Roofline chart: the roofs, the ridge point, and the operations of prefill and decode below them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from ridgeline.core.plural import counted
from ridgeline.planner.roofline import Phase, Roofline
from ridgeline.planner.svg import Axis, Chart, Guide, Line, Points, figure, page, si, table


def roofline_chart(result: Roofline, steps: Mapping[str, float]) -> Chart:
    """Draw operations on the roof, and steps at their FLOP rate. A dashed slope is the level on the chip.

    Operations without FLOPs have no intensity and appear only in the table.
    steps: phase -> seconds of the step, predicted or measured.
    """
    bandwidth = result.accelerator.bandwidth
    peaks = {result.accelerator.peak(dtype): dtype for dtype in (result.spec.dtype, result.spec.matrix_dtype)}
    marks: list[Line | Points | Guide] = [Guide(f"ridge {result.ridge:.0f} FLOP/B", x=result.ridge)]
    dots = [_operations(phase, color) for color, phase in ((2, result.phase("prefill")), (3, result.phase("decode")))]
    step_points = [
        (phase.intensity, phase.flops / steps[phase.name], f"{phase.name} step")
        for phase in result.phases
        if phase.name in steps and math.isfinite(steps[phase.name])
    ]
    intensities = [x for mark in dots for x, _, _ in mark.points] + [x for x, _, _ in step_points]
    on_chip = result.accelerator.on_chip
    slopes = [on_chip] if on_chip is not None and on_chip.bandwidth else []
    ridges = [max(peaks) / level.bandwidth for level in slopes]
    x = Axis.around([*intensities, *ridges, 1.0, 8 * result.ridge], "arithmetic intensity, FLOP per byte", log=True)
    for index, (peak, dtype) in enumerate(sorted(peaks.items(), reverse=True)):
        roof = ((x.low, bandwidth * x.low), (peak / bandwidth, peak), (x.high, peak))
        marks.append(Line(f"{dtype} {si(peak, 'FLOP/s')}", roof, color=index, dashed=index > 0))
    for level, ridge in zip(slopes, ridges, strict=True):
        slope = ((x.low, level.bandwidth * x.low), (ridge, max(peaks)))
        marks.append(Line(f"{level.kind} {si(level.bandwidth, 'B/s')}", slope, color=5, dashed=True))
    marks += dots
    if step_points:
        marks.append(Points("whole step", tuple(step_points), color=4))
    rates = [bandwidth * x.low, 1.3 * max(peaks), *(y for _, y, _ in step_points)]
    title = f"{result.spec.architecture} on {result.accelerator.name}"
    return Chart(title, x, Axis.around(rates, "FLOP/s", log=True), tuple(marks))


def _operations(phase: Phase, color: int) -> Points:
    points = ((point.intensity, point.attained, point.name) for point in phase.points if point.flops)
    return Points(phase.name, tuple(points), color=color)


HEAD = ("operation", "runs", "FLOP", "bytes", "activations", "FLOP/B", "bound", "floor")


def rows(phase: Phase) -> list[tuple[str, ...]]:
    """Table of a phase: one row per operation, with the columns of HEAD."""
    return [
        (
            point.name,
            str(point.count),
            si(point.flops),
            si(point.bytes, "B"),
            si(point.activation_bytes, "B"),
            si(point.intensity),
            point.bound,
            si(point.seconds, "s"),
        )
        for point in phase.points
    ]


def roofline_page(result: Roofline, steps: Mapping[str, float], notes: tuple[str, ...]) -> str:
    """Self-contained HTML page with chart, notes, and one table per phase."""
    parts = [figure(roofline_chart(result, steps))]
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    for phase in result.phases:
        parts.append(
            f"<h2>{escape(phase.name)}: {counted(phase.tokens, 'token')}, {phase.bound}-bound, "
            f"at least {si(phase.floor_s, 's')}</h2>"
        )
        parts.append(table(HEAD, rows(phase)))
    return page(f"Roofline: {result.spec.architecture} on {result.accelerator.name}", "\n".join(parts))
