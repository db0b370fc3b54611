"""What a decoder is, per layer, and what it costs: the one place for parameters, FLOPs, weight bytes and KV bytes.

Everything that sizes, predicts or reports (engine, `fit`, metrics, planner, bench) reads these formulas; a test holds
them equal to the tensors that `models.build` really makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.core.errors import ConfigError

Shares = Sequence[tuple[int, int]]
"""(positions before them, query tokens) of each row of a step."""


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """How the matrices of the layers are stored: `bits` an element, rows of elements padded to multiples of `row`.

    A scale of `scale_bytes` covers a group of `group` inputs of one output channel, or with group 0 all of them; the last
    group may be shorter. zeros: each group has a zero point too, of one byte. ordered: the matrix holds an int32 for each
    input, in which order it takes them. inputs_8bit: products quantize what they read as well. kept: one input in so many,
    and a multiple of `row` of them, has its weights in the model's dtype beside an int64 that names it; 0: none.
    """

    bits: int
    group: int = 0
    zeros: bool = False
    ordered: bool = False
    inputs_8bit: bool = False
    kept: int = 0
    scale_bytes: int = 2
    row: int = 32

    def kept_inputs(self, inputs: int) -> int:
        """Of so many inputs, those whose weights stay in the model's dtype."""
        return min(inputs, -(-inputs // (self.kept * self.row)) * self.row) if self.kept else 0

    def matrix_bytes(self, outputs: int, inputs: int, width: int = 2) -> int:
        """Bytes of a matrix of a model whose dtype takes `width` bytes, its bias left out."""
        elements = -(-inputs // self.row) * self.row * self.bits // 8
        groups = -(-inputs // self.group) if self.group else 1
        scales = groups * (self.scale_bytes + (1 if self.zeros else 0))
        kept = self.kept_inputs(inputs) * (outputs * width + 8)
        return outputs * (elements + scales) + (4 * inputs if self.ordered else 0) + kept


GROUPS = (32, 64, 128, 256)
"""Inputs that a scale of integer weights may cover, beside all of them."""


def _integers() -> dict[str, NumberFormat]:
    """int4-g128 and its kin: -channel for one scale per output channel, -zp with zero points, -ordered for act-order."""
    found = {}
    for bits, usual in ((8, 0), (4, 128), (3, 128)):
        for group in (0, *GROUPS):
            for zeros in (False, True):
                for ordered in (False, True):
                    end = ("-zp" if zeros else "") + ("-ordered" if ordered else "")
                    form = NumberFormat(bits, group, zeros, ordered)
                    found[f"int{bits}-g{group}{end}" if group else f"int{bits}-channel{end}"] = form
        found[f"int{bits}"] = NumberFormat(bits, usual)
    return found


NUMBER_FORMATS = {
    "fp8": NumberFormat(8, inputs_8bit=True, scale_bytes=4, row=1),
    "fp8-weight": NumberFormat(8, scale_bytes=4, row=1),
    "w8a8": NumberFormat(8, inputs_8bit=True),
    "llm-int8": NumberFormat(8, inputs_8bit=True, kept=64),
    **_integers(),
}
"""By the name that the option `quantization` gives them; embedding, head, norms and biases stay in the model's dtype."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3": 1, "int8": 1}


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How the cache stores keys and values. Of each layer a page holds [K | V | scales of both][head][slot][dim].

    dtype: torch's name of the stored type; a type with more bits than an element packs several elements. bits: of an element.
    scale_dtype: torch's name of the type of scales, None for a format without. A scale covers a group of `group` neighbouring
    elements of one key or value (of one head and token), or with group 0 all of them: value = stored * scale.
    """

    name: str
    dtype: str
    bits: int
    scale_dtype: str | None = None
    group: int = 0

    def scales(self, dim: int) -> int:
        """Scales of one key or value of `dim` elements."""
        if self.scale_dtype is None:
            return 0
        return -(-dim // self.group) if self.group else 1

    def vector_bytes(self, dim: int) -> int:
        """Bytes of one key or value of `dim` elements, with its scales."""
        return dim * self.bits // 8 + (self.scales(dim) * DTYPE_BYTES[self.scale_dtype] if self.scale_dtype else 0)


KV_FORMATS = {
    name: KvFormat(name, "float8_e4m3fn" if name == "float8_e4m3" else name, 8 * width)
    for name, width in DTYPE_BYTES.items()
}
"""By name. The calculators know all of them; a device serves the model's own dtype and what AttentionOps.kv_formats names."""


_STORED_AS = ("gptq", "awq", "compressed-tensors")
"""What other engines' users say of checkpoints that hold a format of their own."""


def check_format(asked: str) -> None:
    """Raises ConfigError for a value of the option `quantization` that no checkpoint could be served with."""
    if asked not in ("", *NUMBER_FORMATS, *_STORED_AS):
        raise _unknown_format(asked)


def settled_format(stored: str, asked: str) -> str:
    """The number format of a model whose checkpoint holds `stored` ("": none) when `asked` is wanted. Raises ConfigError for one
    that is unknown, or another than the checkpoint has."""
    known = ("", *NUMBER_FORMATS, *(_STORED_AS if stored else ()))
    if asked not in known or (not stored and asked.endswith("-ordered")):
        raise _unknown_format(asked)
    if stored and asked not in ("", stored, *_STORED_AS):
        raise ConfigError(
            f"--quantization is {asked!r}, but the checkpoint is already quantized ({stored}): leave the option out, or serve the "
            "unquantized model.",
            param="quantization",
        )
    return stored or asked


def _unknown_format(asked: str) -> ConfigError:
    return ConfigError(
        f"--quantization {asked!r} is unknown: use {', '.join(name for name in NUMBER_FORMATS if '-' not in name)}, "
        "fp8-weight, llm-int8, or int4-g64 and the like (3, 4 or 8 bits; g32 to g256 or channel; -zp for zero points).",
        param="quantization",
    )


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al. 2021). `scaling` names how frequencies are stretched beyond the trained context.

    none: as trained. linear: positions divided by `factor` (Chen et al. 2023). llama3: long wavelengths divided by
    `factor`, short ones kept, a ramp between (Llama 3.1 model card). yarn: NTK-by-parts (Peng et al. 2023) with
    `attention_factor` multiplying the rotated values.
    """

    theta: float = 10_000.0
    dim: int = 64
    scaling: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer. `window`: keys at most `window - 1` positions back are seen; None is the whole past.

    `share_from`: index of the layer whose keys and values this one reads instead of its own.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope: Rope
    window: int | None = None
    softcap: float | None = None
    share_from: int | None = None

    def on_rank(self, ranks: int) -> LayerSpec:
        """The share of one of `ranks` ranks. Raises ConfigError where the layer cannot be divided; see units_on_rank."""
        if self.n_heads % ranks or self.d_ff % ranks:
            raise ConfigError(
                f"{self.n_heads} heads and a feed-forward width of {self.d_ff} cannot be split over {ranks} devices: use a "
                "number of devices that divides both."
            )
        heads, kv_heads = self.n_heads // ranks, units_on_rank(self.n_kv_heads, ranks)
        return replace(self, n_heads=heads, n_kv_heads=kv_heads, d_ff=self.d_ff // ranks)

    def slot_bytes(self, kv_format: KvFormat) -> int:
        """Bytes of the keys and values of one token that this layer reads."""
        return 2 * self.n_kv_heads * kv_format.vector_bytes(self.head_dim)

    def kv_bytes(self, kv_format: KvFormat) -> int:
        """Bytes of keys and values that one token leaves in this layer's cache."""
        return 0 if self.share_from is not None else self.slot_bytes(kv_format)

    def attention_flops(self, start: int, tokens: int) -> int:
        """FLOPs of QK^T and PV for `tokens` causal queries that follow `start` positions, the window respected."""
        return 4 * causal_pairs(start, tokens, self.window) * self.n_heads * self.head_dim

    def attention(self, shares: Shares, alone: int | None = None) -> tuple[int, int]:
        """(FLOPs of QK^T and PV, slots of the cache that are read) for rows that run `n` queries after `start` positions, for
        (start, n) in shares. alone: as many of these queries attend, each by itself, and see as much as a row's last one does
        on average: which rows they are of is not told."""
        if alone is None:
            flops = sum(self.attention_flops(start, count) for start, count in shares)
            return flops, sum(self.slots_seen(start, count) for start, count in shares)
        ends = (start + count for start, count in shares)
        seen = alone * sum(min(end, self.window or end) for end in ends) // max(1, len(shares))
        return 4 * seen * self.n_heads * self.head_dim, seen

    def slots_seen(self, start: int, tokens: int) -> int:
        """Slots of the cache that `tokens` queries after `start` positions see, each once."""
        end = start + tokens
        return end if self.window is None else min(end, self.window - 1 + tokens)


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix of a layer as it is multiplied by: queries, keys and values in one, gate and up in one."""

    name: Literal["qkv", "out", "gate_up", "down"]
    outputs: int
    inputs: int
    bias: bool

    @property
    def elements(self) -> int:
        return self.outputs * self.inputs


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model. Sizes are counts; `dtype` is that of the checkpoint's weights.

    `quantization`: the number format of the layers' matrices where that is not `dtype`; a name of NUMBER_FORMATS.
    `kv_format`: the format of the cache where that is not `dtype`; a name of KV_FORMATS.

    `norm_offset`: Gemma's norms scale by (1 + weight). `post_norms`: Gemma 2 and 3 norm the output of attention and
    feed-forward too, before the residual. `embed_scale`: Gemma multiplies embeddings by sqrt(d_model), rounded to the
    weights' dtype. `query_scale`: what replaces 1/sqrt(head_dim) in attention.
    """

    architecture: str
    vocab_size: int
    d_model: int
    layers: tuple[LayerSpec, ...]
    max_len: int
    norm_eps: float = 1e-5
    norm_offset: bool = False
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    activation: Literal["silu", "gelu_tanh"] = "silu"
    tied: bool = False
    embed_scale: float = 1.0
    query_scale: float | None = None
    final_softcap: float | None = None
    dtype: str = "bfloat16"
    quantization: str = ""
    kv_format: str = ""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def scale_of(self, layer: LayerSpec) -> float:
        return self.query_scale if self.query_scale is not None else layer.head_dim**-0.5

    @property
    def kv(self) -> KvFormat:
        """The format of the cache."""
        return KV_FORMATS[self.kv_format or self.dtype]

    def on_rank(self, ranks: int) -> ModelSpec:
        """What one of `ranks` ranks of a mesh holds: its share of every layer; norms, embedding and head are whole on each."""
        return self if ranks == 1 else replace(self, layers=tuple(one.on_rank(ranks) for one in self.layers))

    # --- parameters -------------------------------------------------------------------------------------------------

    def matrices(self, layer: LayerSpec) -> tuple[Matrix, ...]:
        """The matrices of one layer in the order they are used."""
        queries, kept = layer.n_heads * layer.head_dim, 2 * layer.n_kv_heads * layer.head_dim
        return (
            Matrix("qkv", queries + kept, self.d_model, self.qkv_bias),
            Matrix("out", self.d_model, queries, self.out_bias),
            Matrix("gate_up", 2 * layer.d_ff, self.d_model, self.mlp_bias),
            Matrix("down", self.d_model, layer.d_ff, self.mlp_bias),
        )

    def matrix_bytes(self, matrix: Matrix) -> int:
        """Bytes of one matrix as it is stored: elements, scales of its channels, bias."""
        width = DTYPE_BYTES[self.dtype]
        form = NUMBER_FORMATS.get(self.quantization)
        bias = matrix.outputs * width if matrix.bias else 0
        return bias + (form.matrix_bytes(matrix.outputs, matrix.inputs, width) if form else matrix.elements * width)

    def layer_linear_params(self, layer: LayerSpec) -> int:
        """Elements of the weight matrices of one layer (no biases, no norms)."""
        return sum(one.elements for one in self.matrices(layer))

    def stream_norms(self) -> int:
        """Norms [d_model] of one layer."""
        return 4 if self.post_norms else 2

    def head_norm_params(self, layer: LayerSpec) -> int:
        """Elements of the norms of queries and keys of one layer."""
        return 2 * layer.head_dim if self.qk_norm else 0

    def layer_vector_params(self, layer: LayerSpec) -> int:
        """Elements of norms and biases of one layer."""
        biases = sum(one.outputs for one in self.matrices(layer) if one.bias)
        return self.stream_norms() * self.d_model + self.head_norm_params(layer) + biases

    @property
    def embedding_params(self) -> int:
        return self.vocab_size * self.d_model

    @property
    def params(self) -> int:
        """All parameters; a tied head counts once."""
        layers = sum(self.layer_linear_params(one) + self.layer_vector_params(one) for one in self.layers)
        return layers + self.d_model + self.embedding_params * (1 if self.tied else 2)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the weights of all layers as they are stored."""
        width, total = DTYPE_BYTES[self.dtype], 0
        for one in self.layers:
            total += sum(self.matrix_bytes(matrix) for matrix in self.matrices(one))
            total += (self.stream_norms() * self.d_model + self.head_norm_params(one)) * width
        return total

    @property
    def weight_bytes(self) -> int:
        vectors = self.d_model + self.embedding_params * (1 if self.tied else 2)
        return self.layer_bytes + vectors * DTYPE_BYTES[self.dtype]

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that every step reads whatever its batch: all but the embedding's rows (the head counts)."""
        return self.layer_bytes + (self.d_model + self.embedding_params) * DTYPE_BYTES[self.dtype]

    # --- work -------------------------------------------------------------------------------------------------------

    def linear_flops(self, tokens: int, logits: int) -> int:
        """FLOPs (a multiply-add is 2) of all matrix products for `tokens` tokens, for `logits` of which there is a use behind the
        last layer's keys and values: of the others this layer multiplies no more than those."""
        every = sum(self.layer_linear_params(one) for one in self.layers)
        last = sum(one.elements for one in self.matrices(self.layers[-1]) if one.name != "qkv")
        return 2 * (tokens * (every - last) + logits * (last + self.embedding_params))

    def attention(self, shares: Shares, wanted: int) -> tuple[int, int]:
        """(FLOPs, bytes of cache that are read) of attention in all layers, as LayerSpec.attention; for `wanted` of these query
        tokens there is a use behind the last layer, which attends for them alone where they are few."""
        tokens = sum(count for _, count in shares)
        parts = [one.attention(shares) for one in self.layers[:-1]]
        parts.append(self.layers[-1].attention(shares, wanted if few(wanted, tokens) else None))
        read = sum(slots * one.slot_bytes(self.kv) for one, (_, slots) in zip(self.layers, parts, strict=True))
        return sum(flops for flops, _ in parts), read

    # --- KV cache ---------------------------------------------------------------------------------------------------

    def kv_bytes_per_token(self) -> int:
        """Bytes one token leaves in the cache of all layers together (windows not yet applied)."""
        return sum(one.kv_bytes(self.kv) for one in self.layers)

    def kv_bytes(self, length: int) -> int:
        """Bytes of keys and values alive for a sequence of `length` tokens: a window keeps at most its own width."""
        return sum(one.kv_bytes(self.kv) * min(length, one.window or length) for one in self.layers)

    def kv_read_bytes(self, start: int, tokens: int) -> int:
        """Bytes of cache one step must read for a sequence at `start` that runs `tokens` queries (each key once)."""
        return sum(one.slots_seen(start, tokens) * one.slot_bytes(self.kv) for one in self.layers)


def few(wanted: int, tokens: int) -> bool:
    """Whether the last layer attends for the wanted query tokens alone: they must be few."""
    return 16 * wanted <= tokens


def units_on_rank(units: int, ranks: int) -> int:
    """Of `units` indivisible units, such as KV heads, how many each of `ranks` ranks holds.

    With fewer units than ranks a unit is repeated on neighbouring ranks: query heads are always divided, and each needs its
    KV head where it is. Repeating costs cache bytes; refusing would exclude most models with grouped heads from many devices.
    Raises ConfigError where neither number divides the other.
    """
    if units % ranks and ranks % units:
        raise ConfigError(
            f"{units} heads or blocks cannot be split over {ranks} devices: use a divisor or a multiple of {units}."
        )
    return max(1, units // ranks)


def causal_pairs(start: int, tokens: int, window: int | None) -> int:
    """Number of (query, key) pairs of `tokens` causal queries at positions start.., each seeing at most `window` keys."""
    end = start + tokens
    if window is None or end <= window:
        return tokens * start + tokens * (tokens + 1) // 2
    growing = max(0, min(end, window) - start)
    return growing * start + growing * (growing + 1) // 2 + (tokens - growing) * window


# --- groups of layers that share a page table --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers of one kind that share a page table. A page of the group holds `page_tokens` slots of each of its layers."""

    layers: tuple[int, ...]
    window: int | None
    token_bytes: int
    """Bytes of keys and values per token over all layers of the group."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How the cache is cut: every page of every group has `page_bytes` bytes, so one pool serves all groups."""

    groups: tuple[KvGroup, ...]
    page_tokens: int
    page_bytes: int
    format: KvFormat

    @property
    def padding(self) -> float:
        """Share of the cache's bytes that no layer uses, because groups of unequal depth share one page size."""
        used = sum(group.token_bytes for group in self.groups) * self.page_tokens
        return 1 - used / (self.page_bytes * len(self.groups))

    def pages_for(self, length: int, chunk: int) -> int:
        """Most pages a sequence of `length` tokens holds at once, when a step adds at most `chunk` tokens to it."""
        total = 0
        for group in self.groups:
            live = length if group.window is None else min(length, group.window + chunk + self.page_tokens)
            total += -(-live // self.page_tokens)
        return total


def kv_layout(spec: ModelSpec, page_tokens: int, guests: tuple[LayerSpec, ...] = ()) -> KvLayout:
    """Cut the layers into groups of one kind (window, KV heads, head size) and of equal byte size per page. The cache of one
    rank of a mesh is that of `spec.on_rank(ranks)`.

    Kinds of different depth (Gemma 3: five local layers to one global) are cut into pieces as deep as the shallowest
    kind, so that pages stay interchangeable; the last piece of a kind may be padded. guests: layers of a draft model, whose
    indices follow the spec's; each joins the smallest group of the whole past, so that one lease and one hit serve both.
    """
    kinds: dict[tuple[int | None, int], list[int]] = {}
    for index, layer in enumerate(spec.layers):
        if layer.share_from is None:
            kinds.setdefault((layer.window, layer.kv_bytes(spec.kv)), []).append(index)
    depth = min(len(members) for members in kinds.values())
    groups = []
    for (window, token_bytes), members in kinds.items():
        pieces = -(-len(members) // depth)
        per_piece = -(-len(members) // pieces)
        for first in range(0, len(members), per_piece):
            part = tuple(members[first : first + per_piece])
            groups.append(KvGroup(part, window, token_bytes * len(part)))
    for index, guest in enumerate(guests, len(spec.layers)):
        # A guest with a window of its own keeps its whole past all the same: it masks, nothing is freed behind it.
        whole = [one for one in groups if one.window is None] or [KvGroup((), None, 0)]
        host = min(whole, key=lambda one: one.token_bytes)
        joined = KvGroup((*host.layers, index), None, host.token_bytes + guest.kv_bytes(spec.kv))
        groups = [one for one in groups if one is not host] + [joined]
    page_bytes = max(group.token_bytes for group in groups) * page_tokens
    return KvLayout(tuple(groups), page_tokens, page_bytes, spec.kv)
