"""A prompt handed over by TCP: with the pages of each chunk sent while the next one is computed, and with all sent at its end.

    python benchmarks/handover.py --dtype float32 --out benchmarks/results/handover.json

Two engine processes of one host with random weights. The time is that from the ticket, which comes with the last chunk, to the
first token of the engine that goes on; a step of that engine is part of it. `local` is shared memory on CPUs, CUDA IPC on GPUs.
Then the rate at which pages pass between two processes over loopback, beside that of a bare socket.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import HERE, cpu_name, provenance, write_rows

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.sampling import SamplingParams
from ridgeline.core.ticket import Pools, Ticket
from ridgeline.kv.tcp_pools import TcpPools
from ridgeline.kv.transfer import Place
from ridgeline.service.launch import EngineProcess, launch
from ridgeline.wire.messages import Cancel, Delta, Offer, Submit

WAYS = ("chunks", "whole", "local")
SECRET = "5e" * 32
PAGE_BYTES, PAGES = 1 << 20, 512
WIDE = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 256, "vocab_size": 1024}
WIDE |= {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128}
"""The shape `wide`: keys and values of an 8B (131 KB a token in float32) and little to compute, because a CPU computes a prompt of
a real shape far slower than its pages travel."""
TOKENS = 8
"""Output tokens of a request."""


@dataclass
class Heard:
    """The deltas of a request at one engine (wire.client.Receiver)."""

    client: Any
    offers_to: Any = None
    deltas: list[tuple[float, Delta]] = field(default_factory=list)
    offered: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, delta: Delta) -> None:
        if delta.ticket is not None and not delta.finish:
            self.offered += len(delta.ticket.keys)
            if self.offers_to is not None:
                self.offers_to.send(Offer(delta.id, delta.ticket))
            return
        self.deltas.append((time.perf_counter(), delta))
        if delta.finish:
            self.over.set()

    def fail(self, message: str, reason: str = "failed") -> None:
        raise RuntimeError(message)


async def once(engines: list[EngineProcess], name: str, prompt: list[int], early: bool) -> dict[str, float]:
    """Hand one prompt over. early: its pages are offered chunk by chunk."""
    prefill, decode = (engine.client for engine in engines)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, seed=1)
    first, second = Heard(prefill, decode if early else None), Heard(decode)
    began = time.perf_counter()
    prefill.start(Submit(name, prompt, sampling, time.monotonic(), hand_over=True), first)
    await first.over.wait()
    ended, delta = first.deltas[-1]
    ticket: Ticket | None = delta.ticket
    assert ticket is not None and ticket.keys
    drawn = {0: list(delta.tokens)}
    decode.start(Submit(name, prompt, sampling, time.monotonic(), drawn=drawn, ticket=ticket), second)
    await second.over.wait()
    prefill.send(Cancel(name))
    for client in (prefill, decode):
        client.forget(name)
    assert second.deltas[0][1].cached >= len(ticket.keys), "the pages did not arrive"
    times = [at for at, _ in second.deltas]
    steps = [later - before for before, later in pairwise(times)]
    return {
        "wait_ms": 1e3 * (times[0] - ended),
        "prefill_ms": 1e3 * (ended - began),
        "step_ms": 1e3 * median(steps),
        "early_blocks": first.offered,
        "blocks": len(ticket.keys),
    }


def shape(name: str, folder: Path) -> Path:
    """The model folder of a shape."""
    if name != "wide":
        return HERE / "models" / name
    base = json.loads((HERE / "models" / "smollm-135m" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(base | WIDE))
    return folder


async def handed_over(args: argparse.Namespace, way: str) -> dict[str, Any]:
    model = ModelConfig(
        str(shape(args.shape, args.folder)), load_format="dummy", dtype=args.dtype, max_model_len=args.prompt + 64
    )
    engine = EngineConfig(
        device=args.device,
        kv_cache_memory=args.kv_gb << 30,
        max_num_seqs=4,
        max_num_batched_tokens=args.chunk,
        threads=args.threads,
    )
    if way == "local":
        descriptors = tuple(os.memfd_create("pool") for _ in range(2))
        pools = [Pools(descriptors, number) for number in range(2)]
    else:
        pools = [Pools((), number, "127.0.0.1", SECRET, 2) for number in range(2)]
    engines = [await launch(model, engine, pools=each) for each in pools]
    draw, runs = random.Random(0), []
    try:
        facts = [await each.client.wait_ready() for each in engines]
        for number in range(args.repeats + 1):
            prompt = [draw.randrange(10, 1_000) for _ in range(args.prompt)]
            runs.append(await once(engines, f"{way}-{number}", prompt, way == "chunks"))
            print(way, {name: round(value, 2) for name, value in runs[-1].items()}, flush=True)
    finally:
        for each in engines:
            await each.stop()
    result: dict[str, Any] = {name: round(median(run[name] for run in runs[1:]), 2) for name in runs[0]}
    result["mb"] = round(result["blocks"] * facts[0]["page_bytes"] / 1e6, 1)
    return result


def keep(secret: str, pipe: Connection) -> None:
    """A process that keeps pages."""
    pools = TcpPools(Pools((), 0, "127.0.0.1", secret), torch.ones(PAGES, PAGE_BYTES, dtype=torch.uint8))
    pipe.send([Place(0, *exported, pools.address) for exported in pools.export(range(1, PAGES))])
    pipe.recv()
    pools.close()


def rates(repeats: int) -> Iterator[float]:
    """GB/s of fetches of all pages of another process, in batches of 64 MiB."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=keep, args=(SECRET, theirs))
    process.start()
    places: list[Place] = ours.recv()
    pools = TcpPools(Pools((), 1, "127.0.0.1", SECRET), torch.zeros(2, PAGE_BYTES, dtype=torch.uint8))
    for _ in range(repeats + 1):
        began = time.perf_counter()
        for first in range(0, len(places), 64):
            pools.fetch(places[first : first + 64])
        arrived = [arrival.result() for arrival in pools.arrivals(places)]
        yield len(places) * PAGE_BYTES / (time.perf_counter() - began) / 1e9
        assert all(page is not None for page in arrived)
        pools.drop(places)
    pools.close()
    ours.send(None)
    process.join()


def bare(repeats: int) -> Iterator[float]:
    """GB/s of a socket over loopback between two threads, into one buffer of 4 MiB that is filled again and again."""
    size = PAGES * PAGE_BYTES
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for _ in range(repeats):
            sender = threading.Thread(target=_send, args=(listener.getsockname()[1], size))
            sender.start()
            sock, _ = listener.accept()
            with sock:
                began, left, buffer = time.perf_counter(), size, bytearray(4 << 20)
                while left:
                    left -= sock.recv_into(buffer)
                yield size / (time.perf_counter() - began) / 1e9
            sender.join()


def _send(port: int, size: int) -> None:
    data = memoryview(bytearray(4 << 20))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for _ in range(size // len(data)):
            sock.sendall(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="wide", help="wide, or a folder of benchmarks/models")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--kv-gb", type=int, default=1)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", choices=("all", "rates"), default="all")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    machine = cpu_name() if args.device == "cpu" else torch.cuda.get_device_name()
    where = provenance(machine, args.commit)
    facts = {"shape": args.shape, "prompt": args.prompt, "chunk": args.chunk}
    rows: list[dict[str, Any]] = []
    for way in WAYS if args.only != "rates" else ():
        with TemporaryDirectory() as folder:
            args.folder = Path(folder)
            result = asyncio.run(handed_over(args, way))
        row = {"row": f"handover-{args.shape}-{args.device}-{way}-ms", "value": result["wait_ms"]}
        rows.append({**row, **result, **facts, **where})
    for name, figures in (("pages", list(rates(args.repeats))[1:]), ("socket", list(bare(args.repeats)))):
        print(name, [round(figure, 2) for figure in figures], flush=True)
        rows.append(
            {
                "row": f"handover-tcp-{name}-{args.device}-gb-s",
                "value": round(median(figures), 2),
                "best": round(max(figures), 2),
                **where,
            }
        )
    write_rows(args.out, rows)


if __name__ == "__main__":
    main()
