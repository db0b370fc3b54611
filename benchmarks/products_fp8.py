"""Checks and times the 8-bit products on one GPU, for the matrices of an 8B:

    python benchmarks/products_fp8.py [--sweep] [--seconds 240] [--out benchmarks/results/products_fp8.json]

Every kernel is first compared with float64. Times are of CUDA graphs that go through enough copies of a matrix that none
of it is found in the chip's cache. --sweep tries other launches than the shipped ones and names the best.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import provenance, write_rows

from ridgeline.ops.reference import REFERENCE, quantize
from ridgeline.ops.table import Fp8Matrix, Scaled
from ridgeline.ops.triton import fp8, fp8_vector
from ridgeline.ops.triton import quantize as quantizing
from ridgeline.ops.triton.fp8_shapes import SMALL, Small
from ridgeline.ops.triton.linears import FP8_TRITON
from ridgeline.ops.triton.shapes import ResidentTile

DTYPE = torch.bfloat16
# name -> (outputs, inputs): the products of one layer.
SHAPES = {"qkv": (6144, 4096), "out": (4096, 4096), "gate-up": (28672, 4096), "down": (4096, 14336)}
LAYERS = 32
TOKENS = (1, 2, 16, 32, 64, 128, 256, 512, 8192)
COLD_BYTES = 200e6
"""Bytes to go through between two uses of a matrix: several times the chip's cache."""
READ_TB_S = 4.64
ALLOWED = 4e-3
"""Largest relative error of a product in bf16, whose rounding alone is 1.7e-3."""
ALLOWED_LARGE = 2e-2
"""The same for cuBLAS, which sums in the tensor core's own precision."""


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want.double()).norm() / want.double().norm())


def matrices(shape: tuple[int, int]) -> list[Fp8Matrix]:
    """As many different matrices of a shape as the cache cannot hold."""
    copies = max(2, int(COLD_BYTES / (shape[0] * shape[1])) + 1)
    return [_matrix(shape) for _ in range(copies)]


def _matrix(shape: tuple[int, int]) -> Fp8Matrix:
    scaled = quantize(torch.randn(shape, device="cuda", dtype=DTYPE))
    return FP8_TRITON.pack(scaled.values, scaled.scales)


def exact(x: torch.Tensor | Scaled, matrix: Fp8Matrix) -> torch.Tensor:
    """The product of the 8-bit values in float64."""
    given = x if isinstance(x, Scaled) else quantize(x)
    return wide(given) @ (matrix.values.double() * matrix.scales.double().unsqueeze(1)).t()


def check() -> bool:
    """Every kernel against float64 or the reference; prints what is wrong, True if nothing is."""
    wrong = [*check_inputs(), *check_products()]
    for what in wrong:
        print(f"WRONG: {what}", flush=True)
    return not wrong


def wide(x: Scaled) -> torch.Tensor:
    return x.values.double() * x.scales.double().unsqueeze(1)


def check_inputs() -> Iterator[str]:
    """What quantizes must keep as much of its plain result as the reference does."""
    for tokens, size in ((1, 4096), (7, 14336), (300, 576), (3, 20000)):
        x = torch.randn(tokens, size, device="cuda", dtype=DTYPE)
        both = torch.randn(tokens, 2 * size, device="cuda", dtype=DTYPE)
        pairs = [
            ("quantize", quantizing.quantize(x), x),
            ("silu", quantizing.activate(both, "silu"), REFERENCE.tokenwise.activate(both, "silu")),
            ("gelu", quantizing.activate(both, "gelu_tanh"), REFERENCE.tokenwise.activate(both, "gelu_tanh")),
        ]
        if size <= 16384:
            pairs.append(
                ("norm", quantizing.rms_norm(x, x[0], 1e-5, False), REFERENCE.tokenwise.rms_norm(x, x[0], 1e-5, False))
            )
        for name, mine, plain in pairs:
            got, allowed = error(wide(mine), plain), error(wide(quantize(plain)), plain)
            if not got <= 1.02 * allowed + 1e-3:
                yield f"{name} [{tokens}, {size}]: error {got:.4f}, the reference's {allowed:.4f}"


def check_products() -> Iterator[str]:
    for shape in [*SHAPES.values(), (1000, 1008), (64, 72)]:
        matrix = _matrix(shape)
        for tokens in (1, 2, 15, 16, 33, 64, 100, 128, 129, 257):
            x = torch.randn(tokens, shape[1], device="cuda", dtype=DTYPE)
            bias = torch.randn(shape[0], device="cuda", dtype=DTYPE)
            allowed = ALLOWED if tokens <= fp8.LARGEST_SMALL else ALLOWED_LARGE
            for given, added in ((quantize(x), None), (x, bias)):
                want = exact(given, matrix) if added is None else exact(given, matrix) + added.double()
                try:
                    off = error(FP8_TRITON.linear(given, matrix, added, DTYPE), want)
                except Exception as problem:
                    yield f"product {shape} of {tokens} tokens, bias {added is not None}: {str(problem)[:300]}"
                    continue
                if not off < allowed:
                    yield f"product {shape} of {tokens} tokens: error {off:.2g}"
            if bool(matrix.counters.any()):
                yield f"product {shape} of {tokens} tokens left its counters"
                matrix.counters.zero_()
        show_sums(matrix)


def show_sums(matrix: Fp8Matrix) -> None:
    """Errors of the ways to add up, against float64."""
    outputs, inputs = matrix.values.shape
    x = quantize(torch.randn(256, inputs, device="cuda", dtype=DTYPE))
    want = exact(x, matrix)
    few = Scaled(x.values[:32], x.scales[:32])
    said = []
    for name, careful in (("promoted", False), ("float32", True)):
        out = torch.empty(32, outputs, device="cuda")
        fp8.small(few, matrix, None, out, replace(SMALL[32][0], exact=careful))
        said.append(f"{name} {error(out, want[:32]):.2e}")
    if not (outputs | inputs) % 16:
        said.append(f"cuBLAS in bf16 {error(fp8.large(x, matrix, None, None), want):.2e}")
    print(f"error of sums over {inputs}: {', '.join(said)}", flush=True)


def microseconds(run: Callable[[Fp8Matrix], object], held: list[Fp8Matrix], repeats: int = 7) -> float:
    """Median time of one `run` in a graph that uses every matrix once."""
    for matrix in held[:2]:
        run(matrix)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for matrix in held:
            run(matrix)
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(held))
    return statistics.median(times[1:])


def vectors(inputs: int) -> Iterator[tuple[str, ResidentTile]]:
    """As many weights at a time as a processor's registers hold, in some ways."""
    for rows, warps, programs in ((1, 4, 1056), (2, 4, 792), (2, 8, 528), (4, 8, 264), (4, 8, 396), (2, 16, 264)):
        if inputs > 8192:
            rows, warps = max(1, rows // 2), min(16, 2 * warps)
        yield f"r{rows} w{warps} p{programs}", ResidentTile(rows, warps, programs)


def smalls(tokens: int) -> Iterator[tuple[str, Small]]:
    """Launches that differ in more than their number of programs are compiled, a second each: few of them."""
    for outputs, warps in ((64, 4), (128, 4), (128, 8)):
        for inputs, stages in ((128, 4), (128, 6), (256, 3), (256, 5)):
            for programs in (132, 264, 528):
                if (outputs + tokens) * inputs * stages <= 220_000:
                    name = f"n{outputs} k{inputs} p{programs} w{warps} s{stages}"
                    yield name, Small(outputs, inputs, programs, warps, stages)


def candidates(tokens: int, x: Scaled, plain: torch.Tensor, size: tuple[int, int]) -> Iterator[tuple[str, Any]]:
    """Other ways to multiply `tokens` tokens, each as a function of the matrix."""
    out = torch.empty(tokens, size[0], device="cuda", dtype=DTYPE)
    if tokens == 1:
        for name, tile in vectors(size[1]):
            yield f"vector {name}", lambda m, v=tile: fp8_vector.product(plain, m, None, v)
    if tokens <= 256:
        for name, small in smalls(min(128, max(16, tokens))):
            yield f"small {name}", lambda m, v=small: fp8.small(x, m, None, out, v)
    if tokens >= 16:
        yield "cuBLAS", lambda m: fp8.large(x, m, None, None)


def multiply(x: torch.Tensor | Scaled, matrix: Fp8Matrix) -> torch.Tensor:
    return FP8_TRITON.linear(x, matrix, None, DTYPE)


def measure(sweep: bool, deadline: float) -> Iterator[dict[str, Any]]:
    """Time the shipped choice for every shape and number of tokens; with `sweep` all candidates too."""
    for tokens in TOKENS:
        total = 0.0
        for name, shape in SHAPES.items():
            held = matrices(shape)
            plain = torch.randn(tokens, shape[1], device="cuda", dtype=DTYPE)
            x = quantize(plain)
            given: torch.Tensor | Scaled = plain if tokens == 1 else x
            spent = microseconds(partial(multiply, given), held)
            total += spent
            rate = shape[0] * shape[1] / spent * 1e-6
            flops = 2e-6 * shape[0] * shape[1] * tokens / spent
            print(f"M={tokens:5} {name:8} shipped {spent:8.1f} us {rate:5.2f} TB/s {flops:7.1f} TFLOP/s", flush=True)
            yield {"row": f"fp8-{name}-m{tokens}-us", "value": round(spent, 2), "unit": "us", "tb_s": round(rate, 3)}
            if sweep:
                report(tokens, name, list(candidates(tokens, x, plain, shape)), held, deadline)
            del held
        print(f"M={tokens:5} {LAYERS} layers {total * LAYERS / 1e3:.3f} ms", flush=True)
        yield {"row": f"fp8-layers-m{tokens}-ms", "value": round(total * LAYERS / 1e3, 4), "unit": "ms"}


def report(tokens: int, name: str, tried: list[tuple[str, Any]], held: list[Fp8Matrix], deadline: float) -> None:
    """Time candidates until the deadline; print the five best."""
    times: list[tuple[float, str]] = []
    for label, run in tried:
        if time.monotonic() > deadline:
            print("    (out of time)")
            break
        try:
            times.append((microseconds(run, held, 3), label))
        except Exception as problem:  # a launch beyond the chip's memory
            print(f"    {label}: {type(problem).__name__}")
    for spent, label in sorted(times)[:5]:
        print(f"    M={tokens} {name} {label:28} {spent:8.1f} us", flush=True)


def others() -> Iterator[dict[str, Any]]:
    """What stands between the products of a layer."""
    for tokens in (1, 64, 8192):
        x = torch.randn(tokens, 4096, device="cuda", dtype=DTYPE)
        both = torch.randn(tokens, 28672, device="cuda", dtype=DTYPE)
        runs = {
            "norm": lambda _, x=x: quantizing.rms_norm(x, x[0], 1e-5, False),
            "activate": lambda _, x=both: quantizing.activate(x, "silu"),
            "quantize": lambda _, x=x: quantizing.quantize(x),
        }
        for name, run in runs.items():
            spent = microseconds(run, [None] * 20)  # type: ignore[list-item]
            print(f"M={tokens:5} {name:8} {spent:8.1f} us", flush=True)
            yield {"row": f"fp8-{name}-m{tokens}-us", "value": round(spent, 2), "unit": "us"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--seconds", type=float, default=240.0, help="time for --sweep")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    torch.manual_seed(0)
    with torch.inference_mode():
        right = check()
        rows = [*others(), *measure(options.sweep, deadline)]
    if options.out:
        about = provenance(torch.cuda.get_device_name())
        write_rows(options.out, [row | about for row in rows])
    if not right:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
