"""Times the products of a decode step on one GPU: ours and cuBLAS's, per shape and over a whole step.

    python benchmarks/products.py --out benchmarks/results/products.json [--sweep] [--limit SECONDS]

Every measurement replays a CUDA graph that walks over as many weights of the shape as the model has layers, so that no
weight is found in the cache of the chip. --sweep tries other configurations than the shipped ones and uses the best of
them for the sums; it changes nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from common import provenance

from ridgeline.ops.triton.gemm_small import matrix_product
from ridgeline.ops.triton.gemv import vector_product
from ridgeline.ops.triton.shapes import PROCESSORS, MatrixTile, VectorTile, tile_for

DTYPE = torch.bfloat16
READ_TB_S = 4.64
"""What a plain matrix-vector kernel reads from a large matrix on the H200 that the figures quote."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Tile = VectorTile | MatrixTile | None
"""None: cuBLAS."""


@dataclass(frozen=True)
class Model:
    """The linears of one layer and of the head, (outputs, inputs)."""

    name: str
    layers: int
    linears: tuple[tuple[int, int], ...]
    head: tuple[int, int]


MODELS = (
    Model("8b", 32, ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)), (128256, 4096)),
    Model("0.6b", 28, ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), (151936, 1024)),
)


def product(x: torch.Tensor, weight: torch.Tensor, tile: Tile) -> torch.Tensor:
    if tile is None:
        return F.linear(x, weight)
    if isinstance(tile, VectorTile):
        return vector_product(x, weight, None, tile)
    return matrix_product(x, weight, None, tile)


def vector_tiles(tokens: int) -> Iterator[VectorTile]:
    for rows, (block, warps) in itertools.product((1, 2, 4), ((4096, 8), (2048, 8), (1024, 4), (512, 4), (512, 2))):
        if rows * max(1, tokens // 2) <= 4 and rows * block * tokens <= 16384 and rows * block // warps <= 1024:
            yield VectorTile(rows, block, warps)


MATRIX_SHAPES = {
    16: (
        (128, 64, 4, 6),
        (128, 128, 4, 3),
        (64, 64, 4, 8),
        (64, 128, 4, 5),
        (64, 256, 4, 3),
        (32, 128, 4, 6),
        (32, 256, 4, 4),
        (16, 256, 4, 6),
    ),
    32: ((128, 64, 4, 5), (128, 128, 4, 5), (64, 64, 4, 8), (64, 128, 4, 4), (64, 256, 4, 4), (32, 128, 4, 6)),
    64: (
        (128, 64, 4, 4),
        (128, 64, 8, 4),
        (128, 128, 8, 4),
        (64, 64, 4, 6),
        (64, 128, 4, 3),
        (64, 128, 4, 6),
        (256, 64, 8, 4),
    ),
    128: ((128, 64, 8, 3), (128, 64, 8, 6), (128, 128, 8, 3), (64, 64, 4, 4), (256, 64, 8, 4)),
    256: ((128, 64, 8, 4), (64, 64, 4, 5), (64, 128, 4, 2)),
}


def matrix_shapes(batch: int) -> Iterator[MatrixTile]:
    for rows, block, warps, stages in MATRIX_SHAPES[batch]:
        for asked in (0, 512):
            yield MatrixTile(batch, rows, block, warps, stages, asked)


def with_splits(tile: MatrixTile, tokens: int, n: int, k: int) -> Iterator[MatrixTile]:
    tiles = -(-n // tile.rows) * -(-tokens // tile.batch)
    for splits in (1, 2, 3, 4, 5, 6, 8, 16):
        programs = tiles * splits
        if (splits == 1 and programs > PROCESSORS) or (
            90 <= programs <= 4 * PROCESSORS and k // splits >= 4 * tile.block
        ):
            yield replace(tile, splits=splits)


def candidates(tokens: int, n: int, k: int) -> Iterator[Tile]:
    """What a sweep tries for one problem, the shipped one first."""
    yield tile_for(tokens, n, k)
    if tokens <= 4:
        yield from vector_tiles(tokens)
    if tokens > 2:
        batches = [max(16, tokens)] if tokens < 256 else [256, 128]
        for batch in batches:
            for tile in matrix_shapes(batch):
                yield from with_splits(tile, tokens, n, k)


def compile_one(work: tuple[int, Tile]) -> None:
    """Leaves the compiled kernel in Triton's cache on disk."""
    tokens, tile = work
    try:
        product(
            torch.ones(tokens, 4096, dtype=DTYPE, device="cuda"),
            torch.ones(256, 4096, dtype=DTYPE, device="cuda"),
            tile,
        )
    except Exception as error:
        print("does not compile:", tile, type(error).__name__, str(error)[:100])


def compile_all() -> None:
    work: list[tuple[int, Tile]] = [(tokens, tile) for tokens in (1, 2, 4) for tile in vector_tiles(tokens)]
    work += [
        (batch, replace(tile, splits=splits))
        for batch in MATRIX_SHAPES
        for tile in matrix_shapes(batch)
        for splits in (1, 2)
    ]
    with ProcessPoolExecutor(14, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, work))


def error_of(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> float:
    want = x.double() @ weight.double().T
    return float((out.double() - want).norm() / want.norm())


def check() -> None:
    """Stop before timing anything that is wrong: a chain of products, each waiting for the one before, in a graph."""
    weights = [torch.randn(4096, 4096, dtype=DTYPE, device="cuda") / 64 for _ in range(6)]
    for tokens in (1, 2, 3, 4, 7, 16, 40, 64, 100, 128, 200, 256):
        first = torch.randn(tokens, 4096, dtype=DTYPE, device="cuda")

        def chain(first: torch.Tensor = first, tokens: int = tokens) -> list[torch.Tensor]:
            outs = [first]
            for weight in weights:
                outs.append(product(outs[-1], weight, tile_for(tokens, 4096, 4096)))
            return outs

        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = chain()
        for _ in range(3):
            first.normal_()
            for out in outs[1:]:
                out.fill_(float("nan"))
            graph.replay()
            errors = [error_of(out, x, weight) for x, out, weight in zip(outs[:-1], outs[1:], weights, strict=True)]
            if not max(errors) < 5e-3:
                raise SystemExit(f"products of {tokens} tokens are wrong: {errors}")


def replayed(run: Callable[[], object], repeats: int = 5) -> float:
    """Median microseconds of a graph of `run`."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times[1:])


@dataclass(frozen=True)
class Bench:
    """The weights of one model; results as rows."""

    model: Model
    weights: dict[tuple[int, int], list[torch.Tensor]]
    rows: list[dict[str, object]]

    def time(self, tokens: int, shape: tuple[int, int], tile: Tile) -> float:
        """Microseconds of one product; inf if the chip cannot run it."""
        n, k = shape
        copies = self.weights[shape]
        some = copies[: max(4, min(len(copies), 700_000_000 // (2 * n * k)))]
        x = torch.randn(tokens, k, dtype=DTYPE, device="cuda")
        try:
            spent = replayed(lambda: [product(x, weight, tile) for weight in some]) / len(some)
        except Exception as error:
            print("failed:", shape, tokens, tile, type(error).__name__, str(error)[-120:].strip(), flush=True)
            return float("inf")
        if tile is not None and error_of(product(x[:, :], some[0][:512], tile), x, some[0][:512]) > 5e-3:
            print("wrong:", shape, tokens, tile)
            return float("inf")
        what = "cublas" if tile is None else str(tile)
        rate = 2 * n * k / spent * 1e-6
        self.rows.append(
            {
                "model": self.model.name,
                "n": n,
                "k": k,
                "tokens": tokens,
                "what": what,
                "us": round(spent, 3),
                "tb_s": round(rate, 3),
            }
        )
        return spent

    def best(self, tokens: int, shape: tuple[int, int], sweep: bool, until: float) -> Tile:
        """The fastest configuration of one problem; prints it beside cuBLAS."""
        own = tile_for(tokens, *shape)
        tried: dict[Tile, float] = {own: self.time(tokens, shape, own)}
        for tile in candidates(tokens, *shape) if sweep else ():
            if tile not in tried and time.monotonic() < until:
                tried[tile] = self.time(tokens, shape, tile)
        cublas = self.time(tokens, shape, None)
        found = min(tried, key=lambda tile: tried[tile])
        size = 2e-6 * shape[0] * shape[1]
        rates = [f"{size / spent:5.2f}" for spent in (tried[own], tried[found], cublas)]
        print(
            f"{self.model.name:5} {shape[0]:6}x{shape[1]:<6} M={tokens:<4} shipped {rates[0]} best {rates[1]} "
            f"cublas {rates[2]} TB/s  {len(tried):3} {found}",
            flush=True,
        )
        return found

    def step(self, tokens: int, tiles: dict[tuple[int, int], Tile]) -> float:
        """Microseconds of all products of one step, in the order of the layers."""
        xs = {shape[1]: torch.randn(tokens, shape[1], dtype=DTYPE, device="cuda") for shape in self.weights}

        def run() -> None:
            for layer in range(self.model.layers):
                for shape in self.model.linears:
                    product(xs[shape[1]], self.weights[shape][layer], tiles[shape])
            product(xs[self.model.head[1]], self.weights[self.model.head][0], tiles[self.model.head])

        return replayed(run, 9)


def measure(model: Model, counts: list[int], sweep: bool, until: float) -> Iterator[dict[str, object]]:
    weights = {
        shape: [torch.empty(shape, dtype=DTYPE, device="cuda").normal_(0, 0.02) for _ in range(model.layers)]
        for shape in model.linears
    }
    weights[model.head] = [torch.empty(model.head, dtype=DTYPE, device="cuda").normal_(0, 0.02) for _ in range(4)]
    bench = Bench(model, weights, [])
    size = sum(2 * n * k * model.layers for n, k in model.linears) + 2 * model.head[0] * model.head[1]
    for tokens in counts:
        tiles = {shape: bench.best(tokens, shape, sweep, until) for shape in weights}
        ours, cublas = bench.step(tokens, tiles), bench.step(tokens, dict.fromkeys(weights))
        for what, spent in (("ours", ours), ("cublas", cublas)):
            rate = size / spent * 1e-6
            print(
                f"STEP {model.name:5} M={tokens:<4} {what:7} {spent:9.1f} us {rate:5.2f} TB/s {rate / READ_TB_S:6.1%}",
                flush=True,
            )
            bench.rows.append(
                {"model": model.name, "tokens": tokens, "what": f"step {what}", "us": spent, "tb_s": rate}
            )
    yield from bench.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="file for the results, JSON")
    parser.add_argument("--sweep", action="store_true", help="try other configurations too")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--models", nargs="+", default=[model.name for model in MODELS])
    parser.add_argument(
        "--limit", type=float, default=1e9, help="seconds after which a sweep tries nothing new, per model"
    )
    options = parser.parse_args()
    begun = time.monotonic()
    if options.sweep:
        compile_all()
        print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    check()
    rows: list[dict[str, object]] = []
    for model in MODELS:
        if model.name in options.models:
            until = time.monotonic() + options.limit
            rows += [
                {**row, **provenance(torch.cuda.get_device_name())}
                for row in measure(model, options.tokens, options.sweep, until)
            ]
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(rows, indent=1) + "\n")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
