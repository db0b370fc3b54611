"""What `--shadow-rate` costs the requests it watches, and what it says: the same load on a quantized server without a shadow and
with one that scores every answer.

    python benchmarks/shadow.py --quantization int4 --rate 4 --out benchmarks/results/shadow.json [--model FOLDER] [--dummy]

Requests come at random times (Poisson), far enough apart for pauses: answers are scored while nobody waits. --dummy makes random
weights of a config.json, whose drift means nothing and whose cost is that of the shape.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop
from common import cpu_name, provenance, write_rows

from ridgeline.bench.figures import invalid_reason, latency
from ridgeline.bench.options import LoadConfig, TargetConfig, WorkloadConfig
from ridgeline.bench.record import Run
from ridgeline.bench.session import BenchConfig, Session

READY_S = 120.0
LISTENING = re.compile(r"listening on (http://[^\s;]+)")
PERCENTILES = (50, 99)


@contextmanager
def served(*flags: str) -> Iterator[str]:
    """The address of a server that is ready."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "serve.log"
        with log.open("wb") as output:
            command = [sys.executable, "-m", "ridgeline", "serve", "--port", "0", *flags]
            process = subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
        try:
            yield _ready(process, log)
        finally:
            process.terminate()
            process.wait(60)


def _ready(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        if match := LISTENING.search(log.read_text()):
            try:
                with urllib.request.urlopen(f"{match[1]}/health") as answer:
                    if answer.status == 200:
                        return match[1]
            except OSError:
                pass
        time.sleep(0.1)
    raise SystemExit(f"the server did not come up:\n{log.read_text()}")


def metrics(url: str) -> dict[str, float]:
    """Our metrics of the shadow, summed over labels."""
    values: dict[str, float] = {}
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if match := re.match(r"ridgeline:shadow_(\w+?)(?:\{.*\})? (\S+)$", line):
                values[match[1]] = values.get(match[1], 0.0) + float(match[2])
    return values


def measured(url: str, load: LoadConfig, work: WorkloadConfig) -> Run:
    async def once() -> Run:
        async with Session(BenchConfig(TargetConfig(), work, load), url) as session:
            return await session.measure()

    return uvloop.run(once())


def settled(url: str, within: float) -> dict[str, float]:
    """The shadow's metrics once it has begun to score, or what they are after so many seconds."""
    until = time.monotonic() + within
    while time.monotonic() < until:
        now = metrics(url)
        if now.get("answers_total") or now.get("failures_total"):
            return now
        time.sleep(0.2)
    return metrics(url)


def side(arguments: argparse.Namespace, shadow: bool) -> dict[str, Any]:
    """Latencies of one server in milliseconds, and what its shadow said."""
    flags = ["--quantization", arguments.quantization, "--max-model-len", "2048", "--gpu-memory-utilization", "0.6"]
    flags += ["--model", arguments.model] if arguments.model else []
    flags += ["--load-format", "dummy"] if arguments.dummy else []
    flags += ["--shadow-rate", "1"] if shadow else []
    load = LoadConfig(rate=arguments.rate, warmup=2)
    work = WorkloadConfig(input_len="128", output_len="64", max_requests=arguments.requests)
    with served(*flags) as url:
        if shadow:  # the reference is loaded once its server is ready
            measured(url, LoadConfig(concurrency=1), WorkloadConfig(input_len="128", output_len="64", max_requests=1))
            settled(url, READY_S)
        run = measured(url, load, work)
        row: dict[str, Any] = {"valid": not invalid_reason(run), "requests": len(run.completed)}
        for name in ("ttft", "tpot"):
            times = latency(run.rows, name) * 1e3
            row |= {f"{name}_p{share}_ms": round(float(np.percentile(times, share)), 3) for share in PERCENTILES}
        if shadow:
            said = metrics(url)
            row |= {name: said.get(name, 0.0) for name in ("answers_total", "failures_total", "kl")}
            row["same"] = said.get("same_tokens_total", 0.0) / max(said.get("tokens_total", 0.0), 1.0)
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="model folder; empty is the shipped model")
    parser.add_argument("--quantization", default="int8")
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    arguments = parser.parse_args()
    model = Path(arguments.model).name or "ridgeline-14m"
    about = {"model": model, "quantization": arguments.quantization, "rate": arguments.rate}
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()
    for kind in ("alone", "watched"):
        name = f"shadow-{model}-{arguments.quantization}-{kind}"
        row = {"row": name, **side(arguments, shadow=kind == "watched")}
        print(row, flush=True)
        if arguments.out:
            write_rows(arguments.out, [row | about | provenance(machine)])


if __name__ == "__main__":
    main()
