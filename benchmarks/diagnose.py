"""Ten planted bottlenecks: is each named rightly, and does its first remedy help as predicted when it is applied?

    python benchmarks/diagnose.py --out benchmarks/results/diagnose.json                       # the shipped model on a CPU
    python benchmarks/diagnose.py --device cuda --large benchmarks/models/llama-3.1-8b --small benchmarks/models/qwen3-0.6b \\
        --draft benchmarks/models/llama-3.2-1b --out benchmarks/results/diagnose.json

Each plant is a server with options that hurt its workload. The workload runs once, and its record is diagnosed as by `ridgeline
diagnose`. The first remedy is applied, and the same workload runs again. Models have random weights in the shape of a config.json.

right: the bottleneck is the planted one. cure_place: place of the planted technique among the remedies, 0 if it is not among them.
helps: the objective fell by more than 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common import cpu_name, provenance, write_rows
from goodput import folder_of

from ridgeline.bench.replay import measured, replay
from ridgeline.bench.server_process import serving
from ridgeline.cli.diagnose import Record, read_server, record_of, situation_of
from ridgeline.core.workload import RequestSpec, Workload
from ridgeline.planner.diagnose import diagnose, observe
from ridgeline.planner.remedies import OBJECTIVES, Remedy, objective_of, predict
from ridgeline.planner.simulate import Figures
from ridgeline.planner.situation import Situation, figures_of, newest


@dataclass(frozen=True, slots=True)
class Plant:
    """A planted bottleneck. cure: the technique that should be the first remedy. model: "large" or "small"."""

    bottleneck: str
    cure: str
    flags: tuple[str, ...]
    workload: Workload
    concurrency: int | None = None
    model: str = "large"
    draft: bool = False
    slow_bytes_s: float = 0.0
    """Bytes per second that a slow client reads; 0: clients read as fast as they can."""
    choices: int = 1
    """Choices of each request of a slow client. Sockets hold some megabytes: only more than that makes the server wait."""

    @property
    def name(self) -> str:
        return f"diagnose:{self.bottleneck.replace(' ', '-')}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of the workloads. chunk: prompt tokens of a step. page: blocks of a small cache. rate: requests per second."""

    short: int
    prompt: int
    long: int
    output: int
    rate: float
    chunk: int
    cache_bytes: int
    slow_bytes_s: float
    choices: int


GPU = Scale(
    short=128,
    prompt=4096,
    long=16_000,
    output=128,
    rate=25.0,
    chunk=16_384,
    cache_bytes=1 << 30,
    slow_bytes_s=1e6,
    choices=16,
)
CPU = Scale(
    short=32,
    prompt=512,
    long=3_000,
    output=48,
    rate=30.0,
    chunk=3_072,
    cache_bytes=15 << 20,
    slow_bytes_s=5e4,
    choices=4,
)


def every(
    count: int, rate: float, input_len: int, output: int, shared: int = 0, start: float = 0.0
) -> list[RequestSpec]:
    """Requests at a constant rate. shared: tokens of a common prefix."""
    blocks = (7,) if shared else ()
    return [RequestSpec(start + index / rate, input_len, output, blocks, shared or 64) for index in range(count)]


def workload(*parts: Iterable[RequestSpec]) -> Workload:
    requests = sorted((spec for part in parts for spec in part), key=lambda spec: spec.at_s)
    return Workload("planted", tuple(requests), timed=True)


def plants(scale: Scale, gpu: bool) -> list[Plant]:
    short, prompt, output, rate = scale.short, scale.prompt, scale.output, scale.rate
    burst = workload(every(64, 8 * rate, short, output))
    # Where arithmetic limits decoding, as on a CPU, rows of equal length end no sooner beside others. A short one beside a long one
    # waits in vain.
    uneven = workload(every(16, 2 * rate, short, 6 * output), every(48, 6 * rate, short, output // 6))
    small_cache = ("--kv-cache-memory", str(scale.cache_bytes))
    large = workload(every(64, 8 * rate, prompt // 2, output))
    mixed = workload(every(8, 1000, short, 3 * output), every(6, 2.0, scale.long, 2, start=0.2))
    made = [
        Plant("queue", "batching policy", ("--batching", "static:4"), burst if gpu else uneven),
        Plant("small batch", "requests at once", ("--max-num-seqs", "4"), burst),
        Plant("KV capacity", "memory for the KV cache", (*small_cache, "--max-model-len", "4096"), large),
        Plant(
            "prefix misses", "prefix cache", ("--no-enable-prefix-caching",),
            workload(every(40, rate / 2, prompt, 16, shared=prompt - 64)),
        ),
        Plant("prompts delay decoding", "prompt chunk", ("--max-num-batched-tokens", str(scale.chunk)), mixed),
        Plant(
            "client", "client", (), workload(every(4, 4.0, short, 8 * output)), slow_bytes_s=scale.slow_bytes_s,
            choices=scale.choices,
        ),
    ]  # fmt: skip
    if not gpu:
        return made
    return [
        *made,
        Plant("decode bandwidth", "weight format", (), workload(every(16, 1000, short, output)), concurrency=1),
        Plant("prefill compute", "weight format", (), workload(every(32, 1000, 2 * prompt, 2)), concurrency=4),
        Plant(
            "host", "CUDA graphs or compiled operations", ("--enforce-eager",),
            workload(every(64, 1000, short, output)), concurrency=16, model="small",
        ),
        Plant("drafts", "speculation", (), workload(every(48, 1000, prompt, 4)), concurrency=2, draft=True),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of the models, and flags that all servers have."""

    folders: dict[str, str]
    flags: tuple[str, ...] = ()
    draft: str = ""
    context: int = 0

    def of(self, plant: Plant) -> list[str]:
        folder = self.folders[plant.model]
        context = ["--max-model-len", str(self.context)] if self.context else []
        words = [*([folder] if folder else []), *self.flags, *context, *plant.flags]
        return [*words, "--speculate", f"draft:{self.draft}"] if plant.draft else words


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the diagnosis says of a record."""

    bottleneck: str
    evidence: tuple[str, ...]
    objective: str
    situation: Situation
    recorded: Figures
    simulated: Figures
    remedies: Sequence[Remedy] = field(default_factory=tuple)


def examine(record: Record) -> Verdict:
    situation = situation_of(record, "")
    diagnosis = diagnose(observe(record.snapshot, record.rows, record.client))
    outlook = predict(situation, objective_of(diagnosis.bottleneck))
    return Verdict(
        diagnosis.bottleneck,
        diagnosis.evidence,
        outlook.objective,
        situation,
        outlook.recorded,
        outlook.simulated,
        outlook.remedies,
    )


def measure(plant: Plant, models: Models) -> dict[str, Any]:
    """Run a plant, apply its first remedy, run again."""
    if plant.slow_bytes_s:
        return slow_reader(plant, models.of(plant))
    run = replay(models.of(plant), plant.workload, plant.concurrency)
    record = record_of(run)
    assert record is not None
    verdict, before = examine(record), measured(run)
    if not verdict.remedies:
        return row(plant, verdict, None, before, before)
    remedy = verdict.remedies[0]
    after = measured(replay(remedy.change.after.flags(), plant.workload, plant.concurrency))
    return row(plant, verdict, remedy, before, after)


def row(plant: Plant, verdict: Verdict, remedy: Remedy | None, before: Figures, after: Figures) -> dict[str, Any]:
    value = OBJECTIVES[verdict.objective][1]
    change = value(after) / value(before) - 1
    predicted = -remedy.gain if remedy is not None else 0.0
    return {
        "row": plant.name,
        "planted": plant.bottleneck,
        "named": verdict.bottleneck,
        "evidence": "; ".join(verdict.evidence),
        "cure": plant.cure,
        "first_remedy": remedy.name if remedy else "",
        "right": verdict.bottleneck == plant.bottleneck,
        "cure_place": next(
            (at for at, other in enumerate(verdict.remedies, 1) if other.technique.name == plant.cure), 0
        ),
        "objective": verdict.objective,
        "simulated_before_s": round(value(verdict.simulated), 5),
        "measured_before_s": round(value(before), 5),
        "measured_after_s": round(value(after), 5),
        "predicted_change": round(predicted, 3),
        "measured_change": round(change, 3),
        "helps": change < -0.02,
        "flags": list(plant.flags),
        "options": {} if remedy is None else remedy.change.after.changes(verdict.situation),
        "others": [f"{other.name} {-other.gain:+.0%}" for other in verdict.remedies[1:4]],
    }


# --- a slow reader -------------------------------------------------------------------------------------------------------


def slow_reader(plant: Plant, flags: Sequence[str]) -> dict[str, Any]:
    """Clients that read slowly, then the same clients without a pause, on one server."""
    return asyncio.run(_slow_reader(plant, flags))


async def _slow_reader(plant: Plant, flags: Sequence[str]) -> dict[str, Any]:
    async with serving(flags) as url:
        await send(url, plant.workload.first(1), 0.0, 1)
        first = time.time()
        await send(url, plant.workload, plant.slow_bytes_s, plant.choices)
        record = await asyncio.to_thread(read_server, url, "")
        slow = [request for request in record.rows if request["arrived_at"] >= first]
        second = time.time()
        await send(url, plant.workload, 0.0, plant.choices)
        rows = (await asyncio.to_thread(read_server, url, "")).rows
        fast = [request for request in rows if request["arrived_at"] >= second]
    verdict = examine(Record(record.snapshot, slow))
    remedy = verdict.remedies[0] if verdict.remedies else None
    return row(plant, verdict, remedy, figures_of(newest(slow)), figures_of(newest(fast)))


async def send(url: str, load: Workload, bytes_s: float, choices: int) -> None:
    """Send the requests as streams and read them at `bytes_s` bytes per second; 0: as fast as they come."""
    begin = time.monotonic()

    async def client(spec: RequestSpec) -> None:
        await asyncio.sleep(max(0.0, spec.at_s - (time.monotonic() - begin)))
        address = urlsplit(url)
        connection = socket.socket()
        # The kernel shall not read in place of the client.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        connection.connect((address.hostname, address.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=4096)
        body = json.dumps(
            {
                "prompt": list(range(100, 100 + spec.input)),
                "max_tokens": spec.output,
                "ignore_eos": True,
                "stream": True,
                "logprobs": 20,
                "n": choices,
            }
        )
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
        while data := await reader.read(4096):
            if bytes_s:
                await asyncio.sleep(len(data) / bytes_s)
        writer.close()

    async with asyncio.TaskGroup() as group:
        for spec in load.requests:
            group.create_task(client(spec))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--large", default="", help="shape of the served model (default: the shipped model)")
    parser.add_argument("--small", default="", help="shape of the model whose host is the bottleneck")
    parser.add_argument("--draft", default="", help="shape of the draft model")
    parser.add_argument("--only", nargs="*", help="bottlenecks to plant (default: all)")
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    gpu = args.device == "cuda"
    with tempfile.TemporaryDirectory() as place:
        folders = {}
        for name, shape in (("large", args.large), ("small", args.small), ("draft", args.draft)):
            (Path(place) / name).mkdir()
            folders[name] = folder_of(shape, str(Path(place) / name))
        dummy = ("--load-format", "dummy") if gpu else ()
        models = Models(folders, ("--device", args.device, *dummy), folders["draft"], 20_000 if gpu else 0)
        where = provenance(gpu_name() if gpu else cpu_name(), args.commit)
        for plant in plants(GPU if gpu else CPU, gpu):
            if args.only and plant.bottleneck not in args.only:
                continue
            result = measure(plant, models)
            write_rows(args.out, [result | where])
            print(
                f"{plant.bottleneck}: named {result['named']}, first {result['first_remedy']}, predicted "
                f"{result['predicted_change']:+.0%}, measured {result['measured_change']:+.0%} of {result['objective']}, "
                f"right {result['right']}, helps {result['helps']}; then {', '.join(result['others'])}",
                flush=True,
            )


def gpu_name() -> str:
    import torch

    return torch.cuda.get_device_name()


if __name__ == "__main__":
    main()
