"""Times the products of a decode step on one GPU, with the norms and activations between them: ours and cuBLAS's.

    python benchmarks/products.py --out benchmarks/results/products.json [--sweep] [--limit SECONDS]

Every measurement replays a CUDA graph that walks over as many weights of the shape as the model has layers, so that no
weight is found in the cache of the chip. A step is everything of a layer but attention. It is timed in several ways:
"unfused" runs each norm and activation by itself, "norm" and "gate" one of them inside the product, "fused" both where a
configuration is shipped, "cublas" leaves all products to cuBLAS. --sweep tries other configurations than the shipped
ones and times a step of the best of them as "best"; it changes nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from common import provenance

from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Normed, apply_norm
from ridgeline.ops.triton.activation import activate
from ridgeline.ops.triton.gemm_small import matrix_product
from ridgeline.ops.triton.gemv import resident_product, vector_product
from ridgeline.ops.triton.norm import rms_norm
from ridgeline.ops.triton.ring import ring_product
from ridgeline.ops.triton.ring_shapes import RingTile, ring_for
from ridgeline.ops.triton.shapes import PROCESSORS, MatrixTile, ResidentTile, Tile, VectorTile, tile_for

DTYPE = torch.bfloat16
EPS = 1e-5
READ_TB_S = 4.64
"""What a plain matrix-vector kernel reads from a large matrix on the H200 that the figures quote."""
TOKENS = (1, 2, 4, 16, 32, 64, 128)
PROCESSES = 14
SHARED_MEMORY = 225 * 1024


@dataclass(frozen=True)
class Role:
    """A linear and what stands around it: a norm before it, the activation of gate and up or the stream behind it."""

    name: str
    n: int
    k: int
    norm: bool = False
    kind: str | None = None
    add: bool = False


@dataclass(frozen=True)
class Model:
    name: str
    layers: int
    roles: tuple[Role, ...]
    head: Role


def model(name: str, layers: int, sizes: tuple[int, int, int, int, int]) -> Model:
    """sizes: d_model, outputs of qkv, inputs of the output projection, features of gate, vocabulary."""
    wide, qkv, heads, features, words = sizes
    roles = (
        Role("qkv", qkv, wide, norm=True),
        Role("out", wide, heads, add=True),
        Role("gate_up", 2 * features, wide, norm=True, kind="silu"),
        Role("down", wide, features, add=True),
    )
    return Model(name, layers, roles, Role("head", words, wide))


MODELS = (
    model("8b", 32, (4096, 6144, 4096, 14336, 128256)),
    model("0.6b", 28, (1024, 4096, 2048, 3072, 151936)),
    model("1b", 16, (2048, 3072, 2048, 8192, 128256)),
)


@dataclass(frozen=True)
class Choice:
    """How a linear is run: with which tile (None: cuBLAS), and whether the norm and the activation are part of it."""

    tile: Tile | RingTile | None
    norm: bool = False
    gate: bool = False


def shipped(role: Role, tokens: int, norm: bool = True, gate: bool = True) -> Choice:
    """What ops.triton.kernels chooses; without `norm` or `gate`, what it would choose if that could not be inside."""
    gated = gate and role.kind is not None
    ways = ((True, gated), (False, gated), (False, False)) if norm and role.norm else ((False, gated), (False, False))
    for way in ways:
        ring = None if way[0] else ring_for(tokens, role.n, role.k, way[1])
        if (tile := ring or tile_for(tokens, role.n, role.k, *way)) is not None:
            return Choice(tile, *way)
    return Choice(None)


def run(role: Role, choice: Choice, x: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """rest: the norm's gain [k] or the stream [T, n], whichever the role needs."""
    given: torch.Tensor | Normed = Normed(x, rest, EPS, False) if role.norm else x
    given = given if choice.norm else apply_norm(given, rms_norm)
    stream, kind = rest if role.add else None, role.kind if choice.gate else None
    if isinstance(choice.tile, ResidentTile):
        out = resident_product(given, weight, None, choice.tile, stream, kind)
    elif isinstance(choice.tile, VectorTile):
        out = vector_product(apply_norm(given, rms_norm), weight, None, choice.tile, stream)
    elif isinstance(choice.tile, MatrixTile):
        out = matrix_product(apply_norm(given, rms_norm), weight, None, choice.tile, stream, kind)
    elif isinstance(choice.tile, RingTile):
        out = ring_product(apply_norm(given, rms_norm), weight, None, choice.tile, stream, kind)
    else:
        values = apply_norm(given, rms_norm)
        out = F.linear(values, weight) if stream is None else stream.addmm_(values, weight.t())
    return activate(out, role.kind) if role.kind is not None and not choice.gate else out


def exact(role: Role, x: torch.Tensor, weight: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """The same in float64."""
    x, weight, rest = x.double(), weight.double(), rest.double()
    out = (REFERENCE.tokenwise.rms_norm(x, rest, EPS, False) if role.norm else x) @ weight.T
    out = out + rest if role.add else out
    return out if role.kind is None else REFERENCE.tokenwise.activate(out, role.kind)


def rest_of(role: Role, tokens: int, n: int) -> torch.Tensor:
    shape = (tokens, n) if role.add else (role.k,)
    return torch.randn(shape, dtype=DTYPE, device="cuda")


def off(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())


# --- what a sweep tries -----------------------------------------------------------------------------------------------

# rows, block, warps
VECTORS = tuple(
    VectorTile(rows, block, warps)
    for rows in (2, 4, 8)
    for block, warps in ((4096, 8), (4096, 16), (2048, 4), (2048, 8), (1024, 4), (1024, 8), (512, 2), (512, 4))
)
# Tokens of a tile -> (rows, block, warps, stages).
MATRICES = {
    16: ((64, 64, 4, 8), (64, 128, 4, 5), (64, 256, 4, 3), (128, 64, 4, 6), (128, 128, 4, 3), (128, 128, 8, 4)),
    32: ((64, 64, 4, 8), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 5), (128, 128, 4, 4), (128, 128, 8, 4)),
    64: ((64, 128, 4, 6), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 8, 6), (128, 128, 8, 4), (256, 64, 8, 4)),
    128: ((128, 64, 8, 3), (128, 64, 8, 6), (128, 128, 8, 3), (256, 64, 8, 4)),
}


# (rows, warps)
RESIDENTS = tuple(itertools.product((1, 2, 4, 8), (2, 4, 8, 16)))
MOST_HELD = 160
"""Numbers that a thread may keep: its part of x and of the sums or weights."""


def vectors(tokens: int, role: Role) -> Iterator[VectorTile]:
    for tile in VECTORS:
        held = tile.rows * tile.block // (32 * tile.warps)
        if held >= 8 and held * tokens <= 64 and tile.block <= role.k:
            yield tile


def resident_tiles(tokens: int, role: Role) -> Iterator[ResidentTile]:
    block = 1 << (role.k - 1).bit_length()
    for rows, warps in RESIDENTS:
        held = block // (32 * warps)
        if held >= 8 and (rows + 2 * tokens) * held <= MOST_HELD:
            for threads in (512, 1024)[: 3 - tokens]:
                if threads >= 32 * warps:
                    yield ResidentTile(rows, warps, PROCESSORS * threads // (32 * warps))


def matrices(tokens: int, role: Role) -> Iterator[MatrixTile]:
    batch = next(batch for batch in MATRICES if tokens <= batch)
    for rows, block, warps, stages in MATRICES[batch]:
        if (rows + batch) * block * 2 * stages > SHARED_MEMORY:
            continue
        tiles = -(-role.n // rows)
        for splits in (1, 2, 3, 4, 6, 8):
            programs = tiles * splits
            if (splits > 1 or programs < PROCESSORS) and not 90 <= programs <= 4 * PROCESSORS:
                continue
            if role.k >= 4 * block * splits:
                for asked in (0, 512):
                    yield MatrixTile(batch, rows, block, warps, stages, asked, splits)


def candidates(tokens: int, role: Role) -> Iterator[Choice]:
    """What a sweep tries: with everything around the product inside that can be, and apart. Of many tokens only the gate,
    whose activation is inside."""
    gate = role.kind is not None
    if tokens <= 2:
        yield from (Choice(tile) for tile in vectors(tokens, role))
        for tile in resident_tiles(tokens, role):
            if tile.rows > 1 or not gate:
                yield Choice(tile, role.norm, gate)
    if tokens > 1 and (gate or tokens == 2):
        yield from (Choice(tile, False, gate) for tile in matrices(tokens, role))
    if tokens == 2 and gate:
        yield from (Choice(tile) for tile in matrices(tokens, role))


def compile_one(work: tuple[Role, Choice, int]) -> None:
    """Leaves the compiled kernel in Triton's cache on disk."""
    role, choice, tokens = work
    try:
        x = torch.ones(tokens, role.k, dtype=DTYPE, device="cuda")
        run(role, choice, x, torch.ones(256, role.k, dtype=DTYPE, device="cuda"), rest_of(role, tokens, 256))
    except Exception as error:
        print("does not compile:", role.name, choice, type(error).__name__, str(error)[:100], flush=True)


def compile_all(models: list[Model], counts: list[int]) -> None:
    """Every kernel of a sweep, several at a time. Kernels differ by less than candidates do."""
    work: dict[object, tuple[Role, Choice, int]] = {}
    for model in models:
        for tokens in counts:
            for role in (*model.roles, model.head):
                for choice in candidates(tokens, role):
                    tile = choice.tile
                    few = tile
                    if isinstance(tile, MatrixTile):
                        few = replace(tile, splits=min(2, tile.splits))
                    if isinstance(tile, ResidentTile):
                        few = replace(tile, programs=1)
                    apart = 0 if isinstance(tile, MatrixTile) else tokens
                    same = (few, choice.norm, choice.gate, role.add, apart)
                    even = (
                        role.k % tile.block == 0
                        if isinstance(tile, VectorTile)
                        else isinstance(tile, ResidentTile) and role.k
                    )
                    work.setdefault((same, even), (role, replace(choice, tile=few), tokens))
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, work.values(), chunksize=4))
    print(f"{len(work)} kernels compiled", flush=True)


# --- measuring --------------------------------------------------------------------------------------------------------


def replayed(work: Callable[[], object], repeats: int = 5) -> float:
    """Median microseconds of a graph of `work`."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
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
    """One model's weights by role, its norms' gain, and results as rows."""

    model: Model
    weights: dict[str, list[torch.Tensor]]
    gain: torch.Tensor
    rows: list[dict[str, object]]

    @classmethod
    def of(cls, chosen: Model) -> Bench:
        copies = {role.name: chosen.layers for role in chosen.roles} | {chosen.head.name: 4}
        weights = {
            role.name: [
                torch.empty((role.n, role.k), dtype=DTYPE, device="cuda").normal_(0, 0.02)
                for _ in range(copies[role.name])
            ]
            for role in (*chosen.roles, chosen.head)
        }
        return cls(chosen, weights, torch.rand(chosen.head.k, dtype=DTYPE, device="cuda") + 0.5, [])

    @property
    def size(self) -> int:
        """Bytes of weights that a step reads."""
        of_layer = sum(role.n * role.k for role in self.model.roles)
        return 2 * (of_layer * self.model.layers + self.model.head.n * self.model.head.k)

    def layers(self, stream: torch.Tensor, choices: dict[str, Choice]) -> torch.Tensor:
        """A step without attention, whose output is a part of qkv here; ends in logits."""
        qkv, out, gate_up, down = self.model.roles
        of = self.weights
        for layer in range(self.model.layers):
            x = run(qkv, choices["qkv"], stream, of["qkv"][layer], self.gain)[:, : out.k]
            stream = run(out, choices["out"], x, of["out"][layer], stream)
            x = run(gate_up, choices["gate_up"], stream, of["gate_up"][layer], self.gain)
            stream = run(down, choices["down"], x, of["down"][layer], stream)
        x = rms_norm(stream, self.gain, EPS, False)
        return run(self.model.head, choices["head"], x, of["head"][0], self.gain)

    def check(self, tokens: int, choices: dict[str, Choice]) -> None:
        """Stop before timing anything that is wrong: each linear against float64; a step in a graph, whose kernels overlap,
        against the same kernels one at a time, bit for bit where all are ours."""
        for role in (*self.model.roles, self.model.head):
            weight = self.weights[role.name][0][: 8192 if role.kind is None else role.n]
            x, rest = torch.randn(tokens, role.k, dtype=DTYPE, device="cuda"), rest_of(role, tokens, weight.shape[0])
            want = exact(role, x, weight, rest)
            error = off(run(role, choices[role.name], x, weight, rest), want)
            if not error < 6e-3:
                raise SystemExit(f"{self.model.name} {role.name} of {tokens} tokens is wrong: {error}")
        first = torch.randn(tokens, self.model.head.k, dtype=DTYPE, device="cuda")
        graph, began = torch.cuda.CUDAGraph(), first.clone()
        self.layers(first, choices)
        with torch.cuda.graph(graph):
            logits = self.layers(began.clone(), choices)
        for _ in range(2):
            began.normal_()
            graph.replay()
            torch.cuda.synchronize()
            alone = self._one_at_a_time(began.clone(), choices)
            # cuBLAS may choose another kernel in a graph.
            allowed = 2e-2 if any(choice.tile is None for choice in choices.values()) else 0.0
            if not off(logits, alone) <= allowed:
                raise SystemExit(
                    f"{self.model.name}: a step of {tokens} tokens depends on timing: {off(logits, alone)}"
                )

    def _one_at_a_time(self, stream: torch.Tensor, choices: dict[str, Choice]) -> torch.Tensor:
        """`layers` with a pause after every linear, in which nothing overlaps."""
        qkv, out, gate_up, down = (partial(self._alone, role, choices[role.name]) for role in self.model.roles)
        for layer in range(self.model.layers):
            x = qkv(stream, layer, self.gain)[:, : self.model.roles[1].k]
            stream = out(x, layer, stream)
            stream = down(gate_up(stream, layer, self.gain), layer, stream)
        return self._alone(self.model.head, choices["head"], rms_norm(stream, self.gain, EPS, False), 0, self.gain)

    def _alone(self, role: Role, choice: Choice, x: torch.Tensor, layer: int, rest: torch.Tensor) -> torch.Tensor:
        out = run(role, choice, x, self.weights[role.name][layer], rest)
        torch.cuda.synchronize()
        return out

    def time(self, tokens: int, role: Role, choice: Choice) -> float:
        """Microseconds of one linear with what stands around it; inf if the chip cannot run it or it is wrong."""
        weights = self.weights[role.name]
        some = weights[: max(4, min(len(weights), 700_000_000 // (2 * role.n * role.k)))]
        x, rest = torch.randn(tokens, role.k, dtype=DTYPE, device="cuda"), rest_of(role, tokens, role.n)
        few, part = some[0][:1024], rest[:, :1024].contiguous() if role.add else rest
        try:
            want = exact(role, x, few, part)
            if not off(run(role, choice, x, few, part), want) < 6e-3:
                print("wrong:", role.name, tokens, choice, flush=True)
                return math.inf
            spent = replayed(lambda: [run(role, choice, x, weight, rest) for weight in some]) / len(some)
        except Exception as error:
            print("failed:", role.name, tokens, choice, type(error).__name__, str(error)[-120:].strip(), flush=True)
            return math.inf
        self.rows.append(
            {
                "model": self.model.name,
                "role": role.name,
                "n": role.n,
                "k": role.k,
                "tokens": tokens,
                "what": "cublas" if choice.tile is None else str(choice.tile),
                "norm_inside": choice.norm,
                "gate_inside": choice.gate,
                "us": round(spent, 3),
                "tb_s": round(2 * role.n * role.k / spent * 1e-6, 3),
            }
        )
        return spent

    def best(self, tokens: int, role: Role, sweep: bool, until: float) -> Choice:
        """The fastest way to run a linear; prints the shipped one, the best, the same unfused, and cuBLAS."""
        fused, apart = shipped(role, tokens), shipped(role, tokens, norm=False, gate=False)
        tried = {choice: self.time(tokens, role, choice) for choice in dict.fromkeys((fused, apart, Choice(None)))}
        for choice in candidates(tokens, role) if sweep else ():
            if choice not in tried and time.monotonic() < until:
                tried[choice] = self.time(tokens, role, choice)
        # A kernel that does not let the next one start early costs more than it takes itself.
        fastest = min(tried, key=lambda choice: tried[choice] * (1.05 if choice.tile is None else 1.0))
        print(
            f"{self.model.name:5} {role.name:7} {role.n:6}x{role.k:<6} M={tokens:<4} shipped {tried[fused]:7.2f} "
            f"apart {tried[apart]:7.2f} cublas {tried[Choice(None)]:7.2f} best {tried[fastest]:7.2f} us "
            f"{len(tried):3} {fastest}",
            flush=True,
        )
        if sweep:
            for choice in sorted(tried, key=lambda choice: tried[choice])[1:5]:
                print(f"    {tried[choice]:7.2f} {choice}", flush=True)
        return fastest

    def step(self, tokens: int, what: str, choices: dict[str, Choice]) -> None:
        """Time a step and report it."""
        self.check(tokens, choices)
        stream = torch.randn(tokens, self.model.head.k, dtype=DTYPE, device="cuda")
        spent = replayed(lambda: self.layers(stream, choices), 9)
        rate = self.size / spent * 1e-6
        print(
            f"STEP {self.model.name:5} M={tokens:<4} {what:8} {spent:9.1f} us {rate:5.2f} TB/s {rate / READ_TB_S:6.1%}",
            flush=True,
        )
        self.rows.append(
            {"model": self.model.name, "tokens": tokens, "what": f"step {what}", "us": round(spent, 1), "tb_s": rate}
        )

    def steps(self, tokens: int) -> None:
        roles = (*self.model.roles, self.model.head)
        ways = {"unfused": (False, False), "norm": (True, False), "gate": (False, True), "fused": (True, True)}
        seen: list[dict[str, Choice]] = []
        for what, (norm, gate) in ways.items():
            choices = {role.name: shipped(role, tokens, norm, gate) for role in roles}
            if choices not in seen:
                self.step(tokens, what, choices)
            seen.append(choices)
        self.step(tokens, "cublas", {role.name: Choice(None) for role in roles})


def measure(chosen: Model, counts: list[int], sweep: bool, until: float) -> list[dict[str, object]]:
    bench = Bench.of(chosen)
    for tokens in counts:
        bench.steps(tokens)
    for tokens in counts:
        choices = {role.name: bench.best(tokens, role, sweep, until) for role in (*chosen.roles, chosen.head)}
        if sweep:
            bench.step(tokens, "best", choices)
    return bench.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file for the results, JSON")
    parser.add_argument("--sweep", action="store_true", help="try other configurations too")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--models", nargs="+", default=[model.name for model in MODELS])
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which a sweep tries nothing new")
    options = parser.parse_args()
    until = time.monotonic() + options.limit
    models = [model for model in MODELS if model.name in options.models]
    if options.sweep:
        compile_all(models, options.tokens)
    rows: list[dict[str, object]] = []
    for place, shape in enumerate(models):
        left = (until - time.monotonic()) / (len(models) - place)
        measurement = measure(shape, options.tokens, options.sweep, time.monotonic() + left)
        rows += [{**row, **provenance(torch.cuda.get_device_name())} for row in measurement]
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text("[\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n]\n")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
