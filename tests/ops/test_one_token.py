"""One kernel between two attentions: which layers it takes, that it compiles, and its results where there is a Hopper GPU.

Gluon has no interpreter: without such a GPU, only the choice, the room in shared memory and that it compiles can be tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Fp8Matrix, IntMatrix, LayerParts, Matrix, Normed, QkvShape

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from ridgeline.ops.triton import between as kernels
from ridgeline.ops.triton import one_token
from ridgeline.ops.triton.between import Between, Weights

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HOPPER = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
E4M3 = torch.float8_e4m3fn


def layer(model: int, heads: int, features: int, form: str) -> LayerParts:
    """A layer whose weights have no memory behind them."""

    def matrix(rows: int, k: int) -> Matrix:
        packed = torch.empty(rows, k, dtype=E4M3 if form == "fp8" else torch.bfloat16, device="meta")
        if form == "fp8":
            return Matrix(Fp8Matrix(packed, torch.empty(rows), torch.empty(0)), None)
        if form == "integers":
            return Matrix(IntMatrix(packed, packed, None, 4, 128, rows, k), None)
        return Matrix(packed, None)

    norm = torch.empty(model, dtype=torch.bfloat16)
    shape = QkvShape(heads // 128, 8, 128, torch.empty(0), None, None, 1e-5, False)
    qkv = matrix(heads + 2048, model)
    return LayerParts(
        norm, qkv, shape, matrix(model, heads), norm, matrix(2 * features, model), matrix(model, features), "silu"
    )


@pytest.mark.parametrize(
    ("sizes", "form", "taken"),
    [
        ((4096, 4096, 14336), "bf16", True),
        ((4096, 4096, 14336), "fp8", True),
        ((4096, 4096, 14336), "integers", False),
        ((1024, 2048, 3072), "bf16", False),
        ((8192, 8192, 28672), "fp8", True),
        ((8192, 8192, 65536), "bf16", False),
        ((4100, 4096, 14336), "bf16", False),
    ],
)
def test_which_layers_are_taken(sizes: tuple[int, int, int], form: str, taken: bool) -> None:
    """Large ones in one number format, whose rows the copy engine can address and whose inputs leave room for a ring."""
    parts = layer(*sizes, form)
    assert one_token.knows([parts, parts]) is taken
    assert not one_token.knows([parts, layer(4096, 4096, 14336, "fp8" if form == "bf16" else "bf16")])


@pytest.mark.parametrize("k", [64, 1024, 14336, 28672])
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_inputs_and_ring_fit(k: int, dtype: torch.dtype) -> None:
    held = kernels.lines(k, torch.empty(0, dtype=dtype))
    assert held * 128 >= k * dtype.itemsize and held & (held - 1) == 0
    assert held * 128 + kernels.stages(held) * kernels.STAGE <= kernels.MEMORY


def compile_for_hopper(fp8: bool, activation: str) -> int:
    """Compile the kernel as `between` would launch it, no GPU asked -> bytes of shared memory."""
    kernel = kernels.between_kernel
    values = torch.zeros(16, 256, dtype=E4M3 if fp8 else torch.bfloat16)
    blocks, number = kernels._blocks(values), "fp8e4nv" if fp8 else "bf16"
    height, width = blocks.block_shape
    held = tuple(kernels.lines(k, values) for k in (4096, 4096, 14336))
    types: dict[str, Any] = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {"counter_ptr": "*i64", "eps": "fp32", "scales": ("*fp32",) * 4, "biases": ("*bf16",) * 4}
    for name in kernel.arg_names:
        if name.endswith("_desc"):
            types[name] = f"tensordesc<{number}[{height},{width}],{blocks.layout!r}>"
    constants: dict[str, Any] = {"LINES": held, "STAGES": kernels.stages(max(held)), "KIND": kernels.KINDS[activation]}
    constants |= {"OFFSET": True, "FP8": fp8, "BIASES": 9, "PDL": True}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, fixed, {})
    options = {"num_warps": 8, "maxnreg": kernels.REGISTERS}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return int(made.metadata.shared)


@pytest.mark.parametrize(("fp8", "activation"), [(False, "gelu_tanh"), (True, "silu")])
def test_the_kernel_compiles(fp8: bool, activation: str) -> None:
    """In a process of its own: Triton's interpreter, once used, stays in the way."""
    code = f"import test_one_token as t; assert t.compile_for_hopper({fp8}, {activation!r}) <= 200 << 10"
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def off(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())


def rounded(x: torch.Tensor, fp8: bool) -> torch.Tensor:
    """An input as a product takes it, in float64."""
    x = x.to(torch.bfloat16).double()
    if not fp8:
        return x
    scale = x.abs().max().float() / 448
    return (x.float() / scale).to(E4M3).double() * scale.double()


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean() + 1e-5) * gain.double()


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("heads", "model", "features", "rows"),
    [(2048, 1024, 3072, 4096), (4096, 4096, 14336, 6144), (640, 640, 1536, 0), (2048, 2048, 1008, 80)],
)
def test_between_two_attentions(heads: int, model: int, features: int, rows: int, bias: bool, fp8: bool) -> None:
    """As the products one after the other in float64, with what is rounded on the way; thrice the same."""
    torch.manual_seed(0)
    weights, exact = [], []
    for n, k in ((model, heads), (2 * features, model), (model, features), (rows, model)):
        drawn = torch.randn(n, k, device=DEVICE) / k**0.5
        added = torch.randn(n, device=DEVICE, dtype=torch.bfloat16) if bias else None
        scales = (drawn.abs().amax(1) / 448).float() if fp8 and n else None
        values = drawn.to(torch.bfloat16) if scales is None else (drawn / scales[:, None]).to(E4M3)
        weights.append(Weights(values, scales, added))
        full = values.double() if scales is None else values.double() * scales[:, None].double()
        exact.append((full, torch.zeros(n, device=DEVICE).double() if added is None else added.double()))
    gains = [torch.rand(model, device=DEVICE, dtype=torch.bfloat16) + 0.5 for _ in range(2)]
    out, gate_up, down, qkv = weights
    parts = Between(out, gains[0], gate_up, down, gains[1], qkv if rows else None, 1e-5, False, "silu")
    attended = torch.randn(1, heads, device=DEVICE, dtype=torch.bfloat16)
    stream = torch.randn(1, model, device=DEVICE, dtype=torch.bfloat16)
    want = (stream[0].double() + exact[0][0] @ rounded(attended[0], fp8) + exact[0][1]).to(torch.bfloat16).double()
    gate, up = (exact[1][0] @ rounded(normed(want, gains[0]), fp8) + exact[1][1]).split(features)
    want = want + exact[2][0] @ rounded(torch.nn.functional.silu(gate) * up, fp8) + exact[2][1]
    behind = exact[3][0] @ rounded(normed(want.to(torch.bfloat16).double(), gains[1]), fp8) + exact[3][1]
    counter, found = torch.zeros(1, dtype=torch.int64, device=DEVICE), []
    for _ in range(3):
        held = stream.clone()
        made = kernels.between(parts, attended, held, counter)
        assert made.shape == (1, rows)
        assert off(held[0], want) < (4e-2 if fp8 else 5e-3)
        assert not rows or off(made[0], behind) < (4e-2 if fp8 else 6e-3)
        found.append((held, made))
    assert all(
        torch.equal(one, other) for other_pair in found[1:] for one, other in zip(found[0], other_pair, strict=True)
    )


# --- all layers -------------------------------------------------------------------------------------------------------

HEADS, KV_HEADS, DIM = 8, 2, 64


def random_layer(shape: QkvShape, dtype: torch.dtype) -> LayerParts:
    """A layer of HEADS heads of DIM, as wide as they are, with biases for q, k and v."""
    model = HEADS * DIM

    def matrix(rows: int, k: int, bias: bool = False) -> Matrix:
        weight = (torch.randn(rows, k, device=DEVICE) / k**0.5).to(dtype)
        return Matrix(weight, torch.randn(rows, device=DEVICE).to(dtype) if bias else None)

    norms = [(torch.rand(model, device=DEVICE) + 0.5).to(dtype) for _ in range(2)]
    qkv = matrix((HEADS + 2 * KV_HEADS) * DIM, model, bias=True)
    rest = matrix(model, model), norms[1], matrix(2 * 768, model), matrix(model, 768)
    return LayerParts(norms[0], qkv, shape, *rest, "silu")


def between_plainly(
    parts: Between, attended: torch.Tensor, stream: torch.Tensor, counter: torch.Tensor
) -> torch.Tensor:
    """What the kernel does, in operations of the reference."""
    out, gate_up, down = ((one.values, one.bias) for one in (parts.out, parts.gate_up, parts.down))
    stream.copy_(REFERENCE.linear_add(attended.flatten(1), *out, stream))
    normed = Normed(stream.clone(), parts.norm, parts.eps, parts.offset)
    stream.copy_(REFERENCE.linear_add(REFERENCE.linear_activate(normed, *gate_up, parts.activation), *down, stream))
    if parts.qkv is None:
        return stream[:, :0]
    return REFERENCE.linear(Normed(stream, parts.qkv_norm, parts.eps, parts.offset), parts.qkv.values, parts.qkv.bias)


def one_after_the_other(layers: list[LayerParts], stream: torch.Tensor, views: list[Any], step: Any) -> torch.Tensor:
    for parts, view in zip(layers, views, strict=True):
        eps, offset = parts.shape.norm_eps, parts.shape.norm_offset
        held: list[tuple[Any, Any]] = [
            (one.packed, one.bias) for one in (parts.qkv, parts.out, parts.gate_up, parts.down)
        ]
        qkv = REFERENCE.linear(Normed(stream, parts.attention_norm, eps, offset), *held[0])
        attended, _ = REFERENCE.attention(*REFERENCE.qkv_write(qkv, parts.shape, view, step), view, step)
        stream = REFERENCE.linear_add(attended.flatten(1), *held[1], stream)
        normed = Normed(stream, parts.feed_forward_norm, eps, offset)
        stream = REFERENCE.linear_add(REFERENCE.linear_activate(normed, *held[2], parts.activation), *held[3], stream)
    return stream


@pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=[pytest.mark.gpu, hopper])], ids=["on paper", "on a card"]
)
def test_layers_by_one_token(
    real: bool,
    batch: Callable[..., Any],
    qkv_shape: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three layers with caches of their own, as the operations one after the other; more tokens go the other way."""
    dtype = torch.bfloat16 if real else torch.float32
    if not real:
        monkeypatch.setattr(one_token, "between", between_plainly)
        monkeypatch.setattr(one_token, "attention", REFERENCE.attention)
        monkeypatch.setattr(one_token, "qkv_write", REFERENCE.qkv_write)
    case = batch([(150, 1)], heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, junk=1.0).to(DEVICE, dtype)
    shape = qkv_shape(HEADS, KV_HEADS, DIM, DIM, False, DEVICE)
    layers = [random_layer(shape, dtype) for _ in range(3)]
    stream = torch.randn(1, HEADS * DIM, device=DEVICE).to(dtype)
    views, twins = ([replace(case.view, kv=case.view.kv.clone()) for _ in layers] for _ in range(2))
    want = one_after_the_other(layers, stream, twins, case.step)
    otherwise = torch.zeros(2, 3)
    run = one_token.OneToken(layers, REFERENCE.linear, lambda stream, views, step: otherwise)
    got = run(stream.clone(), views, case.step)
    assert off(got, want.double()) < (2e-2 if real else 1e-5)
    for view, twin in zip(views, twins, strict=True):
        torch.testing.assert_close(view.kv, twin.kv, atol=0.1 if real else 1e-4, rtol=0.05 if real else 1e-4)
    assert run(stream.expand(2, -1), views, case.step) is otherwise
