"""What traces cost: streams per second of a server, and CPU time of its service process per stream, with and without them.

    python benchmarks/tracing.py --out benchmarks/results/tracing.json

One `ridgeline serve` with the shipped model for each arm: off; on (--otlp-traces-endpoint, every request is recorded); sampled (one
trace of ten, by OTEL_TRACES_SAMPLER). The collector is a process of its own. The arms take turns, and each row has the median of
its turns. On a machine that does other work only the CPU time says something.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import aiohttp
from common import cpu_name, provenance, write_rows
from router_cost import cpu_seconds

CLIENTS = 16
TOKENS = 8
SAMPLED = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.1"}
LISTENING = re.compile(r"listening on (http://[^;\s]+)")
COLLECTOR = """
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): ...
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@contextmanager
def collector() -> Iterator[str]:
    """The address of a collector that reads spans and drops them."""
    process = subprocess.Popen([sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.terminate()
        process.wait()


@contextmanager
def server(options: list[str], variables: dict[str, str]) -> Iterator[tuple[str, int]]:
    """A server that is ready: its address, and the id of its service process."""
    command = [sys.executable, "-m", "ridgeline", "serve", "--port", "0", "--batch-dir", "off", "--threads", "1"]
    environment = {**os.environ, **variables}
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    try:
        url = next(match[1] for line in process.stderr if (match := LISTENING.search(line)))
        next(line for line in process.stderr if line.startswith("curl "))
        yield url, process.pid
    finally:
        process.terminate()
        process.wait()


async def streams(url: str, count: int) -> float:
    """Run so many streams, CLIENTS at a time; returns the seconds."""
    body = {"prompt": "Once upon a time", "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    waiting = iter(range(count))

    async def client(session: aiohttp.ClientSession) -> None:
        for _ in waiting:
            async with session.post(f"{url}/v1/completions", json=body) as reply:
                assert reply.status == 200
                assert (await reply.read()).endswith(b"data: [DONE]\n\n")

    async with aiohttp.ClientSession() as session:
        started = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to merge rows into")
    parser.add_argument("--commit", default="")
    parser.add_argument("--streams", type=int, default=500, help="in a turn")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        traced = ["--otlp-traces-endpoint", stack.enter_context(collector())]
        arms: dict[str, tuple[list[str], dict[str, str]]] = {
            "off": ([], {}),
            "on": (traced, {}),
            "sampled": (traced, SAMPLED),
        }
        servers = {arm: stack.enter_context(server(*how)) for arm, how in arms.items()}
        rates: dict[str, list[float]] = {arm: [] for arm in arms}
        costs: dict[str, list[float]] = {arm: [] for arm in arms}
        for turn in range(arguments.turns + 1):
            for arm, (url, pid) in servers.items():
                before = cpu_seconds(pid)
                seconds = asyncio.run(streams(url, arguments.streams))
                time.sleep(0.5)
                if turn:  # the first turn warms up
                    rates[arm].append(arguments.streams / seconds)
                    costs[arm].append(1e6 * (cpu_seconds(pid) - before) / arguments.streams)
    rows: list[dict[str, Any]] = [
        {
            "row": f"tracing-{arm}",
            "value": round(statistics.median(rates[arm])),
            "unit": "streams/s",
            "target": None,
            "cpu_us_per_stream": round(statistics.median(costs[arm])),
            "tokens": TOKENS,
            "clients": CLIENTS,
        }
        for arm in arms
    ]
    for row in rows:
        print(row)
    if arguments.out:
        write_rows(arguments.out, [{**row, **provenance(cpu_name(), arguments.commit)} for row in rows])


if __name__ == "__main__":
    main()
