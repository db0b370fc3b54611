"""Goodput under a real trace, found by search, the why of the slowest requests, and what an output token costs in input tokens:

    python benchmarks/goodput.py --trace TRACE.csv --context 1024 --out benchmarks/results/goodput.json
    python benchmarks/goodput.py --trace TRACE.csv --context 16384 --device cuda --shape benchmarks/models/llama-3.1-8b \\
        --start 8 --requests 200 --out benchmarks/results/goodput.json

The first serves the shipped model on the first core with one thread; the second random weights in the shape of a
config.json, with the shipped tokenizer, on a GPU and all cores but the last. The load generator has the last core. Prompts
are token ids. All runs send the same requests,
the trace's first ones that fit the context (kept; those passed over are dropped), with the trace's own bursts scaled to the
rate. The search is that of `ridgeline bench search`: the highest rate at which a share of all offered requests meets the
SLO and requests do not pile up (`kept_up`, completions over arrivals, at least 0.9). The first row is the best run, or that
of the lowest rate where none met it (`met`); every run has a row of its own. Before the search requests come one at a time
for a few seconds (`-equivalence`): the median time per output token over the median of prefill seconds per prompt token, from
the server's own ledger, alone and in the shown run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from common import cpu_name, provenance, write_rows

from ridgeline.bench.figures import invalid_reason, kept_up, missed, run_json, throughput
from ridgeline.bench.options import LoadConfig, ResultConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.probe import fetch
from ridgeline.bench.record import Run
from ridgeline.bench.search import SearchResult, meets, saturated, search
from ridgeline.bench.server_process import serving
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.bench.traces import read_trace
from ridgeline.core.errors import RidgelineError
from ridgeline.models.hub import shipped_model

LATE = {"late_compiles": "late_compiles_total", "late_captures": "late_captures_total", "late_s": "late_seconds_total"}
"""Names in the result -> series of /metrics."""
WORDS = ("id", "summary", "verdict", "blame", "reasons")
"""What is kept of a why."""


def figures(run: Run) -> dict[str, Any]:
    """What a row says of one run."""
    all_of_it, rates = run_json(run), throughput(run)
    return {
        "model": run.facts["model"],
        "trace": run.facts["workload"],
        "slo": str(run.slo),
        "rate": round(run.facts["rate"], 4),
        "goodput_req_s": round(rates["goodput_requests_per_s"], 4),
        "attainment": round(run.attainment, 4),
        **{
            f"{name}_p{share}_ms": round(all_of_it[f"p{share}_{name}_ms"], 2)
            for name in ("ttft", "tpot")
            for share in (50, 99)
        },
        "output_tok_s": round(rates["output_tokens_per_s"], 1),
        "input_tok_s": round(rates["input_tokens_per_s"], 1),
        "seconds": round(run.seconds, 2),
        "kept_up": round(kept_up(run), 3),
        "missed": missed(run),
        "invalid": invalid_reason(run),
        "kept": len(run.rows),
        "dropped": run.dropped,
        "context": run.facts["context"],
    }


def tell(run: Run) -> None:
    rates, json_figures = throughput(run), run_json(run)
    print(
        f"{run.facts['rate']:.3g} requests/s: {run.attainment:.1%} of {len(run.rows)} good,"
        f" {rates['goodput_requests_per_s']:.3g} good requests/s, kept up {kept_up(run):.3f},"
        f" TTFT p50 and p99 {json_figures['p50_ttft_ms']:.0f} and {json_figures['p99_ttft_ms']:.0f} ms,"
        f" TPOT {json_figures['p50_tpot_ms']:.1f} and {json_figures['p99_tpot_ms']:.1f} ms {missed(run)} {invalid_reason(run)}",
        flush=True,
    )


def rate_of(run: Run) -> float:
    return float(run.facts["rate"])


def shown(search_result: SearchResult) -> Run:
    """The run that the first row tells of: the best one, or that of the lowest rate."""
    return search_result.best or min(search_result.runs, key=lambda run: float(run.facts["rate"]))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one server showed. alone: see `equivalence`, of requests one at a time; loaded: of the shown run. device: as
    the server names it. late: see `late_work`, by rate and "before" them."""

    search_result: SearchResult
    whys: list[dict[str, Any]]
    alone: dict[str, float]
    loaded: dict[str, float]
    device: str
    late: dict[str, dict[str, float]]


def found_among(runs: list[Run], attain: float, why: str) -> SearchResult:
    """What a search has found that was stopped before its end. Raises RidgelineError if it has made no run."""
    if not runs:
        raise RidgelineError(f"no run ended ({why}): give --patience more seconds, or less --requests.")
    met = [run for run in runs if meets(run, attain) and not saturated(run) and not invalid_reason(run)]
    best = max(met, key=lambda run: float(run.facts["rate"]), default=None)
    return SearchResult(float(best.facts["rate"]) if best else 0.0, best, tuple(runs), len(met) < len(runs), why)


def equivalence(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Of ended requests as GET /requests lists them: medians of milliseconds per output token after the first and per
    prompt token computed (admission to first token), and their ratio."""
    outputs, inputs = [], []
    for row in rows:
        computed, prefill_s = row["prompt_tokens"] - row["cached_tokens"], row["spent"]["prefill_s"]
        if row["tpot_s"] is not None and computed > 0 and prefill_s > 0:
            outputs.append(row["tpot_s"] * 1e3)
            inputs.append(prefill_s / computed * 1e3)
    output, prompt = statistics.median(outputs), statistics.median(inputs)
    return {
        "requests": len(outputs),
        "ms_per_output_token": round(output, 4),
        "ms_per_input_token": round(prompt, 5),
        "input_tokens_per_output_token": round(output / prompt, 1),
    }


def late_work(metrics: str) -> dict[str, float]:
    """What the server has compiled and captured since Ready while requests waited, and the seconds that took, by its
    /metrics."""
    results = {}
    for name, what in LATE.items():
        values = [
            float(line.rsplit(" ", 1)[1]) for line in metrics.splitlines() if line.startswith(f"ridgeline:{what}{{")
        ]
        results[name] = round(sum(values), 3)
    return results


def gained(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: round(after[name] - before.get(name, 0.0), 3) for name in after}


async def ledger(session: Session, run: Run) -> list[dict[str, Any]]:
    """The server's own rows of a run's requests, as far as it still has them."""
    reply = await fetch(session.client, "/requests?limit=1000")
    asked = {row.answer_id for row in run.rows}
    return [row for row in msgspec.json.decode(reply.text, type=dict)["data"] if row["id"] in asked]


def flags(arguments: argparse.Namespace, folder: str) -> list[str]:
    """What the server is started with; `folder` is where random weights get their shape, "" for the shipped model."""
    options = ["--device", arguments.device, "--slo", arguments.slo]
    if arguments.device == "cpu":
        options += ["--threads", "1"]
    if arguments.context:
        options += ["--max-model-len", str(arguments.context)]
    if folder:
        options = [folder, "--load-format", "dummy", "--served-model-name", Path(arguments.shape).name, *options]
    return options


def folder_of(shape: str, place: str) -> str:
    """A model folder in `place` with the shape's config.json and the shipped model's tokenizer, whose vocabulary is filled up
    to the shape's: a token without text would make no event, and its time to first token would be a later token's. "" without
    a shape."""
    if not shape:
        return ""
    for file in shipped_model().glob("*token*"):
        shutil.copy(file, place)
    shutil.copy(Path(shape) / "config.json", place)
    wanted = json.loads((Path(shape) / "config.json").read_text())["vocab_size"]
    target = Path(place) / "tokenizer.json"
    tokenizer = json.loads(target.read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = {*vocab.values(), *(token["id"] for token in tokenizer["added_tokens"])}
    vocab.update({f"filler{index}": index for index in range(wanted) if index not in taken})
    target.write_text(json.dumps(tokenizer))
    return place


async def measure(arguments: argparse.Namespace) -> Outcome:
    """Start the server, measure it, stop it."""
    cores = sorted(os.sched_getaffinity(0))
    few = arguments.device == "cpu" or len(cores) == 1
    os.sched_setaffinity(0, set(cores[:1] if few else cores[:-1]))  # what is started now stays there
    with tempfile.TemporaryDirectory() as place:
        async with serving(flags(arguments, folder_of(arguments.shape, place))) as url:
            os.sched_setaffinity(0, {cores[-1]})
            outcome = await seek(arguments, url)
    os.sched_setaffinity(0, cores)
    return outcome


async def seek(arguments: argparse.Namespace, url: str) -> Outcome:
    asked = BenchConfig(
        TargetConfig(url, prompts="ids"),
        WorkloadConfig(trace=arguments.trace, max_requests=arguments.requests),
        LoadConfig(rate=arguments.start, warmup=arguments.warmup),
        ResultConfig(slo=arguments.slo),
    )
    async with Session(asked, url) as session:
        state = await fetch(session.client, "/dashboard/data")
        device = msgspec.json.decode(state.text, type=dict)["facts"]["device"]
        single = await session.measure(LoadConfig(concurrency=1, duration=arguments.alone, warmup=arguments.warmup))
        alone = equivalence(await ledger(session, single))
        print(f"alone: {alone}", flush=True)
        ledgers: dict[float, dict[str, float]] = {}
        state = await fetch(session.client, "/metrics")
        seen = late_work(state.text.decode())
        late = {"before": seen}

        async def at(rate: float) -> Run:
            nonlocal seen
            run = await session.measure(replace(asked.load, rate=rate))
            ledgers[rate] = equivalence(await ledger(session, run))
            now = late_work((await fetch(session.client, "/metrics")).text.decode())
            late[f"{rate:.4g}"], seen = gained(now, seen), now
            return run

        runs: list[Run] = []

        def after_run(run: Run) -> None:
            tell(run)
            print(f"  late in it: {late[f'{rate_of(run):.4g}']}", flush=True)
            runs.append(run)

        try:
            async with asyncio.timeout(arguments.patience):
                result = await search(
                    at, arguments.start, arguments.attain, arguments.precision, after_run, arguments.most
                )
        except TimeoutError:
            result = found_among(runs, arguments.attain, f"after {arguments.patience:g} s")
        best = shown(result)
        return Outcome(result, await session.whys(best), alone, ledgers[rate_of(best)], device, late)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="trace file, as the Azure conversation CSV")
    parser.add_argument("--slo", default="ttft=200ms,tpot=100ms")
    parser.add_argument("--attain", type=float, default=0.9, help="share of offered requests that must meet the SLO")
    parser.add_argument("--start", type=float, default=1.0, help="rate of the first run, requests per second")
    parser.add_argument("--requests", type=int, default=100, help="requests of each run")
    parser.add_argument("--warmup", type=int, default=16, help="requests sent together before each run, not counted")
    parser.add_argument("--context", type=int, default=0, help="the server's --max-model-len; 0 takes the model's own")
    parser.add_argument("--alone", type=float, default=10.0, help="seconds of requests one at a time")
    parser.add_argument("--patience", type=float, default=3600.0, help="seconds of the search at most")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--shape", default="", help="folder of a config.json to fill with random weights; none: shipped"
    )
    parser.add_argument("--commit", default="", help="the commit that runs, where there is no .git to ask")
    parser.add_argument("--precision", type=float, default=0.1, help="how near to the limit, as a share of the rate")
    parser.add_argument("--most", type=int, default=6, help="runs at most")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    arguments = parser.parse_args()
    outcome = uvloop.run(measure(arguments))
    machine = cpu_name() if arguments.device == "cpu" else outcome.device
    about = {"device": outcome.device, "attain": arguments.attain, **provenance(machine, arguments.commit)}
    about["command"] = str(about["command"]).replace(arguments.trace, Path(arguments.trace).name)
    table = rows(arguments, outcome, about)
    print(
        json.dumps(table[0]),
        json.dumps(table[2]),
        json.dumps(table[3]),
        *(why["summary"] for why in outcome.whys),
        sep="\n",
    )
    if arguments.out:
        write_rows(arguments.out, table)


def rows(arguments: argparse.Namespace, outcome: Outcome, about: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The shown run, its whys, the equivalence, then every run."""
    result = outcome.search_result
    best, trace = shown(result), read_trace(Path(arguments.trace))
    model = Path(arguments.shape).name if arguments.shape else "shipped"
    name = f"{model}-{arguments.device}-context{best.facts['context']}"
    return [
        {
            "row": name,
            **figures(best),
            **outcome.late[f"{rate_of(best):.4g}"],
            "met": result.best is not None,
            "bounded": result.bounded,
            "stopped": result.stopped,
            "whole_trace_kept": len(trace.within(best.facts["context"]).requests),
            "whole_trace": len(trace.requests),
            **about,
        },
        {
            "row": f"{name}-why",
            "rate": best.facts["rate"],
            "slowest": [short(why) for why in outcome.whys],
            **about,
        },
        {"row": f"{name}-late", "late": outcome.late, **about},
        {"row": f"{name}-equivalence", "alone": outcome.alone, "loaded": outcome.loaded, **about},
        *(
            {"row": f"{name}-rate-{rate_of(run):.4g}", **figures(run), **outcome.late[f"{rate_of(run):.4g}"], **about}
            for run in result.runs
        ),
    ]


def short(why: dict[str, Any]) -> dict[str, Any]:
    """The words of a why, and the lengths they speak of."""
    numbers = why["numbers"]
    sizes = {name: numbers[name] for name in ("prompt_tokens", "output_tokens", "ttft_s", "tpot_s", "e2e_s")}
    return {**{name: why[name] for name in WORDS}, **sizes}


if __name__ == "__main__":
    main()
