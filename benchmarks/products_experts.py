"""A layer's experts on one GPU, by number format: routing, order, gate and up, down, and the sum, in a CUDA graph.

    python benchmarks/products_experts.py [--out benchmarks/results/products_experts.json] [--seconds 120] [--sweep]

Random weights and logits. Every format is first compared with float64. COPIES layers take turns, so that weights come from memory.
`floor_us`: the bytes of the chosen experts at the card's bandwidth or their FLOPs at the rate of bfloat16 (`fp8`: of e4m3),
whichever is longer.
--sweep times other tiles, too, and changes nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from common import provenance, write_rows
from products import PROCESSES, off, replayed
from triton.runtime.errors import OutOfResources

from ridgeline.core.experts import ExpertSpec
from ridgeline.core.gpu_layout import held_format
from ridgeline.core.spec import NUMBER_FORMATS
from ridgeline.ops.experts import by_expert, route
from ridgeline.ops.reference import activate, quantize
from ridgeline.ops.table import Grouped, IntMatrix, Matrix
from ridgeline.ops.triton import experts, integer
from ridgeline.ops.triton.experts import Block, Tile, TritonExperts
from ridgeline.quant.fp8 import quantize_groups
from ridgeline.quant.integer import round_to_nearest

DTYPE = torch.bfloat16
FORMS = ("", "fp8", "fp8-weight", "fp8-block", "int8", "int4", "int4-g128-zp", "int4-g32")
TOKENS = (1, 4, 16, 64, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192)
COPIES = 3
BANDWIDTH, FLOPS = 4.3e12, 800e12
"""Bytes and bfloat16 FLOPs a second that products of an H200 reach (benchmarks/results/limits.json)."""
ALLOWED, ALLOWED_E4M3 = 6e-3, 1.5e-2
"""Relative errors. Products of e4m3 are added in some 14 bits, so that some of what down multiplies is rounded to its other
neighbour in e4m3; the rounding itself is 4e-2."""
Read = Callable[[torch.Tensor], torch.Tensor]


class Shape(NamedTuple):
    """experts: of a layer, of which a token uses per_token."""

    name: str
    d_model: int
    width: int
    experts: int
    per_token: int


SHAPES = (Shape("qwen3-30b-a3b", 2048, 768, 128, 8), Shape("mixtral-8x7b", 4096, 14336, 8, 2))
INNER = {
    16: ((32, 128, 4, 4), (16, 128, 2, 4), (32, 256, 4, 3), (64, 128, 8, 4), (64, 128, 4, 4), (32, 128, 4, 6)),
    32: ((64, 128, 8, 3), (64, 128, 4, 3), (64, 128, 8, 4), (64, 64, 4, 4)),
    64: ((64, 128, 8, 3), (64, 128, 8, 4), (64, 64, 4, 3)),
    128: ((64, 128, 8, 3), (128, 64, 8, 4)),
}
OUTER = {
    16: ((64, 128, 4, 4), (32, 128, 4, 4), (32, 128, 2, 4), (64, 256, 4, 3), (128, 128, 8, 4), (16, 256, 4, 4)),
    32: ((64, 128, 4, 4), (128, 128, 8, 3), (64, 64, 4, 4)),
    64: ((64, 128, 4, 3), (128, 128, 8, 3), (64, 128, 8, 3), (64, 64, 4, 3)),
    128: ((128, 128, 8, 3), (128, 64, 8, 4)),
}
"""Blocks that a sweep tries for tiles of so many pairs: the inner ones beside the first outer one, then the outer ones beside the
best inner one."""


def matrix(outputs: int, inputs: int, form: str) -> Matrix:
    """A random weight in a number format."""
    weight = torch.empty(outputs, inputs, dtype=DTYPE, device="cuda").normal_(0, 0.02)
    if not form:
        return Matrix(weight, None)
    numbers = NUMBER_FORMATS[form]
    if form.startswith("fp8"):
        scaled = quantize_groups(weight, numbers.group)
        packed = integer.pack_e4m3(scaled.values, scaled.scales)
        return Matrix(replace(packed, group=numbers.group, rounded=numbers.inputs_8bit), None)
    codes, scales, zeros = round_to_nearest(weight, numbers)
    return Matrix(integer.pack(codes, scales, zeros, numbers.bits, numbers.group or inputs), None)


def layer(shape: Shape, form: str) -> tuple[list[Matrix], list[Matrix]]:
    return (
        [matrix(2 * shape.width, shape.d_model, form) for _ in range(shape.experts)],
        [matrix(shape.d_model, shape.width, form) for _ in range(shape.experts)],
    )


def floor_us(shape: Shape, form: str, tokens: int) -> float:
    numbers, weights = NUMBER_FORMATS.get(form), 0
    chosen = (
        each for each in ExpertSpec(shape.experts, shape.per_token, shape.width).matrices(shape.d_model) if each.chosen
    )
    for each in chosen:
        held = numbers and held_format(numbers, "hopper", each)
        weights += held.matrix_bytes(each.outputs, each.inputs) if held else 2 * each.elements
    used = shape.experts * (1 - (1 - shape.per_token / shape.experts) ** tokens)
    flops = 6.0 * shape.width * shape.d_model * shape.per_token * tokens
    rate = FLOPS * (2 if numbers and numbers.inputs_8bit else 1)
    return max(used * weights / BANDWIDTH, flops / rate) * 1e6


def run(layers: Sequence[Grouped], shape: Shape, x: torch.Tensor, logits: torch.Tensor, load: torch.Tensor) -> None:
    for grouped in layers:
        grouped(x, logits, shape.per_token, True, load)


def given(shape: Shape, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, logits, load)."""
    return (
        torch.randn(tokens, shape.d_model, dtype=DTYPE, device="cuda"),
        torch.randn(tokens, shape.experts, dtype=DTYPE, device="cuda"),
        torch.zeros(shape.experts, dtype=torch.int64, device="cuda"),
    )


def wrong(form: str) -> Iterator[str]:
    """What the kernels compute otherwise than float64 does with the same weights."""
    shape = Shape("", 1024 + 64, 256 + 64, 8, 2)
    gate_up, down = layer(shape, form)
    grouped = TritonExperts().group(gate_up, down, "silu", range(shape.experts))
    dense = [
        [floats(each, inputs) for each in side] for side, inputs in ((gate_up, shape.d_model), (down, shape.width))
    ]
    for tokens in (1, 7, 16, 40, 200, 1000, 1200):
        x, logits, load = given(shape, tokens)
        chosen = route(logits, shape.per_token, True)
        read = e4m3 if form == "fp8" and tokens >= 200 else torch.Tensor.double

        def expert(number: int, rows: torch.Tensor | None, x: torch.Tensor = x, read: Read = read) -> torch.Tensor:
            inner = activate(read(x if rows is None else x[rows]) @ dense[0][number].t(), "silu")
            return read(inner.to(x.dtype)) @ dense[1][number].t()

        counts = torch.bincount(chosen.experts.flatten(), minlength=shape.experts).tolist()
        exact = by_expert(shape.d_model, chosen, counts, expert, range(shape.experts))
        got = grouped(x, logits, shape.per_token, True, load)
        error = off(got, exact.double())
        if not error < (ALLOWED if read is torch.Tensor.double else ALLOWED_E4M3):
            yield f"{form or 'bf16'}, {tokens} tokens: error {error:.2g}"


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """float64 of rows that are rounded to e4m3, as experts in `fp8` round those of many tokens."""
    scaled = quantize(x)
    return scaled.values.double() * scaled.scales.double()[:, None]


def floats(weight: Matrix, inputs: int) -> torch.Tensor:
    """float64."""
    packed = weight.packed
    if isinstance(packed, torch.Tensor):
        return packed.double()
    codes = packed if isinstance(packed, IntMatrix) else integer.as_codes(packed, inputs)
    return integer.dequantize(codes, torch.float32).double()


def measured(shape: Shape, form: str, sweep: bool, until: float) -> Iterator[dict[str, Any]]:
    copies = COPIES if shape.experts > 8 else 1
    layers = [TritonExperts().group(*layer(shape, form), "silu", range(shape.experts)) for _ in range(copies)]
    name = form or "bf16"
    for tokens in TOKENS:
        if time.monotonic() > until:
            print("out of time", shape.name, name, tokens, flush=True)
            return
        work, floor = partial(run, layers, shape, *given(shape, tokens)), floor_us(shape, form, tokens)
        us = replayed(work, 3) / copies
        yield {
            "row": f"experts-{shape.name}-{name}-m{tokens}-us", "value": round(us, 1), "unit": "us", "floor_us": round(floor, 1),
        }  # fmt: skip
        tried = swept(work, form, copies, tokens * shape.per_token, shape.experts, until) if sweep else {}
        best = sorted(tried.items(), key=lambda item: item[1])[:3]
        print(f"{shape.name} {name:12} {tokens:5} {us:8.1f} us, {floor / us:.2f} of the floor", *best, flush=True)
        if tried:
            yield {"row": f"experts-sweep-{shape.name}-{name}-m{tokens}", "tried": tried}


def rows_for(pairs: int, count: int) -> list[int]:
    """Rows of tiles that are worth trying with so many pairs."""
    mean = pairs / count
    return [
        rows
        for rows in INNER
        if (rows == 16 and mean < 64) or (pairs > experts.FEW_PAIRS and rows / 4 <= mean <= rows * 8)
    ]


def swept(work: Callable[[], None], form: str, copies: int, pairs: int, count: int, until: float) -> dict[str, float]:
    """Microseconds by tile."""
    tried: dict[str, float] = {}
    original = experts.tile_for

    def timed(tile: Tile) -> float:
        if time.monotonic() > until:
            return float("inf")
        experts.tile_for = lambda *_: tile
        try:
            us = round(replayed(work, 2) / copies, 1)
        except OutOfResources:
            us = float("inf")
        finally:
            experts.tile_for = original
        tried[f"{tile.rows}: {tuple(tile.inner)} {tuple(tile.outer)}"] = us
        return us

    for rows in rows_for(pairs, count):
        inners, outers = blocks(INNER[rows], form), blocks(OUTER[rows], form)
        times = {inner: timed(Tile(rows, inner, outers[0])) for inner in inners}
        inner = min(times, key=times.__getitem__)
        for outer in outers[1:]:
            timed(Tile(rows, inner, outer))
    return tried


def blocks(tried: Sequence[tuple[int, int, int, int]], form: str) -> list[Block]:
    """Those that fit a form: codes come in whole chunks of a row."""
    return [Block(*each) for each in tried if not form or each[1] >= 128]


def compiled(form: str, tile: Tile | None, tokens: int) -> None:
    """Leave the kernels of a tile, or of the tile for so many pairs of an expert, in Triton's cache on disk."""
    shape = Shape("", 2048, 768, 8, 8)
    if tile is not None:
        experts.tile_for = lambda *_: tile
    with torch.inference_mode():
        with suppress(OutOfResources):
            run([TritonExperts().group(*layer(shape, form), "silu", range(8))], shape, *given(shape, tokens))
        torch.cuda.synchronize()


def compile_all(forms: Sequence[str], sweep: bool) -> None:
    """Every kernel that is timed, in several processes."""
    work: list[tuple[str, Tile | None, int]] = [
        (form, None, tokens) for form in forms for tokens in (1, 8, 20, 40, 128, 200, 512, 1100)
    ]
    for form in forms if sweep else ():
        for rows in INNER:
            inners, outers = blocks(INNER[rows], form), blocks(OUTER[rows], form)
            tiles = [Tile(rows, inner, outers[0]) for inner in inners]
            tiles += [Tile(rows, inners[0], outer) for outer in outers[1:]]
            work += [(form, tile, tokens) for tile in tiles for tokens in (16, 1) if tokens > 1 or rows == 16]
    with ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compiled, *zip(*work, strict=True), chunksize=3))
    print(f"{len(work)} tiles compiled", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--forms", nargs="*", default=list(FORMS), help='names; bf16 for ""')
    parser.add_argument("--shapes", nargs="*", default=[shape.name for shape in SHAPES])
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    until, rows = time.monotonic() + arguments.seconds, []
    with torch.inference_mode():
        forms = ["" if form == "bf16" else form for form in arguments.forms]
        compile_all(forms, arguments.sweep)
        errors = [error for form in forms for error in wrong(form)]
        print("errors:", errors or "none", flush=True)
        for shape in SHAPES:
            for form in forms if shape.name in arguments.shapes else ():
                rows += list(measured(shape, form, arguments.sweep, until))
                torch.cuda.empty_cache()
                if arguments.out:
                    origin = provenance(torch.cuda.get_device_name())
                    write_rows(arguments.out, [{**row, **origin} for row in rows])
    assert not errors


if __name__ == "__main__":
    main()
