"""Which number formats of blocks a GPU keeps, and which quantized linears it also has in the model's dtype (expanded).

Products of few rows are bound by bytes and read the quantized weights. Products of many rows are bound by arithmetic and faster in
16 bits. Where memory allows it, a GPU therefore also has these linears in the model's dtype, expanded once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice

from ridgeline.core.experts import Matrix
from ridgeline.core.spec import DTYPE_BYTES, NUMBER_FORMATS, TOGETHER, ModelSpec

GPU_BLOCKS: Mapping[str, frozenset[str]] = {
    "cuda": frozenset(),
    "hopper": frozenset({"q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "mxfp4"}),
}
"""Number formats of blocks (NumberFormat.in_blocks) in which linears stay, by kind of GPU: products of 1 to 16 tokens are faster
there than in 16 bits (benchmarks/results/products_int.json)."""
KERNEL_DTYPES = ("bfloat16", "float16")
"""Dtypes of a model whose products have such kernels."""
MOST_ROWS: Mapping[str, int] = {
    **dict.fromkeys(("q4_1", "q4_k", "q5_0"), 24),
    **dict.fromkeys(("q5_1", "q5_k", "q6_k"), 16),
    **dict.fromkeys(("int3", "int4", "int8"), 128),
}
"""Most rows (tokens of a step) of a product that reads weights of a format, if the linear is there in 16 bits too: the most for
which a step of an 8B takes less time (0.96 of bf16's in Q4_K with 24 rows, 1.09 with 32; in Q6_K 0.88 with 16, 1.04 with 24:
benchmarks/results/shapes.json). The other formats follow the one whose layer takes about as long (products_int.json)."""
EXPANDED_SHARE = 0.25
"""Largest share of the memory left for the KV cache that expanded linears may take. Where the cache limits the requests that run at
once, three of four in both forms make more tokens than all in blocks from about 40 requests on: 48 make 10,250 tokens/s, 64 in
blocks 9,030; but 24 make 5,690, 32 in blocks 6,650 (8B in Q4_K, benchmarks/results/shapes.json). Prompts gain either way."""


def converted(spec: ModelSpec, kind: str) -> ModelSpec:
    """The model as this kind of device holds it. A GPU has linears in blocks in the dtype instead, but for the formats that it
    keeps. A CPU keeps all. Experts stay in theirs."""
    if kind not in GPU_BLOCKS:
        return spec
    spec = replace(spec, device_kind=kind)
    if spec.has_experts:
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


def most_rows(formats: Iterable[str]) -> int:
    """Most rows of a product that reads the quantized weights of a linear whose parts have these formats (int4-g64 is as int4).
    0: it is never in both forms."""
    return min((MOST_ROWS.get(name.partition("-")[0], 0) for name in formats), default=0)


def expanded_bytes(spec: ModelSpec) -> int:
    """Bytes that quantized linears take in the model's dtype, of the part of a model that a rank of a GPU holds (`converted`).
    Models with experts have one form: most of their weights are experts."""
    if not spec.quantization or spec.dtype not in KERNEL_DTYPES or spec.has_experts:
        return 0
    counted = [(matrix, count) for layer, count in Counter(spec.layers).items() for matrix in spec.matrices(layer)]
    both = ((matrix, count) for matrix, count in [*counted, (spec.head, 1)] if most_rows(_formats(matrix, spec)))
    return DTYPE_BYTES[spec.dtype] * sum(count * matrix.elements for matrix, count in both)


def _formats(matrix: Matrix, spec: ModelSpec) -> list[str]:
    return [name for _, name in matrix.parts] or [spec.quantization]


def wide_read(spec: ModelSpec, matrix: Matrix) -> tuple[int, int]:
    """(most rows of a product that reads the blocks of a linear in both forms, bytes that one of more rows reads in addition,
    because it reads the model's dtype); (0, 0) for a linear in one form."""
    most = most_rows(_formats(matrix, spec)) if spec.both_forms else 0
    return (
        (most, spec.matrix_bytes(replace(matrix, parts=(), plain=True)) - spec.matrix_bytes(matrix)) if most else (0, 0)
    )


Reads = Mapping[int, int]
"""Bytes by the number of rows above which products read them in addition."""


def wide_reads(spec: ModelSpec) -> tuple[Reads, Reads]:
    """What steps of many rows read in addition to ModelSpec.step_weight_bytes (`wide_read`): linears that run for all tokens, and
    those that run for tokens whose logits are needed (ModelSpec.linear_flops)."""
    of_tokens, of_logits = Counter[int](), Counter[int]()
    if spec.both_forms:
        qkv, *others = spec.matrices(spec.layers[-1])
        for layer, count in Counter(spec.layers[:-1]).items():
            for most, more in (wide_read(spec, matrix) for matrix in spec.matrices(layer)):
                of_tokens[most] += count * more
        for reads, matrices in ((of_tokens, [qkv]), (of_logits, [*others, spec.head])):
            for most, more in (wide_read(spec, matrix) for matrix in matrices):
                reads[most] += more
    return of_tokens, of_logits


def kept_bytes(size: int, available: int, sequence_bytes: int, requested: int | None) -> int:
    """Bytes of expanded linears that a device keeps beside the blocks: all of them or none.

    Args:
        size: bytes of all. available: bytes for them and the KV cache. sequence_bytes: the smallest cache, of one sequence of the
            longest context. requested: bytes of the cache that the user asks for; None: what is left.
    """
    smallest = max(sequence_bytes, available - int(EXPANDED_SHARE * available)) if requested is None else requested
    return size if size <= available - smallest else 0
