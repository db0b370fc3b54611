"""Norms, activation, rotary embedding with the write into the cache, and products: reference by hand, CPU by reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.ops.cpu import CPU
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Normed, Ops


def close(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, roundings: int = 1) -> None:
    """roundings: between operations, where several are compared as one."""
    assert out.dtype == dtype and out.shape == want.shape
    error = (out.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9)
    assert error < roundings * (5e-3 if dtype == torch.bfloat16 else 1e-6), float(error)


@pytest.mark.parametrize("offset", [False, True])
def test_reference_rms_norm_by_hand(offset: bool) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    row = [float(number) for number in x[1]]
    rms = math.sqrt(sum(number * number for number in row) / 8 + 1e-2)
    want = torch.tensor([number / rms * (float(w) + offset) for number, w in zip(row, weight, strict=True)])
    torch.testing.assert_close(REFERENCE.tokenwise.rms_norm(x, weight, 1e-2, offset)[1], want)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_reference_activation_by_hand(kind: str) -> None:
    gate, up = 0.7, -1.3
    act = gate / (1 + math.exp(-gate))
    if kind == "gelu_tanh":
        act = 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    out = REFERENCE.tokenwise.activate(torch.tensor([[gate, up]]), kind)
    assert float(out) == pytest.approx(act * up, abs=1e-6)


def test_reference_rope_turns_pairs_by_position_times_frequency(
    batch: Callable[..., Any], qkv_shape: Callable[..., Any]
) -> None:
    case = batch([(9, 1)], heads=2, kv_heads=1, head_dim=8)
    shape = qkv_shape(2, 1, 8, 4, norms=False)
    qkv = torch.randn(1, 32)
    q, k, v = REFERENCE.attention.qkv_write(qkv, shape, case.view, case.step)
    for pair, frequency in ((0, 1.0), (1, 0.01)):
        angle, (a, b) = 8 * frequency, (float(qkv[0, pair]), float(qkv[0, pair + 2]))
        assert float(q[0, 0, pair]) == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-5)
        assert float(q[0, 0, pair + 2]) == pytest.approx(b * math.cos(angle) + a * math.sin(angle), abs=1e-5)
    assert torch.equal(q[0, 0, 4:], qkv[0, 4:8]) and torch.equal(v.flatten(), qkv[0, 24:])
    page, place = divmod(int(case.view.slots[0]), 16)
    assert torch.equal(case.view.kv[page, :, :, place], torch.stack((k[0], v[0])))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [False, True])
def test_cpu_norms(dtype: torch.dtype, offset: bool) -> None:
    x, weight = torch.randn(5, 96).to(dtype), torch.randn(96).to(dtype)
    close(CPU.tokenwise.rms_norm(x, weight, 1e-5, offset), REFERENCE.tokenwise.rms_norm(x, weight, 1e-5, offset), dtype)


def test_cpu_norm_of_zeros_is_zero() -> None:
    assert torch.equal(CPU.tokenwise.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, False), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_cpu_activation(dtype: torch.dtype, kind: str) -> None:
    x = torch.randn(5, 64).to(dtype)
    close(CPU.tokenwise.activate(x, kind), REFERENCE.tokenwise.activate(x, kind), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fields", [{}, {"norms": True}, {"rope_dim": 8}, {"layer_major": True}])
def test_cpu_qkv_write(
    dtype: torch.dtype, fields: dict[str, Any], batch: Callable[..., Any], qkv_shape: Callable[..., Any]
) -> None:
    case = batch([(40, 7), (3, 1), (20, 20)], layer_major=fields.get("layer_major", False)).to("cpu", dtype)
    shape = qkv_shape(6, 2, 32, fields.get("rope_dim", 32), fields.get("norms", False))
    qkv = torch.randn(28, 10 * 32).to(dtype)
    before = case.view.kv.clone()
    want = REFERENCE.attention.qkv_write(qkv, shape, case.view, case.step)
    want_kv = case.view.kv.clone()
    case.view.kv.copy_(before)
    for _ in range(2):
        out = CPU.attention.qkv_write(qkv, shape, case.view, case.step)
        for actual, other in zip(out, want, strict=True):
            close(actual, other, dtype)
        close(case.view.kv, want_kv, dtype)
        untouched = before == want_kv
        assert torch.equal(case.view.kv[untouched], before[untouched])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16, 130])
def test_cpu_linear(dtype: torch.dtype, tokens: int) -> None:
    weight, bias, x = torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype), torch.randn(tokens, 64).to(dtype)
    packed = CPU.matmul.unquantized.pack(weight)
    for bias_or_none in (None, bias):
        want = F.linear(x.double(), weight.double(), None if bias_or_none is None else bias_or_none.double())
        close(CPU.matmul.unquantized.linear(x, packed, bias_or_none), want.to(dtype), dtype)


@pytest.mark.parametrize("ops", [REFERENCE, CPU], ids=lambda ops: ops.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 16])
def test_what_joins_a_product(ops: Ops, dtype: torch.dtype, tokens: int) -> None:
    """A norm before it, the stream added to it, the activation of a merged gate and up: by hand in float64."""
    x, weight, bias = torch.randn(tokens, 64).to(dtype), torch.randn(96, 64).to(dtype), torch.randn(96).to(dtype)
    gain, stream = torch.randn(64).to(dtype), 10 * torch.randn(tokens, 96).to(dtype)
    wide, packed, normed = x.double(), ops.matmul.unquantized.pack(weight), Normed(x, gain, 1e-2, True)
    values = wide / (wide.square().mean(1, keepdim=True) + 1e-2).sqrt() * (gain.double() + 1)
    for added in (None, bias):
        more = 0 if added is None else added.double()
        close(
            ops.matmul.unquantized.linear(normed, packed, added),
            (values @ weight.double().t() + more).to(dtype),
            dtype,
            3,
        )
        want = stream.double() + wide @ weight.double().t() + more
        close(ops.matmul.unquantized.linear_add(x, packed, added, stream.clone()), want.to(dtype), dtype, 3)
        gate, up = (values @ weight.double().t() + more).chunk(2, 1)
        close(
            ops.matmul.unquantized.linear_activate(normed, packed, added, "silu"),
            (F.silu(gate) * up).to(dtype),
            dtype,
            3,
        )
