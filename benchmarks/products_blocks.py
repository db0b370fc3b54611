"""Products with weights in the blocks of a checkpoint on one GPU: `python benchmarks/products_blocks.py --out FILE`.

The four linears of a layer of an 8B for 1 to 2,048 tokens, each format against bfloat16, int4 in groups of 128 too. Where a server
has both forms of a linear, the tokens at which the times cross are its limit (core.gpu_blocks.MOST_ROWS). Each product is compared
with the dequantized weights first. Copies of a matrix that together exceed the L2 cache take turns in a CUDA graph; a row has the
sum over the four linears of the fastest of --repeats, in microseconds, its share of bfloat16's, and TB/s of weights.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import provenance, write_rows

from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.ops.blocks import arrays
from ridgeline.ops.table import IntMatrix
from ridgeline.ops.triton.blocks import BLOCK_TRITON
from ridgeline.ops.triton.linears import INT_TRITON, UNQUANTIZED
from ridgeline.quant.blocks import round_to_blocks
from ridgeline.quant.integer import round_to_nearest

LINEARS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
TOKENS = (1, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 512, 2048)
FORMATS = {
    **{name: name for name in ("q4_k", "q5_k", "q6_k", "mxfp4", "q4_1", "q5_0", "q5_1")},
    "q4_0": "int4-g32",
    "q8_0": "int8-g32",
}
"""Number format by the type in a checkpoint."""
COLD_BYTES = 256 << 20
ALLOWED = 1e-2
"""Largest difference from the product with dequantized weights, relative to the largest result."""

Product = Callable[[torch.Tensor, Any], torch.Tensor]


def formats(weight: torch.Tensor, names: Sequence[str]) -> dict[str, tuple[Any, Product, torch.Tensor]]:
    """Name: packed matrix, product, and the weights that it stands for. names: of FORMATS."""
    numbers = NUMBER_FORMATS["int4"]
    codes, scales, zeros = round_to_nearest(weight, numbers)
    values = (codes.float() - 8).unflatten(1, (-1, numbers.group)) * scales.unsqueeze(-1)
    made: dict[str, tuple[Any, Product, torch.Tensor]] = {
        "bf16": (weight, lambda x, packed: UNQUANTIZED.linear(x, packed, None), weight),
        "int4": (
            INT_TRITON.pack(codes, scales, zeros, numbers.bits, numbers.group),
            lambda x, packed: INT_TRITON.linear(x, packed, None),
            values.flatten(1),
        ),
    }
    for name in names:
        blocks = round_to_blocks(weight, NUMBER_FORMATS[FORMATS[name]])
        made[name] = (
            BLOCK_TRITON.pack(blocks),
            lambda x, packed: BLOCK_TRITON.linear(x, packed, None),
            blocks.dequantized(),
        )
    return made


def tensors_of(packed: Any) -> list[torch.Tensor]:
    return arrays(packed) if isinstance(packed, IntMatrix) else [packed]


def copies_of(packed: Any) -> list[Any]:
    """The matrix and copies of it that the L2 cache does not hold together."""
    count = max(2, -(-COLD_BYTES // sum(tensor.nbytes for tensor in tensors_of(packed))))
    if isinstance(packed, torch.Tensor):
        return [packed.clone() for _ in range(count)]
    fields = ("codes", "scales", "extra")

    def copy() -> IntMatrix:
        kept = {name: getattr(packed, name) for name in packed.__slots__}
        return IntMatrix(**kept | {name: kept[name].clone() for name in fields if kept[name] is not None})

    return [copy() for _ in range(count)]


def microseconds(work: Sequence[Callable[[], object]], repeats: int) -> float:
    """Of one of the calls, in a CUDA graph of all."""
    for call in work:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in work:
            call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / len(work))
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default=None, help="result file (JSON list); None prints only")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--formats", default=",".join(FORMATS), help="comma-separated names of types")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--commit", default="")
    arguments = parser.parse_args()
    sums: dict[tuple[str, int], float] = {}
    sizes: dict[str, int] = {}
    for outputs, inputs in LINEARS:
        weight = (torch.randn(outputs, inputs, device="cuda") * 0.02).bfloat16()
        for name, (packed, product, values) in formats(weight, arguments.formats.split(",")).items():
            sizes[name] = sizes.get(name, 0) + sum(tensor.nbytes for tensor in tensors_of(packed))
            copies = copies_of(packed)
            for tokens in map(int, arguments.tokens.split(",")):
                x = torch.randn(tokens, inputs, device="cuda").bfloat16()
                expected = x.float() @ values.float().t()
                error = float((product(x, packed).float() - expected).abs().max() / expected.abs().max())
                if error > ALLOWED:
                    raise SystemExit(f"{name}, {tokens} tokens, {outputs} x {inputs}: off by {error:.2%}.")
                calls = [lambda x=x, each=each, product=product: product(x, each) for each in copies]  # type: ignore[misc]
                sums[name, tokens] = sums.get((name, tokens), 0.0) + microseconds(calls, arguments.repeats)
    rows = []
    for (name, tokens), time in sums.items():
        ratio, rate = time / sums["bf16", tokens], sizes[name] / time / 1e6
        row: dict[str, Any] = {"row": f"layer8b-{name}-m{tokens}-us", "value": round(time, 1), "unit": "us"}
        rows.append(row | {"of_bf16": round(ratio, 2), "tb_s": round(rate, 2)})
        print(f"{row['row']}: {time:.1f} us, {ratio:.2f} of bf16, {rate:.2f} TB/s", flush=True)
    if arguments.out:
        facts = provenance(torch.cuda.get_device_name(), arguments.commit)
        write_rows(arguments.out, [row | facts for row in rows])


if __name__ == "__main__":
    main()
