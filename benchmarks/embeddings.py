"""Embeddings per second of the shipped model on a CPU, over HTTP, by inputs of a request:

    python benchmarks/embeddings.py --out benchmarks/results/embeddings.json

A server, and transformers in this process, get the same random token ids in turn. One client sends one request at a time. Both have
the same dtype and --threads. transformers runs one forward pass of inputs of equal length, without padding. Rows `embeddings-N`
have medians over --rounds rounds: embeddings and prompt tokens per second, those of transformers, and the ratio of a round.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import torch
import transformers
from common import cpu_name, provenance, write_rows

from ridgeline.bench.server_process import serving
from ridgeline.models.hub import shipped_model

SIZES = (1, 8, 32)
Inputs = list[list[int]]


def speed(embed: Callable[[Inputs], int], batches: list[Inputs]) -> float:
    """Embeddings per second."""
    started = time.perf_counter()
    count = sum(map(embed, batches))
    return count / (time.perf_counter() - started)


def measure(url: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    def ours(inputs: Inputs) -> int:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        body = json.dumps({"input": inputs, "encoding_format": "base64"})
        connection.request("POST", "/v1/embeddings", body, {"content-type": "application/json"})
        answer = json.load(connection.getresponse())
        return len(answer["data"])

    model = transformers.AutoModel.from_pretrained(shipped_model(), dtype=getattr(torch, args.dtype))

    def theirs(inputs: Inputs) -> int:
        with torch.inference_mode():
            last = model(torch.tensor(inputs), use_cache=False).last_hidden_state[:, -1].float()
            return len(torch.nn.functional.normalize(last).tolist())

    draw, vocab = random.Random(1), model.config.vocab_size
    rows = []
    for size in SIZES:
        rounds = []
        for _ in range(args.rounds + 1):
            batches = [
                [[draw.randrange(3, vocab) for _ in range(args.length)] for _ in range(size)]
                for _ in range(args.inputs // size)
            ]
            rounds.append((speed(ours, batches), speed(theirs, batches)))
        first, second = zip(*rounds[1:], strict=True)  # the first round builds the shapes of its steps
        figures = {
            "value": statistics.median(first),
            "tokens_per_s": statistics.median(first) * args.length,
            "transformers": statistics.median(second),
            "ratio": statistics.median(a / b for a, b in zip(first, second, strict=True)),
        }
        row = {"row": f"embeddings-{size}", "unit": "embeddings/s", "inputs": size, "length": args.length}
        row |= {name: round(value, 2 if name == "ratio" else 1) for name, value in figures.items()}
        row |= {"target": None, "dtype": args.dtype, "threads": args.threads, "rounds": args.rounds}
        rows.append(row)
        print(row)
    return rows


async def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    async with serving(["--device", "cpu", "--dtype", args.dtype, "--threads", str(args.threads)]) as url:
        return await asyncio.to_thread(measure, url, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=64, help="tokens of an input")
    parser.add_argument("--inputs", type=int, default=64, help="inputs of a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--commit", default="")
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = asyncio.run(run(args))
    if args.out:
        about = provenance(cpu_name(), args.commit)
        write_rows(args.out, [row | about for row in rows])


if __name__ == "__main__":
    main()
