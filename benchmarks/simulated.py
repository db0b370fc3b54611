"""Simulated beside measured latencies of a server under a trace, and a replay beside the run that it foretells:

    python benchmarks/simulated.py --rates 6,12,18 --fit 9 --machine "1x NVIDIA H200" --out benchmarks/results/simulation.json
    python benchmarks/simulated.py --device cpu --rates 0.5,1,1.5 --fit 0.8 --change max_num_batched_tokens=128

The server has random weights in the shape of --model; on a CPU it is the shipped model on one core. A run at the rate --fit comes
first: the simulation takes its step times, host times and the cache from that run alone. Then --runs runs are made at each
rate with the same arrivals (Poisson) and other prompts, and for each one the same arrivals and lengths are simulated with the real
scheduler on a virtual clock. Rows sim-conv-LEVEL-FIGURE-error: the mean of the simulated figures over that of the measured ones,
minus 1; `spread` is the range of the measured ones over their mean, to which no simulation can be nearer. sim-conv-FIGURE-error
has the largest of the three levels.

--calibrate: the servers use a calibration (`ridgeline calibrate`), whose step times the run at --fit then scales.

--keep FOLDER writes what the server recorded of each run, as `ridgeline simulate --recorded` and --again FOLDER read it: the latter
simulates those runs again, with today's code and without a server.

--change: the newest run of the middle rate is replayed with another option (`ridgeline simulate --recorded`). Then a server with
that option is measured. Rows replay-OPTION-FIGURE: the estimate with its interval, the measured figure, and whether it lies within.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop
from common import HERE, cpu_name, provenance, write_rows
from goodput import folder_of

from ridgeline.bench.figures import invalid_reason
from ridgeline.bench.options import LoadConfig, ResultConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.record import Run
from ridgeline.bench.server_process import serving
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.cli.diagnose import Record, record_of, situation_of
from ridgeline.core.errors import RidgelineError
from ridgeline.planner.replay import Case, changed, figures, replay
from ridgeline.planner.simulate import Server, serve
from ridgeline.planner.situation import Situation, newest, outcome_of

LEVELS = ("low", "middle", "knee")
TARGETS = {"TTFT p50": 0.10, "TTFT p99": 0.20, "TPOT p50": 0.10, "TPOT p99": 0.20}
MOST = 1000
"""Requests of a run that are simulated: as many as a server keeps."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Taken:
    """A run and what its server recorded. measured: the figures of planner.replay, as its clients saw them."""

    rate: float
    situation: Situation
    rows: Sequence[Mapping[str, Any]]

    @property
    def measured(self) -> dict[str, float]:
        return figures([outcome_of(row) for row in self.rows])

    def simulated(self, server: Server) -> dict[str, float]:
        return figures(serve(server, self.situation.workload).outcomes)


async def take(session: Session, args: argparse.Namespace, rate: float, change: str) -> Taken:
    run: Run = await session.measure(LoadConfig(rate=rate, duration=args.run_s, warmup=16))
    record = record_of(run)
    if record is None or invalid_reason(run):
        raise RidgelineError(f"the run at {rate:g} requests/s does not count: {invalid_reason(run) or 'no record'}")
    if args.keep:
        args.keep.mkdir(parents=True, exist_ok=True)
        number = len(list(args.keep.glob("*.json")))
        kept = {"rate": rate, "change": change, "snapshot": record.snapshot, "rows": record.rows}
        (args.keep / f"{number:02}.json").write_text(json.dumps(kept))
    return taken_of(args, rate, record)


def taken_of(args: argparse.Namespace, rate: float, record: Record) -> Taken:
    folder = str(args.model) if args.device == "cuda" else ""
    taken = Taken(rate, situation_of(record, folder, MOST), newest(record.rows, MOST))
    print(f"{rate:g} requests/s, {len(taken.rows)} requests:", as_ms(taken.measured), flush=True)
    return taken


def kept(args: argparse.Namespace) -> tuple[list[Taken], list[Taken]]:
    """As `runs_of`, from the files of --again."""
    runs: list[Taken] = []
    others: list[Taken] = []
    for file in sorted(args.again.glob("*.json")):
        of_run = json.loads(file.read_text())
        to = others if of_run["change"] else runs
        to.append(taken_of(args, of_run["rate"], Record(of_run["snapshot"], of_run["rows"])))
        args.change = of_run["change"] or args.change
    return runs, others


def as_ms(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value * 1e3, 2) for name, value in values.items()}


def calibrated(words: Sequence[str], place: str) -> str:
    """The option of a server with a calibration for these words."""
    file = f"{place}/calibration.json"
    command = [sys.executable, "-m", "ridgeline", "calibrate", *words, f"--out={file}"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return f"--calibration={file}"


def flags(args: argparse.Namespace, folder: str) -> list[str]:
    words = [
        f"--device={args.device}",
        f"--max-model-len={args.context}",
        "--max-num-seqs=256",
        "--no-enable-prefix-caching",
    ]
    if args.device == "cpu":
        words = [*words[:1], "--threads=1", "--max-num-seqs=16"]
    else:
        words = [folder, "--load-format=dummy", *words]
    return words


async def measured(
    args: argparse.Namespace, words: Sequence[str], rates: Sequence[float], change: str = ""
) -> list[Taken]:
    """A run at each rate on a new server with these words. change: another option of it."""
    name, _, value = change.partition("=")
    changed_words = [f"--{name.replace('_', '-')}={value}"] if change else []
    config = BenchConfig(
        TargetConfig(prompts="ids"), WorkloadConfig(trace=str(args.trace)), LoadConfig(), ResultConfig(slo=args.slo)
    )
    async with serving([*words, *changed_words]) as url, Session(config, url) as session:
        return [await take(session, args, rate, change) for rate in rates]


def error_rows(server: Server, runs: Sequence[Taken], rates: Sequence[float]) -> list[Row]:
    rows = list[Row]()
    for level, rate in zip(LEVELS, rates, strict=True):
        of_rate = [run for run in runs if run.rate == rate]
        begun = time.perf_counter()
        pairs = [(run.measured, run.simulated(server)) for run in of_rate]
        seconds = time.perf_counter() - begun
        for name, target in TARGETS.items():
            real, simulated = ([side[name] for side in sides] for sides in zip(*pairs, strict=True))
            mean, guess = statistics.fmean(real), statistics.fmean(simulated)
            rows.append({
                "row": f"sim-conv-{level}-{name.replace(' ', '-').lower()}-error", "value": round(guess / mean - 1, 4),
                "unit": "simulated over measured, minus 1", "target": target, "rate": rate, "runs": len(of_rate),
                "measured_ms": round(mean * 1e3, 2), "simulated_ms": round(guess * 1e3, 2),
                "spread": round((max(real) - min(real)) / mean, 4),
                "requests": sum(len(run.rows) for run in of_rate), "simulation_s": round(seconds, 2),
            })  # fmt: skip
    for name, target in TARGETS.items():
        label = name.replace(" ", "-").lower()
        worst = max((row for row in rows if f"-{label}-" in row["row"]), key=lambda row: abs(row["value"]))
        rows.append({
            "row": f"sim-conv-{label}-error", "value": abs(worst["value"]), "unit": "largest of three loads", "target": target,
            "spread": worst["spread"], "at": worst["row"],
        })  # fmt: skip
    return rows


def replay_rows(before: Taken, after: Taken, change: str, resamples: int) -> list[Row]:
    name, _, value = change.partition("=")
    then = changed(before.situation, {name: type(getattr(before.situation.engine, name) or 0)(value)})
    recorded = [outcome_of(row) for row in before.rows]
    real, rows = after.measured, list[Row]()
    for each in replay(Case(before.situation), Case(then), recorded, resamples):
        if each.name in TARGETS:
            low, high = each.expected.low, each.expected.high
            rows.append({
                "row": f"replay-{name.replace('_', '-')}-{value}-{each.name.replace(' ', '-').lower()}",
                "value": round(each.expected.value / real[each.name] - 1, 4), "unit": "estimate over measured, minus 1",
                "recorded_ms": round(each.recorded.value * 1e3, 2), "estimate_ms": round(each.expected.value * 1e3, 2),
                "interval_ms": [round(low * 1e3, 2), round(high * 1e3, 2)],
                "measured_ms": round(real[each.name] * 1e3, 2), "within": low <= real[each.name] <= high,
            })  # fmt: skip
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--trace", type=Path, default=HERE / "workloads" / "azure_conv_1000.json")
    parser.add_argument("--rates", default="6,12,18", help="requests/s: low, middle, knee")
    parser.add_argument("--fit", type=float, default=9.0, help="requests/s of the run that the simulation is fitted to")
    parser.add_argument("--run-s", type=float, default=20.0, help="seconds in which the requests of a run are sent")
    parser.add_argument("--runs", type=int, default=2, help="runs at each rate")
    parser.add_argument("--change", default="", help="OPTION=VALUE of another server, for the replay")
    parser.add_argument("--calibrate", action="store_true", help="fit step times to measured steps of the model first")
    parser.add_argument("--keep", type=Path, help="folder for what the server recorded of each run")
    parser.add_argument("--again", type=Path, help="folder of --keep: simulate its runs again")
    parser.add_argument(
        "--resamples", type=int, default=8, help="other runs that are simulated for the replay's intervals"
    )
    parser.add_argument("--slo", default="ttft=200ms,tpot=15ms")
    parser.add_argument("--context", type=int, default=16_384)
    parser.add_argument("--machine", default=cpu_name())
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


async def runs_of(args: argparse.Namespace, rates: Sequence[float]) -> tuple[list[Taken], list[Taken]]:
    """The runs of the server, the first of which is the one to fit, and that of the changed one."""
    if args.device == "cpu":  # the server has the first core, the load generator the last one
        os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:1]))
    with tempfile.TemporaryDirectory() as place:
        words = flags(args, folder_of(str(args.model) if args.device == "cuda" else "", place))
        if args.calibrate:
            words.append(calibrated(words, place))
        runs = await measured(args, words, [args.fit, *rates * args.runs])
        return runs, await measured(args, words, rates[1:2], args.change) if args.change else []


def main() -> None:
    args = arguments()
    rates = [float(rate) for rate in args.rates.split(",")]
    (fit, *runs), others = kept(args) if args.again else uvloop.run(runs_of(args, rates))
    about = provenance(args.machine, args.commit)

    def tell(rows: Sequence[Row]) -> None:
        print(*map(json.dumps, rows), sep="\n", flush=True)
        if args.out:
            write_rows(args.out, [row | about for row in rows])

    tell(error_rows(fit.situation.server, runs, rates))
    for after in others:
        tell(replay_rows([run for run in runs if run.rate == after.rate][-1], after, args.change, args.resamples))


if __name__ == "__main__":
    main()
