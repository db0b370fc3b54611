"""What a full batch lane costs online requests, and what it gets:

    python benchmarks/batch_lane.py --out benchmarks/results/service.json

Serves the shipped model on the first core with one thread; the load generator has the last core. Online and batch requests have
the same lengths and random token ids. With an SLO: online requests alone at a rate, closed loops for the highest throughput at that
SLO, then online requests again beside a batch that never ends. Rows:

    batch-online-goodput-ratio   goodput with the lane full over goodput without
    batch-slack-share            the lane's tokens per second over (the highest ones at the SLO - those of online requests)
    batch-capped-p99-ratio       with --batch-impact and no SLO: p99 TPOT with the lane full over p99 TPOT without, for each impact

Tokens are those of answers. The lane's are counted by the batch's own usage while online requests arrive.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from common import cpu_name, provenance, write_rows

from ridgeline.bench.figures import latency, throughput
from ridgeline.bench.options import LoadConfig, ResultConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.record import Run
from ridgeline.bench.server_process import serving
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.cli.batch import Server
from ridgeline.cli.client import ChatClient

ROWS = 3_000
"""Rows of a batch: more than any round finishes."""
SETTLE_S = 1.5
"""Seconds from the start of the batch to the first online request."""


@asynccontextmanager
async def served(arguments: argparse.Namespace, *flags: str) -> AsyncIterator[tuple[Session, Server]]:
    """A server on the first core, its session on the last one, and its batch routes."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[0]})
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--device",
            "cpu",
            "--threads",
            "1",
            "--max-num-seqs",
            str(arguments.seqs),
            "--batch-dir",
            folder,
            *flags,
        ]
        try:
            async with serving(options) as url:
                os.sched_setaffinity(0, {cores[-1]})
                config = BenchConfig(
                    TargetConfig(url, prompts="ids"),
                    WorkloadConfig(
                        input_len=str(arguments.input), output_len=str(arguments.output), max_requests=100_000
                    ),
                    LoadConfig(rate=arguments.rate, duration=arguments.seconds),
                    ResultConfig(slo=arguments.slo),
                )
                async with Session(config, url) as session:
                    yield session, Server(ChatClient(url))
        finally:
            os.sched_setaffinity(0, set(cores))


def batch_file(folder: str, arguments: argparse.Namespace) -> Path:
    """A file of completions with random token ids."""
    chance, path = random.Random(7), Path(folder) / "rows.jsonl"
    with path.open("w") as file:
        for index in range(ROWS):
            ids = [chance.randrange(300, 4000) for _ in range(arguments.input)]
            body = {"prompt": ids, "max_tokens": arguments.output, "ignore_eos": True}
            row = {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    return path


async def online(session: Session, arguments: argparse.Namespace) -> Run:
    """Online requests at the rate for the time."""
    return await session.measure(LoadConfig(rate=arguments.rate, duration=arguments.seconds, warmup=4))


async def beside(session: Session, server: Server, path: Path, arguments: argparse.Namespace) -> tuple[Run, float]:
    """Online requests beside a batch, and the lane's tokens per second meanwhile."""
    file = await asyncio.to_thread(server.upload, path)
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
    batch = await asyncio.to_thread(server.call, "POST", "/v1/batches", body)
    while (await asyncio.to_thread(server.batch, batch["id"]))["status"] == "validating":
        await asyncio.sleep(0.1)
    await asyncio.sleep(SETTLE_S)

    async def tokens() -> tuple[float, int]:
        now = await asyncio.to_thread(server.batch, batch["id"])
        return time.perf_counter(), now["usage"]["output_tokens"]

    begun, before = await tokens()
    run = await online(session, arguments)
    ended, after = await tokens()
    await asyncio.to_thread(server.call, "POST", f"/v1/batches/{batch['id']}/cancel", {})
    while (await asyncio.to_thread(server.batch, batch["id"]))["status"] != "cancelled":
        await asyncio.sleep(0.1)
    return run, (after - before) / (ended - begun)


async def loop(session: Session, level: int, seconds: float) -> Run:
    """A closed loop of so many requests."""
    return await session.measure(LoadConfig(concurrency=level, duration=seconds, warmup=level))


def highest(loops: dict[int, list[Run]]) -> tuple[float, list[dict[str, Any]]]:
    """The highest median of output tokens per second of loops in which 99 % of the requests meet the SLO, and all loops."""
    table = []
    for level, runs in loops.items():
        rate = statistics.median(throughput(run)["output_tokens_per_s"] for run in runs)
        table.append({"concurrency": level, "output_tok_s": round(rate, 1), "attainment": attainment(runs)})
    return max((entry["output_tok_s"] for entry in table if entry["attainment"] >= 0.99), default=0.0), table


def attainment(runs: Sequence[Run]) -> float:
    return round(sum(run.attainment * len(run.rows) for run in runs) / sum(len(run.rows) for run in runs), 4)


def figures(runs: Sequence[Run], seconds: float) -> dict[str, float]:
    """What a row says of online requests, of all rounds together. Goodput counts over the time in which requests arrived, so that a
    last slow answer does not change it."""
    rows = [row for run in runs for row in run.rows]
    return {
        "requests": len(rows),
        "attainment": attainment(runs),
        "goodput_req_s": round(attainment(runs) * len(rows) / seconds / len(runs), 3),
        "output_tok_s": round(statistics.mean(throughput(run)["output_tokens_per_s"] for run in runs), 1),
        **{
            f"p{share}_{name}_ms": round(float(np.percentile(latency(rows, name), share)) * 1e3, 2)
            for name in ("ttft", "tpot")
            for share in (50, 99)
        },
    }


async def with_slo(arguments: argparse.Namespace, path: Path, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Goodput and the lane's share under an SLO. Rounds alternate, so that a machine that slows down affects all alike."""
    alone: list[Run] = []
    both: list[Run] = []
    rates: list[float] = []
    loops: dict[int, list[Run]] = {level: [] for level in arguments.levels}
    async with served(arguments, "--slo", arguments.slo) as (session, server):
        for _ in range(arguments.rounds):
            alone.append(await online(session, arguments))
            for level, runs in loops.items():
                runs.append(await loop(session, level, arguments.loop_seconds))
            run, rate = await beside(session, server, path, arguments)
            both.append(run)
            rates.append(rate)
            print(json.dumps({"lane_tok_s": round(rate, 1), **figures([run], arguments.seconds)}), flush=True)
    without, with_lane = figures(alone, arguments.seconds), figures(both, arguments.seconds)
    most, table = highest(loops)
    slack, lane = most - without["output_tok_s"], statistics.mean(rates)
    common = {"lane_tok_s": round(lane, 1), "slo": arguments.slo, "rate": arguments.rate, "rounds": arguments.rounds}
    common |= {"without": without, "with_lane": with_lane, **about}
    ratio = round(with_lane["goodput_req_s"] / without["goodput_req_s"], 4)
    share = round(lane / slack, 4) if slack > 0 else None
    return [
        {"row": "batch-online-goodput-ratio", "value": ratio, **common},
        {"row": "batch-slack-share", "value": share, "highest_tok_s": most, "loops": table, **common},
    ]


async def with_impact(
    arguments: argparse.Namespace, impact: float, path: Path, about: dict[str, Any]
) -> dict[str, Any]:
    """The rise of p99 latencies under a cap."""
    alone: list[Run] = []
    both: list[Run] = []
    rates: list[float] = []
    async with served(arguments, "--batch-impact", f"{impact:g}%") as (session, server):
        for _ in range(arguments.rounds):
            alone.append(await online(session, arguments))
            run, rate = await beside(session, server, path, arguments)
            both.append(run)
            rates.append(rate)
    without, with_lane = figures(alone, arguments.seconds), figures(both, arguments.seconds)
    return {
        "row": "batch-capped-p99-ratio" + ("" if impact == arguments.impacts[0] else f"-{impact:g}"),
        "value": round(with_lane["p99_tpot_ms"] / without["p99_tpot_ms"], 4),
        "p50_ratio": round(with_lane["p50_tpot_ms"] / without["p50_tpot_ms"], 4),
        "ttft_ratio": round(with_lane["p99_ttft_ms"] / without["p99_ttft_ms"], 4),
        "impact": f"{impact:g}%",
        "lane_tok_s": round(statistics.mean(rates), 1),
        "rate": arguments.rate,
        "rounds": arguments.rounds,
        "without": without,
        "with_lane": with_lane,
        **about,
    }


async def measure(arguments: argparse.Namespace, about: dict[str, Any]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = batch_file(folder, arguments)
        rows = await with_slo(arguments, path, about)
        for impact in arguments.impacts:
            rows.append(await with_impact(arguments, impact, path, about))
    return rows


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slo", default="ttft=500ms,tpot=40ms")
    parser.add_argument("--rate", type=float, default=4.0, help="online requests per second")
    parser.add_argument("--seconds", type=float, default=5.0, help="time of each run with online requests")
    parser.add_argument("--loop-seconds", type=float, default=2.0, help="time of each closed loop")
    parser.add_argument("--levels", type=lambda text: [int(part) for part in text.split(",")], default=[24, 48])
    parser.add_argument("--impacts", type=numbers, default=[10.0], help="percentages of --batch-impact")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--seqs", type=int, default=64, help="--max-num-seqs of the server")
    parser.add_argument("--commit", default="", help="the commit that runs, where there is no .git to ask")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    arguments = parser.parse_args()
    about = {
        "device": "cpu",
        "input": arguments.input,
        "output": arguments.output,
        **provenance(cpu_name(), arguments.commit),
    }
    table = uvloop.run(measure(arguments, about))
    print(*map(json.dumps, table), sep="\n")
    if arguments.out:
        write_rows(arguments.out, table)


if __name__ == "__main__":
    main()
