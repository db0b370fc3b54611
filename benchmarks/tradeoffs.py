"""Charts of three trade-offs, drawn from the result files: `python benchmarks/tradeoffs.py` writes docs/tradeoff-*.svg.

latency   output tokens per second over the time per output token: an 8B model at 1 to 256 requests at once (curves.json)
drift     speed of compressed forms of the shipped model over their KL divergence from it (compression.json)
cost      dollars per million output tokens over the limit of the time per output token: of the levels of curves.json that keep the
          limit, the cheapest, at the rent of the hardware table
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import HERE, read_rows

from ridgeline.hardware.table import find
from ridgeline.planner.svg import Axis, Chart, Line, Points, document

DOCS = HERE.parent / "docs"
Rows = Sequence[Mapping[str, Any]]


def levels(rows: Rows) -> Rows:
    """The rows of one concurrency each, ascending."""
    return [row for row in rows if "-concurrency-" in row["row"]]


def latency(rows: Rows) -> Chart:
    points = [(row["tpot_ms"], row["tok_s"], f"{row['row'].rpartition('-')[2]} at once") for row in levels(rows)]
    x = Axis.around([x for x, _, _ in points], "time per output token, ms", log=True)
    y = Axis.around([y for _, y, _ in points], "output tokens/s", log=True)
    marks = (Line("", tuple((x, y) for x, y, _ in points)), Points("8B in bf16", tuple(points)))
    return Chart(f"Latency against throughput, {rows[0]['machine']}", x, y, marks)


def drift(rows: Rows) -> Chart:
    """Methods on the model itself; those that are trained afterwards have no measured speed."""
    timed = [row for row in rows if row.get("tok_s") and "-outliers-" not in row["row"]]  # planted outliers
    every = [(row["kl"], row["tok_s"] / row["tok_s_ref"], row["method"]) for row in timed]
    fewer_bits = [point for row, point in zip(timed, every, strict=True) if row["bits"] < 16]
    pruned = [point for row, point in zip(timed, every, strict=True) if row["bits"] == 16]
    x = Axis.around([kl for kl, _, _ in every], "KL divergence from the original, nats per token", log=True)
    y = Axis.around([speed for _, speed, _ in every], "tokens/s over the original's")
    marks = (
        Points("fewer bits", tuple(fewer_bits), color=0),
        Points("fewer weights or heads", tuple(pruned), color=1),
    )
    return Chart("Speed against drift, shipped model, two CPU cores", x, y, marks)


def cost(rows: Rows) -> Chart:
    device = find(rows[0]["machine"])
    assert device is not None and device.rent is not None
    limits = [row["tpot_ms"] for row in levels(rows)]
    points = []
    for limit in limits:
        best = max(row["tok_s"] for row in levels(rows) if row["tpot_ms"] <= limit)
        points.append((limit, device.rent.usd / best / 3600 * 1e6))
    x = Axis.around([x for x, _ in points], "limit of the time per output token, ms", log=True)
    y = Axis.around([y for _, y in points], "USD per million output tokens", log=True)
    title = f"Cost against objective, {rows[0]['machine']} at ${device.rent.usd:g} an hour"
    return Chart(title, x, y, (Line("8B in bf16, 512 + 128 tokens", tuple(points)),))


def charts() -> dict[str, Chart]:
    """Name of each file in docs/, and its chart."""
    curves, compression = (read_rows(HERE / "results" / f"{name}.json") for name in ("curves", "compression"))
    made = {"latency": latency(curves), "drift": drift(compression), "cost": cost(curves)}
    return {f"tradeoff-{name}.svg": chart for name, chart in made.items()}


def main() -> None:
    for name, chart in charts().items():
        Path(DOCS / name).write_text(document(chart), encoding="utf-8")


if __name__ == "__main__":
    main()
