"""Efficiency against concurrency, and what throughput relaxed latency buys:

    python benchmarks/curves.py --device cuda --shape benchmarks/models/llama-3.1-8b --levels 1,2,4,8,16,32,64,128,256 \\
        --out benchmarks/results/curves.json --plot docs/curves-h200.svg
    python benchmarks/curves.py --levels 1,2,4 --out /tmp/curves.json        # the shipped model on this machine

One server, one run per level: a closed loop of so many requests with prompts of 512 tokens and answers of 128 (`--lengths`). MFU
and MBU are those of `ridgeline bench curve`: useful work over all time, as the server counts it.

relaxed: for each factor, the highest throughput among the levels whose median TTFT and TPOT are at most so many times those of a
lone request.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import cpu_name, provenance, write_rows
from goodput import folder_of

from ridgeline.bench.efficiency import Limits, Point, point
from ridgeline.bench.options import LoadConfig, WorkloadConfig
from ridgeline.bench.server_process import serving
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.planner.svg import Axis, Chart, Line, document

FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0)


async def measure(flags: Sequence[str], levels: Sequence[int], lengths: tuple[str, str]) -> tuple[list[Point], str]:
    """A point for each level, and the name of the server's device."""
    points, device = [], ""
    async with serving(flags) as url:
        for level in levels:
            count = max(8, 3 * level)
            workload = WorkloadConfig(input_len=lengths[0], output_len=lengths[1], max_requests=count, seed=level)
            load = LoadConfig(concurrency=level, warmup=min(level, 32))
            async with Session(BenchConfig(workload=workload, load=load), url) as session:
                run = await session.measure()
            points.append(point(run, Limits()))
            device = run.facts["server"]["facts"]["device"]
            print(
                f"{level}: {points[-1].output_tokens_per_s:.0f} tokens/s, MFU {points[-1].mfu}, MBU {points[-1].mbu}",
                flush=True,
            )
    return points, device


def relaxed(points: Sequence[Point], factor: float) -> Point | None:
    """The point with the highest throughput whose latencies are at most `factor` times those of the first one."""
    first = points[0]
    within = [
        point for point in points if point.ttft_s <= factor * first.ttft_s and point.tpot_s <= factor * first.tpot_s
    ]
    return max(within, key=lambda point: point.output_tokens_per_s, default=None)


def rows(points: Sequence[Point], name: str) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for at in points:
        shares = {"mfu": at.mfu, "mbu": at.mbu, "mfu_busy": at.mfu_busy, "mbu_busy": at.mbu_busy}
        made.append(
            {
                "row": f"{name}-concurrency-{at.concurrency}",
                "tok_s": round(at.output_tokens_per_s, 1),
                "ttft_ms": round(at.ttft_s * 1e3, 2),
                "tpot_ms": round(at.tpot_s * 1e3, 3),
                **{share: round(value, 4) for share, value in shares.items() if value is not None},
            }
        )
    chosen = ((factor, relaxed(points, factor)) for factor in FACTORS)
    return made + [
        {
            "row": f"{name}-relaxed-{factor:g}",
            "concurrency": best.concurrency,
            "tok_s": round(best.output_tokens_per_s, 1),
            "gain": round(best.output_tokens_per_s / points[0].output_tokens_per_s, 2),
        }
        for factor, best in chosen
        if best is not None
    ]


def chart(points: Sequence[Point], title: str) -> Chart:
    """MFU and MBU over the concurrency, and the throughput as a share of the highest one."""
    most = max(point.output_tokens_per_s for point in points)
    marks = (
        Line("MFU", tuple((at.concurrency, at.mfu or 0.0) for at in points), color=0),
        Line("MBU", tuple((at.concurrency, at.mbu or 0.0) for at in points), color=1),
        Line(
            f"throughput / {most:.0f} tokens/s",
            tuple((at.concurrency, at.output_tokens_per_s / most) for at in points),
            color=2,
        ),
    )
    x = Axis.around([point.concurrency for point in points], "requests at once", log=True)
    return Chart(title, x, Axis("share of the peak", 0.0, 1.05), marks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", default="", help="folder with a config.json (default: the shipped model)")
    parser.add_argument("--levels", default="1,2,4,8")
    parser.add_argument(
        "--lengths", nargs=2, default=("512", "128"), metavar="TOKENS", help="of prompts and of answers"
    )
    parser.add_argument("--plot", type=Path, help="SVG file")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    levels = [int(word) for word in args.levels.split(",")]
    name = Path(args.shape).name or "shipped"
    with tempfile.TemporaryDirectory() as place:
        folder = folder_of(args.shape, place)
        model = [folder, "--load-format", "dummy"] if folder else []
        flags = [*model, "--device", args.device, "--max-model-len", "4096"]
        points, device = asyncio.run(measure(flags, levels, (args.lengths[0], args.lengths[1])))
    machine = cpu_name() if args.device == "cpu" else device
    write_rows(args.out, [row | provenance(machine, args.commit) for row in rows(points, name)])
    if args.plot:
        args.plot.write_text(document(chart(points, f"{name} on {machine}")))


if __name__ == "__main__":
    main()
