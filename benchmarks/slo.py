"""What `--keep-slo` gains: requests within limits, if the engine orders prompts and sizes steps by them, and if it does not:

    python benchmarks/slo.py --out benchmarks/results/slo.json
    python benchmarks/slo.py --measure --rates 19,22,25 --machine "1x NVIDIA H200" --out benchmarks/results/slo.json

The first simulates a server on one H200: the real scheduler, with step times of the cost model (--shares fits them to a measured
server without --keep-slo). It gets --requests of Azure's conversations with random arrivals at each rate, and those of --bursts
with their own times, stretched.
Rows slo-sim-ARRIVALS-RATE-LIMITS: shares of good requests without and with limits. For --clairvoyant rates also the order of
someone who knows all arrivals: which requests are given up is fixed from the start, and a climb searches the best choice, beginning
with those that miss their limits. slo-sim-ARRIVALS-goodput-LIMITS: gain of the highest rate at which 95 % of requests are good.
With --padded the device differs from what the scheduler believes, as a card does: steps with prompts are padded to the sizes of
graphs, products hide only a part of the weights' reads, and predictions are not calibrated. Rows slo-padded-ARRIVALS-RATE-LIMITS.

The second runs two servers, one with --keep-slo and one without; on a CPU of the shipped model. Rows slo-measured-RATE-LIMITS-with
and slo-measured-RATE-LIMITS-without.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import uvloop
from common import HERE, cpu_name, provenance, write_rows
from goodput import figures, folder_of, tell

from ridgeline.bench.options import LoadConfig, ResultConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.server_process import serving
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.bench.traces import read_trace
from ridgeline.cli.simulate import server_of
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.cost import CostModel, StepWork
from ridgeline.core.slo import Slo
from ridgeline.core.workload import Workload
from ridgeline.engine.deadlines import Deadlines
from ridgeline.engine.graph_shapes import CROWDED_TOKENS
from ridgeline.engine.request import Request
from ridgeline.hardware.table import lookup
from ridgeline.planner import simulate
from ridgeline.planner.simulate import Outcome, Run, Server
from ridgeline.planner.split import good_share

SHARE = 0.95
PADDED: dict[str, Any] = {"overlap": 2.0, "ramp_tokens": 64.0}
"""Of the cost model for the device of --padded."""
LIMITS = ("ttft=200ms,tpot=100ms", "ttft=200ms,tpot=15ms")
Row = dict[str, Any]


class Padded(CostModel):
    """Of steps with prompts in the sizes of graphs."""

    def step_s(self, work: StepWork) -> float:
        if work.chunked:
            tokens = next((size for size in CROWDED_TOKENS if size >= work.tokens), work.tokens)
            flops = work.flops + (tokens - work.tokens) * self.spec.linear_flops(1, 0)
            work = work._replace(tokens=tokens, flops=flops)
        return super().step_s(work)


class Uncalibrated(Deadlines):
    """Predicts by the defaults of the cost model."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__(CostModel(cost.spec, cost.flops_per_s, cost.bytes_per_s))


class Clairvoyant(Deadlines):
    """Knows from the start which requests are given up."""

    given_up: frozenset[int] = frozenset()

    def _chosen(self, prompts: list[Request], now: float, begin: float, token_s: float) -> set[Request]:
        self._met = now
        return {prompt for prompt in prompts if int(prompt.id) in self.given_up}


def poisson(requests: Workload, rate: float, seed: int) -> Workload:
    draw, now, sent = random.Random(seed), 0.0, []
    for request in requests.requests:
        now += draw.expovariate(rate)
        sent.append(replace(request, at_s=now))
    return replace(requests, requests=tuple(sent), timed=True)


def stretched(requests: Workload, rate: float) -> Workload:
    factor = len(requests.requests) / rate / requests.span_s
    return replace(requests, requests=tuple(replace(each, at_s=each.at_s * factor) for each in requests.requests))


def served(server: Server, slo: Slo, workload: Workload) -> tuple[float, list[Outcome]]:
    """The share of good requests, and the outcome of each."""
    run = Run(server, enumerate(workload.requests))
    run.complete()
    outcomes = [run.outcomes[number] for number in range(len(workload.requests))]
    return good_share(slo, outcomes), outcomes


def clairvoyant(server: Server, slo: Slo, workload: Workload, rounds: int) -> float:
    """Share of good requests in the best order found."""
    known = simulate.Deadlines
    simulate.Deadlines = Clairvoyant  # type: ignore[misc]
    try:
        draw, limited = random.Random(0), replace(server, slo=slo)
        missing = [
            place for place, outcome in enumerate(served(server, slo, workload)[1]) if good_share(slo, [outcome]) < 1
        ]
        best, kept = 0.0, frozenset(draw.sample(missing, len(missing) // 2))
        for _ in range(rounds):
            Clairvoyant.given_up = kept
            share, outcomes = served(limited, slo, workload)
            if share >= best:
                best, given_up = share, kept
                missing = [place for place, outcome in enumerate(outcomes) if good_share(slo, [outcome]) < 1]
            more, back = set(missing) - given_up, sorted(given_up)
            kept = given_up.difference(draw.sample(back, min(len(back), draw.randrange(4))))
            kept = kept.union(draw.sample(sorted(more), min(len(more), draw.randrange(4))))
        return best
    finally:
        simulate.Deadlines, Clairvoyant.given_up = known, frozenset()  # type: ignore[misc]


def attained(server: Server, slo: Slo, at: Callable[[float], Workload], rate: float) -> float:
    return served(server, slo, at(rate))[0]


def highest(share: Callable[[float], float], low: float, high: float) -> float:
    while high - low > 0.25:
        rate = (low + high) / 2
        low, high = (rate, high) if share(rate) >= SHARE else (low, rate)
    return low


def simulated(args: argparse.Namespace, tell_row: Callable[[Row], None]) -> None:
    model = ModelConfig(model=str(args.model), max_model_len=16_384)
    server = server_of(model, EngineConfig(enable_prefix_caching=False), lookup("h200"))
    server = replace(
        server,
        cost=replace(server.cost, compute_share=args.shares[0], memory_share=args.shares[1]),
        host_s=0.0005,
        outside_s=0.001,
    )
    kind_of_device = "sim"
    if args.padded:
        values = {each.name: getattr(server.cost, each.name) for each in fields(CostModel)}
        server = replace(server, cost=Padded(**values | PADDED), host_s=0.001, outside_s=0.004)
        simulate.Deadlines, kind_of_device = Uncalibrated, "padded"  # type: ignore[misc]
    random_times = read_trace(args.trace).first(args.requests)
    arrivals: dict[str, Callable[[float], Workload]] = {"random": lambda rate: poisson(random_times, rate, 0)}
    if args.bursts:
        trace = read_trace(args.bursts).first(2 * args.requests)
        arrivals["bursts"] = lambda rate: stretched(trace, rate)
    for text in args.limits or LIMITS:
        slo = Slo.parse(text)
        name = text.replace("=", "-").replace(",", "-")
        for kind, at in arrivals.items():
            for rate in args.rates:
                workload = at(rate)
                without, _ = served(server, slo, workload)
                within, _ = served(replace(server, slo=slo), slo, workload)
                row = {
                    "row": f"slo-{kind_of_device}-{kind}-{rate:g}-{name}",
                    "value": round(within, 4),
                    "without": round(without, 4),
                }
                if kind == "random" and rate in args.clairvoyant:
                    best = max(within, clairvoyant(server, slo, workload, args.rounds))
                    row |= {"clairvoyant": round(best, 4), "of_clairvoyant": round(within / best, 4), "target": 0.97}
                tell_row(row | {"unit": "share of good requests", "slo": text, "rate": rate})
            if args.padded:
                continue
            by = [highest(partial(attained, each, slo, at), 2.0, 40.0) for each in (server, replace(server, slo=slo))]
            gain = round(by[1] / by[0] - 1, 4)
            facts = {
                "without": by[0],
                "with": by[1],
                "unit": "goodput with limits over without, minus 1",
                "target": 0.15,
            }
            tell_row({"row": f"slo-sim-{kind}-goodput-{name}", "value": gain, "slo": text, "share": SHARE} | facts)


async def measured(args: argparse.Namespace, tell_row: Callable[[Row], None]) -> None:
    for text in args.limits or LIMITS:
        for words in ([], ["--slo", text, "--keep-slo"]):
            with tempfile.TemporaryDirectory() as place:
                options = [f"--device={args.device}", "--no-enable-prefix-caching", *words]
                if folder := folder_of(str(args.model) if args.device == "cuda" else "", place):
                    options += [folder, "--load-format=dummy", "--max-model-len=16384"]
                config = BenchConfig(
                    TargetConfig(prompts="ids"),
                    WorkloadConfig(trace=str(args.trace)),
                    LoadConfig(),
                    ResultConfig(slo=text),
                )
                async with serving(options) as url, Session(config, url) as session:
                    for rate in args.rates:
                        run = await session.measure(LoadConfig(rate=rate, duration=args.run_s, warmup=16))
                        tell(run)
                        name = f"slo-measured-{rate:g}-{text.replace('=', '-').replace(',', '-')}"
                        row = {"row": f"{name}-{'with' if words else 'without'}", "value": round(run.attainment, 4)}
                        about = figures(run) | {
                            "model": args.model.name if args.device == "cuda" else "the shipped one"
                        }
                        tell_row(row | {"unit": "share of good requests"} | about)


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--trace", type=Path, default=HERE / "workloads" / "azure_conv_1000.json")
    parser.add_argument("--bursts", type=Path, help="a trace with times, whose bursts are kept")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rates", type=numbers, default=[16.0, 19.0, 22.0, 25.0])
    parser.add_argument("--clairvoyant", type=numbers, default=[22.0], help="rates for which that order is searched")
    parser.add_argument("--rounds", type=int, default=40, help="steps of the search of that order")
    parser.add_argument(
        "--shares", type=numbers, default=[0.75, 0.9], help="of peak arithmetic and bandwidth that steps reach"
    )
    parser.add_argument("--padded", action="store_true", help="simulate a device unlike the predictions")
    parser.add_argument("--limits", action="append", help="as --slo of serve; may be repeated (default: two)")
    parser.add_argument("--measure", action="store_true", help="run servers instead of simulating them")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--run-s", type=float, default=20.0, help="seconds in which the requests of a run are sent")
    parser.add_argument("--machine", default=cpu_name())
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    about = provenance(args.machine, args.commit)

    def tell_row(row: Row) -> None:
        print(json.dumps(row), flush=True)
        if args.out:
            write_rows(args.out, [row | about])

    if args.measure:
        uvloop.run(measured(args, tell_row))
    else:
        simulated(args, tell_row)


if __name__ == "__main__":
    main()
