"""The interface between a decoder and a device's operations: a table that `choose` selects at start-up.

A device without a kernel has the reference or a default. Shapes: T query tokens, D = d_model. x has the model's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from ridgeline.ops import rows
from ridgeline.ops import sample as torch_sampling
from ridgeline.ops.capture import Capture, Uncaptured
from ridgeline.ops.noise import Purpose
from ridgeline.ops.sample import DrawRows, Limits, SampleAmong
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.verify import verify


@dataclass(frozen=True, slots=True)
class QkvShape:
    """How a merged QKV projection splits into heads, and the norms and rotation of the heads before attention.

    n_kv_heads: 0 for a layer that reads the keys and values of another layer: it writes none, and its projection has queries only.
    q_norm, k_norm: weights [head_dim] of per-head RMS norms or None. cos_sin: float32 [max_len, 2, rope_dim / 2], cosines
    at index 0 and sines at 1 (attention factor applied); rotate-half convention on the first rope_dim of head_dim.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    cos_sin: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    norm_eps: float
    norm_offset: bool


@dataclass(frozen=True, slots=True)
class Scaled:
    """A linear's input in 8 bits: value = values * scale of its token.

    values: float8_e4m3fn [T, D]. scales: float32 [T].
    """

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class Normed:
    """A linear's input before its RMS norm: value = rms_norm(x, weight, eps, offset), x [T, D]; see TokenwiseOps.

    Products of few tokens compute the norm while they read x. Other products call the device's norm first.
    """

    x: torch.Tensor
    weight: torch.Tensor
    eps: float
    offset: bool


RmsNorm = Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]
Heads = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""q [T, Hq, d], k and v [T, Hkv, d]; k and v are None for a layer that writes none."""
FloatInput = torch.Tensor | Normed
"""Input of a floating-point linear: [T, D], or a norm that the linear computes."""
Activation = FloatInput | Scaled
"""Input of any linear. Scaled: already quantized by the operation that produced it."""


def split_heads(merged: torch.Tensor, shape: QkvShape) -> Heads:
    """The heads of merged queries, keys and values [T, (Hq + 2 Hkv) * d], as views."""
    sizes = (shape.n_heads, shape.n_kv_heads, shape.n_kv_heads)
    q, k, v = merged.view(merged.shape[0], sum(sizes), shape.head_dim).split_with_sizes(sizes, 1)
    return (q, k, v) if shape.n_kv_heads else (q, None, None)


def apply_norm(x: FloatInput, rms_norm: RmsNorm) -> torch.Tensor:
    """x as a tensor. Computes the norm with `rms_norm` if x is Normed."""
    return rms_norm(x.x, x.weight, x.eps, x.offset) if isinstance(x, Normed) else x


@dataclass(frozen=True, slots=True)
class IntMatrix:
    """Integer weights of a linear: codes of `bits` bits with a scale per group of inputs. The last group may be shorter.

    weight[n, k] = (code[n, k] - zero[n, g]) * scale[n, g], g = k // group. group >= d_in: one scale per output channel.

    codes: uint8 [rows, ceil(d_in / 32) * 4 * bits] in the layout of IntOps.pack. rows: out, which the device may pad.
    scales: float16 [rows, groups] in the device's memory order, of either sign. Published scales of both 16-bit dtypes fit float16.
    zeros: uint8 [rows, groups] in the same order. None: 2^(bits - 1) everywhere.
    kept: of LLM.int8(), inputs whose codes are those of 0: their numbers int32 [n], their columns [out, n] in floating point in the
        layout of FloatOps.pack, and bool [in], whether an input is kept.
    inputs: how the product that `pack` made this for reads x: "float", or in 8 bits with a step per token ("rounded"), except
        outliers of any token of a call ("batch-outliers") or of each token ("token-outliers").
    scaling, extra: another form of scales (ops.blocks) and its second array; "e4m3": of codes, scales float32. more: outputs after.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    out: int
    d_in: int
    kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    inputs: str = "float"
    scaling: str = ""
    extra: torch.Tensor | None = None
    more: IntMatrix | None = None


@dataclass(frozen=True, slots=True)
class Matrix:
    """A loaded linear. packed: floating point in the layout of FloatOps.pack, integers, or e4m3. bias: [out] or None."""

    packed: torch.Tensor | IntMatrix | Fp8Matrix
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A loaded pre-norm decoder layer, or the share of it that one of several ranks holds. All norms have the eps and offset of
    `shape`. stream += out(attention(qkv(norm(stream)))); stream += down(act(gate) * up) with (gate, up) = gate_up(norm(stream)).
    A post norm is applied to what is added to the stream."""

    attention_norm: torch.Tensor
    qkv: Matrix
    shape: QkvShape
    out: Matrix
    feed_forward_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix
    activation: str
    peers: Callable[[], Any] | None = None
    """Memory in which a kernel adds what the ranks compute with `out` and `down` (Group.peers); None: there is one rank."""
    attention_post_norm: torch.Tensor | None = None
    feed_forward_post_norm: torch.Tensor | None = None


RunLayers = Callable[[torch.Tensor, Sequence[KvView], StepInputs], torch.Tensor]
"""(stream [T, D], views of the first layers, step) -> the stream after these layers. May overwrite the input stream."""


def embedded(table: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
    """See TokenwiseOps."""
    return F.embedding(ids, table) if scale == 1.0 else F.embedding(ids, table) * scale


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """See TokenwiseOps."""
    return torch.tanh(logits.float() / cap) * cap


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """The weights of a linear in 8 bits: weight[n, k] = values[n, k] * scales[n].

    values: float8_e4m3fn [out, in] in the layout of Fp8Ops.pack, which may pad both. scales: float32 [out], or [out, groups] of
    `group` inputs (set after `pack`, for MatmulOps.fp8_weight only). counters: int32, arrivals of the programs that share a tile of
    outputs. Zero between products, empty if no kernel needs them. rounded: the format quantizes inputs, too (set as `group` is).
    """

    values: torch.Tensor
    scales: torch.Tensor
    counters: torch.Tensor
    group: int = 0
    rounded: bool = False


@dataclass(frozen=True, slots=True)
class FloatOps:
    """Linears in floating point.

    pack(weight [out, in]) -> packed weight in the device's layout. memory(packed) -> all of its memory, with rows that pad it.
    pack_pruned: as pack, smaller if many weights are 0. None: the device has no such layout.
    linear(x [T, in], packed, bias) -> [T, out]. x may be Normed. A kernel that fuses the norm keeps it in float32, whereas the
        separate norm rounds to x's dtype.
    linear_add(x, packed, bias, stream [T, out]) -> stream + linear(x). May overwrite the stream with the result.
    linear_activate(x, packed, bias, kind) -> [T, F] = activate(linear(x), kind), packed from a merged [2 F, in].
    """

    pack: Callable[[torch.Tensor], torch.Tensor]
    linear: Callable[[FloatInput, torch.Tensor, torch.Tensor | None], torch.Tensor]
    linear_add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
    linear_activate: Callable[[FloatInput, torch.Tensor, torch.Tensor | None, str], torch.Tensor]
    pack_pruned: Callable[[torch.Tensor], torch.Tensor] | None = None
    memory: Callable[[torch.Tensor], torch.Tensor] = lambda packed: packed


@dataclass(frozen=True, slots=True)
class Fp8Ops:
    """Linears with e4m3 weights.

    A token's values are x * (448 / amax), rounded to nearest, ties to even; its scale is amax / 448 (448: the largest e4m3,
    Micikevicius et al. 2022). x is the unquantized operation's result in the model's dtype, amax its largest magnitude.
    pack(values [out, in], scales float32 [out] or [out, groups]) -> Fp8Matrix in the device's layout.
    linear(x, matrix, bias, dtype) -> [T, out] in dtype: products and sums of the 8-bit values in float32, times both scales,
        plus bias, rounded once. An unquantized x is quantized first, after its norm if it is Normed.
    linear_add(x, matrix, bias, stream) -> stream + linear, in the stream's dtype. May overwrite the stream with the result.
    linear_activate(x, matrix, bias, dtype, kind) -> activate(linear(x, matrix, bias, dtype), kind) of a merged gate and up, either
        quantized or left to the next product to quantize. A fused kernel keeps the result of `linear` in float32.
    """

    pack: Callable[[torch.Tensor, torch.Tensor], Fp8Matrix]
    linear: Callable[[Activation, Fp8Matrix, torch.Tensor | None, torch.dtype], torch.Tensor]
    linear_add: Callable[[Activation, Fp8Matrix, torch.Tensor | None, torch.Tensor], torch.Tensor]
    linear_activate: Callable[[Activation, Fp8Matrix, torch.Tensor | None, torch.dtype, str], Activation]


@dataclass(frozen=True, slots=True)
class IntOps:
    """Linears with integer weights.

    pack(codes uint8 [out, in], scales float32 [out, groups], zeros uint8 [out, groups] or None, bits, group) -> IntMatrix;
        bits 3, 4 or 8; group a multiple of 32, or at least `in`. float16 must represent the scales exactly.
    linear(x [T, in], matrix, bias) -> [T, out] in x's dtype: products with the dequantized weights, sums in float32, plus bias,
        rounded once. x may be Normed, as in FloatOps.
    linear_add, linear_activate: as in FloatOps. weights(matrix) -> float32 pieces [outputs, in]; None: they are not expanded.
    """

    pack: Callable[..., IntMatrix]
    linear: Callable[[FloatInput, IntMatrix, torch.Tensor | None], torch.Tensor]
    linear_add: Callable[[torch.Tensor, IntMatrix, torch.Tensor | None, torch.Tensor], torch.Tensor]
    linear_activate: Callable[[FloatInput, IntMatrix, torch.Tensor | None, str], torch.Tensor]
    weights: Callable[[IntMatrix], Iterator[torch.Tensor]] | None = None


@dataclass(frozen=True, slots=True)
class MatmulOps:
    """Linears by the number format of their weights.

    plain: floating point. fp8: weights and inputs in e4m3. fp8_weight: weights only. integer: weights only. w8a8: 8-bit integer
    weights with one scale per output; inputs rounded to 8 bits with a scale per token (reference.in_8_bits). mixed: LLM.int8(): as
    w8a8, but kept inputs (IntMatrix.kept, set after `pack`) and outliers stay in floating point (reference.mixed_inputs). blocks:
    weights only; `pack` takes an ops.blocks.Blocks. without_kernel: formats in e4m3, or "integer": others, that use the reference.
    """

    unquantized: FloatOps
    fp8: Fp8Ops
    fp8_weight: Fp8Ops
    integer: IntOps
    w8a8: IntOps
    mixed: IntOps
    blocks: IntOps
    without_kernel: frozenset[str] = frozenset()

    def has_kernel(self, quantization: str) -> bool:
        """Whether the device has kernels, not only the reference, for linears of this number format (--quantization)."""
        return (quantization if quantization.startswith("fp8") else "integer") not in self.without_kernel


Views = Callable[[torch.Tensor], Sequence[KvView]]
"""slots int64 [groups, T] of query tokens -> the view of each layer."""


@dataclass(frozen=True, slots=True)
class ChainParts:
    """A loaded draft model. embedding [V, D], multiplied by scale. norm [D]: the final norm. head: packed, N tokens. ids int32 [N]:
    token ids of the head's outputs; None: all tokens in order."""

    layers: Sequence[LayerParts]
    embedding: torch.Tensor
    scale: float
    norm: torch.Tensor
    eps: float
    offset: bool
    head: torch.Tensor
    ids: torch.Tensor | None


RunChain = Callable[[rows.ChainStart, Views], None]
"""Draft a chain with the draft model. The views are those of its layers."""


@dataclass(frozen=True, slots=True)
class DraftCut:
    """Rule for the number of draft nodes to verify: those whose expected tokens exceed their cost."""

    node_cost: float
    """Cost of verifying one node of one row, in tokens that the row gains meanwhile by plain decoding."""
    min_chance: float
    """A further level is drafted if some node of the last level is kept with more than this probability."""
    sizes: tuple[int, ...]
    """Node counts that may be verified, in addition to 0 and all. Each is a separate step shape."""


@dataclass(frozen=True, slots=True)
class RecurrentParts:
    """A loaded recurrent draft model.

    embedding [V, D]. matrices in the layout of reference.int_pack: mix [D, D], query [H d, D], out [D, H d], gate_up [2 F, D], down
    [D, F], head [N, D]. norms float32 [D]: query_norm, inner_norm, norm. cos_sin: of its queries, see QkvShape. ids int32 [N]:
    token ids of the head's outputs. parents, ranks int32 [M]: nodes of its largest draft tree, parents before children. parents: -1
    for the last known token. ranks: a node's rank among its parent's candidates, 0 for the likeliest. cut: see DraftCut.
    """

    embedding: torch.Tensor
    matrices: Mapping[str, IntMatrix]
    norms: Mapping[str, torch.Tensor]
    cos_sin: torch.Tensor
    head_dim: int
    ids: torch.Tensor
    parents: torch.Tensor
    ranks: torch.Tensor
    activation: str
    eps: float
    offset: bool
    cut: DraftCut


RunRecurrent = Callable[[Any, int, Views], torch.Tensor | None]
"""Draft with a recurrent draft model in one call.

Args: rows that have drawn (speculation.device.DraftRows); maximum number of nodes; views of the layer that it attends to.
Returns: int32 [S], number of leading nodes worth verifying. Nodes after them are undefined. None: all nodes.
"""


def recurrent_by_nodes(parts: RecurrentParts, otherwise: Callable[[], RunRecurrent]) -> RunRecurrent:
    """Draft the tree node by node. Default of Programs.recurrent."""
    return otherwise()


def unfused(parts: object, otherwise: Any) -> Any:
    """Run the layers or the chain one operation after the other. Default of Programs.layers and Programs.chain."""
    return otherwise


@dataclass(frozen=True, slots=True)
class Programs:
    """Kernels that run all layers, or a whole draft, in one call.

    layers(parts, run) -> a function that runs these layers: `run`, one by one, or a kernel, and `run` for steps that it lacks.
    chain(parts, otherwise) -> a function that drafts chains with this decoder: `otherwise`, or a kernel.
    recurrent(parts, otherwise) -> a function that drafts with a recurrent draft model: the result of `otherwise()`, or a kernel.
    prunes_drafts: the kernel of `recurrent` returns how many of its nodes are worth verifying.
    """

    layers: Callable[[Sequence[LayerParts], RunLayers], RunLayers] = unfused
    chain: Callable[[ChainParts, RunChain], RunChain] = unfused
    recurrent: Callable[[RecurrentParts, Callable[[], RunRecurrent]], RunRecurrent] = recurrent_by_nodes
    prunes_drafts: bool = False


class Attend(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        view: KvView,
        step: StepInputs,
        lse_needed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See AttentionOps."""


@dataclass(frozen=True, slots=True)
class AttentionOps:
    """Write the KV cache and attend to it.

    qkv_write(qkv [T, (Hq + 2 Hkv) * d], shape, view, step) -> (q [T, Hq, d], k [T, Hkv, d], v [T, Hkv, d]): per-head norms,
        rotary embedding at step.position, keys and values written into view at view.slots. With shape.n_kv_heads 0 it only turns
        the queries: k and v are None, and view is the cache that another layer has written in this step.
    attend(q, k, v, view, step) -> (out [T, Hq, d], lse float32 [T, Hq] or None): causal attention of each row's query
        tokens over all slots of the row. The cache contains this step's keys already; k, v hold them contiguously for kernels that
        prefer it. With lse_needed, the sixth argument, lse is log(sum(exp(score))) over the keys that a token sees, with scaled and
        capped scores; ops.merge combines parts of the keys with it. A token that sees no key gets out 0 and lse -inf. Without
        lse_needed lse may be None, and out and lse of tokens without a row are undefined.
    kv_formats: names in KV_FORMATS, beside the model's dtype, that qkv_write writes and that attend, SamplerOps.keep and all
        programs of whole layers read (KvView.format).
    selecting: these operations for layers with KvView.selection, whose cache has the model's dtype. None: those of ops.selective.
    """

    qkv_write: Callable[[torch.Tensor, QkvShape, KvView, StepInputs], Heads]
    attend: Attend
    kv_formats: frozenset[str] = frozenset()
    selecting: Callable[[AttentionOps], AttentionOps] | None = None


NormAdd = Callable[[torch.Tensor, torch.Tensor, float, bool, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TokenwiseOps:
    """Operations on each token's vector independently.

    rms_norm(x [T, D], weight [D], eps, offset) -> [T, D]: x / rms(x) * (weight + offset as 0 or 1), statistics in float32.
    norm_add(x, weight, eps, offset, stream [T, D]) -> stream + rms_norm(x ..) of a post norm. May overwrite the stream.
    activate(gate_up [T, 2 F], kind) -> [T, F]: act(gate) * up.
    place(x, out [T, D]): write x, normed if it is Normed, to columns of a wider matrix.
    embed(table [V, D], ids int32 [T], scale) -> [T, D]: rows of the table, times scale.
    cap(logits [N, V], cap) -> cap * tanh(logits / cap) in float32.
    """

    rms_norm: RmsNorm
    norm_add: NormAdd
    activate: Callable[[torch.Tensor, str], torch.Tensor]
    place: Callable[[FloatInput, torch.Tensor], None]
    embed: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = embedded
    cap: Callable[[torch.Tensor, float], torch.Tensor] = capped


def norm_then_add(rms_norm: RmsNorm) -> NormAdd:
    """TokenwiseOps.norm_add as two operations."""

    def norm_add(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool, stream: torch.Tensor) -> torch.Tensor:
        return stream + rms_norm(x, weight, eps, offset)

    return norm_add


class Sample(Protocol):
    """Type of SamplerOps.sample."""

    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        key: torch.Tensor,
        position: torch.Tensor,
        purpose: Purpose,
        limits: Limits | None = None,
    ) -> torch.Tensor:
        """Draw a token from each row of `logits`."""


@dataclass(frozen=True, slots=True)
class SamplerOps:
    """Operations on the device's rows around a forward pass: gather query tokens, draw, verify drafts, append tokens.

    gather, advance, last, to_host, keep: see ops.rows. verify: see ops.verify.
    sample, sample_among, draw: see ops.sample. All devices draw the same tokens, unless a sum is within its rounding of top_p.
    """

    sample: Sample = torch_sampling.sample
    sample_among: SampleAmong = torch_sampling.sample_among
    draw: DrawRows = torch_sampling.draw
    gather: Callable[[rows.RowState, torch.Tensor, rows.Spread | None], rows.Gathered] = rows.gather
    advance: Callable[[rows.RowState, torch.Tensor, torch.Tensor], torch.Tensor] = rows.advance
    verify: Callable[
        [rows.RowState, torch.Tensor, torch.Tensor, rows.Drafted], tuple[torch.Tensor, torch.Tensor | None]
    ] = verify
    keep: Callable[[rows.RowState, torch.Tensor, torch.Tensor, torch.Tensor, rows.Runs, int], None] = rows.keep
    last: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], torch.Tensor] = rows.last
    to_host: rows.ToHost = rows.to_host


class Grouped(Protocol):
    """The weights of all experts of a layer, multiplied without the host: for devices whose steps are captured."""

    def __call__(
        self, x: torch.Tensor, logits: torch.Tensor, per_token: int, normalized: bool, load: torch.Tensor
    ) -> torch.Tensor:
        """`route`, then `by_expert` of x [T, D] (ops.experts). Adds each expert's tokens to load int64 [experts]. logits:
        contiguous."""

    def tensors(self) -> Iterator[torch.Tensor]: ...


class ExpertOps(Protocol):
    """Experts of a device whose steps are captured, in the number formats of core.quantization.check_experts."""

    def group(self, gate_up: Sequence[Matrix], down: Sequence[Matrix], kind: str, held: range) -> Grouped:
        """Take the merged gate and up, and down, of the experts in `held`, as Weight.stored returns them."""


FromHost = Callable[[torch.Tensor, torch.device], torch.Tensor]
"""Copy a matrix from pinned host memory to a device, in the order of its stream."""


@dataclass(frozen=True, slots=True)
class Ops:
    """The operations of one device. capture: see ops.capture.Capture. experts: None: the host groups tokens by expert. from_host:
    the CPU may multiply few tokens of linears in its memory (quant.hosted). adapters: (dtype) -> ops.adapters.AdapterOps."""

    name: str
    tokenwise: TokenwiseOps
    attention: AttentionOps
    matmul: MatmulOps
    adapters: Callable[[torch.dtype], Any]
    sampler: SamplerOps = SamplerOps()
    programs: Programs = Programs()
    capture: Capture = Uncaptured
    experts: ExpertOps | None = None
    from_host: FromHost | None = None
