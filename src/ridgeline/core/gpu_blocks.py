"""Which number formats of blocks a GPU keeps, and a model in which it has expanded the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from ridgeline.core.spec import NUMBER_FORMATS, TOGETHER, ModelSpec

GPU_BLOCKS: Mapping[str, frozenset[str]] = {
    "cuda": frozenset(),
    "hopper": frozenset({"q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "mxfp4"}),
}
"""Number formats of blocks (NumberFormat.in_blocks) in which linears stay, by kind of GPU: products of 1 to 16 tokens are faster
there than in 16 bits (benchmarks/results/products_int.json)."""
KERNEL_DTYPES = ("bfloat16", "float16")
"""Dtypes of a model whose products have such kernels."""


def expanded(spec: ModelSpec, kind: str) -> ModelSpec:
    """The model with linears in blocks in the dtype instead, but for the formats that this kind of GPU keeps. A CPU keeps all.
    Experts stay in theirs."""
    if kind not in GPU_BLOCKS or any(layer.experts for layer in spec.layers):
        return spec
    kept = GPU_BLOCKS[kind] if spec.dtype in KERNEL_DTYPES else frozenset()
    slow = {name for name, numbers in NUMBER_FORMATS.items() if numbers.in_blocks} - kept

    def of(*names: str) -> tuple[str, ...]:
        return ("",) * len(names) if slow.intersection(names) else names

    formats = []
    for layer in spec.layers:
        names = iter(layer.formats)
        formats.append(tuple(name for count in TOGETHER for name in of(*islice(names, count))))
    (quantization,), (head,) = of(spec.quantization), of(spec.head_format)
    quantization = quantization or next((name for names in formats for name in names if name), "")
    layers = tuple(
        replace(layer, formats=names if quantization else ()) for layer, names in zip(spec.layers, formats, strict=True)
    )
    return replace(spec, layers=layers, quantization=quantization, head_format=head)
