"""Batch-invariant CPU operations in PyTorch: each token is computed in a separate call.

PyTorch and its libraries choose kernels, and thereby the order of sums, by the shape of a call. Here every call has the shape of
one token in its own memory, so the other tokens of a step change no bit of its result. The cost of a step grows linearly with its
tokens, because weights are read again for every token. The compiled operations (ops.native) are batch-invariant without this cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from ridgeline.ops import cpu
from ridgeline.ops.adapters import host_adapters
from ridgeline.ops.columns import norm_then_place
from ridgeline.ops.noise import Purpose
from ridgeline.ops.reference import INT_REFERENCE, mixed_inputs, round_inliers
from ridgeline.ops.sample import Limits, draw_with
from ridgeline.ops.sample import sample as sample_together
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import (
    AttentionOps,
    FloatInput,
    FloatOps,
    Heads,
    Ops,
    QkvShape,
    SamplerOps,
    TokenwiseOps,
    apply_norm,
    norm_then_add,
    split_heads,
)


def _rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tokens of x [T, ...] as [1, ...] each, copied to their own aligned memory."""
    return (token.clone() for token in x.split(1))


def _joined(parts: list[torch.Tensor], empty: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts) if parts else empty


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, offset: bool) -> torch.Tensor:
    """See reference.rms_norm; x [T, D]."""
    return _joined([cpu.rms_norm(token, weight, eps, offset) for token in _rows(x)], x)


def _steps(view: KvView, step: StepInputs) -> list[tuple[KvView, StepInputs]]:
    """For each query token, the inputs of a step of one row with one token. Cached in step.derived."""
    key = ("alone", view.table.data_ptr(), view.slots.data_ptr())
    if (single_steps := step.derived.get(key)) is None:
        single_steps = step.derived[key] = [_single_step(view, step, token) for token in range(step.position.shape[0])]
    return [(replace(view, slots=slots), token_step) for slots, token_step in single_steps]


def _single_step(view: KvView, step: StepInputs, token: int) -> tuple[torch.Tensor, StepInputs]:
    row, part = int(step.row_of[token]), slice(token, token + 1)
    behind = int(step.q_start[row + 1]) - token
    single_step = StepInputs(
        rows=step.rows[row : row + 1],
        q_start=torch.tensor([0, 1], dtype=torch.int32),
        # 0 for a padding token, which belongs to no row and attends to nothing.
        length=(step.length[row : row + 1] - behind + 1).clamp(min=0) * (behind > 0),
        position=step.position[part],
        row_of=torch.zeros(1, dtype=torch.int32),
        max_query=1,
        max_length=step.max_length,
        key_positions=step.key_positions,
    )
    return view.slots[part], single_step


def qkv_write(qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs) -> Heads:
    """See AttentionOps."""
    parts = [
        cpu.qkv_write(token_qkv, shape, token_view, token_step)
        for token_qkv, (token_view, token_step) in zip(_rows(qkv), _steps(view, step), strict=True)
    ]
    if not parts:
        return cpu.qkv_write(qkv, shape, view, step)
    merged = torch.cat([torch.cat([heads for heads in part if heads is not None], 1) for part in parts])
    return split_heads(merged.flatten(1), shape)


def attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    view: KvView,
    step: StepInputs,
    lse_needed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See AttentionOps. Query tokens of draft trees are computed together, because their visibility is not plain causal order."""
    if step.ancestors is not None:
        return cpu.attention(q, k, v, view, step, lse_needed)
    # The cache already contains the keys and values of these tokens.
    token_inputs = zip(_rows(q), _steps(view, step), strict=True)
    parts = [
        cpu.attention(token_q, None, None, token_view, token_step, lse_needed)
        for token_q, (token_view, token_step) in token_inputs
    ]
    lse = [part for _, part in parts if part is not None]
    out = _joined([out for out, _ in parts], q)
    return out, _joined(lse, torch.empty(q.shape[:2])) if lse_needed else None


def activate(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """See reference.activate."""
    return _joined([cpu.activate(token, kind) for token in _rows(gate_up)], gate_up[:, : gate_up.shape[1] // 2])


def linear(x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See reference.linear."""
    x = apply_norm(x, rms_norm)
    return _joined([cpu.linear(token, packed, bias) for token in _rows(x)], x.new_empty((0, packed.shape[0])))


def linear_add(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, stream: torch.Tensor) -> torch.Tensor:
    """See reference.linear_add."""
    return linear(x, packed, bias).add_(stream)


def linear_activate(x: FloatInput, packed: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """See reference.linear_activate."""
    return activate(linear(x, packed, bias), kind)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    key: torch.Tensor,
    position: torch.Tensor,
    purpose: Purpose,
    limits: Limits | None = None,
) -> torch.Tensor:
    """See ops.sample.sample."""
    row_inputs = zip(_rows(logits), temperature.split(1), key.split(1), position.split(1), strict=True)
    each = (limits and limits.of(slice(row, row + 1)) for row in range(len(logits)))
    return _joined(
        [sample_together(*inputs, purpose, row_limits) for inputs, row_limits in zip(row_inputs, each, strict=True)],
        position.int(),
    )


_TOKENWISE = TokenwiseOps(rms_norm, norm_then_add(rms_norm), activate, norm_then_place(rms_norm))
_UNQUANTIZED = FloatOps(cpu.pack, linear, linear_add, linear_activate)
CPU_INVARIANT = Ops(
    name="cpu, batch-invariant",
    tokenwise=_TOKENWISE,
    attention=AttentionOps(qkv_write, attention),
    matmul=replace(
        cpu.CPU.matmul,
        unquantized=_UNQUANTIZED,
        mixed=mixed_inputs(INT_REFERENCE, _UNQUANTIZED, _TOKENWISE, round_inliers),
    ),
    adapters=host_adapters(activate),
    sampler=SamplerOps(sample=sample, draw=draw_with(sample)),
)
