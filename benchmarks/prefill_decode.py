"""Prefill apart from decode, simulated: goodput per device of numbers of engines, by workload and objective.

    python benchmarks/prefill_decode.py --workload chat --slo ttft=1s,tpot=20ms --out benchmarks/results/prefill_decode.json

The real scheduler on a virtual clock, with step times of the cost model without calibration (planner.split). Goodput is the highest
rate, per device, at which nine of ten requests meet the objective; arrivals are random (Poisson) with one seed. The joint engine is
simulated with several sizes of a step, and its best one counts: smaller chunks of prompts shorten the waits of running answers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import provenance, write_rows
from reader_pace import server_of

from ridgeline.core.slo import Slo
from ridgeline.core.workload import Workload, arrivals, synthetic
from ridgeline.planner.simulate import Server
from ridgeline.planner.split import RATIOS, Goodput, Ratio, goodput

WORKLOADS = {
    "chat": (("200-800", "100-300"), 0),
    "documents": (("2000-6000", "50-150"), 0),
    "agents": (("4500-6000", "50-150"), 4096),
    "stories": (("50-150", "300-700"), 0),
}
"""(input, output) tokens, uniform, and the length of a prefix that all prompts share."""
COUNT = 3000
CHUNKS = (256, 512, 1024, 2048)
"""Query tokens of a step of the joint engine."""


def arriving(name: str) -> Workload:
    lengths, prefix = WORKLOADS[name]
    return synthetic(COUNT, lengths, prefix, 0).at(arrivals(COUNT, 1.0, 1.0, 0))


def joint(server: Server, workload: Workload, slo: Slo) -> tuple[Goodput, int]:
    """The best goodput of an engine that does both, and its query tokens of a step."""
    sizes = {*(size for size in CHUNKS if size < server.limits.step_tokens), server.limits.step_tokens}
    return max(
        (
            (
                goodput(replace(server, limits=replace(server.limits, step_tokens=size)), workload, slo, Ratio(1, 0)),
                size,
            )
            for size in sorted(sizes)
        ),
        key=lambda pair: pair[0].rate,
    )


def rows(server: Server, name: str, slo: Slo) -> Iterator[dict[str, Any]]:
    workload = arriving(name)
    base, size = joint(server, workload, slo)
    for ratio in RATIOS:
        result = goodput(server, workload, slo, ratio) if ratio.decode else base
        print(name, slo, ratio, f"{result.per_device:.2f} requests/s for each device", flush=True)
        yield {
            "row": f"{name} {slo} {ratio}",
            "ratio": str(ratio),
            "step_tokens": server.limits.step_tokens if ratio.decode else size,
            "rate": round(result.rate, 3),
            "rate_per_device": round(result.per_device, 3),
            "gain": round(result.per_device / base.per_device, 3) if base.rate else None,
            "ttft_p50_ms": round(1e3 * result.figures.ttft_s, 1) if result.rate else None,
            "tpot_p50_ms": round(1e3 * result.figures.tpot_s, 2) if result.rate else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, default=Path(__file__).parent / "models" / "llama-3.1-8b")
    parser.add_argument("--on", default="NVIDIA L40S", help="row of the hardware table that is simulated")
    parser.add_argument("--link-gb-s", type=float, default=20.0, help="rate at which an engine pulls pages")
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--slo", required=True)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    server = replace(server_of(args.shape, args.on), link=args.link_gb_s * 1e9)
    where = provenance(f"{args.on} (simulated, uncalibrated)", args.commit)
    facts = {"shape": args.shape.name, "workload": args.workload, "slo": args.slo, "link_gb_s": args.link_gb_s}
    made = [{**row, **facts, **where} for row in rows(server, args.workload, Slo.parse(args.slo))]
    write_rows(args.out, made)


if __name__ == "__main__":
    main()
