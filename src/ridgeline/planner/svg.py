"""Small SVG charts: axes, lines, points, guides and a legend, for light and dark mode, without external resources.

A `Chart` is plain data. `figure` draws it for a page that contains `STYLE` (see `page`), `document` as a separate file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

_LIGHT = ("#2563eb", "#dc2626", "#059669", "#b45309", "#7c3aed", "#0e7490", "#be185d", "#4d7c0f")
_DARK = ("#7aa2ff", "#ff8a80", "#4ade9c", "#f5b35c", "#bda4ff", "#5fd0e6", "#ff8fc0", "#b5d66b")
COLORS = len(_LIGHT)
"""Number of colors; further series repeat them."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 18.0, 50.0, 46.0
_LETTER, _LINE = 6.1, 13.0
"""Approximate width and height of a letter in labels, in pixels; used to keep labels apart."""


def _palette(colors: Sequence[str], ink: str, muted: str, grid: str, paper: str) -> str:
    series = "".join(f"--s{number}:{color};" for number, color in enumerate(colors))
    return f"--ink:{ink};--muted:{muted};--grid:{grid};--paper:{paper};{series}"


STYLE = (
    f":root{{{_palette(_LIGHT, '#1b2430', '#5b6675', '#e3e7ec', '#ffffff')}}}"
    f"@media(prefers-color-scheme:dark){{:root{{{_palette(_DARK, '#e6eaf0', '#9aa6b5', '#2b3442', '#12161c')}}}}}"
    "svg.chart{font:11px system-ui,sans-serif;fill:var(--ink);max-width:100%;height:auto}"
    "svg.chart .grid{stroke:var(--grid)}svg.chart .frame{stroke:var(--muted);fill:none}"
    "svg.chart .muted{fill:var(--muted)}svg.chart .title{font-size:14px;font-weight:600}"
    "svg.chart .label{paint-order:stroke;stroke:var(--paper);stroke-width:3px}"
    "svg.chart .line{fill:none;stroke-width:2}svg.chart .guide{stroke-dasharray:4 4}"
)
"""CSS of all charts. A page with figures must contain it once."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A scale from `low` to `high`."""

    label: str
    low: float
    high: float
    log: bool = False
    """Logarithmic scale; `low` must be above 0."""
    unit: str = ""
    """Unit after each tick label."""

    @classmethod
    def around(cls, values: Iterable[float], label: str, *, log: bool = False, unit: str = "") -> Axis:
        """An axis that contains all finite values, with a margin. A linear axis starts at 0 unless values are negative."""
        finite = [value for value in values if math.isfinite(value) and (not log or value > 0)] or [1.0]
        low, high = min(finite), max(finite)
        if log:
            margin = max(1.15, (high / low) ** 0.06)
            return cls(label, low / margin, high * margin, True, unit)
        low = min(0.0, low)
        return cls(label, low, high + 0.05 * ((high - low) or 1.0), False, unit)

    def place(self, value: float) -> float:
        """Relative position of a value: 0 at `low`, 1 at `high`."""
        if self.log:
            return math.log(max(value, 1e-300) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round values within the axis: powers of ten (and 2, 5 times them on short log axes), or equal steps."""
        if not self.log:
            step = _round_step((self.high - self.low) / 6)
            first = math.ceil(self.low / step - 1e-9)
            return [number * step for number in range(first, math.floor(self.high / step + 1e-9) + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        digits = (1,) if len(powers) > 4 else (1, 2, 5)
        ticks = [digit * 10.0**power for power in powers for digit in digits]
        return [value for value in ticks if self.low <= value * (1 + 1e-9) and value <= self.high * (1 + 1e-9)]


@dataclass(frozen=True, slots=True)
class Line:
    """Points connected by a line."""

    name: str
    points: tuple[tuple[float, float], ...]
    color: int = 0
    """Index of the color."""
    dashed: bool = False
    """For predictions and limits."""


@dataclass(frozen=True, slots=True)
class Points:
    """Dots (x, y, label). The label is also the tooltip; "" for no label."""

    name: str
    points: tuple[tuple[float, float, str], ...]
    color: int = 0


@dataclass(frozen=True, slots=True)
class Guide:
    """A labelled line across the plot: vertical at `x`, or horizontal at `y`."""

    label: str
    x: float | None = None
    y: float | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """A title, two axes, and the marks in drawing order. Sizes are pixels."""

    title: str
    x: Axis
    y: Axis
    marks: tuple[Line | Points | Guide, ...]
    width: float = 720.0
    height: float = 430.0


def si(value: float, unit: str = "") -> str:
    """Format with three digits, a metric prefix and the unit: 1234.0 -> "1.23k", (0.002, "s") -> "2 ms"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}".rstrip()
    power = max(-4, min(6, math.floor(math.log10(abs(value)) / 3 + 1e-12)))
    digits = f"{value / 1000.0**power:.3g}"
    if digits in ("1e+03", "-1e+03") and power < 6:
        power, digits = power + 1, digits.replace("1e+03", "1")
    prefix = ("p", "n", "µ", "m", "", "k", "M", "G", "T", "P", "E")[power + 4]
    return f"{digits} {prefix}{unit}" if unit else digits + prefix


def figure(chart: Chart) -> str:
    """The chart as an `<svg>` element for a page that contains STYLE."""
    plot = _Plot(chart)
    parts = [
        f'<svg class="chart" xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {chart.width:g} {chart.height:g}" '
        f'width="{chart.width:g}" height="{chart.height:g}" role="img" aria-label="{escape(chart.title)}">',
        f'<text class="title" x="{_LEFT:g}" y="18">{escape(chart.title)}</text>',
        *plot.axes(),
    ]
    for mark in chart.marks:
        if isinstance(mark, Guide):
            parts += plot.guide(mark)
    for mark in chart.marks:
        if isinstance(mark, Line):
            parts.append(plot.line(mark))
        elif isinstance(mark, Points):
            parts += plot.dots(mark)
    parts += [*plot.labels(), *plot.legend(), "</svg>"]
    return "".join(parts)


def document(chart: Chart) -> str:
    """The chart as a separate SVG file with colors and background."""
    paper = '<rect width="100%" height="100%" fill="var(--paper)"/>'
    head, _, body = figure(chart).partition(">")
    return f'<?xml version="1.0" encoding="UTF-8"?>\n{head}><style>{STYLE}</style>{paper}{body}\n'


def page(title: str, body: str, style: str = "") -> str:
    """A self-contained HTML page. body: HTML, escaped by the caller. style: additional CSS."""
    css = (
        "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:60rem;"
        "margin:2rem auto;padding:0 1rem}table{border-collapse:collapse;font-variant-numeric:tabular-nums;"
        "display:block;overflow-x:auto}th,td{padding:.25rem .75rem;text-align:right;border-bottom:1px solid var(--grid)}"
        "th:first-child,td:first-child{text-align:left}p.note,td.note{color:var(--muted)}"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        'content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}{css}{style}</style></head>\n"
        f"<body><h1>{escape(title)}</h1>\n{body}\n</body></html>\n"
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table; cells are escaped."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _round_step(rough: float) -> float:
    """The smallest of 1, 2, 5 times a power of ten that is at least `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))


@dataclass(frozen=True, slots=True)
class _Box:
    """Area of a label. x, y: upper left corner."""

    x: float
    y: float
    width: float
    height: float = _LINE

    def overlaps(self, other: _Box) -> bool:
        across = self.x < other.x + other.width and other.x < self.x + self.width
        return across and self.y < other.y + other.height and other.y < self.y + self.height


class _Plot:
    """The area between the axes of a chart, and the labels that occupy it."""

    def __init__(self, chart: Chart) -> None:
        self.chart = chart
        self.right, self.bottom = chart.width - _RIGHT, chart.height - _BOTTOM
        self._unplaced: list[tuple[float, float, str]] = []
        self._occupied: list[_Box] = []

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixel position of a point. Points outside of the axes move to the border."""
        across, up = self.chart.x.place(x), self.chart.y.place(y)
        across, up = max(0.0, min(1.0, across)), max(0.0, min(1.0, up))
        return _LEFT + across * (self.right - _LEFT), self.bottom - up * (self.bottom - _TOP)

    def axes(self) -> list[str]:
        chart, parts = self.chart, []
        for value in chart.x.ticks():
            x, _ = self.at(value, chart.y.low)
            parts.append(f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{self.bottom}"/>')
            text = escape(si(value, chart.x.unit))
            parts.append(f'<text class="muted" x="{x:.1f}" y="{self.bottom + 15}" text-anchor="middle">{text}</text>')
        for value in chart.y.ticks():
            _, y = self.at(chart.x.low, value)
            parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{self.right}" y2="{y:.1f}"/>')
            text = escape(si(value, chart.y.unit))
            parts.append(f'<text class="muted" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
        width, height = self.right - _LEFT, self.bottom - _TOP
        parts.append(f'<rect class="frame" x="{_LEFT}" y="{_TOP}" width="{width}" height="{height}"/>')
        middle = (_LEFT + self.right) / 2
        label = f'x="{middle:.1f}" y="{chart.height - 10}" text-anchor="middle"'
        parts.append(f"<text {label}>{escape(chart.x.label)}</text>")
        turned = f'transform="translate(14 {(_TOP + self.bottom) / 2:.1f}) rotate(-90)" text-anchor="middle"'
        parts.append(f"<text {turned}>{escape(chart.y.label)}</text>")
        return parts

    def line(self, mark: Line) -> str:
        pixels = [self.at(x, y) for x, y in mark.points if math.isfinite(x) and math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in pixels)
        dash = ' stroke-dasharray="6 4"' if mark.dashed else ""
        return f'<polyline class="line" stroke="var(--s{mark.color % COLORS})"{dash} points="{path}"/>'

    def dots(self, mark: Points) -> list[str]:
        parts = []
        for x, y, label in mark.points:
            across, down = self.at(x, y)
            title = f"<title>{escape(f'{mark.name}: {label}' if label else mark.name)}</title>"
            place = f'cx="{across:.1f}" cy="{down:.1f}" r="4.5" fill="var(--s{mark.color % COLORS})"'
            parts.append(f"<circle {place}>{title}</circle>")
            self._occupied.append(_Box(across - 5, down - 5, 10, 10))
            if label:
                self._unplaced.append((across, down, label))
        return parts

    def guide(self, mark: Guide) -> list[str]:
        text = escape(mark.label)
        if mark.x is not None:
            x, _ = self.at(mark.x, self.chart.y.low)
            line = f'<line class="frame guide" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{self.bottom}"/>'
            width = _LETTER * len(mark.label)
            left = x + 4 if x + 4 + width < self.right else x - 4 - width
            self._occupied.append(_Box(left, self.bottom - 18, width))
            return [line, f'<text class="muted" x="{left:.1f}" y="{self.bottom - 7:.1f}">{text}</text>']
        _, y = self.at(self.chart.x.low, mark.y or 0.0)
        line = f'<line class="frame guide" x1="{_LEFT}" y1="{y:.1f}" x2="{self.right}" y2="{y:.1f}"/>'
        self._occupied.append(_Box(_LEFT + 6, y - 15, _LETTER * len(mark.label)))
        return [line, f'<text class="muted" x="{_LEFT + 6}" y="{y - 4:.1f}">{text}</text>']

    def labels(self) -> list[str]:
        """Labels of dots that have free space next to them. The other dots have only their tooltip."""
        parts = []
        for x, y, text in self._unplaced:
            width = _LETTER * len(text)
            for left, top in ((7, -7), (-7 - width, -7), (-width / 2, -20), (-width / 2, 8), (7, -20), (7, 7)):
                box = _Box(x + left, y + top, width)
                inside = box.x > _LEFT and box.x + width < self.right and _TOP < box.y < self.bottom - _LINE
                if inside and not any(box.overlaps(other) for other in self._occupied):
                    self._occupied.append(box)
                    parts.append(f'<text class="label" x="{box.x:.1f}" y="{box.y + 10:.1f}">{escape(text)}</text>')
                    break
        return parts

    def legend(self) -> list[str]:
        """Names of the series above the plot, right-aligned."""
        parts, x = [], self.right
        for mark in reversed(self.chart.marks):
            if isinstance(mark, Guide) or not mark.name:
                continue
            x -= _LETTER * len(mark.name)
            parts.append(f'<text x="{x:.1f}" y="{_TOP - 8}">{escape(mark.name)}</text>')
            color = f"var(--s{mark.color % COLORS})"
            if isinstance(mark, Line):
                dash = ' stroke-dasharray="4 2"' if mark.dashed else ""
                place = f'x1="{x - 18:.1f}" y1="{_TOP - 12}" x2="{x - 5:.1f}" y2="{_TOP - 12}"'
                parts.append(f'<line class="line" stroke="{color}"{dash} {place}/>')
            else:
                parts.append(f'<circle cx="{x - 10:.1f}" cy="{_TOP - 12}" r="4" fill="{color}"/>')
            x -= 30
        return parts
