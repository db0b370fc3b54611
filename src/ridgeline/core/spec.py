"""The architecture of a decoder, layer by layer, and formulas for its parameters, FLOPs, weight bytes and KV bytes.

Engine, `fit`, metrics, planner and bench all use these formulas. A test compares them with the tensors of `models.build`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from ridgeline.core.errors import ConfigError
from ridgeline.core.experts import ExpertSpec, Idle, Matrix, idle_bytes
from ridgeline.core.formats import DTYPE_BYTES, GROUPS, KV_FORMATS, NUMBER_FORMATS, QUANTIZED_KV, KvFormat, NumberFormat
from ridgeline.core.gpu_layout import held_format
from ridgeline.core.ranks import units_on_rank

__all__ = [
    "DTYPE_BYTES",
    "GROUPS",
    "KV_FORMATS",
    "NUMBER_FORMATS",
    "QUANTIZED_KV",
    "KvFormat",
    "KvGroup",
    "KvLayout",
    "LayerSpec",
    "ModelSpec",
    "NumberFormat",
    "Rope",
    "Shares",
    "causal_pairs",
    "kv_layout",
    "restricts_last_layer",
]

Shares = Sequence[tuple[int, int]]
"""(cached tokens, query tokens) of each row of a step."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al. 2021). `scaling` names how frequencies are adapted beyond the trained context.

    none: as trained. linear: positions divided by `factor` (Chen et al. 2023). llama3: long wavelengths divided by
    `factor`, short ones kept, interpolated between (Llama 3.1 model card). yarn: NTK-by-parts (Peng et al. 2023) with
    `attention_factor` multiplying the rotated values; truncate: the ramp between parts begins and ends at whole pairs. longrope:
    each pair's frequency is divided by a factor of its own (Ding et al. 2024): one of `long_factors` if a longer context than the
    original one is served, else one of `short_factors`. identity: nothing rotates. dim: elements of a head that rotate, the first
    ones.
    """

    theta: float = 10_000.0
    dim: int = 64
    scaling: Literal["none", "linear", "llama3", "yarn", "longrope", "identity"] = "none"
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer.

    window: a query sees keys at most `window - 1` positions back; None: all earlier keys. share_from: index of the earlier layer
    whose keys and values this layer reads. It has no weights for keys and values and writes none; n_kv_heads is that layer's.
    d_ff: inner width of the feed-forward block; with experts, of all that one token uses, at most, on this rank.
    budget: slots per KV head that the only query of a row reads, in whole pages (ops.selective); None: all.
    formats: number formats of q, k, v, out, gate, up and down, where a checkpoint has several (names that NUMBER_FORMATS lacks mean
    the model's dtype); (): ModelSpec.quantization.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    rope: Rope
    window: int | None = None
    softcap: float | None = None
    share_from: int | None = None
    experts: ExpertSpec | None = None
    budget: int | None = None
    formats: tuple[str, ...] = ()

    def on_rank(self, ranks: int, attention_ranks: int | None = None) -> LayerSpec:
        """The part of the layer on one of `ranks` ranks, of which `attention_ranks` divide the heads (None: all). Raises
        ConfigError where it cannot be divided; see units_on_rank."""
        heads_ranks = attention_ranks or ranks
        if self.n_heads % heads_ranks or (self.experts is None and self.d_ff % ranks):
            raise ConfigError(
                f"{self.n_heads} heads and a feed-forward width of {self.d_ff} cannot be split over {ranks} devices: use a "
                "number of devices that divides both."
            )
        experts, kv_heads = self.experts and self.experts.on_rank(ranks), units_on_rank(self.n_kv_heads, heads_ranks)
        d_ff = experts.active_width if experts else self.d_ff // ranks
        return replace(self, n_heads=self.n_heads // heads_ranks, n_kv_heads=kv_heads, d_ff=d_ff, experts=experts)

    @property
    def written_heads(self) -> int:
        """KV heads that this layer computes and writes."""
        return 0 if self.share_from is not None else self.n_kv_heads

    def slot_bytes(self, kv_format: KvFormat) -> int:
        """Bytes of one token's keys and values that this layer reads."""
        return 2 * self.n_kv_heads * kv_format.vector_bytes(self.head_dim)

    def kv_bytes(self, kv_format: KvFormat) -> int:
        """Bytes of keys and values that one token adds to this layer's cache."""
        return 0 if self.share_from is not None else self.slot_bytes(kv_format)

    @property
    def bounds_bytes(self) -> int:
        """Bytes of the bounds of a page's keys: minimum and maximum of each element, in bfloat16."""
        return 0 if self.budget is None else 4 * self.written_heads * self.head_dim

    def attention_flops(self, start: int, tokens: int) -> int:
        """FLOPs of QK^T and PV for `tokens` causal queries after `start` positions, with the window applied."""
        return 4 * causal_pairs(start, tokens, self.window) * self.n_heads * self.head_dim

    def attention(self, shares: Shares, queries: int | None = None) -> tuple[int, int]:
        """(FLOPs of QK^T and PV, cache slots read) for rows that run `n` queries after `start` positions, for (start, n) in shares.

        queries: number of queries that attend, each reading its slots separately; None: all. Their rows are not known, so each
        counts the average slots of a row's last query.
        """
        if queries is None:
            flops = sum(self.attention_flops(start, count) for start, count in shares)
            return flops, sum(self.slots_seen(start, count) for start, count in shares)
        ends = (start + count for start, count in shares)
        slots = queries * sum(min(end, self.window or end) for end in ends) // max(1, len(shares))
        return 4 * slots * self.n_heads * self.head_dim, slots

    def slots_seen(self, start: int, tokens: int) -> int:
        """Cache slots that `tokens` queries after `start` positions read, each once. Bounds of 16 slots count as one."""
        end = start + tokens
        if self.budget is not None and tokens == 1 and end > self.budget:
            return min(end, self.budget + end // 16)
        return end if self.window is None else min(end, self.window - 1 + tokens)


TOGETHER = (3, 1, 2, 1)
"""How many of the matrices q, k, v, out, gate, up and down each linear of a layer multiplies: LayerSpec.formats has them in this
order."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model. `dtype` is that of the checkpoint's weights.

    `quantization`: the number format of the layers' matrices, a name of NUMBER_FORMATS; "" means `dtype`.
    `head_format`: likewise of the head. A tied head that has one is kept beside the embedding, which is in `dtype`.
    `kv_format`: the format of the cache, a name of KV_FORMATS; "" means `dtype`. `vocabulary_ranks`: ranks that share the rows of
    embedding and head. `device_kind`: of the device with the weights (core.gpu_blocks). `host_bytes`: of those in host memory.
    `both_forms`: quantized linears are in `dtype` too, which steps of many rows read (core.gpu_blocks); memory is not counted here.

    `norm_offset`: Gemma's norms scale by (1 + weight). `post_norms`: Gemma 2 and 3 also norm the output of attention and
    feed-forward, before the residual addition. `embed_scale`: Gemma multiplies embeddings by sqrt(d_model), rounded to the
    weights' dtype. `query_scale`: replaces 1/sqrt(head_dim) in attention. `qk_norm`: queries and keys are normed, "head": each head
    alone (Qwen3), "all": all heads of a token together (OLMoE, OLMo 2).

    `norm`: of the residual stream: RMS norm, or layer norm without or with a bias. `pre_norms`: attention and feed-forward read the
    normed stream; OLMo 2 only norms their outputs. `parallel`: both read one norm of the stream, and their outputs are added to it
    (Cohere). `gated`: feed-forward has a gate; GPT-2's has none. `interleaved`: pairs of neighbours rotate in the checkpoint. They
    are moved apart when it is loaded. `positions`: rows of a learned table that is added to the embeddings; 0: there is none.
    `residual_scale`: multiplies what a block adds to the stream (Granite). `logit_scale`: multiplies logits (Granite, Cohere).
    `sinks`: attention has a logit for each head that joins the softmax's sum and has no value (gpt-oss). `swiglu_clamped`: see
    ops.reference.clamped_swiglu.
    """

    architecture: str
    vocab_size: int
    d_model: int
    layers: tuple[LayerSpec, ...]
    max_len: int
    norm_eps: float = 1e-5
    norm_offset: bool = False
    post_norms: bool = False
    qk_norm: Literal["", "head", "all"] = ""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm: Literal["rms", "layer", "layer_bias"] = "rms"
    pre_norms: bool = True
    parallel: bool = False
    gated: bool = True
    interleaved: bool = False
    positions: int = 0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    sinks: bool = False
    activation: Literal["silu", "gelu_tanh", "gelu", "relu", "swiglu_clamped"] = "silu"
    tied: bool = False
    embed_scale: float = 1.0
    query_scale: float | None = None
    final_softcap: float | None = None
    dtype: str = "bfloat16"
    quantization: str = ""
    head_format: str = ""
    kv_format: str = ""
    vocabulary_ranks: int = 1
    host_bytes: int = 0
    both_forms: bool = False
    device_kind: str = "cpu"
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    mtp_layers: int = 0
    """Layers for multi-token prediction in the checkpoint, behind those of the decoder, which does not have them."""

    def scale_of(self, layer: LayerSpec) -> float:
        return self.query_scale if self.query_scale is not None else layer.head_dim**-0.5

    @property
    def plain(self) -> bool:
        """Whether kernels know every operation: those that run whole layers, and those that a CPU records."""
        blocks = self.norm == "rms" and self.pre_norms and self.gated and not self.parallel
        return blocks and not self.positions and not self.sinks and self.residual_scale == 1.0 == self.logit_scale

    @property
    def matrix_dtype(self) -> str:
        """Precision of the layers' matrix products. Attention and the head compute in `dtype`."""
        stored = NUMBER_FORMATS.get(self.quantization)
        return stored.products or self.dtype if stored else self.dtype

    @property
    def kv(self) -> KvFormat:
        """The format of the cache."""
        return KV_FORMATS[self.kv_format or self.dtype]

    def on_rank(self, ranks: int, attention_ranks: int | None = None) -> ModelSpec:
        """The part of the model on one of `ranks` ranks: its share of every layer (LayerSpec.on_rank), of the embedding and of the
        head. Norms of the stream are replicated. Raises ConfigError where it cannot be divided."""
        if ranks == 1:
            return self
        layers = tuple(layer.on_rank(ranks, attention_ranks) for layer in self.layers)
        return replace(self, layers=layers, vocabulary_ranks=ranks)

    @property
    def vocabulary_rows(self) -> int:
        """Rows of embedding and head that each rank holds. The last ranks may hold rows of zeros beyond the vocabulary."""
        return -(-self.vocab_size // self.vocabulary_ranks)

    # --- parameters -------------------------------------------------------------------------------------------------

    def matrices(self, layer: LayerSpec) -> tuple[Matrix, ...]:
        """The matrices of one layer in the order of their use."""
        queries, keys, d_ff = layer.n_heads * layer.head_dim, layer.written_heads * layer.head_dim, layer.d_ff
        gate_up = Matrix("gate_up", (1 + self.gated) * d_ff, self.d_model, self.mlp_bias)
        dense = gate_up, Matrix("down", self.d_model, d_ff, self.mlp_bias)
        matrices = (
            Matrix("qkv", queries + 2 * keys, self.d_model, self.qkv_bias),
            Matrix("out", self.d_model, queries, self.out_bias),
            *(layer.experts.matrices(self.d_model) if layer.experts else dense),
        )
        if not layer.formats:
            return matrices
        sizes = iter(zip((queries, keys, keys, self.d_model, d_ff, d_ff, self.d_model), layer.formats, strict=True))
        counts = zip(matrices, TOGETHER, strict=True)
        return tuple(replace(matrix, parts=tuple(islice(sizes, count))) for matrix, count in counts)

    def matrix_bytes(self, matrix: Matrix) -> int:
        """Bytes of a stored matrix, all its copies: elements, scales, zero points, bias."""
        width, total = DTYPE_BYTES[self.dtype], 0
        for outputs, name in matrix.parts or ((matrix.outputs, "" if matrix.plain else self.quantization),):
            stored = NUMBER_FORMATS.get(name)
            if stored is None or (stored.experts and not matrix.chosen):
                total += outputs * matrix.inputs * width
            else:
                total += held_format(stored, self.device_kind, matrix).matrix_bytes(outputs, matrix.inputs, width)
        return matrix.copies * (total + (matrix.outputs * width if matrix.bias else 0))

    def layer_linear_params(self, layer: LayerSpec) -> int:
        """Elements of the weight matrices of one layer (no biases, no norms)."""
        return sum(matrix.copies * matrix.elements for matrix in self.matrices(layer))

    def active_params(self, layer: LayerSpec) -> int:
        """Elements of the weight matrices of one layer that a token is multiplied by."""
        return sum(round(matrix.used * matrix.elements) for matrix in self.matrices(layer))

    def stream_norms(self) -> int:
        """Number of vectors of width d_model of the norms in one layer: weights and biases."""
        before = (1 if self.parallel else 2) if self.pre_norms else 0
        return (before + 2 * self.post_norms) * self.norm_vectors

    @property
    def norm_vectors(self) -> int:
        """Vectors of one norm: its weight, and its bias if it has one."""
        return 2 if self.norm == "layer_bias" else 1

    @property
    def outer_params(self) -> int:
        """Elements of the final norm and of the learned positions."""
        return (self.norm_vectors + self.positions) * self.d_model

    def head_norm_params(self, layer: LayerSpec) -> int:
        """Elements of the query and key norms of one layer, and of its sinks."""
        heads = layer.n_heads + layer.written_heads if self.qk_norm == "all" else 1 + (layer.written_heads > 0)
        return (heads * layer.head_dim if self.qk_norm else 0) + self.sinks * layer.n_heads

    def layer_vector_params(self, layer: LayerSpec) -> int:
        """Elements of norms and biases of one layer."""
        biases = sum(matrix.copies * matrix.outputs for matrix in self.matrices(layer) if matrix.bias)
        return self.stream_norms() * self.d_model + self.head_norm_params(layer) + biases

    @property
    def embedding_params(self) -> int:
        return self.vocabulary_rows * self.d_model

    @property
    def params(self) -> int:
        """Number of parameters; a tied head counts once."""
        layers = sum(self.layer_linear_params(layer) + self.layer_vector_params(layer) for layer in self.layers)
        return layers + self.outer_params + self.embedding_params * (1 if self.tied else 2)

    @property
    def layer_bytes(self) -> int:
        """Bytes of the stored weights of all layers."""
        width, total = DTYPE_BYTES[self.dtype], 0
        for layer, layers in Counter(self.layers).items():
            vectors = (self.stream_norms() * self.d_model + self.head_norm_params(layer)) * width
            total += layers * (vectors + sum(self.matrix_bytes(matrix) for matrix in self.matrices(layer)))
        return total

    @property
    def head(self) -> Matrix:
        """The output layer."""
        return Matrix("head", self.vocabulary_rows, self.d_model, parts=((self.vocabulary_rows, self.head_format),))

    @property
    def head_bytes(self) -> int:
        """Bytes of the head, those of the embedding if it shares them."""
        return self.matrix_bytes(self.head)

    @property
    def weight_bytes(self) -> int:
        outer = (self.outer_params + self.embedding_params) * DTYPE_BYTES[self.dtype]
        return self.layer_bytes + outer + (0 if self.shares_embedding else self.head_bytes)

    @property
    def has_experts(self) -> bool:
        return any(layer.experts for layer in self.layers)

    @property
    def shares_embedding(self) -> bool:
        """Whether the head is the embedding's memory."""
        return self.tied and not self.head_format

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a step reads: layers with all their experts, final norm, head. Embedding rows are not counted.
        Linears in both forms count as blocks, which steps of few rows read; see gpu_blocks.wide_reads."""
        return self.layer_bytes + self.norm_vectors * self.d_model * DTYPE_BYTES[self.dtype] + self.head_bytes

    def idle_bytes(self, tokens: int, logits: int) -> int:
        """Expected bytes of step_weight_bytes that a step does not read: experts that none of its tokens uses. See linear_flops."""
        return idle_bytes(self.experts(self.layers[:-1]), tokens) + idle_bytes(self.experts(self.layers[-1:]), logits)

    def experts(self, layers: Sequence[LayerSpec]) -> Counter[Idle]:
        """The matrices of these layers' experts, see idle_bytes."""
        blocks = ((layer.experts, self.matrices(layer)) for layer in layers)
        pairs = ((experts, matrix) for experts, matrices in blocks for matrix in matrices if experts and matrix.chosen)
        return Counter((experts.missed, self.matrix_bytes(matrix)) for experts, matrix in pairs)

    # --- work -------------------------------------------------------------------------------------------------------

    def linear_flops(self, tokens: int, logits: int) -> int:
        """FLOPs of all matrix products for `tokens` query tokens, a multiply-add counted 2.

        logits: query tokens whose logits are needed. For the others the last layer computes keys and values only.
        """
        all_layers = sum(self.active_params(layer) for layer in self.layers)
        qkv, *_ = self.matrices(self.layers[-1])
        restricted = self.active_params(self.layers[-1]) - qkv.elements
        return 2 * (tokens * (all_layers - restricted) + logits * (restricted + self.embedding_params))

    def attention(self, shares: Shares, needed: int) -> tuple[int, int]:
        """(FLOPs, bytes of cache read) of attention in all layers; see LayerSpec.attention.

        needed: query tokens whose logits are needed. Where they are few, the last layer attends for them only.
        """
        tokens = sum(count for _, count in shares)
        parts = [layer.attention(shares) for layer in self.layers[:-1]]
        parts.append(self.layers[-1].attention(shares, needed if restricts_last_layer(needed, tokens) else None))
        read = sum(slots * layer.slot_bytes(self.kv) for layer, (_, slots) in zip(self.layers, parts, strict=True))
        return sum(flops for flops, _ in parts), read

    # --- KV cache ---------------------------------------------------------------------------------------------------

    def kv_bytes_per_token(self) -> int:
        """Bytes that one token adds to the cache of all layers, before windows drop any."""
        return sum(layer.kv_bytes(self.kv) for layer in self.layers)

    def kv_bytes(self, length: int) -> int:
        """Bytes of live keys and values for a sequence of `length` tokens. A layer with a window keeps at most `window` tokens."""
        return sum(layer.kv_bytes(self.kv) * min(length, layer.window or length) for layer in self.layers)

    def kv_read_bytes(self, start: int, tokens: int) -> int:
        """Bytes of cache that one step reads for a sequence of `start` cached tokens that runs `tokens` queries (each key once)."""
        return sum(layer.slots_seen(start, tokens) * layer.slot_bytes(self.kv) for layer in self.layers)


def restricts_last_layer(needed: int, tokens: int) -> bool:
    """Whether the last layer attends only for the query tokens whose logits are needed. It does where they are few."""
    return 16 * needed <= tokens


def causal_pairs(start: int, tokens: int, window: int | None) -> int:
    """Number of (query, key) pairs of `tokens` causal queries after `start` positions, each seeing at most `window` keys."""
    end = start + tokens
    if window is None or end <= window:
        return tokens * start + tokens * (tokens + 1) // 2
    growing = max(0, min(end, window) - start)
    return growing * start + growing * (growing + 1) // 2 + (tokens - growing) * window


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers of one kind that share a page table. A page of the group holds `page_tokens` slots for each of its layers."""

    layers: tuple[int, ...]
    window: int | None
    token_bytes: int
    """Bytes of keys and values per token, summed over the layers of the group."""
    bounds_bytes: int = 0
    """Bytes of the bounds of a page's keys, summed over the layers of the group."""

    def page_bytes(self, page_tokens: int) -> int:
        """Bytes that the layers of the group use of a page."""
        return self.token_bytes * page_tokens + self.bounds_bytes


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How the cache is divided. Every page of every group has `page_bytes` bytes, so one pool serves all groups. ranks: of context
    parallelism, each of which holds an equal run of the slots of every page; page_bytes are on one of them."""

    groups: tuple[KvGroup, ...]
    page_tokens: int
    page_bytes: int
    format: KvFormat
    ranks: int = 1

    @property
    def padding(self) -> float:
        """Share of the cache's bytes that no layer uses, because groups of unequal size share one page size."""
        used = sum(group.page_bytes(self.page_tokens // self.ranks) for group in self.groups)
        return 1 - used / (self.page_bytes * len(self.groups))

    def pages_for(self, length: int, chunk: int) -> int:
        """Maximum pages that a sequence of `length` tokens holds at once, if a step adds at most `chunk` tokens to it."""
        total = 0
        for group in self.groups:
            live = length if group.window is None else min(length, group.window + chunk + self.page_tokens)
            total += -(-live // self.page_tokens)
        return total


def kv_layout(spec: ModelSpec, page_tokens: int, drafter_layers: tuple[LayerSpec, ...] = ()) -> KvLayout:
    """Divide the layers into groups of one kind (window, KV heads, head size) with pages of equal size.

    A kind with more layers than the smallest kind (Gemma 3: five local layers to one global) is cut into groups of that smallest
    number of layers, so that pages are interchangeable. The last group of a kind may be padded. For one rank of a mesh pass
    `spec.on_rank(ranks)`.

    Args:
        drafter_layers: layers of a draft model, with indices after the spec's. Each joins the smallest group without a window, so
            that one lease and one prefix hit serve both models.
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
            bounds_bytes = sum(spec.layers[index].bounds_bytes for index in part)
            groups.append(KvGroup(part, window, token_bytes * len(part), bounds_bytes))
    for index, draft_layer in enumerate(drafter_layers, len(spec.layers)):
        if draft_layer.share_from is not None:
            continue
        # A draft layer with a window masks its attention; its pages are not freed.
        unwindowed = [group for group in groups if group.window is None] or [KvGroup((), None, 0)]
        host = min(unwindowed, key=lambda group: group.token_bytes)
        token_bytes = host.token_bytes + draft_layer.kv_bytes(spec.kv)
        joined = KvGroup((*host.layers, index), None, token_bytes, host.bounds_bytes)
        groups = [group for group in groups if group is not host] + [joined]
    page_bytes = max(group.page_bytes(page_tokens) for group in groups)
    return KvLayout(tuple(groups), page_tokens, page_bytes, spec.kv)
