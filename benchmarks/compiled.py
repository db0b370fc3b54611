"""torch.compile as a rung of its own: one decode step of a Llama shape in plain PyTorch, eager and compiled, beside Ridgeline's.

    python benchmarks/compiled.py --model benchmarks/models/llama-3.1-8b [--device cuda] [--out benchmarks/results/ladder.json]

One request with random bfloat16 weights and 128 tokens behind it. The plain step has a static KV cache, fused qkv and gate-up
matrices and PyTorch's attention, which is how torch.compile does best (gpt-fast, PyTorch 2023). Each rung keeps those below:
eager, torch.compile, torch.compile with CUDA graphs; then Ridgeline eager, with graphs, int8, int4. --only measures some of them;
a speed-up is over the eager rung, measured in this run or found in the result file.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import cpu_name, provenance, read_rows, timed, write_rows

from ridgeline.cli.roofline import read_spec
from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.spec import ModelSpec
from ridgeline.engine.local import LocalEngine

CONTEXT, PLACES, ANSWER = 128, 512, 257
PLAIN = ("torch-eager", "torch-compile", "torch-compile-graphs")
"""Rungs of the plain step."""
SERVED: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
"""Rungs of Ridgeline: options of the server."""


class PlainStep:
    """One token through a decoder of a spec's shape: the token's id [1] and position [1] -> the next id [1]."""

    def __init__(self, spec: ModelSpec, device: str) -> None:
        layer, width = spec.layers[0], spec.d_model
        self.heads, self.kv_heads, self.dim, self.eps = layer.n_heads, layer.n_kv_heads, layer.head_dim, spec.norm_eps
        rows = (self.heads + 2 * self.kv_heads) * self.dim

        def matrix(out: int, inputs: int) -> torch.Tensor:
            return torch.randn(out, inputs, device=device, dtype=torch.bfloat16) * inputs**-0.5

        self.layers = [
            (
                matrix(rows, width),
                matrix(width, self.heads * self.dim),
                matrix(2 * layer.d_ff, width),
                matrix(width, layer.d_ff),
            )
            for _ in spec.layers
        ]
        self.embedding, self.head = matrix(spec.vocab_size, width), matrix(spec.vocab_size, width)
        self.norm = torch.ones(width, device=device, dtype=torch.bfloat16)
        shape = (len(self.layers), 2, 1, self.kv_heads, PLACES, self.dim)
        self.cache = torch.randn(shape, device=device, dtype=torch.bfloat16)
        angle = torch.outer(torch.arange(PLACES), 1e4 ** (-torch.arange(0, self.dim, 2) / self.dim)).to(device)
        self.cos, self.sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
        self.places = torch.arange(PLACES, device=device)

    def __call__(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        stream = self.embedding[token]
        cos, sin = self.cos[position], self.sin[position]
        mask = (self.places <= position).view(1, 1, 1, -1)
        heads = (self.heads, self.kv_heads, self.kv_heads)

        def turn(x: torch.Tensor) -> torch.Tensor:
            swapped = torch.cat((-x[..., self.dim // 2 :], x[..., : self.dim // 2]), -1)
            return (x * cos + swapped * sin).to(x.dtype)

        for (qkv, out, gate_up, down), (keys, values) in zip(self.layers, self.cache, strict=True):
            normed = F.rms_norm(stream, self.norm.shape, self.norm, self.eps)
            q, k, v = F.linear(normed, qkv).view(1, sum(heads), 1, self.dim).split(heads, 1)
            keys.index_copy_(2, position, turn(k))
            values.index_copy_(2, position, v)
            attended = F.scaled_dot_product_attention(turn(q), keys, values, attn_mask=mask, enable_gqa=True)
            stream = stream + F.linear(attended.reshape(1, -1), out)
            gate, up = F.linear(F.rms_norm(stream, self.norm.shape, self.norm, self.eps), gate_up).chunk(2, -1)
            stream = stream + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(stream, self.norm.shape, self.norm, self.eps), self.head).argmax(-1)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def recorded(advance: Callable[[], None]) -> Callable[[], None]:
    """`advance` as a CUDA graph. torch.compile's own (mode="reduce-overhead") refuses a step that writes to its cache."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            advance()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        advance()
    return graph.replay


@torch.inference_mode()
def seconds_per_token(
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], device: str, tokens: int, graph: bool
) -> float:
    """Median of three runs of `tokens` tokens, each fed to the next step on the device, after a run that compiles."""
    token, position = (torch.zeros(1, dtype=torch.long, device=device) for _ in range(2))

    def advance() -> None:
        token.copy_(step(token, position))
        position.add_(1)

    once, runs = recorded(advance) if graph else advance, []
    for _ in range(4):
        position.fill_(CONTEXT)
        wait(device)
        begin = time.perf_counter()
        for _ in range(tokens):
            once()
        wait(device)
        runs.append((time.perf_counter() - begin) / tokens)
    return statistics.median(runs[1:])


def plain_rungs(spec: ModelSpec, device: str, tokens: int, names: Collection[str]) -> Iterator[tuple[str, float]]:
    for name in PLAIN:
        graph = name == "torch-compile-graphs"
        if name not in names or (graph and device == "cpu"):
            continue
        step = PlainStep(spec, device)
        run = step if name == "torch-eager" else torch.compile(step.__call__)
        yield name, seconds_per_token(run, device, tokens, graph)
        torch.compiler.reset()


def served_rungs(model: str, device: str, names: Collection[str]) -> Iterator[tuple[str, float]]:
    for name, options in SERVED.items():
        if name not in names:
            continue
        quantization = options.get("quantization", "")
        config = ModelConfig(model=model, load_format="dummy", max_model_len=PLACES, quantization=quantization)
        engine = EngineConfig(
            device=device, max_num_seqs=1, enable_prefix_caching=False, enforce_eager="enforce_eager" in options
        )
        local = LocalEngine.start(config, engine)
        vocab = local.engine.setup.vocab_size
        timed(local, [(CONTEXT, 16)], vocab)
        runs = [
            timed(local, [(CONTEXT, ANSWER)], vocab).seconds - timed(local, [(CONTEXT, 1)], vocab).seconds
            for _ in range(3)
        ]
        local.close()
        yield name, statistics.median(runs) / (ANSWER - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="benchmarks/models/llama-3.1-8b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tokens", type=int, default=ANSWER - 1, help="tokens of a run of the plain step")
    parser.add_argument("--only", nargs="+", choices=[*PLAIN, *SERVED], default=[*PLAIN, *SERVED], help="rungs")
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    args = parser.parse_args()
    machine = cpu_name() if args.device == "cpu" else torch.cuda.get_device_name()
    facts, name = provenance(machine, args.commit), args.model.rstrip("/").rpartition("/")[2]
    spec = read_spec(ModelConfig(model=args.model))
    measured = {row["row"]: row["tpot_ms"] for row in read_rows(args.out) if "tpot_ms" in row} if args.out else {}
    eager = "torch-eager" in args.only
    first = 0.0 if eager else measured.get(f"ladder-{name}-torch-eager-{args.device}", 0.0) / 1e3
    plain = plain_rungs(spec, args.device, args.tokens, args.only)
    for rungs in (plain, served_rungs(args.model, args.device, args.only)):
        for rung, seconds in rungs:
            first = first or seconds
            row = {
                "row": f"ladder-{name}-{rung}-{args.device}",
                "model": name,
                "rung": rung,
                "tpot_ms": round(seconds * 1e3, 4),
            }
            row |= {"tok_s": round(1 / seconds, 2), "speedup": round(first / seconds, 3), "torch": torch.__version__}
            print(row, flush=True)
            if args.out:
                write_rows(args.out, [row | facts])


if __name__ == "__main__":
    main()
