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
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvloop
from common import cpu_name, provenance, write_rows

from ridgeline.bench.figures import run_json, throughput
from ridgeline.bench.options import LoadConfig, ResultConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.record import Run
from ridgeline.bench.server_process import serving
from ridgeline.bench.session import BenchConfig, Session
from ridgeline.cli.batch import Server
from ridgeline.cli.client import ChatClient

ROWS = 20_000
"""Rows of the batch: more than any run finishes."""
SETTLE_S = 3.0
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
    requests = max(1, round(arguments.rate * arguments.seconds))
    return await session.measure(LoadConfig(rate=arguments.rate, duration=arguments.seconds, warmup=4), f"{requests}")


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
    return run, (after - before) / (ended - begun)


async def capacity(session: Session, levels: Sequence[int], seconds: float) -> tuple[float, list[dict[str, Any]]]:
    """The highest output tokens per second of closed loops in which 99 % of the requests meet the SLO, and all loops."""
    loops = []
    for level in levels:
        run = await session.measure(LoadConfig(concurrency=level, duration=seconds, warmup=level))
        loops.append(
            {
                "concurrency": level,
                "output_tok_s": round(throughput(run)["output_tokens_per_s"], 1),
                "attainment": round(run.attainment, 4),
                "p99_tpot_ms": round(run_json(run)["p99_tpot_ms"], 2),
            }
        )
        print(json.dumps(loops[-1]), flush=True)
    return max((loop["output_tok_s"] for loop in loops if loop["attainment"] >= 0.99), default=0.0), loops


def figures(run: Run, seconds: float) -> dict[str, float]:
    """What a row says of online requests. Goodput counts over the time in which requests arrived, so that a last slow answer does
    not change it."""
    times, rates = run_json(run), throughput(run)
    return {
        "requests": len(run.rows),
        "attainment": round(run.attainment, 4),
        "goodput_req_s": round(run.attainment * len(run.rows) / seconds, 3),
        "output_tok_s": round(rates["output_tokens_per_s"], 1),
        **{f"p99_{name}_ms": round(times[f"p99_{name}_ms"], 2) for name in ("ttft", "tpot")},
    }


async def measure(arguments: argparse.Namespace, about: dict[str, Any]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = batch_file(folder, arguments)
        async with served(arguments, "--slo", arguments.slo) as (session, server):
            alone = await online(session, arguments)
            highest, loops = await capacity(session, arguments.levels, arguments.loop_seconds)
            both, lane = await beside(session, server, path, arguments)
        without, with_lane = figures(alone, arguments.seconds), figures(both, arguments.seconds)
        ratio = with_lane["goodput_req_s"] / without["goodput_req_s"]
        slack = highest - without["output_tok_s"]
        common = {"slo": arguments.slo, "rate": arguments.rate, "without": without, "with_lane": with_lane, **about}
        rows.append(
            {"row": "batch-online-goodput-ratio", "value": round(ratio, 4), "lane_tok_s": round(lane, 1), **common}
        )
        share = round(lane / slack, 4) if slack > 0 else None
        rows.append(
            {
                "row": "batch-slack-share",
                "value": share,
                "lane_tok_s": round(lane, 1),
                "highest_tok_s": highest,
                "loops": loops,
                **common,
            }
        )
        for impact in arguments.impacts:
            async with served(arguments, "--batch-impact", f"{impact:g}%") as (session, server):
                alone = await online(session, arguments)
                both, lane = await beside(session, server, path, arguments)
            without, with_lane = figures(alone, arguments.seconds), figures(both, arguments.seconds)
            name = "batch-capped-p99-ratio" + ("" if impact == arguments.impacts[0] else f"-{impact:g}")
            ratio = with_lane["p99_tpot_ms"] / without["p99_tpot_ms"]
            rows.append(
                {
                    "row": name,
                    "value": round(ratio, 4),
                    "impact": f"{impact:g}%",
                    "ttft_ratio": round(with_lane["p99_ttft_ms"] / without["p99_ttft_ms"], 4),
                    "lane_tok_s": round(lane, 1),
                    "rate": arguments.rate,
                    "without": without,
                    "with_lane": with_lane,
                    **about,
                }
            )
    return rows


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slo", default="ttft=500ms,tpot=40ms")
    parser.add_argument("--rate", type=float, default=4.0, help="online requests per second")
    parser.add_argument("--seconds", type=float, default=12.0, help="time of each run with online requests")
    parser.add_argument("--loop-seconds", type=float, default=5.0, help="time of each closed loop")
    parser.add_argument("--levels", type=lambda text: [int(part) for part in text.split(",")], default=[8, 16, 32, 48])
    parser.add_argument("--impacts", type=numbers, default=[10.0], help="percentages of --batch-impact")
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
