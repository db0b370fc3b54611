"""A step operation by operation: what `core.cost.step_work` sums up, and what each operation's activations add to it.

The roofline ledger, `ridgeline roofline` and the cost model read one set of formulas, those of `core.spec`. A test holds
the sums over all operations equal to `step_work`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ridgeline.core.spec import DTYPE_BYTES, NUMBER_FORMATS, LayerSpec, Matrix, ModelSpec, few

ID_BYTES = 4
SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of operation of a step, all its runs together.

    name: one of NAMES. count: how often a step runs it. flops: of matrix products and attention (a multiply-add is 2);
    what norms, rotations and activations compute is not counted. bytes: of weights, and of keys and values read and
    written: what no kernel can avoid. activation_bytes: what comes in and goes out beside them when the operation runs
    alone; caches and fusion spare a device part of it.
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
    "gate+up",
    "activation",
    "down",
    "head",
    "sampling",
)
"""In the order of a step; "norm" is all norms of the stream. A block ends by adding to the stream: part of "out" and "down",
or of the norm behind them where a model has one there."""


@dataclass(frozen=True, slots=True)
class _Step:
    """Sizes of one step. shares: (cached, new) tokens of its rows. tokens: the new ones of all rows, or in the last layer behind
    attention those of them that go on."""

    spec: ModelSpec
    shares: tuple[tuple[int, int], ...]
    tokens: int
    logits: int

    @property
    def width(self) -> int:
        """Bytes of an element of plain activations."""
        return DTYPE_BYTES[self.spec.dtype]

    def taken(self, size: int) -> int:
        """Bytes of the activations [tokens, size] that a matrix takes: in 8 bits with a scale each where the format says so."""
        form = NUMBER_FORMATS.get(self.spec.quantization)
        return self.tokens * (size + SCALE_BYTES if form and form.inputs_8bit else size * self.width)

    def plain(self, size: int) -> int:
        """Bytes of activations [tokens, size] in the model's dtype."""
        return self.tokens * size * self.width


def operations(spec: ModelSpec, shares: Iterable[tuple[int, int]], logits: int | None = None) -> tuple[Operation, ...]:
    """The operations of a step whose rows run `n` query tokens after `start` cached ones, for (start, n) in shares.

    logits: query tokens that need logits; None: one per row. Empty for a step without tokens; else one of each of NAMES.
    """
    rows = tuple(shares)
    tokens = sum(count for _, count in rows)
    if not tokens:
        return ()
    step = _Step(spec, rows, tokens, len(rows) if logits is None else logits)
    total: dict[str, list[int]] = {name: [0, 0, 0, 0] for name in NAMES}
    for part in _ends(step):
        _add(total, part, 1)
    for layer, times in Counter(spec.layers[:-1]).items():
        for part in (*_attends(step, layer), *_goes_on(step, layer)):
            _add(total, part, times)
    alone = step.logits if few(step.logits, tokens) else None
    for part in (
        *_attends(step, spec.layers[-1], alone),
        *_goes_on(replace(step, tokens=step.logits), spec.layers[-1]),
    ):
        _add(total, part, 1)
    return tuple(Operation(name, *total[name]) for name in NAMES)


def _add(total: dict[str, list[int]], part: Operation, times: int) -> None:
    values = (part.count, part.flops, part.bytes, part.activation_bytes)
    total[part.name] = [have + times * more for have, more in zip(total[part.name], values, strict=True)]


def _ends(step: _Step) -> Iterator[Operation]:
    """What a step runs once: embedding, final norm, head, sampling."""
    spec, d_model, width = step.spec, step.spec.d_model, step.width
    yield Operation("embedding", 1, 0, 0, 2 * step.plain(d_model) + step.tokens * ID_BYTES)
    yield Operation("norm", 1, 0, d_model * width, 2 * step.logits * d_model * width)
    flops = 2 * step.logits * spec.embedding_params
    scores = step.logits * spec.vocab_size * width
    yield Operation("head", 1, flops, spec.embedding_params * width, step.logits * d_model * width + scores)
    yield Operation("sampling", 1, 0, 0, scores + step.logits * ID_BYTES)


def _attends(step: _Step, layer: LayerSpec, alone: int | None = None) -> Iterator[Operation]:
    """One layer up to its attention, which is that of all tokens or of `alone` of them. A norm reads the stream and writes what a
    matrix takes."""
    spec, d_model, width = step.spec, step.spec.d_model, step.width
    heads = layer.n_heads * layer.head_dim
    merged = heads + 2 * layer.n_kv_heads * layer.head_dim
    yield Operation("norm", 1, 0, d_model * width, step.plain(d_model) + step.taken(d_model))
    yield _product(step, spec.matrices(layer)[0], step.taken(d_model))
    written = step.tokens * layer.kv_bytes(spec.kv)
    rotated = step.plain(merged) + step.plain(heads)
    yield Operation("rope+kv write", 1, 0, spec.head_norm_params(layer) * width + written, rotated)
    flops, slots = layer.attention(step.shares, alone)
    attending = step.tokens if alone is None else alone
    yield Operation("attention", 1, flops, slots * layer.slot_bytes(spec.kv), 2 * attending * heads * width)


def _goes_on(step: _Step, layer: LayerSpec) -> Iterator[Operation]:
    """The rest of it. The end of a block reads and writes the stream."""
    spec, d_model = step.spec, step.spec.d_model
    posts = spec.stream_norms() - 2
    moved = step.plain(d_model) + step.taken(d_model) + posts * 3 * step.plain(d_model)
    yield Operation("norm", 1 + posts, 0, (1 + posts) * d_model * step.width, moved)
    yield Operation("activation", 1, 0, 0, step.plain(2 * layer.d_ff) + step.taken(layer.d_ff))
    _, out, gate_up, down = spec.matrices(layer)
    joined = 0 if posts else step.plain(d_model)
    # Attention's output is plain; its product quantizes it on the way in.
    yield _product(step, out, step.plain(out.inputs) + joined)
    yield _product(step, gate_up, step.taken(gate_up.inputs))
    yield _product(step, down, step.taken(down.inputs) + joined)


def _product(step: _Step, matrix: Matrix, moved: int) -> Operation:
    """moved: bytes of activations beside those that come out."""
    name = "gate+up" if matrix.name == "gate_up" else matrix.name
    flops, held = 2 * step.tokens * matrix.elements, step.spec.matrix_bytes(matrix)
    return Operation(name, 1, flops, held, moved + step.plain(matrix.outputs))
