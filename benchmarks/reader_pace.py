"""What --reader-pace gains: simulated for a shape on a GPU, and measured on a server of this machine:

    python benchmarks/reader_pace.py --out benchmarks/results/reader_pace.json

Simulated: the real scheduler on a virtual clock, with step times of the uncalibrated cost model. Requests have the lengths of a
workload file and arrive at random (Poisson); each rate is simulated with the same arrivals without and with the pace, and figures
are means over --seeds arrivals. All answers are streamed to readers. goodput: share of requests within the SLO. -limit: the
highest rate (in steps of 0.25) with a goodput of 90 %. -small-cache: the KV cache has a sixth of its blocks, so that requests wait
for them.

Measured: the shipped model on a CPU, with steps of few tokens. Readers with long answers run, and newcomers with long prompts come
one after the other. Runs without and with the pace alternate; a row has the values of all its rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common import cpu_name, lens, provenance, write_rows

from ridgeline.bench.record import Run
from ridgeline.bench.replay import replay
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel
from ridgeline.core.sizing import Memory, Planner
from ridgeline.core.slo import Latencies, Slo, reader_pace
from ridgeline.core.workload import RequestSpec, Workload, arrivals
from ridgeline.engine.policy import Limits
from ridgeline.hardware.table import find
from ridgeline.models.build import served_spec
from ridgeline.models.config import read_model
from ridgeline.planner.simulate import Outcome, Server, quantile, serve

CONTEXT = 16_384
HOST_S = 0.002
"""Host seconds of a step; a step in flight hides them."""
RATES = (8.0, 16.0, 20.0, 24.0, 26.0, 28.0, 32.0)
GOOD = 0.9
Shapes = Sequence[tuple[int, int]]


# --- simulated -----------------------------------------------------------------------------------------------------------


def server_of(shape: Path, device: str) -> Server:
    """A server of the shape on a device of the hardware table, with the options that `ridgeline serve` would choose."""
    row = find(device)
    model = ModelConfig(load_format="dummy", max_model_len=CONTEXT)
    spec = replace(served_spec(read_model(shape)[0], model), max_len=CONTEXT)
    plan, _ = Planner(spec, EngineConfig(), Memory("cuda", row.memory_bytes)).plan()
    cost = CostModel(spec, row.peak(spec.matrix_dtype), row.bandwidth)
    limits = Limits(plan.max_rows, plan.max_step_tokens, plan.max_len)
    return Server(cost, plan.layout, plan.n_pages, limits, host_s=HOST_S)


@dataclass(frozen=True, slots=True)
class Trial:
    """Simulations of a server with a pace, 0 for none."""

    server: Server
    pace_s: float
    shapes: Shapes
    slo: Slo
    seeds: int

    def figures(self, rate: float) -> dict[str, float]:
        """Mean figures over the seeds."""
        runs = [self._run(rate, seed) for seed in range(self.seeds)]
        return {name: round(statistics.fmean(run[name] for run in runs), 4) for name in runs[0]}

    def _run(self, rate: float, seed: int) -> dict[str, float]:
        times = arrivals(len(self.shapes), rate, 1.0, seed)
        requests = (RequestSpec(at, *lengths) for at, lengths in zip(times, self.shapes, strict=True))
        server = replace(self.server, limits=replace(self.server.limits, pace_s=self.pace_s))
        served = serve(server, Workload("arrivals", tuple(requests), timed=True))
        ttft, tpot = (
            sorted(value for outcome in served.outcomes if (value := getattr(outcome, name)) == value)
            for name in ("ttft_s", "tpot_s")
        )
        return {
            "ttft_p50_ms": 1e3 * quantile(ttft, 0.5),
            "ttft_p99_ms": 1e3 * quantile(ttft, 0.99),
            "tpot_p50_ms": 1e3 * quantile(tpot, 0.5),
            "tpot_p99_ms": 1e3 * quantile(tpot, 0.99),
            "e2e_mean_s": statistics.fmean(outcome.e2e_s for outcome in served.outcomes),
            "goodput": sum(map(self._good, served.outcomes)) / len(served.outcomes),
            "device_s": served.device_s,
        }

    def _good(self, outcome: Outcome) -> bool:
        tpot = outcome.tpot_s if outcome.tpot_s == outcome.tpot_s else None
        return not self.slo.verdict(Latencies(outcome.ttft_s, None, tpot, outcome.e2e_s))

    def limit(self, low: float, high: float, step: float = 0.25) -> float:
        """The highest rate with a goodput of at least GOOD, which `low` has and `high` has not."""
        while high - low > step:
            middle = round((low + high) / 2 / step) * step
            low, high = (middle, high) if self.figures(middle)["goodput"] >= GOOD else (low, middle)
        return low


def simulated(server: Server, pace: str, shapes: Shapes, slo: Slo, seeds: int) -> Iterator[dict[str, Any]]:
    """Rows of every server, rate and pace."""
    small_steps = replace(server.limits, step_tokens=1024)
    servers = {
        "": (server, RATES),
        "-chunk-1024": (replace(server, limits=small_steps), RATES),
        "-small-cache": (replace(server, pages=server.pages // 6), (16.0, 20.0, 24.0)),
    }
    for name, (changed, rates) in servers.items():
        for word, pace_s in (("plain", 0.0), ("paced", reader_pace(pace))):
            trial = Trial(changed, pace_s, shapes, slo, seeds)
            chosen = {"step_tokens": changed.limits.step_tokens, "pages": changed.pages, "pace_s": pace_s}
            for rate in rates:
                yield {"row": f"simulated{name}-rate-{rate:g}-{word}", **chosen, "rate": rate, **trial.figures(rate)}
            yield {"row": f"simulated{name}-limit-{word}", **chosen, "rate": trial.limit(8.0, 32.0), "share": GOOD}


# --- measured ------------------------------------------------------------------------------------------------------------

READERS, READ, NEWCOMERS, PROMPT, ANSWER = 56, 700, 8, 1000, 4
"""Readers and tokens of their answers; newcomers, tokens of their prompts and of their answers."""
FLAGS = ("--device", "cpu", "--threads", "1", "--max-num-batched-tokens", "128")
ROUNDS = 2


def two_kinds() -> Workload:
    """Readers come at once, newcomers from the third second on."""
    readers = (RequestSpec(0.01 * index, 16, READ) for index in range(READERS))
    newcomers = (RequestSpec(3.0 + 1.5 * index, PROMPT, ANSWER) for index in range(NEWCOMERS))
    return Workload("readers and newcomers", (*readers, *newcomers), timed=True)


def measured(pace: str) -> list[dict[str, Any]]:
    """A row without and one with the pace."""
    rounds: dict[str, list[dict[str, float]]] = {"": [], pace: []}
    for _ in range(ROUNDS):
        for word, figures in rounds.items():
            run = replay([*FLAGS, *(["--reader-pace", word] if word else [])], two_kinds())
            figures.append(kinds(run) | {"failed": len(run.rows) - len(run.completed)})
    return [
        {"row": f"measured-{'paced' if word else 'plain'}", "pace_s": reader_pace(word)}
        | {name: [entry[name] for entry in figures] for name in figures[0]}
        for word, figures in rounds.items()
    ]


def kinds(run: Run) -> dict[str, float]:
    newcomers = sorted(row.ttft_s for row in run.completed if row.asked_input == PROMPT and row.ttft_s)
    readers = [row for row in run.completed if row.asked_output == READ]
    return {
        "newcomers_ttft_p50_ms": round(1e3 * statistics.median(newcomers), 1),
        "newcomers_ttft_max_ms": round(1e3 * newcomers[-1], 1),
        "readers_tpot_p50_ms": round(1e3 * statistics.median(row.tpot_s or 0.0 for row in readers), 2),
        "readers_tpot_max_ms": round(1e3 * max(row.tpot_s or 0.0 for row in readers), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Path, default=Path(__file__).parent / "models" / "llama-3.1-8b")
    parser.add_argument("--on", default="NVIDIA H200", help="row of the hardware table that is simulated")
    parser.add_argument("--workload", default="azure_conv_1000")
    parser.add_argument("--pace", default="120ms")
    parser.add_argument("--slo", default="ttft=200ms,tpot=120ms")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--only", choices=("simulated", "measured"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    if args.only != "measured":
        where = provenance(f"{args.on} (simulated)", args.commit) | {"shape": args.shape.name, "slo": args.slo}
        made = simulated(
            server_of(args.shape, args.on), args.pace, lens(args.workload), Slo.parse(args.slo), args.seeds
        )
        for row in made:
            write_rows(args.out, [row | where])
            print(row, flush=True)
    if args.only != "simulated":
        where = provenance(cpu_name(), args.commit)
        for row in measured(args.pace):
            write_rows(args.out, [row | where])
            print(row, flush=True)


if __name__ == "__main__":
    main()
