"""The load generator against a mock server of known speed: does it measure right, and does it carry 2,000 streams?

    python benchmarks/load.py --out benchmarks/results/load.json

The mock runs in a process of its own. Agreement: requests one after the other and at a rate; the figure is how far the
measured median is from the mock's setting. Streams: so many at once with ten chunks per second each, begun over five
seconds; the figures are how late the client was, and how much of one core it used. "in-step" begins them all at once,
so that all chunks of a tenth of a second come together, as from an engine that runs one batch.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import uvloop
from common import cpu_name, provenance, write_rows

from ridgeline.bench.figures import at_once, cpu_share, invalid_reason, lag_p99, latency, spread
from ridgeline.bench.mock import Speed, serve_mock
from ridgeline.bench.options import LoadConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.record import Run
from ridgeline.bench.session import BenchConfig, Session

STREAMS = 2000
CHUNKS_PER_S = 10
RAMP_S = 5.0


@dataclass(frozen=True)
class Case:
    """One setting whose answer is known."""

    name: str
    speed: Speed
    load: LoadConfig
    work: WorkloadConfig
    endpoint: str = "completions"


CASES = (
    Case(
        "one-at-a-time", Speed(0.2, 0.05), LoadConfig(concurrency=1),
        WorkloadConfig(input_len="200", output_len="20", max_requests=15),
    ),
    Case(
        "poisson-20", Speed(0.2, 0.02), LoadConfig(rate=20.0),
        WorkloadConfig(input_len="100-1000", output_len="50", max_requests=200),
    ),
    Case(
        "chat-4-per-chunk", Speed(0.1, 0.04, per_chunk=4), LoadConfig(rate=20.0),
        WorkloadConfig(input_len="100-1000", output_len="60", max_requests=200), "chat",
    ),
)  # fmt: skip


@contextmanager
def mock(speed: Speed) -> Iterator[str]:
    """A mock server in a process of its own."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(speed, there), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        process.terminate()
        process.join()


def _serve(speed: Speed, connection: Connection) -> None:
    uvloop.run(serve_mock(speed, "127.0.0.1", 0, connection.send))


def measure(speed: Speed, load: LoadConfig, work: WorkloadConfig, endpoint: str = "completions") -> Run:
    async def once(url: str) -> Run:
        async with Session(BenchConfig(TargetConfig(endpoint=endpoint), work, load), url) as session:
            return await session.measure()

    with mock(speed) as url:
        return uvloop.run(once(url))


def agreement(case: Case) -> Iterator[dict[str, Any]]:
    """Rows: relative error of each measured median."""
    run = measure(case.speed, case.load, case.work, case.endpoint)
    if why := invalid_reason(run):
        print(f"{case.name}: not valid, {why}")
    token_s = case.speed.itl_s / case.speed.per_chunk
    results = {
        "ttft": (statistics.median(latency(run.rows, "ttft")), case.speed.ttft_s),
        "tpot": (statistics.median(latency(run.rows, "tpot")), token_s),
        "itl-chunk": (spread(run, "chunk").percentiles[50].value, case.speed.itl_s),
    }
    for name, (measured, truth) in results.items():
        yield {
            "row": f"{case.name}-{name}-error",
            "value": round(abs(measured - truth) / truth, 5),
            "unit": "share",
            "target": 0.01,
            "measured_ms": round(measured * 1e3, 4),
            "true_ms": truth * 1e3,
            "valid": not invalid_reason(run),
        }


def streams(count: int, seconds: int, *, in_step: bool) -> Iterator[dict[str, Any]]:
    """Rows: how late and how busy the client is with so many streams at once."""
    load = LoadConfig(concurrency=count) if in_step else LoadConfig(rate=count / RAMP_S, burstiness=math.inf)
    work = WorkloadConfig(input_len="32", output_len=str(CHUNKS_PER_S * seconds), max_requests=count)
    run = measure(Speed(0.2, 1 / CHUNKS_PER_S), load, work)
    sent, loop = lag_p99(run)
    tpot = statistics.median(latency(run.rows, "tpot"))
    chunks = sum(len(row.gaps_s) + 1 for row in run.rows)
    rows = {
        "at-once": (at_once(run.rows), "streams", count),
        "chunks-per-s": (round(chunks / run.seconds), "1/s", None),
        "send-lag-p99-ms": (round(sent * 1e3, 3), "ms", 10.0),
        "loop-lag-p99-ms": (round(loop * 1e3, 3), "ms", 10.0),
        "cpu-share": (round(cpu_share(run), 4), "share of one core", 0.9),
        "tpot-error": (round(abs(tpot * CHUNKS_PER_S - 1), 5), "share", 0.01),
    }
    kind = "in-step-" if in_step else ""
    for name, (value, unit, target) in rows.items():
        results = {
            "row": f"{count}-streams-{kind}{name}",
            "value": value,
            "unit": unit,
            "valid": not invalid_reason(run),
        }
        yield results if target is None else {**results, "target": target}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to merge rows into")
    parser.add_argument("--seconds", type=int, default=15, help="how long the streams last")
    given = parser.parse_args()
    rows = [row for case in CASES for row in agreement(case)]
    rows += [row for in_step in (False, True) for row in streams(STREAMS, given.seconds, in_step=in_step)]
    where = provenance(cpu_name().rpartition(",")[0] + f", {os.cpu_count()} cores")
    for row in rows:
        print(f"{row['row']:36} {row['value']:>12} {row['unit']}" + ("" if row["valid"] else "   NOT VALID"))
    if given.out:
        # What a busy machine measured of itself is no result.
        kept = [{name: value for name, value in row.items() if name != "valid"} for row in rows if row["valid"]]
        write_rows(given.out, [{**row, **where} for row in kept])


if __name__ == "__main__":
    main()
