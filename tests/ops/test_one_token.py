"""All layers of one token in one kernel: which it takes, that it compiles, and its results where there is a Hopper GPU.

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
from ridgeline.ops.step import SHORT
from ridgeline.ops.table import Fp8Matrix, IntMatrix, LayerParts, Matrix, QkvShape

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from ridgeline.ops.triton import layers as kernels
from ridgeline.ops.triton import layers_table as tables
from ridgeline.ops.triton import one_token

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
    shape = QkvShape(max(8, heads // 128), 8, 128, torch.empty(0, 2, 64), None, None, 1e-5, False)
    qkv = matrix(heads + 2048, model)
    return LayerParts(
        norm, qkv, shape, matrix(model, heads), norm, matrix(2 * features, model), matrix(model, features), "silu"
    )


@pytest.mark.parametrize(
    ("sizes", "form", "taken"),
    [
        ((4096, 4096, 14336), "bf16", False),
        ((4096, 4096, 14336), "fp8", True),
        ((4096, 4096, 14336), "integers", False),
        ((1024, 2048, 3072), "fp8", False),
        ((8192, 8192, 28672), "fp8", True),
        ((8192, 8192, 262144), "fp8", False),
        ((4112, 4096, 14336), "fp8", False),
    ],
)
def test_which_layers_are_taken(sizes: tuple[int, int, int], form: str, taken: bool) -> None:
    """Large ones in 8 bits, all alike, whose rows the copy engine can address and whose inputs leave room for a ring."""
    parts = layer(*sizes, form)
    assert one_token.knows([parts, parts]) is taken
    assert not one_token.knows([parts, layer(4096, 4096, 14336, "fp8" if form == "bf16" else "bf16")])


@pytest.mark.parametrize("sizes", [(64, 64, 1536), (4096, 4096, 14336), (8192, 8192, 28672)])
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_inputs_and_ring_fit(sizes: tuple[int, int, int], form: str) -> None:
    """And what warps exchange of attention: a value of each warp for the heads of a group."""
    parts = layer(*sizes, form)
    held = tables.held(one_token._layer(parts))
    for lines, (_, k) in zip(held, ((0, sizes[1]), (0, sizes[0]), (0, sizes[2])), strict=False):
        assert lines * 128 >= k * (1 if form == "fp8" else 2) and lines & (lines - 1) == 0
    group, dim = max(1, parts.shape.n_heads // parts.shape.n_kv_heads), parts.shape.head_dim
    assert held[3] * 128 >= 4 * 8 * group * dim
    assert max(held) * 128 + tables.stages(max(held)) * tables.STAGE <= tables.MEMORY


def test_one_descriptor_for_matrices_anywhere() -> None:
    """Matrices alike lie at places of one grid, whatever lies between them."""
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    cut = [memory[start : start + 64 * 256].view(64, 256) for start in (48_000, 16_000, 400_000)]
    where = tables.places(cut)
    assert where.lowest is cut[1] and [place * where.step for place in where.places] == [32_000, 0, 384_000]
    assert tables.reachable(cut)
    assert not tables.reachable([cut[0], memory[8 : 8 + 64 * 256].view(64, 256)])
    alone = tables.places(cut[:1])
    assert alone.places == (0,) and alone.step > 0


def compile_for_hopper(fp8: bool, activation: str, heads: tuple[int, int, int]) -> int:
    """Compile the kernel as it would be launched, no GPU asked -> bytes of shared memory."""
    kernel = kernels.layers_kernel
    values = torch.zeros(16, 256, dtype=E4M3 if fp8 else torch.bfloat16)
    number, rows = "fp8e4nv" if fp8 else "bf16", (16, 8, 8, 4)
    group = triton.next_power_of_2(heads[0] // heads[1])
    held = (*(tables.lines(k, values) for k in (4096, 4096, 14336)), group * heads[2] // 4)
    numbers = {"part_ptr": "*fp32", "part_sums_ptr": "*fp32", "eps": "fp32", "scale": "fp32"}
    numbers |= dict.fromkeys(("table_ptr", "slot_ptr", "counter_ptr", "draws_ptr"), "*i64")
    numbers |= dict.fromkeys(("rows_ptr", "length_ptr", "position_ptr", "arrivals_ptr"), "*i32")
    types: dict[str, Any] = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= numbers | {"page_stride": "i64", "kind_stride": "i64"}
    for name, one in zip(("qkv_desc", "out_desc", "gate_up_desc", "down_desc"), rows, strict=True):
        blocks = tables.blocks(tables.places([values]), one)
        types[name] = f"tensordesc<{number}[{','.join(map(str, blocks.block_shape))}],{blocks.layout!r}>"
    constants: dict[str, Any] = {
        "LINES": held,
        "ROWS": rows,
        "STAGES": tables.stages(max(held)),
        "KIND": kernels.KINDS[activation],
    }
    constants |= {"OFFSET": True, "FP8": fp8, "BIASES": 9, "PDL": True, "PAGE_TOKENS": 16, "NORMS": 3 if fp8 else 0}
    constants |= {"HEADS": heads[0], "KV_HEADS": heads[1], "DIM": heads[2], "HALF": heads[2] // 2}
    signature = {name: "constexpr" if name in constants else types[name] for name in kernel.arg_names}
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(kernel, signature, fixed, {})
    options = {"num_warps": 8, "maxnreg": kernels.REGISTERS}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return int(made.metadata.shared)


@pytest.mark.parametrize(
    ("fp8", "activation", "heads"),
    [(False, "gelu_tanh", (32, 8, 128)), (True, "silu", (28, 4, 128)), (False, "silu", (8, 1, 256))],
)
def test_the_kernel_compiles(fp8: bool, activation: str, heads: tuple[int, int, int]) -> None:
    """In a process of its own: Triton's interpreter, once used, stays in the way."""
    code = f"import test_one_token as t; assert t.compile_for_hopper({fp8}, {activation!r}, {heads}) <= 227 << 10"
    clean = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def off(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())


# --- on a card --------------------------------------------------------------------------------------------------------


def rounded(x: torch.Tensor, fp8: bool) -> torch.Tensor:
    """An input as a product takes it, in float64."""
    x = x.to(torch.bfloat16).double()
    if not fp8:
        return x
    scale = x.abs().max().float() / 448
    return (x.float() / scale).to(E4M3).double() * scale.double()


def normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt((x * x).mean() + 1e-6) * gain.double()


def random_layer(model: int, features: int, shape: QkvShape, fp8: bool, bias: bool) -> LayerParts:
    def matrix(rows: int, k: int) -> Matrix:
        drawn = torch.randn(rows, k, device=DEVICE) / k**0.5
        added = torch.randn(rows, device=DEVICE).to(torch.bfloat16) if bias else None
        if not fp8:
            return Matrix(drawn.to(torch.bfloat16), added)
        scales = drawn.abs().amax(1) / 448
        return Matrix(Fp8Matrix((drawn / scales[:, None]).to(E4M3), scales, torch.empty(0)), added)

    norms = [(torch.rand(model, device=DEVICE) + 0.5).to(torch.bfloat16) for _ in range(2)]
    heads, rows = shape.n_heads * shape.head_dim, (shape.n_heads + 2 * shape.n_kv_heads) * shape.head_dim
    qkv, out = matrix(rows, model), matrix(model, heads)
    return LayerParts(norms[0], qkv, shape, out, norms[1], matrix(2 * features, model), matrix(model, features), "silu")


def times(matrix: Matrix, x: torch.Tensor) -> torch.Tensor:
    """matrix x in float64, with what is rounded on the way."""
    packed = matrix.packed
    assert not isinstance(packed, IntMatrix)
    if isinstance(packed, Fp8Matrix):
        out = (packed.values.double() * packed.scales[:, None].double()) @ rounded(x, fp8=True)
    else:
        out = packed.double() @ rounded(x, fp8=False)
    return out if matrix.bias is None else out + matrix.bias.double()


def one_after_the_other(layers: list[LayerParts], x: torch.Tensor, views: list[Any], step: Any) -> torch.Tensor:
    """stream [model] in float64; attention by the reference."""
    for parts, view in zip(layers, views, strict=True):
        qkv = times(parts.qkv, normed(x, parts.attention_norm)).to(torch.bfloat16)[None]
        attended, _ = REFERENCE.attention(*REFERENCE.qkv_write(qkv, parts.shape, view, step), view, step)
        x = (x + times(parts.out, attended.flatten())).to(torch.bfloat16).double()
        gate, up = times(parts.gate_up, normed(x, parts.feed_forward_norm)).chunk(2)
        x = (x + times(parts.down, torch.nn.functional.silu(gate) * up)).to(torch.bfloat16).double()
    return x


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rope", "model", "features", "norms"),
    [
        (32, 8, 128, 128, 4096, 14336, False),
        (16, 8, 128, 128, 1024, 3072, True),
        (14, 2, 64, 64, 896, 4864, False),
        (8, 1, 256, 128, 640, 1536, False),
        (10, 2, 64, 32, 640, 1152, True),
    ],
)
@pytest.mark.parametrize(
    ("length", "window"), [(1, None), (2, None), (150, None), (190, 33), (5000, None), (5000, 1000)]
)
def test_layers_of_one_token(
    heads: int,
    kv_heads: int,
    dim: int,
    rope: int,
    model: int,
    features: int,
    norms: bool,
    length: int,
    window: int | None,
    fp8: bool,
    batch: Callable[..., Any],
    qkv_shape: Callable[..., Any],
) -> None:
    """As the operations one after the other; the caches too; thrice the same."""
    torch.manual_seed(0)
    case = batch([(length, 1)], heads=heads, kv_heads=kv_heads, head_dim=dim, junk=1.0, window=window)
    case = case.to(DEVICE, torch.bfloat16)
    shape = qkv_shape(heads, kv_heads, dim, rope, norms, DEVICE)
    if norms:
        shape = replace(shape, q_norm=shape.q_norm.to(torch.bfloat16), k_norm=shape.k_norm.to(torch.bfloat16))
    # Rotary tables of tests are short.
    shape = replace(shape, norm_offset=False, cos_sin=shape.cos_sin.repeat(26, 1, 1))
    layers = [random_layer(model, features, shape, fp8, bias=norms) for _ in range(3)]
    views, twins = ([replace(case.view, kv=case.view.kv.clone()) for _ in layers] for _ in range(2))
    stream = torch.randn(1, model, device=DEVICE).to(torch.bfloat16)
    want = one_after_the_other(layers, stream[0].double(), twins, case.step)
    run, found = kernels.Layers([one_token._layer(one) for one in layers]), []
    for _ in range(3):
        got = run(stream.clone(), views, case.step)
        assert off(got[0], want) < (6e-2 if fp8 else 1e-2)
        found.append(got)
    for view, twin in zip(views, twins, strict=True):
        assert off(view.kv, twin.kv.double()) < (6e-2 if fp8 else 1e-2)
    assert all(torch.equal(found[0], one) for one in found[1:])


@pytest.mark.gpu
@hopper
def test_what_goes_the_other_way(batch: Callable[..., Any], qkv_shape: Callable[..., Any]) -> None:
    """More tokens than one, and attention that the kernel does not know."""
    case = batch([(150, 1)], heads=8, kv_heads=2, head_dim=64).to(DEVICE, torch.bfloat16)
    layers = [random_layer(512, 768, qkv_shape(8, 2, 64, 64, False, DEVICE), False, False) for _ in range(2)]
    otherwise, stream = torch.zeros(2, 3), torch.randn(1, 512, device=DEVICE).to(torch.bfloat16)
    run = one_token.OneToken(layers, lambda *_: otherwise)
    assert run(stream, [case.view] * 2, case.step).shape == (1, 512)
    assert run(stream.expand(2, -1), [case.view] * 2, case.step) is otherwise
    assert run(stream, [case.view] * 2, replace(case.step, max_length=SHORT + 1)) is otherwise
    assert run(stream, [replace(case.view, softcap=30.0)] * 2, case.step) is otherwise
    assert run(stream, [replace(case.view, kv=case.view.kv.float())] * 2, case.step) is otherwise
