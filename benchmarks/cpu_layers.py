"""Would layers that lie in host memory run faster on the CPU than their weights reach the GPU? What one layer costs on this CPU.

    python benchmarks/cpu_layers.py [--link-gb-s 55.3] [--tokens 1,2,4,8,16,64] [--out benchmarks/results/split.json]

The linears of a layer of --model in bfloat16, random weights, by the operations that serve on a CPU. Two sets of weights are used
in turn, so that caches hold none. With a GPU the link is measured, and so is the way of a step's activations to the host and back,
which each layer would wait for; without one, --link-gb-s says how fast copies are, and the way costs nothing.

`cpu-layer-N`: milliseconds of a layer for N tokens, beside those of the copy of its weights. `cpu-layers-break-even`: the most
tokens of --tokens for which the CPU is faster.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import HERE, cpu_name, provenance, write_rows

from ridgeline.hardware.bandwidth import host_link_rate, read_bandwidth
from ridgeline.models.config import read_model
from ridgeline.ops.choose import choose

DTYPE = torch.bfloat16
CPU = torch.device("cpu")


def seconds(work: Callable[[int], Any], repeats: int) -> float:
    """Median time of a call, which gets its number."""
    times = []
    for number in range(-2, repeats):
        begin = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[2:])


def crossing_s(tokens: int, width: int, repeats: int) -> float:
    """Seconds in which the activations of a step come to the host and go back; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0.0
    host = torch.empty(tokens, width, dtype=DTYPE, pin_memory=True)
    device = host.cuda()

    def cross(number: int) -> None:
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        device.copy_(host, non_blocking=True)

    return seconds(cross, repeats)


class Layer:
    """The linears of one layer of a model, in two sets of random weights."""

    def __init__(self, model: Path) -> None:
        spec, _ = read_model(model)
        layer = spec.layers[0]
        heads = (layer.n_heads + 2 * layer.n_kv_heads) * layer.head_dim
        self.width = spec.d_model
        self.shapes = (
            (heads, spec.d_model),
            (spec.d_model, layer.n_heads * layer.head_dim),
            (2 * layer.d_ff, spec.d_model),
            (spec.d_model, layer.d_ff),
        )
        self.ops = choose(CPU, DTYPE).matmul.unquantized
        self.sets = [[self.ops.pack(torch.randn(shape, dtype=DTYPE) / 64) for shape in self.shapes] for _ in range(2)]

    @property
    def bytes(self) -> int:
        return sum(rows * columns for rows, columns in self.shapes) * DTYPE.itemsize

    def run_s(self, tokens: int, repeats: int) -> float:
        """Seconds of the products of a step with so many tokens. Attention stays where the cache is."""
        inputs = [torch.randn(tokens, columns, dtype=DTYPE) for _, columns in self.shapes]

        def run(number: int) -> None:
            for x, weight in zip(inputs, self.sets[number % 2], strict=True):
                self.ops.linear(x, weight, None)

        with torch.inference_mode():
            return seconds(run, repeats)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    layer = Layer(args.model)
    link = host_link_rate(torch.device("cuda")) if torch.cuda.is_available() else args.link_gb_s * 1e9
    copy_ms = layer.bytes / link * 1e3
    shared = {
        "model": args.model.name, "layer_bytes": layer.bytes, "copy_ms": round(copy_ms, 3), "link_gb_s": round(link / 1e9, 1),
        "link_measured": torch.cuda.is_available(), "read_gb_s": round(read_bandwidth(CPU) / 1e9, 1),
        "threads": torch.get_num_threads(),
    }  # fmt: skip
    rows, faster = [], 0
    for tokens in map(int, args.tokens.split(",")):
        products, crossing = layer.run_s(tokens, args.repeats), crossing_s(tokens, layer.width, args.repeats)
        total = (products + crossing) * 1e3
        faster = tokens if total < copy_ms else faster
        figures = {"products_ms": round(products * 1e3, 3), "crossing_ms": round(crossing * 1e3, 4)}
        reached = {"gb_s": round(layer.bytes / products / 1e9, 1), "times_faster": round(copy_ms / total, 3)}
        rows.append(
            {"row": f"cpu-layer-{tokens}", "value": round(total, 3), "unit": "ms", **figures, **reached, **shared}
        )
    return [*rows, {"row": "cpu-layers-break-even", "value": faster, "unit": "tokens of a step", **shared}]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "models" / "llama-3.1-8b", help="folder with config.json")
    parser.add_argument("--tokens", default="1,2,4,8,16,64", help="tokens of a step")
    parser.add_argument("--link-gb-s", type=float, default=math.nan, help="rate of copies, where there is no GPU")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--machine", default=cpu_name())
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    args = parser.parse_args(words)
    if not torch.cuda.is_available() and math.isnan(args.link_gb_s):
        parser.error("there is no GPU here: say how fast copies are with --link-gb-s")
    rows = [row | provenance(args.machine, args.commit) for row in measure(args)]
    print(*map(json.dumps, rows), sep="\n")
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
