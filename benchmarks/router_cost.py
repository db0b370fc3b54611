"""What the router costs: streams and events through one core, and time to first token.

    python benchmarks/router_cost.py --streams 5000 --out benchmarks/results/service.json

Mock servers and load generators are processes of their own; the router is `ridgeline route` on the last core. Rows:

    router-streams    streams at once, events per second through the router while all run, its CPU time per event, requests
                      included, and how many events per second one core carries at that cost
    router-ttft-ms    p99 and median of the time to first token through the router, less those of the same load sent to mock
                      servers directly, while half of the streams run, in turns

Needs ten cores that nothing else uses, besides the router's and its siblings. On fewer only the CPU time per event says something.
A mock server sends some 12,000 events per second, and a load generator reads 20,000.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import accumulate, cycle, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import uvloop
from common import cpu_name, provenance, write_rows
from load import CHUNKS_PER_S, mock

from ridgeline.bench.figures import at_once, invalid_reason, latency
from ridgeline.bench.mock import Speed
from ridgeline.bench.options import LoadConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.record import Row, Run
from ridgeline.bench.session import BenchConfig, Session

TTFT_S = 0.5
LISTENING = re.compile(r"listening on (http://[^;\s]+)")


@contextmanager
def router(replicas: Sequence[str], core: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A router on one core: its address and process."""
    options = [word for url in replicas for word in ("--replica", url)]
    command = [sys.executable, "-m", "ridgeline", "route", "--port", "0", "--replica-limit", "100000", *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        os.sched_setaffinity(process.pid, {core})
        assert process.stderr is not None
        for line in process.stderr:
            if match := LISTENING.search(line):
                yield match[1], process
                return
        raise RuntimeError("the router did not start")
    finally:
        process.terminate()
        process.wait()


def core_of_router() -> int:
    """The last core. Its threads' siblings are left idle: this process and its children keep to the others."""
    cores = os.sched_getaffinity(0)
    last = max(cores)
    try:
        text = Path(f"/sys/devices/system/cpu/cpu{last}/topology/thread_siblings_list").read_text()
    except OSError:
        text = str(last)
    bounds = (part.partition("-") for part in text.strip().split(","))
    shared = {core for low, _, high in bounds for core in range(int(low), int(high or low) + 1)}
    os.sched_setaffinity(0, cores - shared or cores)
    return last


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def send(url: str, streams: int, seconds: float) -> Run:
    """So many streams at once after `seconds`, and for as long, with ten events per second each. They begin one after the other."""
    config = BenchConfig(
        TargetConfig(endpoint="completions", prompts="text"),
        WorkloadConfig(input_len="100", output_len=str(int(CHUNKS_PER_S * seconds)), max_requests=2 * streams),
        LoadConfig(rate=streams / seconds, burstiness=math.inf),
    )

    async def run() -> Run:
        async with Session(config, url) as session:
            return await session.measure()

    return uvloop.run(run())


class Clients:
    """Load generators, each a process that sends its share of the streams."""

    def __init__(self, processes: Executor, count: int) -> None:
        self._processes, self._count = processes, count

    def measure(self, urls: Sequence[str], streams: int, seconds: float) -> tuple[list[Row], str]:
        """The requests of `send` by all of them, which take the addresses in turn, and why the result is invalid or ""."""
        chosen = islice(cycle(urls), self._count)
        futures = [self._processes.submit(send, url, streams // self._count, seconds) for url in chosen]
        runs = [future.result() for future in futures]
        return [row for run in runs for row in run.rows], next(
            (why for run in runs if (why := invalid_reason(run))), ""
        )


def streams_row(
    clients: Clients, url: str, process: subprocess.Popen[str], streams: int, seconds: float
) -> dict[str, Any]:
    before = cpu_seconds(process.pid)
    rows, invalid = clients.measure([url], streams, seconds)
    used, events = cpu_seconds(process.pid) - before, sum(row.output_tokens for row in rows)
    times = [time for row in rows if row.first_s is not None for time in accumulate((row.first_s, *row.gaps_s))]
    return {
        "row": "router-streams",
        "value": at_once(rows),
        "errors": Counter(row.error for row in rows if row.error),
        "events_per_s": round(sum(seconds < time < 2 * seconds for time in times) / seconds),
        "cpu_us_per_event": round(1e6 * used / events, 1),
        "events_per_core_s": round(events / used),
        "invalid": invalid,
    }


def ttft_row(
    clients: Clients, url: str, mocks: Sequence[str], streams: int, seconds: float, turns: int
) -> dict[str, Any]:
    added: dict[int, list[float]] = {50: [], 99: []}
    invalid = ""
    for _ in range(turns):
        runs = [clients.measure(urls, streams, seconds) for urls in (mocks, [url])]
        invalid = invalid or next((why for _, why in runs if why), "")
        full = [[row for row in rows if seconds < row.scheduled_s < 2 * seconds] for rows, _ in runs]
        times = [statistics.quantiles(latency(rows, "ttft"), n=100) for rows in full]
        for percentile, values in added.items():
            values.append(float(1e3 * (times[1][percentile - 1] - times[0][percentile - 1])))
    return {
        "row": "router-ttft-ms",
        "value": round(statistics.median(added[99]), 3),
        "p50": round(statistics.median(added[50]), 3),
        "p99_of_turns": [round(value, 3) for value in added[99]],
        "streams": streams,
        "invalid": invalid,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to merge valid rows into")
    parser.add_argument("--commit", default="")
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--rows", default="streams,ttft", help="which of the two, comma-separated")
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a stream")
    parser.add_argument("--replicas", type=int, default=6, help="each on a core of its own")
    parser.add_argument("--clients", type=int, default=3, help="load generators, likewise")
    parser.add_argument("--turns", type=int, default=2, help="of the time to first token; each takes six lengths")
    arguments = parser.parse_args()
    machine, core = cpu_name(), core_of_router()
    with ExitStack() as stack:
        mocks = [stack.enter_context(mock(Speed(TTFT_S, 1 / CHUNKS_PER_S))) for _ in range(arguments.replicas)]
        url, process = stack.enter_context(router(mocks, core))
        count = arguments.clients
        clients = Clients(stack.enter_context(ProcessPoolExecutor(count, get_context("spawn"))), count)
        clients.measure(mocks, count, 1.0)  # starts the processes
        streams, seconds, rows = arguments.streams, arguments.seconds, arguments.rows.split(",")
        if "streams" in rows:
            keep(arguments, machine, streams_row(clients, url, process, streams, seconds))
        if "ttft" in rows:
            keep(arguments, machine, ttft_row(clients, url, mocks, streams // 2, seconds, arguments.turns))


def keep(arguments: argparse.Namespace, machine: str, row: dict[str, Any]) -> None:
    print(row, flush=True)
    if arguments.out and not row["invalid"]:
        write_rows(arguments.out, [{**row, **provenance(machine, arguments.commit)}])


if __name__ == "__main__":
    main()
