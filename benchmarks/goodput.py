"""Goodput of the shipped model on this CPU under a real trace, found by search, and the why of its slowest requests:

    python benchmarks/goodput.py --trace TRACE.csv --context 1024 --out benchmarks/results/goodput.json

`ridgeline serve` runs on the first core with one thread, the load generator on the last. All runs send the same requests,
the trace's first ones that fit the context (kept; those passed over are dropped), with the trace's own bursts scaled to the
rate. The search is that of `ridgeline bench search`: the highest rate at which a share of all offered requests meets the
SLO and requests do not pile up (`kept_up`, completions over arrivals, at least 0.9). The first row is the best run, or that
of the lowest rate where none met it (`met`); every run has a row of its own.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import uvloop
from common import cpu_name, provenance, write_rows

from ridgeline.bench.figures import kept_up, missed, run_json, throughput, trouble
from ridgeline.bench.options import LoadConfig, ResultConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.own import serving
from ridgeline.bench.record import Run
from ridgeline.bench.search import Found, search
from ridgeline.bench.session import Asked, Session
from ridgeline.bench.traces import read_trace

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
        "invalid": trouble(run),
        "kept": len(run.rows),
        "dropped": run.dropped,
        "context": run.facts["context"],
    }


def tell(run: Run) -> None:
    rates = throughput(run)
    print(
        f"{run.facts['rate']:.3g} requests/s: {run.attainment:.1%} of {len(run.rows)} good,"
        f" {rates['goodput_requests_per_s']:.3g} good requests/s {missed(run)} {trouble(run)}",
        flush=True,
    )


def shown(found: Found) -> Run:
    """The run that the first row tells of: the best one, or that of the lowest rate."""
    return found.best or min(found.runs, key=lambda run: float(run.facts["rate"]))


async def measure(arguments: argparse.Namespace) -> tuple[Found, list[dict[str, Any]]]:
    """(what the search found, the whys of the slowest requests of its best run, or of the lowest rate if none met it)."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})  # what is started now stays there
    flags = ["--device", "cpu", "--threads", "1", "--slo", arguments.slo]
    if arguments.context:
        flags += ["--max-model-len", str(arguments.context)]
    async with serving(flags) as url:
        os.sched_setaffinity(0, {cores[-1]})
        asked = Asked(
            TargetConfig(url),
            WorkloadConfig(trace=arguments.trace, max_requests=arguments.requests),
            LoadConfig(rate=arguments.start, warmup=2),
            ResultConfig(slo=arguments.slo),
        )
        async with Session(asked, url) as session:
            found = await search(
                lambda rate: session.measure(replace(asked.load, rate=rate)),
                arguments.start,
                arguments.attain,
                arguments.precision,
                tell,
                arguments.most,
            )
            whys = await session.whys(shown(found))
    os.sched_setaffinity(0, cores)
    return found, whys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", required=True, help="trace file, as the Azure conversation CSV")
    parser.add_argument("--slo", default="ttft=200ms,tpot=100ms")
    parser.add_argument("--attain", type=float, default=0.9, help="share of offered requests that must meet the SLO")
    parser.add_argument("--start", type=float, default=1.0, help="rate of the first run, requests per second")
    parser.add_argument("--requests", type=int, default=100, help="requests of each run")
    parser.add_argument("--context", type=int, default=0, help="the server's --max-model-len; 0 takes the model's own")
    parser.add_argument("--precision", type=float, default=0.1, help="how near to the limit, as a share of the rate")
    parser.add_argument("--most", type=int, default=6, help="runs at most")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    arguments = parser.parse_args()
    about = {"device": "cpu", "attain": arguments.attain, **provenance(cpu_name())}
    about["command"] = str(about["command"]).replace(arguments.trace, Path(arguments.trace).name)
    found, whys = uvloop.run(measure(arguments))
    best, trace = shown(found), read_trace(Path(arguments.trace))
    name = f"shipped-cpu-context{best.facts['context']}"
    rows: list[dict[str, Any]] = [
        {
            "row": name,
            **figures(best),
            "met": found.best is not None,
            "bounded": found.bounded,
            "stopped": found.stopped,
            "whole_trace_kept": len(trace.within(best.facts["context"]).asks),
            "whole_trace": len(trace.asks),
            **about,
        },
        {"row": f"{name}-why", "rate": best.facts["rate"], "slowest": [short(why) for why in whys], **about},
        *({"row": f"{name}-rate-{run.facts['rate']:.4g}", **figures(run), **about} for run in found.runs),
    ]
    print(rows[0], *(why["summary"] for why in rows[1]["slowest"]), sep="\n")
    if arguments.out:
        write_rows(arguments.out, rows)


def short(why: dict[str, Any]) -> dict[str, Any]:
    """The words of a why, and the lengths they speak of."""
    numbers = why["numbers"]
    sizes = {name: numbers[name] for name in ("prompt_tokens", "output_tokens", "ttft_s", "tpot_s", "e2e_s")}
    return {**{name: why[name] for name in WORDS}, **sizes}


if __name__ == "__main__":
    main()
