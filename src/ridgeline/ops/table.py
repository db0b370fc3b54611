"""The set of operations a decoder runs on, as one value: the reference, the CPU's or the GPU's, chosen once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ridgeline.ops import rows
from ridgeline.ops.noise import Purpose
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


Plain = torch.Tensor | Normed
"""What a linear in floating point takes: [T, D], or a norm that is still to be done."""
Activation = Plain | Scaled
"""What any linear takes; Scaled: quantized by the operation that made it."""


def plain(x: Plain, rms_norm: Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]) -> torch.Tensor:
    """x as a tensor, normed with `rms_norm` where that is still to be done."""
    return rms_norm(x.x, x.weight, x.eps, x.offset) if isinstance(x, Normed) else x


@dataclass(frozen=True, slots=True)
class Matrix:
    """A loaded linear in floating point: packed as Ops.pack made it; bias [out] or None."""

    packed: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A loaded decoder layer on one device, pre-norm, without post norms, its linears in floating point:

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
"""(stream [T, D], each layer's view, step) -> the stream behind the last layer. The caller gives the stream up."""


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
    """

    activate: Callable[[torch.Tensor, str], Activation]
    pack: Callable[[torch.Tensor, torch.Tensor], Fp8Matrix]
    linear: Callable[[Activation, Fp8Matrix, torch.Tensor | None, torch.dtype], torch.Tensor]
    linear_add: Callable[[Activation, Fp8Matrix, torch.Tensor | None, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ops:
    """Every operation with one signature for all devices. T query tokens; D = d_model; dtype of x is the model's.

    rms_norm(x [T, D], weight [D], eps, offset) -> [T, D]: x / rms(x) * (weight + offset as 0 or 1), statistics in float32.
    qkv_write(qkv [T, (Hq + 2 Hkv) * d], shape, view, step) -> (q [T, Hq, d], k [T, Hkv, d], v [T, Hkv, d]):
        per-head norms, rotary embedding at step.position, keys and values written into view at view.slots.
    attention(q, k, v, view, step) -> (out [T, Hq, d], lse float32 [T, Hq] or None): causal attention of each row's query
        tokens over all slots the row holds (this step's keys are in the cache already; k, v are the fresh ones, for
        kernels that prefer them contiguous).
    activate(gate_up [T, 2 F], kind) -> [T, F]: act(gate) * up.
    pack(weight [out, in]) -> opaque packed weight; linear(x [T, in], packed, bias) -> [T, out]. x may be Normed: a kernel
        that norms as it reads keeps float32 where the plain norm rounds to x's dtype.
    linear_add(x [T, in], packed, bias, stream [T, out]) -> stream + linear(x): the end of a block. The caller gives the
        stream up: the result may lie in its memory.
    linear_activate(x [T, in], packed, bias, kind) -> [T, F] = activate(linear(x), kind), packed from a merged [2 F, in].
    sample(logits [N, V], temperature, key, position, purpose) -> tokens int32 [N]: see ops.sample.sample; the same tokens
        on every device.
    gather, advance: see ops.rows.
    layers(parts, run) -> what runs these layers: `run`, which calls them one after the other, or something faster.
    fp8: the same for 8-bit linears; None: this device has no kernels for them, the reference serves.
    """

    name: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]
    qkv_write: Callable[[torch.Tensor, QkvShape, KvView, StepInputs], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    attention: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, KvView, StepInputs], tuple[torch.Tensor, torch.Tensor | None]
    ]
    activate: Callable[[torch.Tensor, str], torch.Tensor]
    pack: Callable[[torch.Tensor], torch.Tensor]
    linear: Callable[[Plain, torch.Tensor, torch.Tensor | None], torch.Tensor]
    linear_add: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], torch.Tensor]
    linear_activate: Callable[[Plain, torch.Tensor, torch.Tensor | None, str], torch.Tensor]
    fp8: Fp8Ops | None = None
    sample: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Purpose], torch.Tensor] = sample_plainly
    gather: Callable[[rows.RowState, torch.Tensor, rows.Spread | None], rows.Gathered] = rows.gather
    advance: Callable[[rows.RowState, torch.Tensor, torch.Tensor], torch.Tensor] = rows.advance
    layers: Callable[[Sequence[LayerParts], RunLayers], RunLayers] = one_by_one
