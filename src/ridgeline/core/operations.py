"""A step operation by operation: the parts of `core.cost.step_work`, with the activations that each operation moves.

The roofline ledger, `ridgeline roofline` and the cost model share one set of formulas, those of `core.spec`. A test holds
the sums over all operations equal to `step_work`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ridgeline.core.experts import Matrix, idle_bytes
from ridgeline.core.gpu_blocks import wide_read
from ridgeline.core.spec import DTYPE_BYTES, NUMBER_FORMATS, LayerSpec, ModelSpec, restricts_last_layer

ID_BYTES = 4
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of operation of a step, summed over all its runs.

    name: one of NAMES. count: runs per step. flops: of matrix products and attention (a multiply-add counts 2); those of norms,
    rotations and activation functions are not counted. bytes: weights, and keys and values read and written, which no kernel can
    avoid. activation_bytes: inputs and outputs in addition, when the operation runs unfused; caches and fusion save part of them.
    """

    name: str
    count: int
    flops: int
    bytes: int
    activation_bytes: int


NAMES = (
    "embedding",
    "norm",
    "qkv",
    "rope+kv write",
    "attention",
    "out",
    "router",
    "gate+up",
    "activation",
    "down",
    "head",
    "sampling",
)
"""In the order of a step. "norm" is all norms of the residual stream. The residual addition at the end of a block is part of
"out" and "down", or of the norm after them where a model has one."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Sizes of one step.

    shares: (cached, new) tokens of its rows. tokens: new tokens of all rows; after the attention of the last layer, only those
    whose logits are needed.
    """

    spec: ModelSpec
    shares: tuple[tuple[int, int], ...]
    tokens: int
    logits: int

    @property
    def width(self) -> int:
        """Bytes of an activation element in the model's dtype."""
        return DTYPE_BYTES[self.spec.dtype]

    def weight_bytes(self, matrix: Matrix, rows: int) -> int:
        """Bytes of a matrix that a product of so many rows reads."""
        most, more = wide_read(self.spec, matrix)
        return self.spec.matrix_bytes(matrix) + (more if rows > most else 0)

    def input_bytes(self, size: int) -> int:
        """Bytes of the [tokens, size] input of a matrix product: 8 bits an element and a scale per token if the format says so."""
        number_format = NUMBER_FORMATS.get(self.spec.quantization)
        return self.tokens * (size + SCALE_BYTES if number_format and number_format.inputs_8bit else size * self.width)

    def model_dtype_bytes(self, size: int) -> int:
        """Bytes of [tokens, size] activations in the model's dtype."""
        return self.tokens * size * self.width


def operations(spec: ModelSpec, shares: Iterable[tuple[int, int]], logits: int | None = None) -> tuple[Operation, ...]:
    """The operations of a step whose rows run `n` query tokens after `start` cached ones, for (start, n) in shares.

    logits: query tokens that need logits; None: one per row. Returns those of NAMES that the model has; nothing for a step without
    tokens.
    """
    rows = tuple(shares)
    tokens = sum(count for _, count in rows)
    if not tokens:
        return ()
    step = _Step(spec, rows, tokens, len(rows) if logits is None else logits)
    total: dict[str, list[int]] = {name: [0, 0, 0, 0] for name in NAMES}
    for operation in _once_per_step(step):
        _add(total, operation, 1)
    for layer, times in Counter(spec.layers[:-1]).items():
        for operation in (*_through_attention(step, layer), *_after_attention(step, layer)):
            _add(total, operation, times)
    queries = step.logits if restricts_last_layer(step.logits, tokens) else None
    for operation in (
        *_through_attention(step, spec.layers[-1], queries),
        *_after_attention(replace(step, tokens=step.logits), spec.layers[-1]),
    ):
        _add(total, operation, 1)
    return tuple(Operation(name, *total[name]) for name in NAMES if total[name][0])


def _add(total: dict[str, list[int]], operation: Operation, times: int) -> None:
    values = (operation.count, operation.flops, operation.bytes, operation.activation_bytes)
    total[operation.name] = [
        before + times * value for before, value in zip(total[operation.name], values, strict=True)
    ]


def _once_per_step(step: _Step) -> Iterator[Operation]:
    """Operations that a step runs once: embedding, final norm, head, sampling."""
    spec, d_model, width = step.spec, step.spec.d_model, step.width
    yield Operation("embedding", 1, 0, 0, 2 * step.model_dtype_bytes(d_model) + step.tokens * ID_BYTES)
    yield Operation("norm", 1, 0, d_model * width, 2 * step.logits * d_model * width)
    flops = 2 * step.logits * spec.embedding_params
    scores = step.logits * spec.vocab_size * width
    yield Operation("head", 1, flops, step.weight_bytes(spec.head, step.logits), step.logits * d_model * width + scores)
    yield Operation("sampling", 1, 0, 0, scores + step.logits * ID_BYTES)


def _through_attention(step: _Step, layer: LayerSpec, queries: int | None = None) -> Iterator[Operation]:
    """One layer from its norm to its attention. queries: number of query tokens that attend; None: all of them.

    The norm reads the residual stream and writes the input of a matrix product.
    """
    spec, d_model, width = step.spec, step.spec.d_model, step.width
    heads = layer.n_heads * layer.head_dim
    merged = heads + 2 * layer.written_heads * layer.head_dim
    yield Operation("norm", 1, 0, d_model * width, step.model_dtype_bytes(d_model) + step.input_bytes(d_model))
    yield _product(step, spec.matrices(layer)[0], step.input_bytes(d_model))
    kv_written = step.tokens * layer.kv_bytes(spec.kv)
    rotated = step.model_dtype_bytes(merged) + step.model_dtype_bytes(heads)
    yield Operation("rope+kv write", 1, 0, spec.head_norm_params(layer) * width + kv_written, rotated)
    flops, slots = layer.attention(step.shares, queries)
    attending_queries = step.tokens if queries is None else queries
    yield Operation("attention", 1, flops, slots * layer.slot_bytes(spec.kv), 2 * attending_queries * heads * width)


def _after_attention(step: _Step, layer: LayerSpec) -> Iterator[Operation]:
    """One layer from its output projection to its end. Both blocks end with an addition to the residual stream."""
    spec, d_model = step.spec, step.spec.d_model
    posts = spec.stream_norms() - 2
    norm_bytes = (
        step.model_dtype_bytes(d_model) + step.input_bytes(d_model) + posts * 3 * step.model_dtype_bytes(d_model)
    )
    yield Operation("norm", 1 + posts, 0, (1 + posts) * d_model * step.width, norm_bytes)
    yield Operation("activation", 1, 0, 0, step.model_dtype_bytes(2 * layer.d_ff) + step.input_bytes(layer.d_ff))
    _, out, *products = spec.matrices(layer)
    stream_bytes = 0 if posts else step.model_dtype_bytes(d_model)
    # Attention writes the model's dtype; the output projection quantizes while it reads.
    yield _product(step, out, step.model_dtype_bytes(out.inputs) + stream_bytes)
    for matrix in products:
        ends_block = stream_bytes if matrix.name == "down" else 0
        operation = _product(step, matrix, round(matrix.used * step.input_bytes(matrix.inputs)) + ends_block)
        if layer.experts and matrix.chosen:
            idle = idle_bytes({(layer.experts.missed, operation.bytes): 1}, step.tokens)
            operation = replace(operation, bytes=operation.bytes - idle)
        yield operation


PRODUCTS = {"gate_up": "gate+up", "shared_gate_up": "gate+up", "shared_down": "down", "shared_gate": "router"}
"""Names of the operations that matrices belong to, where they differ from the matrix's name."""


def _product(step: _Step, matrix: Matrix, extra_bytes: int) -> Operation:
    """extra_bytes: bytes of activations in addition to the output."""
    flops, read = round(2 * step.tokens * matrix.used * matrix.elements), step.weight_bytes(matrix, step.tokens)
    outputs = round(matrix.used * step.model_dtype_bytes(matrix.outputs))
    return Operation(PRODUCTS.get(matrix.name, matrix.name), 1, flops, read, extra_bytes + outputs)
