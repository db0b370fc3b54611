"""The compiled operations equal the reference: every shape of attention, odd sizes, any number of rows and threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.ops import native_cpu
from ridgeline.ops.columns import columns, joined
from ridgeline.ops.native.files import cpu_flags, library_path, sources
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import LayerParts, Matrix, Normed, Ops, QkvShape
from tests.combinations import crossed

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = [F32, BF16]


def close(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, bf16_error: float = 5e-3) -> None:
    assert out.dtype == dtype and out.shape == want.shape
    assert not torch.isnan(out).any()
    error = (out.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9)
    assert error < (bf16_error if dtype == BF16 else 1e-6), float(error)
    worst = (out.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-9)
    assert worst < (2e-2 if dtype == BF16 else 5e-6), float(worst)


# --- products -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(96, 64), (1, 1), (17, 33), (130, 70), (49, 5), (256, 512), (64, 1100)])
def test_linear(ops: Ops, threads: int, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    packed = ops.matmul.unquantized.pack(weight)
    assert packed.shape[0] == outputs
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 32, 33, 47, 65, 150):
        x = torch.randn(rows, inputs).to(dtype)
        for bias_or_none in (None, bias):
            want = F.linear(x.double(), weight.double(), None if bias_or_none is None else bias_or_none.double())
            close(ops.matmul.unquantized.linear(x, packed, bias_or_none), want.to(dtype), dtype)


def test_linear_of_many_rows_and_inputs(ops: Ops, threads: int) -> None:
    """Rows that do not fit the cache at once."""
    weight, x = torch.randn(200, 2080).bfloat16(), torch.randn(700, 2080).bfloat16()
    close(
        ops.matmul.unquantized.linear(x, ops.matmul.unquantized.pack(weight), None),
        F.linear(x.double(), weight.double()).bfloat16(),
        BF16,
    )


def test_linear_takes_rows_that_do_not_lie_in_order(ops: Ops) -> None:
    weight, x = torch.randn(32, 48), torch.randn(5, 96)[:, ::2]
    close(ops.matmul.unquantized.linear(x, ops.matmul.unquantized.pack(weight), None), F.linear(x, weight), F32)


def test_a_packed_weight_stands_alone(ops: Ops) -> None:
    weight, x = torch.randn(40, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    packed = ops.matmul.unquantized.pack(weight)
    want = ops.matmul.unquantized.linear(x, packed, None)
    weight.zero_()
    assert torch.equal(ops.matmul.unquantized.linear(x, packed, None), want)


def test_float16_falls_back(ops: Ops) -> None:
    weight, x = torch.randn(40, 64).half(), torch.randn(3, 64).half()
    assert torch.equal(ops.matmul.unquantized.linear(x, ops.matmul.unquantized.pack(weight), None), F.linear(x, weight))
    assert ops.tokenwise.rms_norm(x, torch.ones(64).half(), 1e-5, False).dtype == torch.float16


# --- what happens to each token alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 576), (5, 96), (3, 7), (200, 130)])
@pytest.mark.parametrize("offset", [False, True])
def test_norms(ops: Ops, dtype: torch.dtype, rows: int, size: int, offset: bool) -> None:
    x, weight = torch.randn(rows, size).to(dtype), torch.randn(size).to(dtype)
    close(ops.tokenwise.rms_norm(x, weight, 1e-5, offset), REFERENCE.tokenwise.rms_norm(x, weight, 1e-5, offset), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_side_by_side(ops: Ops, dtype: torch.dtype) -> None:
    """Copies and norms, from and to columns of wider matrices."""
    wide, weight = torch.randn(5, 90).to(dtype), torch.randn(33).to(dtype)
    x, y = wide[:, 7:40], torch.randn(5, 20).to(dtype)
    both = joined(ops.tokenwise, (y, Normed(x, weight, 1e-5, True), x))
    assert torch.equal(both[:, :20], y) and torch.equal(both[:, 53:], x)
    close(both[:, 20:53], REFERENCE.tokenwise.rms_norm(x, weight, 1e-5, True), dtype)
    alone = columns(ops.tokenwise, both, 53, 86)
    assert torch.equal(alone, x) and alone.is_contiguous()
    assert columns(ops.tokenwise, both, 0, 86) is both


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(96, 64), (160, 70), (36, 33)])
def test_what_joins_a_product(ops: Ops, threads: int, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    """A norm that is still to be done, the stream added to a product, the activation of one."""
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    norm, packed = torch.randn(inputs).to(dtype), ops.matmul.unquantized.pack(weight)
    for rows in (*range(1, 10), 13, 16, 17, 40):
        # A traceback shows the arguments, `rows` among them.
        check_joined(ops, packed, weight, bias, norm, rows)


def check_joined(
    ops: Ops, packed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, norm: torch.Tensor, rows: int
) -> None:
    """What joins a product of so many rows against the reference in float64 on the same numbers: what is computed in one go is
    not rounded in between."""
    dtype, (outputs, inputs) = weight.dtype, weight.shape
    x, stream = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
    normed, wide_normed = Normed(x, norm, 1e-5, False), Normed(x.double(), norm.double(), 1e-5, False)
    wide, wide_weight, wide_bias = x.double(), weight.double(), bias.double()
    want = REFERENCE.matmul.unquantized.linear(wide_normed, wide_weight, wide_bias).to(dtype)
    close(ops.matmul.unquantized.linear(normed, packed, bias), want, dtype)
    for bias_or_none, wide_one in ((None, None), (bias, wide_bias)):
        want = REFERENCE.matmul.unquantized.linear_add(wide, wide_weight, wide_one, stream.double()).to(dtype)
        close(ops.matmul.unquantized.linear_add(x, packed, bias_or_none, stream.clone()), want, dtype)
    for given, wide_given, kind in ((normed, wide_normed, "silu"), (x, wide, "gelu_tanh")):
        want = REFERENCE.matmul.unquantized.linear_activate(wide_given, wide_weight, wide_bias, kind).to(dtype)
        # The rounding of a few large sums weighs most here.
        close(ops.matmul.unquantized.linear_activate(given, packed, bias, kind), want, dtype, bf16_error=1e-2)


def test_the_stream_holds_the_result(ops: Ops) -> None:
    weight, x, stream = torch.randn(32, 48), torch.randn(5, 48), torch.randn(5, 32)
    out = ops.matmul.unquantized.linear_add(x, ops.matmul.unquantized.pack(weight), None, stream)
    assert out.data_ptr() == stream.data_ptr()
    apart = torch.randn(5, 64)[:, ::2]
    close(
        ops.matmul.unquantized.linear_add(x, ops.matmul.unquantized.pack(weight), None, apart),
        apart + F.linear(x, weight),
        F32,
    )


def test_norm_of_zeros_is_zero_and_nan_stays(ops: Ops) -> None:
    assert torch.equal(ops.tokenwise.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, False), torch.zeros(2, 8))
    assert ops.tokenwise.rms_norm(torch.full((1, 8), float("nan")), torch.ones(8), 1e-5, False).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows, size", [(1, 1536), (5, 64), (3, 7), (90, 260)])
def test_activation(ops: Ops, dtype: torch.dtype, kind: str, rows: int, size: int) -> None:
    x = (4 * torch.randn(rows, 2 * size)).to(dtype)
    close(ops.tokenwise.activate(x, kind), REFERENCE.tokenwise.activate(x, kind), dtype)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activation_far_out(ops: Ops, kind: str) -> None:
    gate = torch.tensor([-1e30, -300.0, -100.0, -88.0, 0.0, 88.0, 300.0, 1e30])
    x = torch.cat((gate, torch.ones(8))).unsqueeze(0)
    torch.testing.assert_close(
        ops.tokenwise.activate(x, kind), REFERENCE.tokenwise.activate(x, kind), rtol=1e-6, atol=1e-30
    )
    assert ops.tokenwise.activate(torch.full((1, 2), float("nan")), kind).isnan().all()


def shape_of(heads: int, kv_heads: int, dim: int, rope_dim: int, norms: bool, dtype: torch.dtype) -> QkvShape:
    angle = torch.outer(torch.arange(800).double(), 10000.0 ** (-torch.arange(0, rope_dim, 2).double() / rope_dim))
    return QkvShape(
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=dim,
        cos_sin=torch.stack((angle.cos(), angle.sin()), 1).float(),
        q_norm=(torch.rand(dim) + 0.5).to(dtype) if norms else None,
        k_norm=(torch.rand(dim) + 0.5).to(dtype) if norms else None,
        norm_eps=1e-6,
        norm_offset=norms,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(32, 32, False), (64, 64, True), (40, 24, True), (256, 64, False)])
@pytest.mark.parametrize("layer_major", [False, True])
def test_qkv_write(
    ops: Ops, batch: Callable[..., Any], dtype: torch.dtype, layer_major: bool, sizes: tuple[int, int, bool]
) -> None:
    dim, rope_dim, norms = sizes
    case = batch([(40, 7), (3, 1), (20, 20)], head_dim=dim, layer_major=layer_major).to("cpu", dtype)
    shape = shape_of(6, 2, dim, rope_dim, norms, dtype)
    qkv = torch.randn(28, 10 * dim).to(dtype)
    given, before = qkv.clone(), case.view.kv.clone()
    want = REFERENCE.attention.qkv_write(qkv, shape, case.view, case.step)
    want_kv = case.view.kv.clone()
    case.view.kv.copy_(before)
    for _ in range(2):  # the second time with what the step derived
        out = ops.attention.qkv_write(qkv, shape, case.view, case.step)
        assert torch.equal(qkv, given)
        for actual, other in zip(out, want, strict=True):
            close(actual, other, dtype)
        close(case.view.kv, want_kv, dtype)
        untouched = before == want_kv
        assert torch.equal(case.view.kv[untouched], before[untouched])


# --- attention ------------------------------------------------------------------------------------------------------------

DECODE = [(1, 1), (17, 1), (64, 1), (33, 1)]
MIXED = [(40, 7), (1, 1), (90, 90), (33, 1), (70, 5), (100, 68)]

CASES: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": (DECODE, {}),
    "decode-padded": ([*DECODE, (0, 1)], {}),
    "mixed": (MIXED, {"padding": 3}),
    "whole-prompts": ([(20, 20), (31, 31)], {}),
    "one-row": ([(37, 1)], {}),
    "one-row-shared-fairly": ([(700, 1)], {}),
    "one-row-split": ([(700, 1)], {"heads": 3, "kv_heads": 3}),
    "one-row-verified": ([(700, 5)], {"heads": 12, "kv_heads": 4, "tree": True}),
    "one-row-verified-split": ([(700, 5)], {"heads": 9, "kv_heads": 3, "tree": True}),
    "long-decode": ([(700, 1), (3, 1), (350, 1)], {}),
    "long-chunk": ([(300, 70), (520, 1)], {"heads": 3, "kv_heads": 1}),
    "verify": ([(40, 5), (60, 5), (9, 5)], {}),
    "few-packed": ([(200, 2), (130, 3), (333, 4), (140, 6)], {}),
    "few-packed-40": ([(200, 2), (130, 3), (333, 4), (140, 6)], {"head_dim": 40, "tree": True}),
    "few-packed-softcap": ([(150, 3)], {"head_dim": 128, "softcap": 2.0, "window": 140}),
    "mha": (MIXED, {"heads": 2, "kv_heads": 2}),
    "mqa": (MIXED, {"heads": 5, "kv_heads": 1, "head_dim": 40}),
    "mqa-many-heads": (MIXED, {"heads": 24, "kv_heads": 1}),
    "head-16": (MIXED, {"head_dim": 16}),
    "head-64": (MIXED, {"head_dim": 64}),
    "head-80": (MIXED, {"head_dim": 80}),
    "head-128": (MIXED, {"head_dim": 128}),
    "head-256": (MIXED, {"head_dim": 256}),
    "page-8": (MIXED, {"page_tokens": 8, "window": 19}),
    "page-32": (MIXED, {"page_tokens": 32}),
    "window": (MIXED, {"window": 19}),
    "window-decode": (DECODE, {"window": 19}),
    "window-long": ([(600, 1), (600, 300)], {"window": 100}),
    "softcap": (MIXED, {"softcap": 2.0}),
    "softcap-window": (MIXED, {"softcap": 2.0, "window": 9}),
    "tree": (MIXED, {"tree": True}),
    "tree-64": ([(80, 64), (64, 64)], {"tree": True}),
    "tree-window": (MIXED, {"tree": True, "window": 9}),
    "compacted-window": (MIXED, {"compacted": True, "window": 30}),
    "layer-major": (MIXED, {"layer_major": True}),
}


def check(ops: Ops, case: Any, dtype: torch.dtype) -> None:
    """The case in `dtype` against the reference in float64 on the same numbers."""
    case = case.to("cpu", dtype)
    given = case.view.kv.clone()
    wide = [tensor.double() for tensor in (case.q, case.k, case.v)]
    want, lse = REFERENCE.attention.attend(*wide, case.view, case.step)
    assert lse is not None
    for _ in range(2):  # the second time with what the step derived
        out, _ = ops.attention.attend(case.q, case.k, case.v, case.view, case.step)
        assert out.dtype == dtype and out.shape == want.shape
        assert torch.equal(case.view.kv.nan_to_num(7.0), given.nan_to_num(7.0))
        if dtype == F32:
            torch.testing.assert_close(out.double(), want, atol=4e-6, rtol=2e-5)
        else:
            assert not out.isnan().any()
            assert (out.double() - want).norm() < 1e-2 * want.norm()
            assert (out.double() - want).abs().max() < 4e-2


@pytest.mark.parametrize(
    ("name", "dtype", "threads"),
    crossed(list(CASES), DTYPES, (1, 2), quick=lambda *at: sum(at) % 2 == 0),
    indirect=["threads"],
)
def test_attention(ops: Ops, threads: int, batch: Callable[..., Any], name: str, dtype: torch.dtype) -> None:
    rows, fields = CASES[name]
    check(ops, batch(rows, **fields), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fields", [{}, {"window": 9}, {"page_tokens": 8, "window": 9}, {"head_dim": 40}])
def test_slots_nobody_sees_may_hold_anything(
    ops: Ops, batch: Callable[..., Any], dtype: torch.dtype, fields: dict[str, Any]
) -> None:
    check(ops, batch([*MIXED, (700, 1)], junk=float("nan"), **fields), dtype)


def test_large_scores(ops: Ops, batch: Callable[..., Any]) -> None:
    """Softmax over scores far apart: nothing overflows."""
    case = batch([(200, 3), (50, 50)], head_dim=64)
    case.q.mul_(300.0)
    want, _ = REFERENCE.attention.attend(case.q, case.k, case.v, case.view, case.step)
    out, _ = ops.attention.attend(case.q, case.k, case.v, case.view, case.step)
    torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-3)


def test_attention_takes_queries_as_qkv_write_leaves_them(ops: Ops, batch: Callable[..., Any]) -> None:
    case = batch(MIXED)
    merged = torch.cat((case.q, case.k, case.v), 1)
    want, _ = ops.attention.attend(case.q, case.k, case.v, case.view, case.step)
    out, _ = ops.attention.attend(*merged.split((6, 2, 2), 1), case.view, case.step)
    assert torch.equal(out, want)


@pytest.mark.parametrize("seed", range(12))
def test_attention_of_random_batches(ops: Ops, batch: Callable[..., Any], seed: int) -> None:
    draw = random.Random(seed)
    kv_heads = draw.choice([1, 2, 3])
    rows = []
    for _ in range(draw.randint(1, 6)):
        length = draw.choice([1, draw.randint(1, 40), draw.randint(1, 300)])
        rows.append((length, draw.choice([1, draw.randint(1, length), min(length, 64), length])))
    fields = {
        "heads": kv_heads * draw.choice([1, 2, 3, 7]),
        "kv_heads": kv_heads,
        "head_dim": draw.choice([32, 48, 64, 96, 128]),
        "page_tokens": draw.choice([8, 16, 16, 48]),
        "window": draw.choice([None, None, 1, draw.randint(1, 200)]),
        "softcap": draw.choice([None, None, 5.0]),
        "tree": draw.random() < 0.3,
        "compacted": draw.random() < 0.2,
        "padding": draw.choice([0, 2]),
        "junk": float("nan"),
        "seed": seed,
    }
    torch.manual_seed(seed)
    for dtype in DTYPES:
        check(ops, batch(rows, **fields), dtype)


# --- whole layers ---------------------------------------------------------------------------------------------------------


def layer_parts(
    dtype: torch.dtype, pack: Callable[[torch.Tensor], torch.Tensor], options: dict[str, Any]
) -> LayerParts:
    """A small layer with random weights: 6 heads over 2, head_dim 32, d_model 96."""

    def matrix(outputs: int, inputs: int) -> Matrix:
        bias = torch.randn(outputs).to(dtype) if options.get("bias") else None
        return Matrix(pack((torch.randn(outputs, inputs) * inputs**-0.5).to(dtype)), bias)

    return LayerParts(
        attention_norm=torch.rand(96).to(dtype),
        qkv=matrix(10 * 32, 96),
        shape=shape_of(6, 2, 32, 32, options.get("norms", False), dtype),
        out=matrix(96, 6 * 32),
        feed_forward_norm=torch.rand(96).to(dtype),
        gate_up=matrix(2 * options.get("d_ff", 128), 96),
        down=matrix(96, options.get("d_ff", 128)),
        activation=options.get("activation", "silu"),
    )


def run_layers(
    ops: Ops, layers: list[LayerParts], stream: torch.Tensor, views: Sequence[KvView], step: StepInputs
) -> torch.Tensor:
    """One operation after the other."""
    for parts, view in zip(layers, views, strict=True):
        eps, offset = parts.shape.norm_eps, parts.shape.norm_offset
        normed = Normed(stream, parts.attention_norm, eps, offset)
        qkv = ops.matmul.unquantized.linear(normed, parts.qkv.packed, parts.qkv.bias)
        out, _ = ops.attention.attend(*ops.attention.qkv_write(qkv, parts.shape, view, step), view, step)
        stream = ops.matmul.unquantized.linear_add(out.flatten(1), parts.out.packed, parts.out.bias, stream)
        normed = Normed(stream, parts.feed_forward_norm, eps, offset)
        inner = ops.matmul.unquantized.linear_activate(
            normed, parts.gate_up.packed, parts.gate_up.bias, parts.activation
        )
        stream = ops.matmul.unquantized.linear_add(inner, parts.down.packed, parts.down.bias, stream)
    return stream


def refuse(stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
    raise AssertionError("these layers run in one call")


@pytest.mark.parametrize("options", [{}, {"bias": True, "norms": True, "activation": "gelu_tanh"}])
@pytest.mark.parametrize(
    ("rows", "dtype", "threads"),
    crossed(
        [[(37, 1)], [(700, 1)], DECODE, [(9, 5)], [(20, 1)] * 13, MIXED],
        DTYPES,
        (1, 2),
        quick=lambda *at: sum(at) % 2 == 0,
    ),
    indirect=["threads"],
)
def test_layers_in_one_call(
    ops: Ops,
    threads: int,
    batch: Callable[..., Any],
    rows: list[tuple[int, int]],
    options: dict[str, Any],
    dtype: torch.dtype,
) -> None:
    case = batch(rows, padding=2 if len(rows) > 1 else 0).to("cpu", dtype)
    # In bfloat16 the rounding of every operation would add up, so there the same operations are called one by one.
    single = REFERENCE if dtype == F32 else ops
    packed: list[LayerParts] = []
    apart: list[LayerParts] = []
    for seed in range(3):
        for kept, pack in ((packed, ops.matmul.unquantized.pack), (apart, single.matmul.unquantized.pack)):
            torch.manual_seed(seed)
            kept.append(layer_parts(dtype, pack, options))
    stream = torch.randn(len(case.q), 96).to(dtype)
    # The layers differ in cache, and the second in its window.
    views, twins = ([replace(case.view, kv=case.view.kv.clone(), window=w) for w in (None, 11, None)] for _ in range(2))
    want = run_layers(single, apart, stream.clone(), twins, case.step)
    out = ops.programs.layers(packed, refuse)(stream, views, case.step)
    owned = int(case.step.q_start[-1])
    close(out[:owned], want[:owned], dtype)
    for view, twin in zip(views, twins, strict=True):
        # Page 0 is where padding writes.
        close(view.kv[1:], twin.kv[1:], dtype)


@pytest.mark.parametrize("many", [2, 3, 9])
@pytest.mark.parametrize("rows", [[(9, 5)], MIXED], ids=["verified", "mixed"])
def test_layers_by_any_number_of_threads(
    ops: Ops, batch: Callable[..., Any], many: int, rows: list[tuple[int, int]]
) -> None:
    """Two threads share 10 heads evenly and write those that they made, three do not, and nine meet as OpenMP has it."""
    case, options = batch(rows).to("cpu", F32), {"d_ff": 1536}
    packed, apart = [], []
    for seed in range(3):
        for kept, pack in ((packed, ops.matmul.unquantized.pack), (apart, REFERENCE.matmul.unquantized.pack)):
            torch.manual_seed(seed)
            kept.append(layer_parts(F32, pack, options))
    stream = torch.randn(len(case.q), 96)
    views, twins = ([replace(case.view, kv=case.view.kv.clone()) for _ in packed] for _ in range(2))
    want = run_layers(REFERENCE, apart, stream.clone(), twins, case.step)
    before = torch.get_num_threads()
    torch.set_num_threads(many)
    try:
        for _ in range(5):
            close(ops.programs.layers(packed, refuse)(stream.clone(), views, case.step), want, F32)
    finally:
        torch.set_num_threads(before)
    for view, twin in zip(views, twins, strict=True):
        close(view.kv[1:], twin.kv[1:], F32)


def test_views_of_the_first_layers_run_these_alone(ops: Ops, batch: Callable[..., Any]) -> None:
    case = batch(MIXED).to("cpu", F32)
    torch.manual_seed(0)
    parts = [layer_parts(F32, ops.matmul.unquantized.pack, {}) for _ in range(3)]
    run, stream = ops.programs.layers(parts, lambda stream, views, step: stream), torch.randn(len(case.q), 96)
    views, twins = ([replace(case.view, kv=case.view.kv.clone()) for _ in parts] for _ in range(2))
    before = views[2].kv.clone()
    want = ops.programs.layers(parts[:2], refuse)(stream.clone(), twins[:2], case.step)
    assert torch.equal(run(stream.clone(), views[:2], case.step), want)
    assert torch.equal(views[1].kv, twins[1].kv) and torch.equal(views[2].kv, before)
    assert torch.equal(run(stream, [], case.step), stream)


@pytest.mark.parametrize("options", [{"d_ff": 40}])
def test_layers_of_other_sizes_run_one_by_one(ops: Ops, options: dict[str, Any]) -> None:
    assert ops.programs.layers([layer_parts(F32, ops.matmul.unquantized.pack, options)], refuse) is refuse
    half = layer_parts(torch.float16, lambda weight: weight, {})
    assert ops.programs.layers([half], refuse) is refuse


def test_layers_over_a_cache_of_other_numbers_run_one_by_one(ops: Ops, batch: Callable[..., Any]) -> None:
    case = batch(DECODE).to("cpu", BF16)
    run = ops.programs.layers([layer_parts(F32, ops.matmul.unquantized.pack, {})], refuse)
    with pytest.raises(AssertionError, match="one call"):
        run(torch.randn(len(case.q), 96), [case.view], case.step)


# --- build and load -----------------------------------------------------------------------------------------------------------


def test_load_says_how_to_build(tmp_path: Path) -> None:
    library, why = native_cpu.load(tmp_path)
    assert library is None and why
    assert "ridgeline.ops.native.build" in why or "lacks" in why


def test_a_broken_library_is_refused(folder: Path, tmp_path: Path) -> None:
    library_path(tmp_path).write_bytes(b"not a library")
    library, why = native_cpu.load(tmp_path)
    assert library is None and why.startswith("cannot open")


def test_the_name_follows_the_sources_and_the_processor(tmp_path: Path) -> None:
    assert {".cpp", ".h"} == {source.suffix for source in sources()}
    before = library_path(tmp_path)
    assert library_path(tmp_path, cpu_flags()) == before != library_path(tmp_path, frozenset({"other"}))
