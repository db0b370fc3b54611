"""The set of operations a decoder runs on, as one value: the reference, the CPU's or the GPU's, chosen once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from ridgeline.ops import rows
from ridgeline.ops.capture import Capture, Uncaptured
from ridgeline.ops.noise import Purpose
from ridgeline.ops.sample import Limits
from ridgeline.ops.sample import sample as sample_plainly
from ridgeline.ops.step import KvView, StepInputs


@dataclass(frozen=True, slots=True)
class QkvShape:
    """How one merged projection splits into heads, and what happens to them before attention.

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
    """A linear's input before its RMS norm: value = rms_norm(x, weight, eps, offset), x [T, D]; see Ops.

    A product of few tokens norms while it reads x; every other asks the norm of its device for the values.
    """

    x: torch.Tensor
    weight: torch.Tensor
    eps: float
    offset: bool


Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""q [T, Hq, d], k and v [T, Hkv, d]."""
Plain = torch.Tensor | Normed
"""What a linear in floating point takes: [T, D], or a norm that is still to be done."""
Activation = Plain | Scaled
"""What any linear takes; Scaled: quantized by the operation that made it."""


def plain(x: Plain, rms_norm: Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]) -> torch.Tensor:
    """x as a tensor, normed with `rms_norm` where that is still to be done."""
    return rms_norm(x.x, x.weight, x.eps, x.offset) if isinstance(x, Normed) else x


@dataclass(frozen=True, slots=True)
class IntMatrix:
    """The weights of a linear in integers of `bits` bits, a scale per group of inputs; the last group may be shorter.

    weight[n, k] = (code[n, k] - zero[n, g]) * scale[n, g], g = k // group; group >= d_in: one scale per output channel.

    codes: uint8, as IntOps.pack laid them out, out * ceil(d_in / 32) * 4 * bits bytes (outputs may be padded beyond that).
    scales: float16 [out, groups], in the order the device wants, of either sign. float16 holds published scales of both half
    types.
    zeros: uint8 [out, groups] in the same order, or None: 2^(bits - 1) everywhere.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    bits: int
    group: int
    out: int
    d_in: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A loaded linear: packed as Ops.pack made it of floating-point numbers, in integers, or in 8 bits with its inputs in 8
    bits too; bias [out] or None."""

    packed: torch.Tensor | IntMatrix | Fp8Matrix
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A loaded decoder layer on one device, pre-norm, without post norms, its linears as Matrix says:

    stream += out(attention(qkv(norm(stream)))); stream += down(act(gate) * up), (gate, up) = gate_up(norm(stream)). All its
    norms have the eps and offset of `shape`.
    """

    attention_norm: torch.Tensor
    qkv: Matrix
    shape: QkvShape
    out: Matrix
    feed_forward_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix
    activation: str


RunLayers = Callable[[torch.Tensor, Sequence[KvView], StepInputs], torch.Tensor]
"""(stream [T, D], views of the first layers, step) -> the stream behind the last of these. The caller gives the stream up."""


def embedded(table: torch.Tensor, ids: torch.Tensor, scale: float) -> torch.Tensor:
    """See Ops.embed."""
    found = F.embedding(ids, table)
    return found if scale == 1.0 else found * scale


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """See Ops.cap."""
    return torch.tanh(logits.float() / cap) * cap


def one_by_one(parts: Sequence[LayerParts], run: RunLayers) -> RunLayers:
    """The layers as they are."""
    return run


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """The weights of a linear in 8 bits: weight[n, k] = values[n, k] * scales[n].

    values: float8_e4m3fn [out, in]. scales: float32 [out]. counters: int32, what programs that share an output tile
    count themselves with; zero between products, empty where no kernel needs them.
    """

    values: torch.Tensor
    scales: torch.Tensor
    counters: torch.Tensor


@dataclass(frozen=True, slots=True)
class Fp8Ops:
    """What fp8 linears run on: the products, and the activation, which quantizes as it goes.

    A token's values are x * (448 / amax), rounded to the nearest even; its scale is amax / 448 (448: the largest e4m3,
    Micikevicius et al. 2022). x is the plain operation's result in the model's dtype, amax its largest magnitude.
    activate: as in Ops, with a Scaled for the result, or plain where products quantize what they read.
    pack(values, scales) -> Fp8Matrix over the same memory. linear(x, matrix, bias, dtype) -> [T, out] in dtype: products
        and sums of the 8-bit values in float32, times both scales, plus bias, rounded once; an x that is not quantized
        yet is first, after its norm where that is still to be done.
    linear_add(x, matrix, bias, stream) -> stream + linear, in the stream's dtype; its memory may hold the result.
    linear_activate(x, matrix, bias, dtype, kind) -> activate(linear(x, matrix, bias, dtype), kind), of a merged gate and up;
        within one kernel linear's results keep float32.
    """

    activate: Callable[[torch.Tensor, str], Activation]
    pack: Callable[[torch.Tensor, torch.Tensor], Fp8Matrix]
    linear: Callable[[Activation, Fp8Matrix, torch.Tensor | None, torch.dtype], torch.Tensor]
    linear_add: Callable[[Activation, Fp8Matrix, torch.Tensor | None, torch.Tensor], torch.Tensor]
    linear_activate: Callable[[Activation, Fp8Matrix, torch.Tensor | None, torch.dtype, str], Activation]


@dataclass(frozen=True, slots=True)
class IntOps:
    """What weight-only integer linears run on.

    pack(codes uint8 [out, in], scales float32 [out, groups], zeros uint8 [out, groups] or None, bits, group) -> IntMatrix;
        bits 3, 4 or 8; group a multiple of 32, or at least `in`. Scales are numbers that float16 holds.
    linear(x [T, in], matrix, bias) -> [T, out] in x's dtype: products with the dequantized weights, sums in float32, plus
        bias, rounded once. x may be Normed, as in Ops.linear.
    linear_add, linear_activate: as in Ops.
    """

    pack: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int], IntMatrix]
    linear: Callable[[Plain, IntMatrix, torch.Tensor | None], torch.Tensor]
    linear_add: Callable[[torch.Tensor, IntMatrix, torch.Tensor | None, torch.Tensor], torch.Tensor]
    linear_activate: Callable[[Plain, IntMatrix, torch.Tensor | None, str], torch.Tensor]


Views = Callable[[torch.Tensor], Sequence[KvView]]
"""slots int64 [groups, T] of query tokens -> the view of each layer."""


@dataclass(frozen=True, slots=True)
class ChainParts:
    """A loaded decoder that drafts. embedding [V, D], multiplied by scale; norm [D], the final one; head: packed, of N tokens;
    ids int32 [N], which ones they are (None: all, in their order)."""

    layers: Sequence[LayerParts]
    embedding: torch.Tensor
    scale: float
    norm: torch.Tensor
    eps: float
    offset: bool
    head: torch.Tensor
    ids: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LastTokens:
    """Tokens at the end of rows, all int32: q_start [S + 1], row_of [T], place [T], from 0 for a row's last token downwards;
    n_query [S]: ones, since they end at the next query token. most: of a row."""

    n_query: torch.Tensor
    q_start: torch.Tensor
    row_of: torch.Tensor
    place: torch.Tensor
    most: int


@dataclass(frozen=True, slots=True)
class ChainStart:
    """Where a chain begins. state: its ints move along the draft, and what is drafted is written behind what rows know. rows
    int32 [S]; temperature float32 [S]; last: what is read before the first token is drafted; count: tokens to draft; longest:
    most slots any row can hold; greedy: no row samples."""

    state: rows.RowState
    rows: torch.Tensor
    temperature: torch.Tensor
    last: LastTokens
    count: int
    longest: int
    greedy: bool


RunChain = Callable[[ChainStart, Views], None]
"""Drafts the chain over the views of the drafting layers."""


def no_chain(parts: ChainParts) -> RunChain | None:
    """Chains are drafted token by token."""
    return None


@dataclass(frozen=True, slots=True)
class DraftCut:
    """How many nodes of a draft are verified: those whose expected tokens exceed their cost."""

    node_cost: float
    """Cost of verifying one node of one row, in tokens that the row gains meanwhile by plain decoding."""
    min_chance: float
    """A further level is drafted if some node of the last level is kept with more than this probability."""
    sizes: tuple[int, ...]
    """Numbers of nodes that may be verified, beside 0 and all. Each size is a step shape of its own."""


@dataclass(frozen=True, slots=True)
class RecurrentParts:
    """A recurrent draft, loaded. embedding [V, D]; matrices mix [D, D], query [H d, D], out [D, H d], gate_up
    [2 F, D], down [D, F], head [N, D]; norms query_norm, inner_norm and norm float32 [D]; cos_sin: of its queries, as in QkvShape;
    ids int32 [N]: the tokens that the head is for. parents, ranks int32 [M]: of the nodes of its largest draft tree, parents
    before children, -1 for the last known token; a node is the child of that rank, 0 the likeliest. cut: of its drafts."""

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


RunRecurrent = Callable[[rows.RowState, torch.Tensor, torch.Tensor, torch.Tensor, int, Views], torch.Tensor]
"""(state, rows int32 [S], heat float32 [R], hidden [S, D], count, views of the layer that is attended to): writes up to that
many nodes behind what the rows know -> int32 [S], how many of the first ones are worth verifying; those behind may be anything."""


Verify = Callable[[rows.RowState, torch.Tensor, torch.Tensor, rows.Drafted], tuple[torch.Tensor, torch.Tensor | None]]


KeepPath = Callable[[rows.RowState, torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor], None]


DrawRows = Callable[[rows.RowState, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class Attention(Protocol):
    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        view: KvView,
        step: StepInputs,
        lse_needed: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See Ops."""


class Sample(Protocol):
    def __call__(
        self,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        key: torch.Tensor,
        position: torch.Tensor,
        purpose: Purpose,
        limits: Limits | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Ops:
    """Every operation with one signature for all devices. T query tokens; D = d_model; dtype of x is the model's.

    rms_norm(x [T, D], weight [D], eps, offset) -> [T, D]: x / rms(x) * (weight + offset as 0 or 1), statistics in float32.
    norm_add(x, weight, eps, offset, stream [T, D]) -> stream + rms_norm(x ..): how a block with a post norm ends. The caller gives
        the stream up. None: one after the other.
    cap(logits [N, V], cap) -> cap * tanh(logits / cap) in float32.
    qkv_write(qkv [T, (Hq + 2 Hkv) * d], shape, view, step) -> (q [T, Hq, d], k [T, Hkv, d], v [T, Hkv, d]):
        per-head norms, rotary embedding at step.position, keys and values written into view at view.slots.
    attention(q, k, v, view, step) -> (out [T, Hq, d], lse float32 [T, Hq] or None): causal attention of each row's query
        tokens over all slots the row holds (this step's keys are in the cache already; k, v are the fresh ones, for
        kernels that prefer them contiguous). With lse_needed, the sixth argument, lse is log(sum(exp(score))) over the keys that
        a token sees, scores scaled and capped; ops.merge combines parts of the keys by it. A token that sees no key gets out 0
        and lse -inf. Without lse_needed lse may be None, and out and lse of tokens of no row are undefined.
    activate(gate_up [T, 2 F], kind) -> [T, F]: act(gate) * up.
    pack(weight [out, in]) -> opaque packed weight; linear(x [T, in], packed, bias) -> [T, out]. x may be Normed: a kernel
        that norms as it reads keeps float32 where the plain norm rounds to x's dtype.
    linear_add(x [T, in], packed, bias, stream [T, out]) -> stream + linear(x): the end of a block. The caller gives the
        stream up: the result may lie in its memory.
    linear_activate(x [T, in], packed, bias, kind) -> [T, F] = activate(linear(x), kind), packed from a merged [2 F, in].
    sample(logits [N, V], temperature, key, position, purpose, limits or None) -> tokens int32 [N]: see ops.sample.sample; the
        same tokens on every device, but where a sum of chances is within its rounding of top_p.
    embed(table [V, D], ids int32 [T], scale) -> [T, D]: rows of the table, times scale.
    capture: see ops.capture.Capture.
    gather, advance, last, to_host: see ops.rows. verify: as decoding.verify.verify, which serves where it is None.
    keep(state, rows int32 [S], packed, path int64 [S, wide], group, run [pages, heads, page_tokens, dim]): of rows that `verify`
        has moved on, keys and values of the kept nodes to where those of a chain would lie; None: nothing here does it in one call.
    draw(state, knobs float32 [R, KNOBS], rows int32 [N], logits [N, V], depth int32 [N] or None) -> tokens int32 [N]: what device
        rows draw at places KNOWN + depth (None: 0), behind their last known tokens and their drafts, with the rows' noise and
        limits, as `sample`. None: nothing here does it in one call.
    chain(parts) -> what drafts chains of this decoder in one call, or None: nothing here does.
    recurrent(parts) -> what drafts with them in one call, or None: these numbers are not known here. None: nothing here does.
    layers(parts, run) -> what runs these layers: `run`, which calls them one after the other, or something faster.
    fp8, fp8_weight, integer: the same for linears in e4m3, for those whose activations stay plain, and for integers; None:
        this device has no kernels for them, the reference serves.
    w8a8: integer linears of 8 bits and one scale per output, whose inputs are rounded to 8 bits with a scale per token as they
        are read (quant.integer.in_8_bits); None: they are rounded first.
    apart(x [T, D], empty uint8 [D]) -> [T, D]: quant.integer.outliers_apart of x with zeros where `empty` is not 0; None: it
        is done operation by operation.
    """

    name: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]
    qkv_write: Callable[[torch.Tensor, QkvShape, KvView, StepInputs], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    attention: Attention
    activate: Callable[[torch.Tensor, str], torch.Tensor]
    pack: Callable[[torch.Tensor], torch.Tensor]
    linear: Callable[[Plain, torch.Tensor, torch.Tensor | None], torch.Tensor]
    linear_add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
    linear_activate: Callable[[Plain, torch.Tensor, torch.Tensor | None, str], torch.Tensor]
    fp8: Fp8Ops | None = None
    fp8_weight: Fp8Ops | None = None
    integer: IntOps | None = None
    w8a8: IntOps | None = None
    apart: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    sample: Sample = sample_plainly
    embed: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor] = embedded
    cap: Callable[[torch.Tensor, float], torch.Tensor] = capped
    norm_add: Callable[[torch.Tensor, torch.Tensor, float, bool, torch.Tensor], torch.Tensor] | None = None
    capture: Capture = Uncaptured
    gather: Callable[[rows.RowState, torch.Tensor, rows.Spread | None], rows.Gathered] = rows.gather
    advance: Callable[[rows.RowState, torch.Tensor, torch.Tensor], torch.Tensor] = rows.advance
    last: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], torch.Tensor] = rows.last
    to_host: rows.ToHost = rows.to_host
    layers: Callable[[Sequence[LayerParts], RunLayers], RunLayers] = one_by_one
    verify: Verify | None = None
    keep: KeepPath | None = None
    draw: DrawRows | None = None
    chain: Callable[[ChainParts], RunChain | None] = no_chain
    recurrent: Callable[[RecurrentParts], RunRecurrent | None] | None = None

    def norm_onto(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool, stream: torch.Tensor
    ) -> torch.Tensor:
        """stream + rms_norm(x, ..), by norm_add where there is one."""
        if self.norm_add is None:
            return stream + self.rms_norm(x, weight, eps, offset)
        return self.norm_add(x, weight, eps, offset, stream)
