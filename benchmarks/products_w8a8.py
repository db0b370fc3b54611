"""What 8-bit inputs cost and gain on one GPU, for the four products of an 8B's layer with what stands around them:

    python benchmarks/products_w8a8.py [--out benchmarks/results/products_w8a8.json] [--seconds 60] [--sweep all]

Every format multiplies through the weights that serve it, in a CUDA graph: norm, product, activation, sum with the stream;
"-unfused" is the same format without kernels of its own for its inputs. W8A8 is first compared with float64. --sweep times other
launches, the large product's beside PyTorch's int8 product, which leaves the scales to be done; it changes nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import provenance, write_rows
from products import EPS, MODELS, Role, off, replayed

from ridgeline.core.spec import NUMBER_FORMATS
from ridgeline.ops.reference import in_8_bits, mixed_inputs, round_inliers, rounding_inputs
from ridgeline.ops.table import Activation, IntMatrix, Normed, Scaled
from ridgeline.ops.triton import w8a8
from ridgeline.ops.triton.fp8_shapes import Large, Vector
from ridgeline.ops.triton.integer_matrix import dequantize
from ridgeline.ops.triton.linears import W8A8_TRITON
from ridgeline.ops.triton.table import TRITON
from ridgeline.quant.format import LinearShape, Part, Share, Weight, WeightFormat
from ridgeline.quant.fp8 import Fp8Format
from ridgeline.quant.integer import IntFormat
from ridgeline.quant.mixed import MixedFormat
from ridgeline.quant.unquantized import UnquantizedFormat

DTYPE = torch.bfloat16
MODEL = MODELS[0]
TOKENS = (1, 16, 64, 128, 512, 2048, 8192)
FORMS = ("bf16", "fp8", "int8", "w8a8-unfused", "w8a8", "llm-int8-unfused", "llm-int8")
COPIES = 3
"""Layers that take turns, so that weights come from memory."""
ALLOWED = 5e-3
LARGER = (
    Large(128, 256, 128, 8, 4),
    Large(128, 256, 128, 8, 3),
    Large(256, 128, 128, 8, 3),
    Large(256, 128, 128, 8, 4),
    Large(128, 128, 128, 8, 4),
    Large(128, 128, 128, 4, 3),
    Large(128, 256, 128, 8, 4, 8),
    Large(64, 256, 128, 4, 4),
)


def formats() -> dict[str, WeightFormat]:
    cuda, int8 = torch.device("cuda"), TRITON.matmul.integer
    wide, mixed = NUMBER_FORMATS["w8a8"], NUMBER_FORMATS["llm-int8"]
    parts = mixed_inputs(int8, TRITON.matmul.unquantized, TRITON.tokenwise, round_inliers)
    unfused = replace(TRITON, matmul=replace(TRITON.matmul, mixed=parts))
    return {
        "bf16": UnquantizedFormat(TRITON.matmul.unquantized, DTYPE, cuda),
        "fp8": Fp8Format(TRITON.matmul.fp8, DTYPE, cuda),
        "int8": IntFormat(int8, NUMBER_FORMATS["int8"], DTYPE, cuda),
        "w8a8-unfused": IntFormat(rounding_inputs(int8), wide, DTYPE, cuda),
        "w8a8": IntFormat(TRITON.matmul.w8a8, wide, DTYPE, cuda),
        "llm-int8-unfused": MixedFormat(unfused, mixed, DTYPE, cuda),
        "llm-int8": MixedFormat(TRITON, mixed, DTYPE, cuda),
    }


def layer(form: WeightFormat) -> dict[str, Weight]:
    times = {}
    for role in MODEL.roles:
        rows = (Part(role.n // 2, 1),) * 2 if role.kind else (Part(role.n, 1),)
        weight = form.create(LinearShape(role.k, rows), Share())
        for part, name in list(weight.expects):
            tensor = torch.empty(rows[part].rows, role.k, dtype=DTYPE, device="cuda").normal_(0, 0.02)
            weight.load(part, name, tensor)
        times[role.name] = weight
    return times


def call(role: Role, weight: Weight, x: Activation, stream: torch.Tensor) -> Activation:
    if role.kind is not None:
        return weight.activate(x, role.kind)
    return weight.add(x, stream) if role.add else weight.apply(x)


def run(layers: Sequence[dict[str, Weight]], x: dict[int, torch.Tensor], gain: torch.Tensor) -> None:
    """The products of all copies. What the activation gives is what the product behind it takes."""
    for layer in layers:
        each: Activation = x[0]
        for role in MODEL.roles:
            if role.norm:
                each = Normed(x[0], gain, EPS, False)
            elif role.name == "out":
                each = x[role.k]
            each = call(role, layer[role.name], each, x[0])


def given(tokens: int) -> dict[int, torch.Tensor]:
    """Inputs by their width; 0: of a layer."""
    x = {role.k: torch.randn(tokens, role.k, dtype=DTYPE, device="cuda") for role in MODEL.roles}
    return x | {0: x[MODEL.head.k]}


def compiled(name: str) -> None:
    """Leaves the kernels of a format, or of the sweep, in Triton's cache on disk."""
    with torch.inference_mode():
        if name == "sweep":
            matrix = W8A8_TRITON.pack(
                torch.ones(256, 4096, dtype=torch.uint8, device="cuda"),
                torch.ones(256, 1, device="cuda"),
                None,
                8,
                4096,
            )
            out = torch.empty(256, 256, dtype=DTYPE, device="cuda")
            for variant in LARGER:
                w8a8.large(w8a8.codes(torch.ones(256, 4096, dtype=DTYPE, device="cuda")), matrix, None, out, variant)
        else:
            layers, gain = [layer(formats()[name])], torch.ones(MODEL.head.k, dtype=DTYPE, device="cuda")
            for tokens in TOKENS[:-1]:
                run(layers, given(tokens), gain)
        torch.cuda.synchronize()


def measured(until: float, chosen: Sequence[str]) -> Iterator[dict[str, Any]]:
    gain = torch.rand(MODEL.head.k, dtype=DTYPE, device="cuda") + 0.5
    for name in chosen:
        form = formats()[name]
        layers = [layer(form) for _ in range(COPIES)]
        rows = []
        for tokens in TOKENS:
            if time.monotonic() > until:
                print("out of time", name, tokens, flush=True)
                return
            us = replayed(partial(run, layers, given(tokens), gain), 5) / COPIES
            rows.append(f"{us:9.1f}")
            yield {"row": f"w8a8-layer-{name}-m{tokens}-us", "value": round(us, 1), "unit": "us"}
        print(f"{name:17}", *rows, flush=True)


def wrong() -> Iterator[str]:
    """What W8A8 multiplies otherwise than float64 does."""
    form = formats()["w8a8"]
    for outputs, inputs in ((256, 4096), (1000, 1048)):
        weight = form.create(LinearShape(inputs, (Part(outputs, 1),)), Share())
        weight.load(0, "weight", torch.randn(outputs, inputs, dtype=DTYPE, device="cuda"))
        codes, scales = weight.tensors()
        matrix = IntMatrix(codes, scales, None, 8, inputs, outputs, inputs)
        wide = dequantize(matrix, torch.float32).double()
        for tokens in (1, 16, 33, 128, 200, 1000):
            x = torch.randn(tokens, inputs, dtype=DTYPE, device="cuda")
            stream = torch.randn(tokens, outputs, dtype=DTYPE, device="cuda")
            want = in_8_bits(x.float()).double() @ wide.t()
            pairs = ((weight.apply(x), want), (weight.add(x, stream.clone()), want + stream.double()))
            for out, exact in pairs:
                if not off(out, exact) < ALLOWED:
                    yield f"{outputs} x {inputs}, {tokens} tokens: error {off(out, exact):.2g}"


VECTORS = tuple(
    Vector(rows, inputs, warps) for rows in (1, 2, 4) for inputs, warps in ((2048, 4), (4096, 4), (4096, 8))
)


def all_of(matrices: Sequence[IntMatrix], x: Scaled, out: torch.Tensor, launch: Vector) -> None:
    for matrix in matrices:
        w8a8.vector(x, matrix, None, out, launch)


def swept_one(until: float) -> Iterator[dict[str, Any]]:
    """Launches of the product of one token, over copies that do not fit the cache."""
    for role in MODEL.roles:
        copies = max(2, (200 << 20) // (role.n * role.k))
        codes = torch.randint(0, 256, (role.n, role.k), dtype=torch.uint8, device="cuda")
        scales = torch.rand(role.n, 1, device="cuda")
        matrices = [W8A8_TRITON.pack(codes, scales, None, 8, 1 << 20) for _ in range(copies)]
        x = w8a8.codes(torch.randn(1, role.k, dtype=DTYPE, device="cuda"))
        out = torch.empty(1, role.n, dtype=DTYPE, device="cuda")
        tried: dict[str, float] = {}
        for variant in VECTORS:
            if time.monotonic() > until:
                return
            tried[str(variant)] = round(replayed(partial(all_of, matrices, x, out, variant), 3) / copies, 2)
        print(f"{role.name} M=1", *sorted(tried.items(), key=lambda item: item[1])[:3], flush=True)
        yield {"row": f"w8a8-sweep-{role.name}-m1", "tried": tried}


def swept(until: float) -> Iterator[dict[str, Any]]:
    """Launches of the large product, each role alone, with the inputs rounded already."""
    for tokens in (256, 512, 2048, 8192):
        for role in MODEL.roles:
            codes = torch.randint(0, 256, (role.n, role.k), dtype=torch.uint8, device="cuda")
            matrix = W8A8_TRITON.pack(codes, torch.rand(role.n, 1, device="cuda"), None, 8, 1 << 20)
            x = w8a8.codes(torch.randn(tokens, role.k, dtype=DTYPE, device="cuda"))
            out = torch.empty(tokens, role.n, dtype=DTYPE, device="cuda")
            ways: dict[str, Callable[[], object]] = {
                str(variant): partial(w8a8.large, x, matrix, None, out, variant) for variant in LARGER
            }
            ways["_int_mm"] = partial(torch._int_mm, x.values, matrix.codes.view(torch.int8).t())
            tried: dict[str, float] = {}
            for name, work in ways.items():
                if time.monotonic() > until:
                    return
                try:
                    tried[name] = round(replayed(work, 3), 1)
                except Exception as problem:
                    print("failed", name, repr(problem)[-100:], flush=True)
            best = sorted(tried.items(), key=lambda item: item[1])[:2]
            print(f"{role.name} M={tokens}", *best, "_int_mm", tried.get("_int_mm"), flush=True)
            yield {"row": f"w8a8-sweep-{role.name}-m{tokens}", "tried": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--forms", nargs="+", default=FORMS)
    parser.add_argument("--sweep", choices=("one", "all"), default="", help="other launches, of one token or of all")
    parser.add_argument("--seconds", type=float, default=60, help="after which nothing new is measured")
    parser.add_argument("--commit", default="", help="what runs, where there is no git to ask")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    torch.manual_seed(0)
    work = [*options.forms, *(["sweep"] if options.sweep == "all" else [])]
    if len(work) > 2:  # fewer compile faster than processes start
        with ProcessPoolExecutor(8, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compiled, work))
    print(f"compiled, {until - time.monotonic():.0f} s left", flush=True)
    with torch.inference_mode():
        faults = list(wrong())
        for fault in faults:
            print("WRONG:", fault, flush=True)
        rows = list(measured(until, options.forms))
        if options.sweep:
            rows += [*swept_one(until), *(swept(until) if options.sweep == "all" else ())]
    if options.out:
        about = provenance(torch.cuda.get_device_name(), options.commit)
        write_rows(options.out, [row | about for row in rows])
    if faults:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
