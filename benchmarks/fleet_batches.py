"""Rows of a batch per second: on one server, and through the router of `ridgeline up` on one and two replicas.

    python benchmarks/fleet_batches.py --out benchmarks/results/service.json
    python benchmarks/fleet_batches.py --device cuda --seconds 20 --out benchmarks/results/service.json
    python benchmarks/fleet_batches.py --parts timed-1,timed-2 --out benchmarks/results/service.json

No online request runs. A CPU serves the shipped model with one thread for each engine, a GPU random weights in the shape of
--model, each replica on a GPU of its own. Rows are completions of random token ids. Once --warm rows have ended, their number is
read twice, --seconds apart: nothing asks the server meanwhile. Rounds alternate, and a row has their medians. load: processes that
wanted a core in the minute before each reading (os.getloadavg); above the number of cores, figures of a CPU say little.

    fleet-batch-rows-server      `ridgeline serve` runs its own batch
    fleet-batch-rows-1, -2       `ridgeline up` with so many replicas; router_cpu_ms: processor time of the router for each row
    fleet-batch-rows-gain        rows per second of two replicas over those of one, and of one over those of the server
    fleet-batch-rows-timed-1, -2 `ridgeline route` before so many servers that compute nothing: each runs TIMED_ROWS rows at once,
                                 which take TIMED_S. filled: rows per second over the most that is possible. What is left of
                                 real engines is the router, so a machine that is busy shows it, too
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop
from aiohttp import web
from common import HERE, cpu_name, provenance, write_rows
from goodput import folder_of
from replicas_gpu import as_flags, fleet, serve_options

from ridgeline.bench.server_process import serving
from ridgeline.cli.batch import Server
from ridgeline.cli.client import ChatClient

PARTS = ("server", "1", "2")
TIMED = "timed-"
TIMED_ROWS, TIMED_S = 64, 1.0
_LOOK_S = 1.0
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def batch_file(path: Path, args: argparse.Namespace) -> Path:
    chance = random.Random(11)
    with path.open("w") as file:
        for index in range(args.rows):
            ids = [chance.randrange(300, 4000) for _ in range(args.input)]
            body = {"prompt": ids, "max_tokens": args.output, "ignore_eos": True}
            row = {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(row) + "\n")
    return path


@asynccontextmanager
async def served(args: argparse.Namespace, part: str, place: str) -> AsyncIterator[tuple[str, int]]:
    """The server of a part; yields its address and process id."""
    if part.startswith(TIMED):
        async with timed(int(part.removeprefix(TIMED)), str(Path(place) / "state")) as address:
            yield address
        return
    options = serve_options(args, folder_of(str(args.model) if args.device == "cuda" else "", place))
    state = str(Path(place) / "state")
    if part == "server":
        async with serving(as_flags({**options, "batch_dir": state})) as url:
            yield url, child()
        return
    args.engines = int(part)
    async with fleet(args, options, place, batch_dir=state) as url:
        yield url, child()


@asynccontextmanager
async def timed(count: int, state: str) -> AsyncIterator[tuple[str, int]]:
    """A router before servers that compute nothing."""
    context, replicas, flags = multiprocessing.get_context("spawn"), [], []
    for _ in range(count):
        here, there = multiprocessing.Pipe()
        replicas.append(context.Process(target=_timed_server, args=(there,), daemon=True))
        replicas[-1].start()
        flags += ["--replica", f"http://127.0.0.1:{await asyncio.to_thread(here.recv)}"]
    command = [sys.executable, "-m", "ridgeline", "route", "--port", "0", "--batch-dir", state, *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    assert process.stderr is not None
    try:
        while not (match := re.search(rb"listening on (http://[^;\s]+)", line := await process.stderr.readline())):
            assert line, "the router did not start"
        yield match[1].decode(), process.pid
    finally:
        process.terminate()
        await process.wait()
        for replica in replicas:
            replica.terminate()


def _timed_server(connection: Connection) -> None:
    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "step": time.monotonic_ns(), "batch_rows": TIMED_ROWS})

    async def complete(request: web.Request) -> web.Response:
        body = await request.json()
        read, written = len(body["prompt"]), body["max_tokens"]
        await asyncio.sleep(TIMED_S)
        usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return web.json_response({"choices": [{"text": "word " * written}], "usage": usage})

    async def serve() -> None:
        app = web.Application()
        app.router.add_get("/health", health)
        app.router.add_post("/v1/completions", complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        connection.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    uvloop.run(serve())


def cpu_seconds(pid: int) -> float:
    """Processor time of one process, without its children."""
    values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) * _TICK_S


def child() -> int:
    """The only process that this one has started."""
    pid = os.getpid()
    (only,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(only)


async def measure(args: argparse.Namespace, part: str, place: str) -> dict[str, float]:
    """Rows and output tokens per second of one part, and the processor time of its front or router."""
    async with served(args, part, place) as (url, pid):
        server = Server(ChatClient(url))
        file = await asyncio.to_thread(server.upload, Path(place) / "rows.jsonl")
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "1h"}
        batch_id = (await asyncio.to_thread(server.call, "POST", "/v1/batches", body))["id"]

        async def reading() -> tuple[float, int, int, float]:
            now = await asyncio.to_thread(server.batch, batch_id)
            counts, tokens = now["request_counts"], now["usage"]["output_tokens"]
            assert not counts["failed"], now
            return time.perf_counter(), counts["completed"], tokens, cpu_seconds(pid)

        while (await reading())[1] < args.warm:
            await asyncio.sleep(_LOOK_S)
        first = await reading()
        await asyncio.sleep(args.seconds)
        last = await reading()
        assert last[1] < args.rows, "the batch has ended: give more --rows"
        await asyncio.to_thread(server.call, "POST", f"/v1/batches/{batch_id}/cancel", {})
    passed, rows, tokens, cpu = (after - before for before, after in zip(first, last, strict=True))
    cpu_ms = cpu / max(1, rows) * 1e3
    return {"rows_s": rows / passed, "tokens_s": tokens / passed, "router_cpu_ms": cpu_ms, "load": os.getloadavg()[0]}


async def run(args: argparse.Namespace, about: dict[str, Any]) -> list[dict[str, Any]]:
    figures: dict[str, list[dict[str, float]]] = {part: [] for part in args.parts}
    for _ in range(args.rounds):
        for part in args.parts:
            with tempfile.TemporaryDirectory() as place:
                batch_file(Path(place) / "rows.jsonl", args)
                figures[part].append(await measure(args, part, place))
                print(part, {name: round(value, 2) for name, value in figures[part][-1].items()}, flush=True)
    rows = []
    median = {
        part: {name: statistics.median(f[name] for f in runs) for name in runs[0]} for part, runs in figures.items()
    }
    for part, values in median.items():
        row: dict[str, Any] = {"row": f"fleet-batch-rows-{part}", "value": round(values["rows_s"], 1)}
        row |= {"tokens_s": round(values["tokens_s"]), "rounds": [round(f["rows_s"], 1) for f in figures[part]]}
        row |= {
            "router_cpu_ms": round(values["router_cpu_ms"], 2),
            "load": [round(f["load"], 1) for f in figures[part]],
        }
        if part.startswith(TIMED):
            most = int(part.removeprefix(TIMED)) * TIMED_ROWS / TIMED_S
            row |= {"filled": round(values["rows_s"] / most, 3), "target": 0.9}
        rows.append(row | about)
    if set(PARTS) <= median.keys():
        server, single, double = (median[part]["rows_s"] for part in PARTS)
        gain = {"row": "fleet-batch-rows-gain", "value": round(double / single, 3), "target": 1.9}
        rows.append({**gain, "one_over_server": round(single / server, 3), **about})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--model", type=Path, default=HERE / "models" / "llama-3.1-8b", help="folder with a config.json"
    )
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--rows", type=int, default=20_000, help="of the batch: more than a run finishes")
    parser.add_argument("--warm", type=int, default=100, help="rows before the first reading")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--input", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--commit", default="", help="the commit that runs, where there is no .git to ask")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    args = parser.parse_args()
    about = {"device": args.device, "input": args.input, "output": args.output, **provenance(cpu_name(), args.commit)}
    table = uvloop.run(run(args, about))
    print(*map(json.dumps, table), sep="\n")
    if args.out:
        write_rows(args.out, table)


if __name__ == "__main__":
    main()
