"""The roofline as a chart: the roofs, the ridge, and where the operations of prefill and decode stand under them."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from ridgeline.core.plural import counted
from ridgeline.planner.roofline import Phase, Roofline, matrix_dtype
from ridgeline.planner.svg import Axis, Chart, Guide, Line, Points, figure, page, si, table


def roofline_chart(found: Roofline, steps: Mapping[str, float]) -> Chart:
    """Operations at the roof (what their intensity allows), and whole steps where `steps` (phase -> seconds, predicted or
    measured) puts them. Operations without arithmetic have no intensity and stand in the table alone."""
    bandwidth = found.accelerator.bandwidth
    peaks = {found.accelerator.peak(dtype): dtype for dtype in (found.spec.dtype, matrix_dtype(found.spec))}
    marks: list[Line | Points | Guide] = [Guide(f"ridge {found.ridge:.0f} FLOP/B", x=found.ridge)]
    dots = [_operations(one, color) for color, one in ((2, found.phase("prefill")), (3, found.phase("decode")))]
    whole = [
        (one.intensity, one.flops / steps[one.name], f"{one.name} step") for one in found.phases if one.name in steps
    ]
    intensities = [x for mark in dots for x, _, _ in mark.points] + [x for x, _, _ in whole]
    x = Axis.around([*intensities, 1.0, 8 * found.ridge], "arithmetic intensity, FLOP per byte", log=True)
    for number, (peak, dtype) in enumerate(sorted(peaks.items(), reverse=True)):
        roof = ((x.low, bandwidth * x.low), (peak / bandwidth, peak), (x.high, peak))
        marks.append(Line(f"{dtype} {si(peak, 'FLOP/s')}", roof, color=number, dashed=number > 0))
    marks += dots
    if whole:
        marks.append(Points("whole step", tuple(whole), color=4))
    rates = [bandwidth * x.low, 1.3 * max(peaks), *(y for _, y, _ in whole)]
    title = f"{found.spec.architecture} on {found.accelerator.name}"
    return Chart(title, x, Axis.around(rates, "FLOP/s", log=True), tuple(marks))


def _operations(found: Phase, color: int) -> Points:
    points = ((one.intensity, one.attained, one.name) for one in found.points if one.flops)
    return Points(found.name, tuple(points), color=color)


HEAD = ("operation", "runs", "FLOP", "bytes", "activations", "FLOP/B", "bound", "floor")


def rows(found: Phase) -> list[tuple[str, ...]]:
    """The table of a phase, a row per operation under HEAD."""
    return [
        (
            one.name,
            str(one.count),
            si(one.flops),
            si(one.bytes, "B"),
            si(one.activation_bytes, "B"),
            si(one.intensity),
            one.bound,
            si(one.seconds, "s"),
        )
        for one in found.points
    ]


def roofline_page(found: Roofline, steps: Mapping[str, float], notes: tuple[str, ...]) -> str:
    """A self-contained HTML page: chart, notes, and a table for each phase."""
    parts = [figure(roofline_chart(found, steps))]
    parts += [f'<p class="note">{escape(note)}</p>' for note in notes]
    for one in found.phases:
        parts.append(
            f"<h2>{escape(one.name)}: {counted(one.tokens, 'token')}, {one.bound}-bound, at least {si(one.floor_s, 's')}</h2>"
        )
        parts.append(table(HEAD, rows(one)))
    return page(f"Roofline: {found.spec.architecture} on {found.accelerator.name}", "\n".join(parts))
