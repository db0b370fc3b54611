"""Checks and times the products with integer or e4m3 weights on one GPU, alone and in whole decode steps of an 8B:

    python benchmarks/products_int.py --out benchmarks/results/products_int.json [--sweep] [--limit SECONDS]
    python benchmarks/products_int.py --linears --forms bf16 fp8-weight fp8-block int8 --out benchmarks/results/fp8_weight.json

Every kernel is first compared with float64. A step is what a decoder does for one token of each row, all in a CUDA graph:
norms, products, rotary embedding, attention over 128 slots, head in bf16; only embedding and sampling are missing. Steps
of bf16, int8 (a scale per channel) and int4 (a scale per 128 inputs) differ in the layers' weights alone. One token goes
through the layers as a decoder's does, in one kernel where there is one; `-apart`: kernel by kernel. --sweep tries
other configurations than the shipped ones within whole steps, and names the best; it changes nothing. --linears times each
linear of a layer by itself instead, with its norm, activation or residual sum.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from common import provenance, write_rows
from kernels import DIM, HEADS, KV_HEADS, Batch, make
from products import EPS, MODELS, PROCESSES, Role, off, replayed

from ridgeline.ops.reference import FP8, REFERENCE, dequantized
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import IntMatrix, LayerParts, Matrix, Normed, QkvShape, apply_norm
from ridgeline.ops.triton import integer_shapes, kernels
from ridgeline.ops.triton.activation import activate
from ridgeline.ops.triton.integer import as_codes, pack, pack_e4m3
from ridgeline.ops.triton.integer_ring import integer_ring_product
from ridgeline.ops.triton.integer_shapes import IntRingTile, IntStreamTile, IntVectorTile
from ridgeline.ops.triton.integer_stream import integer_stream_product
from ridgeline.ops.triton.integer_vector import integer_vector_product
from ridgeline.ops.triton.linears import INT_TRITON
from ridgeline.ops.triton.norm import rms_norm
from ridgeline.ops.triton.products import ProductShape
from ridgeline.ops.triton.table import TRITON
from ridgeline.quant.fp8 import quantize_groups

DTYPE = torch.bfloat16
MODEL = MODELS[0]
BITS = {"int8": (8, 1 << 20), "int4": (4, 128), "fp8-weight": (8, 1 << 20), "fp8-block": (8, 128)}
SHARED_TILES = {"fp8-weight": "int8", "fp8-block": "int8"}
"""Forms in e4m3, whose sweep tries the tiles of another one, and of which no kernel runs all layers."""
STEPS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPTS = (512, 1024, 2048, 8192)
LINEARS = (1, 4, 16, 64, 256, 2048)
IN_TURN = 8
"""Weights of a linear that are multiplied in turn: together they are larger than the L2 cache."""
SLOTS = 128
ALLOWED = 6e-3
Tile = IntVectorTile | IntRingTile | IntStreamTile


@dataclass(frozen=True)
class Choice:
    """How a linear is run: a tile (None: widen, then cuBLAS), and whether the activation is part of it."""

    tile: Tile | None
    gate: bool = False


def random_matrix(n: int, k: int, form: str) -> IntMatrix:
    """Any bytes are codes; their mean is about zero."""
    bits, group = BITS[form]
    groups = max(1, k // group)
    if form in SHARED_TILES:
        values = torch.empty(n, k, dtype=DTYPE, device="cuda").normal_(0, 100).clamp_(-448, 448).to(FP8)
        scales = torch.full((n, groups) if group < k else (n,), 2e-4, device="cuda")
        return as_codes(replace(pack_e4m3(values, scales), group=group if group < k else 0), k)
    codes = torch.randint(0, 256, (n, k * bits // 8), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(n, groups, device="cuda") + 0.5).mul_(0.02 / (1 << bits - 2)).half()
    return IntMatrix(codes, scales, None, bits, group, n, k)


def shipped(role: Role, tokens: int, matrix: IntMatrix) -> Choice:
    """What ops.triton.kernels chooses."""
    x = (tokens, matrix.out, matrix.d_in, DTYPE, DTYPE, matrix.codes.device, True)
    for kind in dict.fromkeys((role.kind, None)):
        shape = ProductShape(*x, kind=kind, bits=matrix.bits, group=matrix.group)
        if (kernel_for := kernels.INTEGER.kernel_for(shape)) is not None:
            return Choice(kernel_for[1], kind is not None)
    return Choice(None)


def run(role: Role, choice: Choice, x: torch.Tensor, matrix: IntMatrix, rest: torch.Tensor) -> torch.Tensor:
    """rest: the norm's gain [k] or the stream [T, n], whichever the role needs."""
    given: torch.Tensor | Normed = Normed(x, rest, EPS, False) if role.norm else x
    stream = rest if role.add else None
    if isinstance(choice.tile, IntVectorTile):
        if x.shape[0] > 1:
            given = apply_norm(given, rms_norm)
        return integer_vector_product(given, matrix, None, choice.tile, stream, role.kind)
    values = apply_norm(given, rms_norm)
    if choice.tile is None:
        linear = INT_TRITON.linear(values, matrix, None) if stream is None else None
        out = INT_TRITON.linear_add(values, matrix, None, rest) if linear is None else linear
    else:
        kind = role.kind if choice.gate else None
        if isinstance(choice.tile, IntStreamTile):
            streamed = integer_stream_product(values, matrix, None, choice.tile, stream, kind)
            assert streamed is not None
            out = streamed
        else:
            out = integer_ring_product(values, matrix, None, choice.tile, stream, kind)
    return activate(out, role.kind) if role.kind is not None and not choice.gate else out


# --- right before fast ------------------------------------------------------------------------------------------------


CHECKED = (
    *itertools.product([(256, 4096)], [(4, 128, False), (8, 1 << 20, False), (4, 32, True)]),
    *itertools.product([(1000, 1048)], [(4, 128, True), (3, 1 << 20, False), (8, 64, True)]),
    *itertools.product([(200, 14336)], [(4, 128, False), (8, 1 << 20, False)]),
    *itertools.product([(256, 4096), (1000, 1048), (200, 14336)], [(0, 1 << 20, False), (0, 128, False)]),
)
"""((outputs, inputs), (bits, group, zero points)). 0 bits: e4m3 values."""


def checked_matrix(n: int, k: int, bits: int, group: int, asymmetric: bool) -> tuple[IntMatrix, torch.Tensor]:
    """A matrix and its weights in float64."""
    if not bits:
        of_group = group if group < k else 0
        scaled = quantize_groups(torch.randn(n, k, device="cuda"), of_group)
        spread = scaled.scales.view(n, -1)[:, torch.arange(k, device="cuda") // group].double()
        packed = replace(pack_e4m3(scaled.values, scaled.scales), group=of_group)
        return as_codes(packed, k), scaled.values.double() * spread
    groups = -(-k // group)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device="cuda")
    scales = (torch.rand(n, groups, device="cuda") + 0.5).half().float()
    zeros = torch.randint(0, 1 << bits, (n, groups), dtype=torch.uint8, device="cuda") if asymmetric else None
    return pack(codes, scales, zeros, bits, group), dequantized(codes, scales, zeros, bits, group).double()


def check_one(case: tuple[tuple[int, int], tuple[int, int, bool]]) -> list[str]:
    """What is wrong with products of one matrix and any number of tokens."""
    (n, k), (bits, group, asymmetric) = case
    matrix, weight = checked_matrix(n, k, bits, group, asymmetric)
    wrong = []
    for tokens in (1, 4, 16, 200, 400, 1024):
        x, bias = torch.randn(tokens, k, dtype=DTYPE, device="cuda"), torch.randn(n, dtype=DTYPE, device="cuda")
        stream = torch.randn(tokens, n, dtype=DTYPE, device="cuda")
        want = x.double() @ weight.T + bias.double()
        runs = {
            "linear": (partial(INT_TRITON.linear, x, matrix, bias), want),
            "add": (partial(INT_TRITON.linear_add, x, matrix, bias, stream.clone()), want + stream.double()),
            "gate": (
                partial(INT_TRITON.linear_activate, x, matrix, bias, "silu"),
                REFERENCE.tokenwise.activate(want, "silu"),
            ),
        }
        for name, (work, expected) in runs.items():
            place = f"{name} of {tokens} tokens, {n} x {k}, {bits} bits, group {group}, zeros {asymmetric}"
            try:
                error = off(work(), expected)
            except Exception as problem:
                wrong.append(f"{place}: {type(problem).__name__} {str(problem)[-200:]}")
                continue
            if not error < ALLOWED:
                wrong.append(f"{place}: error {error:.2g}")
    return wrong


# --- whole steps ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """A decode step of one format; weights: name of the role -> a matrix for each layer, integers or bf16."""

    weights: dict[str, list[Any]]
    head: torch.Tensor
    gain: torch.Tensor
    shape: QkvShape

    @classmethod
    def of(cls, form: str, head: torch.Tensor, layers: int = MODEL.layers) -> Step:
        made: dict[str, list[Any]] = {}
        for role in MODEL.roles:
            size = (role.n, role.k)
            made[role.name] = [
                random_matrix(*size, form)
                if form in BITS
                else torch.empty(size, dtype=DTYPE, device="cuda").normal_(0, 0.02)
                for _ in range(layers)
            ]
        angle = torch.rand(SLOTS + 64, DIM // 2, device="cuda")
        cos_sin = torch.stack((angle.cos(), angle.sin()), 1)
        shape = QkvShape(HEADS, KV_HEADS, DIM, cos_sin, None, None, EPS, False)
        return cls(made, head, torch.rand(head.shape[1], dtype=DTYPE, device="cuda") + 0.5, shape)

    def linear(
        self, role: Role, layer: int, x: torch.Tensor, rest: torch.Tensor, choice: Choice | None
    ) -> torch.Tensor:
        weight = self.weights[role.name][layer]
        if isinstance(weight, IntMatrix):
            assert choice is not None
            return run(role, choice, x, weight, rest)
        given = Normed(x, rest, EPS, False) if role.norm else x
        if role.kind is not None:
            return TRITON.matmul.unquantized.linear_activate(given, weight, None, role.kind)
        return (
            TRITON.matmul.unquantized.linear_add(x, weight, None, rest)
            if role.add
            else TRITON.matmul.unquantized.linear(given, weight, None)
        )

    def __call__(self, stream: torch.Tensor, batch: Batch, choices: dict[str, Choice]) -> torch.Tensor:
        qkv, out, gate_up, down = MODEL.roles
        step = replace(batch.step)
        for layer, view in enumerate(batch.views):
            x = self.linear(qkv, layer, stream, self.gain, choices.get("qkv"))
            q, k, v = TRITON.attention.qkv_write(x, self.shape, view, step)
            x = TRITON.attention.attend(q, k, v, view, step)[0].view(stream.shape[0], -1)
            stream = self.linear(out, layer, x, stream, choices.get("out"))
            x = self.linear(gate_up, layer, stream, self.gain, choices.get("gate_up"))
            stream = self.linear(down, layer, x, stream, choices.get("down"))
        return self.logits(stream)

    def logits(self, stream: torch.Tensor) -> torch.Tensor:
        return TRITON.matmul.unquantized.linear(rms_norm(stream, self.gain, EPS, False), self.head, None)

    def us(self, batch: Batch, choices: dict[str, Choice], repeats: int = 5) -> float:
        stream = torch.randn(batch.q.shape[0], self.head.shape[1], dtype=DTYPE, device="cuda")
        return replayed(lambda: self(stream.clone(), batch, choices), repeats)

    def shipped_us(self, batch: Batch, repeats: int = 5) -> float:
        """The same of one token as a decoder runs its layers."""
        stream = torch.randn(1, self.head.shape[1], dtype=DTYPE, device="cuda")
        matrices = ([Matrix(weight, None) for weight in self.weights[role.name]] for role in MODEL.roles)
        layers = [
            LayerParts(self.gain, qkv, self.shape, out, self.gain, gate_up, down, "silu")
            for qkv, out, gate_up, down in zip(*matrices, strict=True)
        ]

        def apart(stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
            raise LookupError("no kernel of ours takes these layers")

        run = TRITON.programs.layers(layers, apart)
        return replayed(lambda: self.logits(run(stream.clone(), batch.views, batch.step)), repeats)


def choices_of(step: Step, tokens: int) -> dict[str, Choice]:
    return {
        role.name: shipped(role, tokens, matrix)
        for role in MODEL.roles
        if isinstance(matrix := step.weights[role.name][0], IntMatrix)
    }


# --- what a sweep tries -----------------------------------------------------------------------------------------------

# Rows and warps for one token; the first two for some.
VECTORS = {
    ("int4", 4096): ((8, 4), (8, 8), (4, 4), (4, 2)),
    ("int4", 14336): ((8, 16), (4, 16), (2, 8), (4, 8)),
    ("int8", 4096): ((8, 8), (4, 8), (4, 4), (8, 4)),
    ("int8", 14336): ((4, 16), (8, 16), (2, 8), (4, 8)),
}
PROGRAMS = {2: (528, 792), 4: (264, 396, 528), 8: (132, 264, 396), 16: (132, 264)}
FEW = (1, 2, 4)
# Of a ring: (block, warps, registers); its stages take what memory two programs to a processor have, or one of 8 warps.
RINGS = ((256, 4, 128), (128, 4, 128), (128, 8, 168))
# Of a stream: (groups, step, programs on a processor).
STREAMS = {
    "int4": ((2, 256, 2), (2, 128, 2), (1, 256, 2), (1, 128, 2), (1, 256, 3), (1, 256, 4)),
    "int8": ((2, 128, 2), (1, 128, 2), (1, 128, 3), (1, 128, 4)),
}
SWEPT = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def vector_tiles(form: str, role: Role, tokens: int) -> list[IntVectorTile]:
    if tokens * role.k > integer_shapes.WIDEST_VECTORS:
        return []
    known = VECTORS[SHARED_TILES.get(form, form), role.k]
    item = known if tokens == 1 else known[:2]
    return [
        IntVectorTile(rows, warps, programs)
        for rows, warps in item
        for programs in (PROGRAMS[warps] if tokens == 1 else PROGRAMS[warps][:3:2])
    ]


def ring_tiles(form: str, role: Role, tokens: int) -> Iterator[IntRingTile]:
    """As many programs as fill the chip, and half of them."""
    batch = next((size for size in (16, 32, 64) if tokens <= size), 128)
    sides = 1 if role.kind is None else 2
    for block, warps, registers in RINGS:
        rows, double = 16 * warps, warps == 4
        held = sides * rows * block * BITS[form][0] // 8 + batch * block * 2
        stages = min(12, (100_000 if double else 200_000) // held)
        shared = integer_shapes.PROCESSORS * (2 if double else 1)
        tiles = -(-role.n // (sides * rows)) * -(-tokens // batch)
        most = max(1, min(8, shared // tiles, role.k // 512)) if role.kind is None else 1
        split = 1 << most.bit_length() - 1
        for item in sorted({split, max(1, split // 2)}) if stages > 1 else ():
            yield IntRingTile(batch, block, warps, stages, registers, item, shared)


def stream_tiles(form: str, role: Role, tokens: int) -> Iterator[IntStreamTile]:
    """As many programs as fill the chip, and half of them."""
    batch = next((size for size in (8, 16, 32, 64) if tokens <= size), None)
    for groups, step, each in STREAMS[SHARED_TILES.get(form, form)] if batch is not None else ():
        tile, places = IntStreamTile(batch or 0, groups, step, each), integer_shapes.PROCESSORS * each
        most = max(1, min(8, places // -(-role.n // tile.rows), role.k // 512)) if role.kind is None else 1
        split = 1 << most.bit_length() - 1
        for item in sorted({split, max(1, split // 2)}):
            yield replace(tile, split=item)


def candidates(form: str, role: Role, tokens: int) -> list[Choice]:
    tiles: list[Tile] = [*vector_tiles(form, role, tokens)] if tokens in FEW else []
    tiles += [*ring_tiles(form, role, tokens), *stream_tiles(form, role, tokens)] if tokens > 1 else ()
    return [Choice(tile, True) for tile in tiles]


def compile_one(work: tuple[str, Role, Choice, int]) -> None:
    """Leaves the compiled kernel in Triton's cache on disk."""
    form, role, choice, tokens = work
    try:
        matrix = random_matrix(256, role.k, form)
        rest = torch.ones((tokens, 256) if role.add else (role.k,), dtype=DTYPE, device="cuda")
        run(role, choice, torch.ones(tokens, role.k, dtype=DTYPE, device="cuda"), matrix, rest)
    except Exception as error:
        print("does not compile:", form, role.name, choice, type(error).__name__, str(error)[-150:], flush=True)


def compile_step(work: tuple[str, int]) -> None:
    """As compile_one, for all that a step needs."""
    form, tokens = work
    step = Step.of(form, torch.ones(MODEL.head.n, MODEL.head.k, dtype=DTYPE, device="cuda"), 1)
    stream = torch.ones(tokens, MODEL.head.k, dtype=DTYPE, device="cuda")
    step(stream, make([(SLOTS, 1)] * tokens, "page", 1), choices_of(step, tokens))


def compiled(forms: list[str]) -> list[tuple[str, Role, Choice, int]]:
    """Every kernel of a sweep. How many programs there are is nothing that a kernel is compiled for."""
    work = {}
    for form, role, tokens in itertools.product(forms, MODEL.roles, SWEPT):
        for choice in candidates(form, role, tokens):
            assert choice.tile is not None
            tile = choice.tile
            if not isinstance(tile, IntStreamTile):
                tile = replace(tile, programs=1 if isinstance(tile, IntVectorTile) else 132)
            item = (form, role, Choice(tile, True), tokens)
            work[form, role.name != "out" and role, item[2]] = item
    return list(work.values())


def sweep(form: str, step: Step, tokens: int, until: float) -> Iterator[dict[str, Any]]:
    """Each role's tile in turn, judged by the whole step."""
    batch = make([(SLOTS, 1)] * tokens, "page")
    best = choices_of(step, tokens)
    least = step.us(batch, best)
    print(f"{form} M={tokens} first {least:.1f} us", flush=True)
    for role in sorted(MODEL.roles, key=lambda role: -role.n * role.k):
        tried: dict[str, float] = {}
        for choice in candidates(form, role, tokens):
            if time.monotonic() > until:
                return
            try:
                spent = step.us(batch, best | {role.name: choice}, 3)
            except Exception as problem:
                print("failed", choice, str(problem)[-100:], flush=True)
                continue
            tried[str(choice.tile)] = spent
            if spent < least - 1.0:
                least, best[role.name] = spent, choice
        order = sorted(tried.items(), key=lambda item: item[1])
        print(
            f"{form} M={tokens} {role.name}: {least:.1f} us with {best[role.name].tile}; then", *order[:4], flush=True
        )
        name = f"sweep-{form}-{role.name}-m{tokens}"
        yield {"row": name, "best": str(best[role.name].tile), "us": least, "tried": tried}


def steps(form: str, step: Step) -> Iterator[dict[str, Any]]:
    for tokens in STEPS:
        batch = make([(SLOTS, 1)] * tokens, "page")
        spent = {"": step.us(batch, choices_of(step, tokens), 7)}
        if tokens == 1 and form in BITS and form not in SHARED_TILES:
            spent = {"-apart": spent[""], "": step.shipped_us(batch, 7)}
        for how, us in spent.items():
            print(f"STEP {form:5} M={tokens:<4} {us:9.1f} us {how}", flush=True)
            yield {"row": f"int-step-{form}-m{tokens}-us{how}", "value": round(us, 1), "unit": "us"}


def prompts(form: str, step: Step) -> Iterator[dict[str, Any]]:
    """Products of a layer for many tokens, without attention."""
    for tokens in PROMPTS:
        total = 0.0
        for role in MODEL.roles:
            weights = step.weights[role.name][:4]
            x = torch.randn(tokens, role.k, dtype=DTYPE, device="cuda")
            rest = torch.randn((tokens, role.n) if role.add else (role.k,), dtype=DTYPE, device="cuda")
            choice = shipped(role, tokens, weights[0]) if form in BITS else None
            total += replayed(lambda: [step.linear(role, i, x, rest, choice) for i in range(4)], 3) / 4  # noqa: B023
        print(f"LAYER {form:5} M={tokens:<4} {total:9.1f} us", flush=True)
        yield {"row": f"int-layer-{form}-m{tokens}-us", "value": round(total, 1), "unit": "us"}


def linears(form: str, step: Step) -> Iterator[dict[str, Any]]:
    """Each linear of a layer by itself, and their sum."""
    for tokens in LINEARS:
        total = 0.0
        for role in MODEL.roles:
            weights = step.weights[role.name]
            x = torch.randn(tokens, role.k, dtype=DTYPE, device="cuda")
            rest = torch.randn((tokens, role.n) if role.add else (role.k,), dtype=DTYPE, device="cuda")
            choice = shipped(role, tokens, weights[0]) if form in BITS else None
            run_all = partial(run_in_turn, step, role, x, rest, choice)
            us = replayed(run_all, 7) / IN_TURN
            read = role.n * role.k * (BITS[form][0] if form in BITS else 16) / 8
            tile = "" if choice is None else str(choice.tile)
            print(f"LINEAR {form:10} {role.name:7} M={tokens:<4} {us:8.2f} us {tile}", flush=True)
            row = {"row": f"int-linear-{form}-{role.name}-m{tokens}-us", "value": round(us, 2), "unit": "us"}
            yield row | {"tb_s": round(read / us / 1e6, 3), "tile": tile}
            total += us
        print(f"LINEARS {form:10} M={tokens:<4} {total:9.1f} us", flush=True)
        yield {"row": f"int-linears-{form}-m{tokens}-us", "value": round(total, 1), "unit": "us"}


def run_in_turn(step: Step, role: Role, x: torch.Tensor, rest: torch.Tensor, choice: Choice | None) -> None:
    for layer in range(IN_TURN):
        step.linear(role, layer, x, rest, choice)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which a sweep tries nothing new")
    parser.add_argument("--forms", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--linears", action="store_true", help="time each linear of a layer instead of steps")
    options = parser.parse_args()
    until = time.monotonic() + options.limit
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    with torch.inference_mode():
        began = time.monotonic()
        with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
            steps_made = pool.map(compile_step, itertools.product(options.forms, LINEARS if options.linears else STEPS))
            actual = pool.map(check_one, CHECKED)
            if options.sweep:
                list(pool.map(compile_one, compiled([form for form in options.forms if form in BITS])))
            wrong = [what for each in actual for what in each]
            list(steps_made)
        print(f"checked and compiled in {time.monotonic() - began:.0f} s", flush=True)
        for what in wrong[:12]:
            print("WRONG:", what, flush=True)
        print(f"{len(wrong)} wrong; tokens up to {integer_shapes.MOST_TOKENS} through a ring", flush=True)
        head = torch.empty((MODEL.head.n, MODEL.head.k), dtype=DTYPE, device="cuda").normal_(0, 0.02)
        for form in options.forms:
            step = Step.of(form, head, IN_TURN if options.linears else MODEL.layers)
            rows += linears(form, step) if options.linears else [*steps(form, step), *prompts(form, step)]
            for tokens in SWEPT if options.sweep and form in BITS and not options.linears else ():
                rows += sweep(form, step, tokens, until)
            del step
            if options.out:
                about = provenance(torch.cuda.get_device_name())
                write_rows(options.out, [row | about for row in rows])
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
