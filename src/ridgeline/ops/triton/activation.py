"""Gated activation act(gate) * up in one pass, computed in float32, and the soft cap of logits."""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.ops.triton.launch import await_inputs, overlap

BLOCK = 1024
CAPPED = 2048
"""Logits per program of the soft cap."""
KINDS = {None: 0, "silu": 1, "gelu_tanh": 2, "swiglu_clamped": 3}
"""Activation -> the kernels' constexpr KIND. 0: no activation."""


@triton.jit
def _sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + exp(-x)). FAST: four approximate instructions. The compiler guards both approximations against values near the ends
    of float32. The guards are unnecessary: 1 + exp(-x) is never near 0, and where it is infinite the result 0 is correct."""
    if FAST:
        return tl.inline_asm_elementwise(
            """{
            .reg .f32 t;
            mul.f32 t, $1, 0fBFB8AA3B;
            ex2.approx.ftz.f32 t, t;
            add.f32 t, t, 0f3F800000;
            rcp.approx.ftz.f32 $0, t;
            }""",
            "=f,f",
            [x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.sigmoid(x)


@triton.jit
def gated(gate, up, KIND: tl.constexpr, FAST: tl.constexpr = False):
    """act(gate) * up in float32; see KINDS. FAST: for NVIDIA GPUs; see _sigmoid."""
    if KIND == 2:
        # gelu_tanh(x) = x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 x^3)), since (1 + tanh(y)) / 2 = sigmoid(2 y).
        act = gate * _sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate), FAST)
    elif KIND == 3:
        # See reference.clamped_swiglu.
        gate = tl.minimum(gate, 7.0)
        act = gate * _sigmoid(1.702 * gate, FAST)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
    else:
        act = gate * _sigmoid(gate, FAST)
    return act * up


@triton.jit
def _activate_kernel(x_ptr, out_ptr, x_stride, size, KIND: tl.constexpr, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """x [T, 2 size] (gate, up) -> out [T, size]. Each program computes BLOCK features of one token; the grid is [T, blocks]."""
    await_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    gate = tl.load(x_ptr + token * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + token * x_stride + size + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * size + at, gated(gate, up, KIND, PDL).to(out_ptr.dtype.element_ty), mask=inside)


def activate(gate_up: torch.Tensor, kind: str) -> torch.Tensor:
    """See reference.activate."""
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    if tokens:
        _activate_kernel[(tokens, triton.cdiv(size, BLOCK))](
            gate_up, out, gate_up.stride(0), size, KIND=KINDS[kind], BLOCK=BLOCK, **overlap(out.device)
        )
    return out


@triton.jit
def _cap_kernel(x_ptr, out_ptr, size, cap, PDL: tl.constexpr, BLOCK: tl.constexpr):
    """out float32 [size] = cap * tanh(x / cap), BLOCK elements per program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    await_inputs(PDL)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0).to(tl.float32)
    # tanh(x) = 2 sigmoid(2 x) - 1
    tl.store(out_ptr + at, cap * (2.0 * tl.sigmoid(2.0 * (x / cap)) - 1.0), mask=at < size)


def capped(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """See table.capped. One read and one write of the logits."""
    out = torch.empty_like(logits, dtype=torch.float32)
    if logits.is_contiguous():
        grid = (triton.cdiv(logits.numel(), CAPPED),)
        _cap_kernel[grid](logits, out, logits.numel(), cap, BLOCK=CAPPED, num_warps=4, **overlap(logits.device))
        return out
    return torch.tanh(logits.float() / cap) * cap
