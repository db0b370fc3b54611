"""The set of operations a decoder runs on, as one value: the reference, the CPU's or the GPU's, chosen once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

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
class Ops:
    """Every operation with one signature for all devices. T query tokens; D = d_model; dtype of x is the model's.

    rms_norm(x [T, D], weight [D], eps, offset) -> [T, D]: x / rms(x) * (weight + offset as 0 or 1), statistics in float32.
    add_rms_norm(x, residual, weight, eps, offset) -> (normed, residual + x).
    qkv_write(qkv [T, (Hq + 2 Hkv) * d], shape, view, step) -> (q [T, Hq, d], k [T, Hkv, d], v [T, Hkv, d]):
        per-head norms, rotary embedding at step.position, keys and values written into view at view.slots.
    attention(q, k, v, view, step) -> (out [T, Hq, d], lse float32 [T, Hq] or None): causal attention of each row's query
        tokens over all slots the row holds (this step's keys are in the cache already; k, v are the fresh ones, for
        kernels that prefer them contiguous).
    activate(gate_up [T, 2 F], kind) -> [T, F]: act(gate) * up.
    pack(weight [out, in]) -> opaque packed weight; linear(x [T, in], packed, bias) -> [T, out].
    """

    name: str
    rms_norm: Callable[[torch.Tensor, torch.Tensor, float, bool], torch.Tensor]
    add_rms_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], tuple[torch.Tensor, torch.Tensor]]
    qkv_write: Callable[[torch.Tensor, QkvShape, KvView, StepInputs], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
    attention: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, KvView, StepInputs], tuple[torch.Tensor, torch.Tensor | None]
    ]
    activate: Callable[[torch.Tensor, str], torch.Tensor]
    pack: Callable[[torch.Tensor], torch.Tensor]
    linear: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
