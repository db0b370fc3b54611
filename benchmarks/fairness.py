"""What fairness between API keys gains for a key with few requests, simulated for a shape on a GPU:

    python benchmarks/fairness.py --out benchmarks/results/fairness.json

The real scheduler on a virtual clock, with step times of the uncalibrated cost model, so that the figures do not depend on this
machine. One client sends all its requests at once; another sends single requests at a steady rate from then on. The same
workload is served twice: as requests of one client, and of two. A row has the TTFT of the single requests and of the crowd,
and the time until all answers have ended.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import HERE, provenance, write_rows
from reader_pace import server_of

from ridgeline.core.workload import RequestSpec, Workload
from ridgeline.hardware.table import find
from ridgeline.planner.simulate import quantile, serve

CROWD, SINGLES, EVERY_S = 200, 20, 0.2
INPUT, SINGLE_OUTPUT = 512, 33
ROWS = 32


def workload(separate: bool) -> Workload:
    """The crowd's requests at 0 s, and single ones from 0.1 s on. Only their answers have SINGLE_OUTPUT tokens."""
    chance = random.Random(1)
    lengths = [2 * chance.randrange(32, 224) for _ in range(CROWD)]
    crowd = [RequestSpec(0.0, INPUT, length, client="crowd") for length in lengths]
    name = "single" if separate else "crowd"
    singles = [RequestSpec(0.1 + EVERY_S * index, INPUT, SINGLE_OUTPUT, client=name) for index in range(SINGLES)]
    return Workload("crowd and singles", (*crowd, *singles), timed=True)


def row(shape: Path, device: str, separate: bool) -> dict[str, Any]:
    """The figures of one way to serve the workload."""
    server = server_of(shape, device)
    served = serve(replace(server, limits=replace(server.limits, rows=ROWS)), workload(separate))
    singles, crowd = (
        sorted(outcome.ttft_s for outcome in served.outcomes if (outcome.output == SINGLE_OUTPUT) == single)
        for single in (True, False)
    )
    assert (len(singles), len(crowd)) == (SINGLES, CROWD)
    return {
        "row": f"fairness-{'two-keys' if separate else 'one-key'}",
        "single_ttft_p50_s": round(quantile(singles, 0.5), 3),
        "single_ttft_max_s": round(singles[-1], 3),
        "crowd_ttft_p50_s": round(quantile(crowd, 0.5), 3),
        "seconds": round(served.seconds, 3),
        "device": f"{find(device).name} (simulated)",
        "shape": shape.name,
        "rows": ROWS,
        **provenance(f"{find(device).name} (simulated)"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--device", default="h200", help="a device of the hardware table")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    arguments = parser.parse_args()
    table = [row(arguments.shape, arguments.device, separate) for separate in (False, True)]
    print(*map(json.dumps, table), sep="\n")
    if arguments.out:
        write_rows(arguments.out, table)


if __name__ == "__main__":
    main()
