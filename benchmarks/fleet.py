"""A fleet in virtual time: what the router's policies do on a trace with shared prefixes, and what a loss costs.

    python benchmarks/fleet.py --trace mooncake_conversation.jsonl --out benchmarks/results/simulation.json

Replicas are Llama-3.1-8B on one H100 each, with the real scheduler and step times of the uncalibrated cost model; the router and
the autoscaler are those of the service. Nothing depends on how busy this machine is but the rows of speed, which count the CPU
seconds of the process. The trace is Mooncake's conversation trace (arXiv:2407.00079), its first --requests within a context of 32k.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import HERE, cpu_name, lens, provenance, write_rows

from ridgeline.bench.traces import read_trace
from ridgeline.cli.simulate import server_of
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.slo import Slo
from ridgeline.core.workload import RequestSpec, Workload, arrivals
from ridgeline.hardware.table import lookup
from ridgeline.planner.fleet import Fleet, FleetFigures, Loss, simulate_fleet
from ridgeline.service.autoscale import Scaling

SLO = Slo.parse("ttft=2s,tpot=50ms")
POLICIES = ("prefix", "least-work", "round-robin")
BURST = 40.0
"""Requests per second of the rows of speed: about 64 requests are in flight at each replica."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--replicas", type=int, default=8)
    parser.add_argument("--rate", type=float, default=5.0)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    model = ModelConfig(str(HERE / "models" / "llama-3.1-8b"), load_format="dummy", max_model_len=32_768)
    server = server_of(model, EngineConfig(), lookup("h100"))
    trace = read_trace(Path(args.trace)).first(args.requests).within(32_768).at_rate(args.rate)
    fleet = Fleet(server, args.replicas)
    about = provenance(cpu_name())
    rows = [{"row": name, **row, **about} for name, row in _rows(fleet, trace)]
    write_rows(args.out, rows)
    for row in rows:
        print({name: value for name, value in row.items() if name not in about})


def _rows(fleet: Fleet, trace: Workload) -> Iterator[tuple[str, dict[str, Any]]]:
    for policy in POLICIES:
        yield f"sim-mooncake-{policy}", _figures(simulate_fleet(replace(fleet, policy=policy), trace))
    losses = [Loss(60.0 * number, down_s=60.0) for number in range(1, 6)]
    yield "sim-mooncake-losses", _figures(simulate_fleet(replace(fleet, losses=losses), trace))
    capacity = fleet.capacity
    rates = capacity.prefill_tokens_s, capacity.limit
    scaling = Scaling(1, 2 * fleet.replicas, *rates, ttft_s=2.0, cold_start_s=30.0, calm_s=60.0)
    scaled = replace(fleet, replicas=fleet.replicas // 2, scaling=scaling)
    yield "sim-mooncake-autoscaled", _figures(simulate_fleet(scaled, trace))
    requests = tuple(RequestSpec(0.0, *shape) for shape in lens("azure_conv_1000"))
    for replicas in (1, fleet.replicas):
        times = arrivals(len(requests), BURST * replicas, 1.0, 0)
        load = Workload("azure_conv_1000", requests, timed=True).at(times)
        began = time.process_time()
        simulate_fleet(replace(fleet, replicas=replicas, policy="least-work"), load)
        rate = len(requests) / (time.process_time() - began) * 60
        yield f"sim-requests-per-minute-{replicas}", {"value": round(rate), "unit": "requests", "target": 50_000}


def _figures(figures: FleetFigures) -> dict[str, Any]:
    result = figures.figures
    return {
        "requests": figures.requests,
        "answered": len(figures.outcomes),
        "failed": figures.failed,
        "retried": figures.retried,
        "hit_rate": round(figures.hit_rate, 4),
        "ttft_p50_s": round(result.ttft_s, 4),
        "ttft_p99_s": round(result.slow_ttft_s, 3),
        "tpot_p50_s": round(result.tpot_s, 5),
        "attainment": round(figures.attainment(SLO), 4),
        "most_replicas": figures.most,
        "replica_hours": round(figures.replica_s / 3600, 4),
        "unit": f"share within {SLO}",
        "value": round(figures.attainment(SLO), 4),
    }


if __name__ == "__main__":
    main()
