"""The compiled products of 8-bit inputs equal sums of integers, bit by bit: W8A8 and LLM.int8(), any number of rows and threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ridgeline.ops import native_cpu
from ridgeline.ops.reference import OUTLIER, REFERENCE, rms_norm
from ridgeline.ops.table import IntMatrix, IntOps, Normed, Ops
from tests.combinations import crossed

BF16, F32 = torch.bfloat16, torch.float32
ROWS = [1, 2, 3, 5, 8, 9, 16, 17, 33, 70]
SIZES = [(96, 64), (49, 33), (160, 352)]


def numbers(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of all values and scales, which float16 holds."""
    codes = torch.randint(0, 256, (outputs, inputs), dtype=torch.uint8)
    return codes, (torch.rand(outputs, 1) / 100 + 1e-3).half().float()


def integer_product(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Sums in int64 of inputs rounded to 8 bits per token, times both scales, in float32."""
    steps = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(F32).tiny) / 127.0
    sums = (x / steps).round().long() @ (codes.long() - 128).t()
    return sums.float() * scales.t() * steps


def outliers_apart(x: torch.Tensor, far: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The inputs `far`, bool as x, in floating point; the others in 8 bits."""
    weight = (codes.double() - 128) * scales.double()
    return integer_product(x.masked_fill(far, 0.0), codes, scales).double() + (x * far).double() @ weight.t()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("outputs, inputs", SIZES)
def test_w8a8_is_the_product_of_integers(ops: Ops, threads: int, rows: int, outputs: int, inputs: int) -> None:
    """Exactly: the sums of integers do not depend on the instructions, the rows or the threads."""
    codes, scales = numbers(outputs, inputs)
    matrix, x = ops.matmul.w8a8.pack(codes, scales, None, 8, inputs), torch.randn(rows, inputs)
    x[0, 3], x[-1] = 40.0, 0.0
    want = integer_product(x, codes, scales)
    assert torch.equal(ops.matmul.w8a8.linear(x, matrix, None), want)
    bias, stream = torch.randn(outputs), torch.randn(rows, outputs)
    assert torch.equal(ops.matmul.w8a8.linear_add(x, matrix, bias, stream.clone()), want + bias + stream)
    half = x.bfloat16()
    assert torch.equal(
        ops.matmul.w8a8.linear(half, matrix, None), integer_product(half.float(), codes, scales).bfloat16()
    )


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_what_w8a8_fuses(ops: Ops, threads: int, rows: int) -> None:
    codes, scales = numbers(96, 72)
    matrix, x, gain = ops.matmul.w8a8.pack(codes, scales, None, 8, 72), torch.randn(rows, 72), torch.rand(72)
    want = integer_product(x, codes, scales)
    torch.testing.assert_close(
        ops.matmul.w8a8.linear_activate(x, matrix, None, "silu"), REFERENCE.tokenwise.activate(want, "silu")
    )
    normed = integer_product(rms_norm(x, gain, 1e-5, True), codes, scales)
    mine = ops.matmul.w8a8.linear(Normed(x, gain, 1e-5, True), matrix, None)
    # The last bit of a norm decides now and then which of two steps an input becomes.
    assert float((mine - normed).norm() / normed.norm()) < 5e-3
    odd = ops.matmul.w8a8.linear(x.half(), matrix, None)
    torch.testing.assert_close(odd, integer_product(x.half().float(), codes, scales).half(), rtol=2e-3, atol=2e-3)


def mixed(ops: Ops, outputs: int, inputs: int, kept: list[int], dtype: torch.dtype) -> tuple[IntMatrix, torch.Tensor]:
    """A matrix of LLM.int8() and its weights in float64; codes of kept inputs are those of 0."""
    codes, scales = numbers(outputs, inputs)
    codes[:, kept] = 128
    columns, is_kept = torch.randn(outputs, len(kept)).to(dtype), torch.zeros(inputs, dtype=torch.bool)
    is_kept[kept] = True
    matrix = ops.matmul.mixed.pack(codes, scales, None, 8, inputs)
    packed = ops.matmul.unquantized.pack(columns.clone())
    weight = (codes.double() - 128) * scales.double()
    weight[:, kept] = columns.double()
    return replace(matrix, kept=(torch.tensor(kept, dtype=torch.int32), packed, is_kept)), weight


def mixed_product(x: torch.Tensor, matrix: IntMatrix, weight: torch.Tensor, batch: bool) -> torch.Tensor:
    """LLM.int8() of weights whose kept columns are in floating point."""
    assert matrix.kept is not None
    is_kept = matrix.kept[2]
    far = x.abs() >= OUTLIER
    far = (far.any(0).expand_as(far) if batch else far) | is_kept
    inner = x.masked_fill(far, 0.0)
    steps = inner.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(F32).tiny) / 127.0
    return ((inner / steps).round() * steps.double() + (x * far).double()) @ weight.t()


@pytest.mark.parametrize(
    ("dtype", "rows", "threads"),
    crossed([F32, BF16, torch.float16], ROWS, (1, 2), quick=lambda *at: sum(at) % 2 == 0),
    indirect=["threads"],
)
@pytest.mark.parametrize("outputs, inputs", SIZES)
def test_llm_int8_takes_the_outliers_of_a_batch(
    ops: Ops, threads: int, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    kept = list(range(1, inputs, 11))
    matrix, weight = mixed(ops, outputs, inputs, kept, dtype)
    x = torch.randn(rows, inputs).clamp(-5, 5).to(dtype)
    x[:, kept] *= 20  # neither outliers nor part of a step
    x[0, 5], x[-1, 14], x[rows // 2, inputs - 1] = 60.0, -9.0, OUTLIER
    want, small = mixed_product(x.float(), matrix, weight, batch=True), {F32: 2e-6, BF16: 4e-3}.get(dtype, 2e-3)
    mine, bias = ops.matmul.mixed.linear(x, matrix, None), torch.randn(outputs).to(dtype)
    assert mine.dtype is dtype and float((mine.double() - want).norm() / want.norm()) < small
    stream = torch.randn(rows, outputs).to(dtype)
    sum_ = ops.matmul.mixed.linear_add(x, matrix, bias, stream.clone()).double()
    assert float((sum_ - want - bias.double() - stream.double()).norm() / want.norm()) < 2 * small
    if rows > 1 and dtype is F32:
        of_token = mixed_product(x, matrix, weight, batch=False)
        assert float((of_token - want).norm()) > 5 * float((mine.double() - want).norm())


@pytest.mark.parametrize("rows", [1, 6, 9, 40])
def test_llm_int8_of_each_token_is_batch_invariant(folder: Path, threads: int, rows: int) -> None:
    fixed, what = native_cpu.load(folder, fixed=True)
    assert fixed is not None, what
    for dtype in (F32, BF16):
        matrix, weight = mixed(fixed, 64, 96, list(range(0, 96, 3)), dtype)
        x = (torch.randn(rows, 96) * 4).to(dtype)
        mine = fixed.matmul.mixed.linear(x, matrix, None)
        want = mixed_product(x.float(), matrix, weight, batch=False)
        assert float((mine.double() - want).norm() / want.norm()) < (1e-6 if dtype is F32 else 4e-3)
        alone = torch.cat([fixed.matmul.mixed.linear(x[row : row + 1], matrix, None) for row in range(rows)])
        assert torch.equal(mine, alone)


@pytest.mark.parametrize("choose", [lambda ops: ops.matmul.w8a8, lambda ops: ops.matmul.mixed])
def test_what_is_no_number_stays_in_its_row(ops: Ops, choose: Callable[[Ops], IntOps]) -> None:
    codes, scales = numbers(32, 64)
    matrix, x = choose(ops).pack(codes, scales, None, 8, 64), torch.rand(12, 64)
    clean = choose(ops).linear(x, matrix, None)
    x[3, 5], x[10, 6] = float("nan"), float("inf")
    out = choose(ops).linear(x, matrix, None)
    assert not out[3].isfinite().any() and not out[10].isfinite().any()
    rest = [row for row in range(12) if row not in (3, 10)]
    assert out[rest].isfinite().all() and float((out[rest] - clean[rest]).norm() / clean.norm()) < 0.02


@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 9])
def test_a_cpu_without_byte_products(plainer: Callable[[str], Path], threads: int, rows: int) -> None:
    """AVX2 alone multiplies 16-bit numbers; the sums are the same."""
    plain, what = native_cpu.load(plainer("avx2-words"))
    assert plain is not None and what == "AVX2"
    codes, scales = numbers(48, 100)
    x = torch.randn(rows, 100)
    mine = plain.matmul.w8a8.linear(x, plain.matmul.w8a8.pack(codes, scales, None, 8, 100), None)
    assert torch.equal(mine, integer_product(x, codes, scales))
