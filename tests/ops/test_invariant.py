"""Batch-invariant operations: bit-equal rows whatever is computed beside them, and close to the reference.

On a GPU where there is one, else in Triton's interpreter. There a product of tiles is numpy's, whose order of sums changes
with the tile; it is replaced by one that goes through the inputs in order, as a GPU's matrix unit does, 16 at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.core.errors import ConfigError
from ridgeline.ops.reference import FP8_REFERENCE, REFERENCE, quantize
from ridgeline.ops.table import Normed, Ops, Programs, Scaled
from ridgeline.ops.triton import invariant, qkv
from ridgeline.ops.triton.gemm_small import matrix_product
from ridgeline.ops.triton.invariant import INVARIANT
from ridgeline.ops.triton.invariant_attention import InvariantAttention
from ridgeline.ops.triton.shapes import MatrixTile
from ridgeline.ops.triton.table import TRITON
from tests.combinations import crossed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SLOW = [] if DEVICE == "cuda" else [pytest.mark.long]
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
MOST = 300 if DEVICE == "cuda" else 260
TOKENS = (1, 2, 3, 16, 17, 64, 200) if DEVICE == "cuda" else (1, 3, 17, 64)
SHAPES = [(160, 448), (70, 64), (96, 1048)] + ([(4096, 4096), (6144, 4096)] if DEVICE == "cuda" else [])


@pytest.fixture(scope="module", autouse=True)
def sums_in_order(interpreter: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", in_order)
        yield


def in_order(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """a [M, K] b [K, N] + d, summed along K from d on; e4m3 numbers come as bytes."""
    from triton.runtime.interpreter import TensorHandle

    left, right = (
        torch.from_numpy(tensor.data).view(torch.float8_e4m3fn).float().numpy()
        if tensor.data.dtype == "uint8"
        else tensor.data
        for tensor in (a, b)
    )
    total = d.data.copy()
    for at in range(left.shape[1]):
        total += left[:, at : at + 1].astype(total.dtype) * right[at : at + 1].astype(total.dtype)
    return TensorHandle(total, d.dtype.scalar)


def close(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative error in the 2-norm."""
    assert out.shape == want.shape and out.dtype == dtype
    assert torch.isfinite(out).all()
    error = float((out.double() - want.double()).norm() / want.double().norm().clamp(min=1e-9))
    assert error < {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype], error


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def some_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small weights have several runs too."""
    monkeypatch.setattr(invariant, "runs", lambda n, k: max(1, min(3, k // 128)))


@pytest.mark.usefixtures("some_runs")
@pytest.mark.parametrize(
    ("n", "k", "dtype"),
    [(*shape, dtype) for shape in SHAPES for dtype in DTYPES]
    if DEVICE == "cuda"
    else [(70, 264, torch.float16), pytest.param(70, 64, torch.float32, marks=pytest.mark.long)],
    ids=str,
)
def test_a_row_is_the_same_among_any_number_of_tokens(n: int, k: int, dtype: torch.dtype) -> None:
    """With norm, bias, stream and activation, by few and by many tokens, of one run and of several."""
    weight, bias = torch.randn(n, k).to(DEVICE, dtype), torch.randn(n).to(DEVICE, dtype)
    x, stream = torch.randn(MOST, k).to(DEVICE, dtype), torch.randn(MOST, n).to(DEVICE, dtype)
    gain = torch.rand(k).add(0.5).to(DEVICE, dtype)
    packed = INVARIANT.matmul.unquantized.pack(weight / 8)

    def run(part: slice) -> tuple[torch.Tensor, ...]:
        deferred = Normed(x[part], gain, 1e-5, False)
        return (
            INVARIANT.matmul.unquantized.linear(x[part], packed, None),
            INVARIANT.matmul.unquantized.linear(deferred, packed, bias),
            INVARIANT.matmul.unquantized.linear_add(x[part], packed, bias, stream[part].clone()),
            INVARIANT.matmul.unquantized.linear_activate(deferred, packed, bias, "silu"),
            INVARIANT.matmul.unquantized.linear_activate(x[part], packed, None, "gelu_tanh"),
        )

    whole = run(slice(0, MOST))
    normed = REFERENCE.tokenwise.rms_norm(x.double(), gain.double(), 1e-5, False)
    sums, of_normed = x.double() @ packed.double().T, normed @ packed.double().T + bias.double()
    wants = (
        sums,
        of_normed,
        stream.double() + sums + bias.double(),
        REFERENCE.tokenwise.activate(of_normed, "silu"),
        REFERENCE.tokenwise.activate(sums, "gelu_tanh"),
    )
    for out, want in zip(whole, wants, strict=True):
        close(out, want, dtype)
    for place, tokens in enumerate(TOKENS):
        # In the interpreter every other one from the end, which takes half of the time.
        for first in (0, MOST - tokens) if DEVICE == "cuda" else (place % 2 * (MOST - tokens),):
            part = slice(first, first + tokens)
            for out, want in zip(run(part), whole, strict=True):
                assert torch.equal(out, want[part]), (tokens, first)


@pytest.mark.parametrize("splits", [1, 3])
def test_many_tokens_are_summed_like_few(splits: int) -> None:
    """The two kernels themselves, on a weight that no tile divides."""
    x, weight, bias = torch.randn(90, 400), torch.randn(100, 400), torch.randn(100)
    x, weight, bias = x.to(DEVICE).half(), weight.to(DEVICE).half(), bias.to(DEVICE).half()
    few = matrix_product(x, weight, bias, MatrixTile(16, 64, 128, 4, 2, splits=splits))
    many = invariant.many_product(x, weight, bias, MatrixTile(32, 32, 128, 4, 2, splits=splits), None, None)
    assert torch.equal(few, many)
    close(many, x.double() @ weight.double().T + bias.double(), torch.float16)


@pytest.mark.parametrize(
    ("n", "k"), [(4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1024, 3072), (576, 576)]
)
def test_launches_differ_by_tokens_and_sums_do_not(n: int, k: int) -> None:
    """The number of runs belongs to the weight; a pipeline fits a processor's shared memory."""
    for dtype in (torch.bfloat16, torch.float32):
        tiles = [invariant.tile_of(tokens, n, k, dtype) for tokens in (1, 16, 40, 128, 256, 257, 9000)]
        assert {tile.splits for tile in tiles} == {invariant.runs(n, k)}
        for tile in tiles:
            assert (tile.rows + tile.batch) * tile.block * dtype.itemsize * tile.stages <= 225 * 1024
            assert invariant.BLOCK % tile.block == 0


def test_rows_of_odd_width_are_refused() -> None:
    with pytest.raises(ConfigError, match="--deterministic"):
        INVARIANT.matmul.unquantized.pack(torch.zeros(8, 13, dtype=torch.float16))


def test_fp8_rows_are_the_same_among_any_number_of_tokens() -> None:
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs fp8 tensor cores")
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    weight = quantize(torch.randn(130, 512))
    matrix = INVARIANT.matmul.fp8.pack(weight.values.to(DEVICE), weight.scales.to(DEVICE))
    x, stream = quantize(torch.randn(MOST, 512).to(DEVICE)), torch.randn(MOST, 130).to(DEVICE, dtype)
    whole = INVARIANT.matmul.fp8.linear(x, matrix, None, dtype)
    added = INVARIANT.matmul.fp8.linear_add(x, matrix, None, stream.clone())
    close(whole, FP8_REFERENCE.linear(x, matrix, None, dtype), dtype)
    for tokens in TOKENS:
        part = slice(MOST - tokens, MOST)
        given = Scaled(x.values[part], x.scales[part])
        assert torch.equal(INVARIANT.matmul.fp8.linear(given, matrix, None, dtype), whole[part])
        assert torch.equal(INVARIANT.matmul.fp8.linear_add(given, matrix, None, stream[part].clone()), added[part])


# --- attention --------------------------------------------------------------------------------------------------------

MIXED = [(40, 7), (1, 1), (140, 30), (33, 1)]
ATTENTION: dict[str, tuple[list[tuple[int, int]], dict[str, Any]]] = {
    "decode": ([(1, 1), (200, 1), (64, 1), (300, 1), (0, 1)], {}),
    "verify": ([(140, 3), (200, 5), (9, 2)], {}),
    "mixed": (MIXED, {"padding": 3}),
    "mqa-odd-sizes": (MIXED, {"heads": 5, "kv_heads": 1, "head_dim": 40}),
    "window": (MIXED, {"window": 19}),
    "window-decode": ([(200, 1), (64, 1), (300, 1)], {"window": 100}),
    "softcap": (MIXED, {"softcap": 2.0}),
    "tree": (MIXED, {"tree": True}),
    "tree-window": (MIXED, {"tree": True, "window": 9}),
    "compacted-window": (MIXED, {"compacted": True, "window": 30}),
}


QUICK = ("decode", "mqa-odd-sizes", "softcap", "tree-window", "compacted-window")
"""In the interpreter the others are long: each of their masks is in one of these."""
SHORT_RUNS = InvariantAttention(run=64, runs=2, spare_programs=24)
"""Runs of 64 slots, 128 from slot 128 on, and so on, so that small cases have many of them."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "name", crossed(list(ATTENTION), quick=lambda name: DEVICE == "cuda" or [*ATTENTION][name] in QUICK)
)
def test_attention(name: str, dtype: torch.dtype, batch: Callable[..., Any]) -> None:
    if DEVICE == "cpu" and dtype == torch.float16 and name != "mqa-odd-sizes":
        pytest.skip("one dtype is enough in the slow interpreter")
    rows, fields = ATTENTION[name]
    case = batch(rows, junk=float("nan"), **fields).to(DEVICE, dtype)
    want, want_lse = REFERENCE.attention.attend(case.q.double(), case.k, case.v, case.view, case.step)
    owned = slice(0, int(case.step.q_start[-1]))
    for _ in range(2 if DEVICE == "cuda" or name == "decode" else 1):  # again with the plan the step derived
        out, lse = SHORT_RUNS(case.q, case.k, case.v, case.view, case.step)
        assert want_lse is not None and lse is not None
        seen = torch.isfinite(want_lse[owned, 0])
        close(out[owned][seen], want[owned][seen].to(dtype), dtype)
        close(lse[owned][seen].to(dtype), want_lse[owned][seen], dtype)


@pytest.mark.parametrize("dtype", DTYPES if DEVICE == "cuda" else [torch.float16], ids=str)
@pytest.mark.parametrize(
    "fields",
    [
        {"window": 70},
        pytest.param({}, marks=SLOW),
        pytest.param({"softcap": 3.0, "heads": 3, "kv_heads": 1, "head_dim": 40}, marks=SLOW),
    ],
)
def test_a_query_is_the_same_however_its_row_is_cut(
    fields: dict[str, Any], dtype: torch.dtype, batch: Callable[..., Any], pieces_of: Callable[..., Any]
) -> None:
    """A prompt at once; in chunks beside others; its tokens one by one, as they are decoded: every bit the same. Slots
    from 128 and 256 on have longer runs, and tiles of queries lie on both sides."""
    case = batch([(270, 270), (60, 60), (5, 5)], **{"heads": 2, "kv_heads": 1, **fields}).to(DEVICE, dtype)
    whole, whole_lse = SHORT_RUNS(case.q, case.k, case.v, case.view, case.step)
    assert whole_lse is not None
    cuts = [
        [(0, 0, 100)],
        [(0, 100, 270), (1, 0, 33)],
        [(1, 33, 60), (0, 269, 270), (2, 4, 5)],
        [(0, 250, 261), (2, 0, 5)],
        [(0, at, at + 1) for at in (0, 63, 64, 127, 128, 200, 255, 256)] + [(1, 59, 60)],
        [(0, 127, 129), (1, 50, 53)],
    ]
    for pieces in cuts:
        q, step, which = pieces_of(case, pieces)
        out, lse = SHORT_RUNS(q, case.k, case.v, case.view, step)
        assert lse is not None
        assert torch.equal(out, whole[which]), pieces
        assert torch.equal(lse, whole_lse[which]), pieces


@pytest.mark.parametrize("spare", [pytest.param(1, marks=SLOW), 8])
def test_who_computes_a_run_changes_nothing(spare: int, batch: Callable[..., Any]) -> None:
    """Rows split over programs, and rows for which there were no programs left."""
    case = batch([(400, 1), (330, 1), (380, 1)], heads=3, kv_heads=1).to(DEVICE, torch.float32)
    results = []
    for programs in (100, spare):
        attention = InvariantAttention(run=64, runs=8, spare_programs=programs)
        results.append(attention(case.q, case.k, case.v, case.view, replace(case.step))[0])
    assert torch.equal(*results)


def test_every_operation_was_judged() -> None:
    """What a token's own program computes may be shared with the faster set (`tokenwise`, `sampler`), sums of
    integers, which are exact in any order (`w8a8`), and what neither has (`capture`); a new operation must be looked
    at."""
    assert {field.name for field in fields(Ops)} - _shared(INVARIANT, TRITON) == {
        "name",
        "attention",
        "experts",
        "matmul",
        "programs",
    }
    assert _shared(INVARIANT.attention, TRITON.attention) == {"kv_formats"}
    assert INVARIANT.programs == Programs()
    assert _shared(INVARIANT.matmul, TRITON.matmul) == {"w8a8", "without_kernel"}


def _shared(ops: Any, other: Any) -> set[str]:
    """Names of the fields that both hold alike."""
    return {field.name for field in fields(ops) if getattr(ops, field.name) is getattr(other, field.name)}


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_heads_are_normed_alike_among_few_and_many_tokens(
    monkeypatch: pytest.MonkeyPatch, batch: Callable[..., Any], qkv_shape: Callable[..., Any]
) -> None:
    monkeypatch.setattr(qkv, "MANY_TOKENS", 8)
    case, shape = batch([(20, 20)]).to(DEVICE, torch.float32), qkv_shape(6, 2, 32, 32, True, DEVICE)
    projected = torch.randn(20, 10 * 32, device=DEVICE)
    whole = INVARIANT.attention.qkv_write(projected.clone(), shape, case.view, case.step)
    view = replace(case.view, slots=case.view.slots[10:13])
    step = replace(case.step, position=case.step.position[10:13])
    for out, want in zip(
        INVARIANT.attention.qkv_write(projected[10:13].clone(), shape, view, step), whole, strict=True
    ):
        assert torch.equal(out, want[10:13])
