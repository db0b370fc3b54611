"""The compiled operations equal the reference: every shape of attention, odd sizes, any number of rows and threads."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ridgeline.ops import native_cpu
from ridgeline.ops.native.binding import library_path, sources
from ridgeline.ops.native.build import build, why_not
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.table import Ops, QkvShape

BF16, F32 = torch.bfloat16, torch.float32
DTYPES = [F32, BF16]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a library for this CPU lies: the user's cache if it was built, else made for these tests."""
    if library_path().exists():
        return library_path().parent
    if (reason := why_not()) is not None:
        pytest.skip(f"native operations: {reason}")
    return build(tmp_path_factory.mktemp("native")).parent


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sources compiled as for a CPU without AMX and without bfloat16 instructions."""
    if (reason := why_not()) is not None:
        pytest.skip(f"native operations: {reason}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", f"{os.environ.get('CXX', 'g++')} -mno-amx-bf16 -mno-avx512bf16")
        return build(tmp_path_factory.mktemp("plain")).parent


@pytest.fixture(scope="module", params=["this-cpu", "plain"])
def ops(request: pytest.FixtureRequest) -> Ops:
    found, what = native_cpu.load(request.getfixturevalue("folder" if request.param == "this-cpu" else "plain_folder"))
    assert found is not None, what
    assert request.param == "this-cpu" or "AMX" not in what
    return found


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def close(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype and out.shape == want.shape
    assert not torch.isnan(out).any()
    error = (out.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9)
    assert error < (5e-3 if dtype == BF16 else 1e-6), float(error)
    worst = (out.double() - want.double()).abs().max() / want.double().abs().max().clamp(min=1e-9)
    assert worst < (2e-2 if dtype == BF16 else 5e-6), float(worst)


# --- products -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("outputs, inputs", [(96, 64), (1, 1), (17, 33), (130, 70), (49, 5), (256, 512), (64, 1100)])
def test_linear(ops: Ops, threads: int, dtype: torch.dtype, outputs: int, inputs: int) -> None:
    weight, bias = torch.randn(outputs, inputs).to(dtype), torch.randn(outputs).to(dtype)
    packed = ops.pack(weight)
    assert packed.shape[0] == outputs
    for rows in (1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 32, 33, 47, 65, 150):
        x = torch.randn(rows, inputs).to(dtype)
        for one in (None, bias):
            want = F.linear(x.double(), weight.double(), None if one is None else one.double())
            close(ops.linear(x, packed, one), want.to(dtype), dtype)


def test_linear_of_many_rows_and_inputs(ops: Ops, threads: int) -> None:
    """Rows that do not fit the cache at once."""
    weight, x = torch.randn(200, 2080).bfloat16(), torch.randn(700, 2080).bfloat16()
    close(ops.linear(x, ops.pack(weight), None), F.linear(x.double(), weight.double()).bfloat16(), BF16)


def test_linear_takes_rows_that_do_not_lie_in_order(ops: Ops) -> None:
    weight, x = torch.randn(32, 48), torch.randn(5, 96)[:, ::2]
    close(ops.linear(x, ops.pack(weight), None), F.linear(x, weight), F32)


def test_a_packed_weight_stands_alone(ops: Ops) -> None:
    weight, x = torch.randn(40, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    packed = ops.pack(weight)
    want = ops.linear(x, packed, None)
    weight.zero_()
    assert torch.equal(ops.linear(x, packed, None), want)


def test_float16_falls_back(ops: Ops) -> None:
    weight, x = torch.randn(40, 64).half(), torch.randn(3, 64).half()
    assert torch.equal(ops.linear(x, ops.pack(weight), None), F.linear(x, weight))
    assert ops.rms_norm(x, torch.ones(64).half(), 1e-5, False).dtype == torch.float16


# --- what happens to each token alone -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, size", [(1, 576), (5, 96), (3, 7), (200, 130)])
@pytest.mark.parametrize("offset", [False, True])
def test_norms(ops: Ops, dtype: torch.dtype, rows: int, size: int, offset: bool) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((rows, size), (rows, size), (size,)))
    close(ops.rms_norm(x, weight, 1e-5, offset), REFERENCE.rms_norm(x, weight, 1e-5, offset), dtype)
    before = residual.clone()
    out, total = ops.add_rms_norm(x, residual, weight, 1e-5, offset)
    want, want_total = REFERENCE.add_rms_norm(x, residual, weight, 1e-5, offset)
    assert torch.equal(total, want_total) and torch.equal(residual, before)
    close(out, want, dtype)


def test_norm_of_zeros_is_zero_and_nan_stays(ops: Ops) -> None:
    assert torch.equal(ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-5, False), torch.zeros(2, 8))
    assert ops.rms_norm(torch.full((1, 8), float("nan")), torch.ones(8), 1e-5, False).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows, size", [(1, 1536), (5, 64), (3, 7), (90, 260)])
def test_activation(ops: Ops, dtype: torch.dtype, kind: str, rows: int, size: int) -> None:
    x = (4 * torch.randn(rows, 2 * size)).to(dtype)
    close(ops.activate(x, kind), REFERENCE.activate(x, kind), dtype)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activation_far_out(ops: Ops, kind: str) -> None:
    gate = torch.tensor([-1e30, -300.0, -100.0, -88.0, 0.0, 88.0, 300.0, 1e30])
    x = torch.cat((gate, torch.ones(8))).unsqueeze(0)
    torch.testing.assert_close(ops.activate(x, kind), REFERENCE.activate(x, kind), rtol=1e-6, atol=1e-30)
    assert ops.activate(torch.full((1, 2), float("nan")), kind).isnan().all()


def shape_of(heads: int, kv_heads: int, dim: int, rope_dim: int, norms: bool, dtype: torch.dtype) -> QkvShape:
    angle = torch.outer(torch.arange(300).double(), 10000.0 ** (-torch.arange(0, rope_dim, 2).double() / rope_dim))
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
    want = REFERENCE.qkv_write(qkv, shape, case.view, case.step)
    want_kv = case.view.kv.clone()
    case.view.kv.copy_(before)
    for _ in range(2):  # the second time with what the step derived
        out = ops.qkv_write(qkv, shape, case.view, case.step)
        assert torch.equal(qkv, given)
        for one, other in zip(out, want, strict=True):
            close(one, other, dtype)
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
    "one-row-split": ([(700, 1)], {}),
    "long-decode": ([(700, 1), (3, 1), (350, 1)], {}),
    "long-chunk": ([(300, 70), (520, 1)], {"heads": 3, "kv_heads": 1}),
    "verify": ([(40, 5), (60, 5), (9, 5)], {}),
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
    wide = [one.double() for one in (case.q, case.k, case.v)]
    want, lse = REFERENCE.attention(*wide, case.view, case.step)
    assert lse is not None
    for _ in range(2):  # the second time with what the step derived
        out, _ = ops.attention(case.q, case.k, case.v, case.view, case.step)
        assert out.dtype == dtype and out.shape == want.shape
        assert torch.equal(case.view.kv.nan_to_num(7.0), given.nan_to_num(7.0))
        if dtype == F32:
            torch.testing.assert_close(out.double(), want, atol=4e-6, rtol=2e-5)
        else:
            assert not out.isnan().any()
            assert (out.double() - want).norm() < 1e-2 * want.norm()
            assert (out.double() - want).abs().max() < 4e-2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(CASES))
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
    want, _ = REFERENCE.attention(case.q, case.k, case.v, case.view, case.step)
    out, _ = ops.attention(case.q, case.k, case.v, case.view, case.step)
    torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-3)


def test_attention_takes_queries_as_qkv_write_leaves_them(ops: Ops, batch: Callable[..., Any]) -> None:
    case = batch(MIXED)
    merged = torch.cat((case.q, case.k, case.v), 1)
    want, _ = ops.attention(case.q, case.k, case.v, case.view, case.step)
    out, _ = ops.attention(*merged.split((6, 2, 2), 1), case.view, case.step)
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


# --- build and load -----------------------------------------------------------------------------------------------------------


def test_load_says_how_to_build(tmp_path: Path) -> None:
    found, why = native_cpu.load(tmp_path)
    assert found is None and why
    assert "ridgeline.ops.native.build" in why or "lacks" in why


def test_a_broken_library_is_refused(folder: Path, tmp_path: Path) -> None:
    library_path(tmp_path).write_bytes(b"not a library")
    found, why = native_cpu.load(tmp_path)
    assert found is None and "cannot be opened" in why


def test_the_name_follows_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {".cpp", ".h"} == {one.suffix for one in sources()}
    before = library_path(tmp_path)
    monkeypatch.setattr("ridgeline.ops.native.binding.cpu_flags", lambda: frozenset({"other"}))
    assert library_path(tmp_path) != before
