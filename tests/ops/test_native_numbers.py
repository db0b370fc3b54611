"""The compiled 8-bit linears and draws equal the reference: any number of rows and threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.ops.noise import Purpose
from ridgeline.ops.reference import FP8, FP8_REFERENCE, FP8_WEIGHT_REFERENCE, quantize, rms_norm
from ridgeline.ops.sample import sample
from ridgeline.ops.table import Normed, Ops
from tests.combinations import crossed

BF16, F32 = torch.bfloat16, torch.float32


# --- 8-bit linears --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "rows", "threads"),
    crossed([F32, BF16, torch.float16], [1, 2, 5, 7, 8, 12, 16, 17, 40], (1, 2), quick=lambda *at: sum(at) % 2 == 0),
    indirect=["threads"],
)
@pytest.mark.parametrize("outputs, inputs", [(96, 64), (49, 33), (160, 70)])
def test_fp8_linear(ops: Ops, threads: int, dtype: torch.dtype, rows: int, outputs: int, inputs: int) -> None:
    """Quantized alike, values and scales, and multiplied: plain, normed on the way in, and quantized before."""
    weight = quantize(torch.randn(outputs, inputs) * torch.rand(outputs, 1))
    matrix, plain = ops.matmul.fp8.pack(weight.values, weight.scales), FP8_REFERENCE.pack(weight.values, weight.scales)
    x, stream = torch.randn(rows, inputs).to(dtype), torch.randn(rows, outputs).to(dtype)
    bias, norm = torch.randn(outputs).to(dtype), torch.rand(inputs).to(dtype)
    # A norm's last bit decides now and then which of two e4m3 numbers a value becomes.
    exact, coarse = 1e-6 if dtype == F32 else 5e-3, 5e-2
    for given, error in ((x, exact), (quantize(x), exact), (Normed(x, norm, 1e-5, False), coarse)):
        want = FP8_REFERENCE.linear(given, plain, bias, dtype).double()
        out = ops.matmul.fp8.linear(given, matrix, bias, dtype)
        assert out.dtype == dtype and (out.double() - want).norm() < error * want.norm()
        want = FP8_REFERENCE.linear_add(given, plain, None, stream).double()
        out = ops.matmul.fp8.linear_add(given, matrix, None, stream.clone())
        assert out.dtype == dtype and (out.double() - want).norm() < error * want.norm()


@pytest.mark.parametrize("rows", [1, 3, 16, 40])
def test_fp8_weights_alone(ops: Ops, threads: int, rows: int) -> None:
    """Inputs keep their bfloat16 numbers, normed or not."""
    weight = quantize(torch.randn(49, 70) * torch.rand(49, 1))
    matrix, plain = (
        weight_format.pack(weight.values, weight.scales)
        for weight_format in (ops.matmul.fp8_weight, FP8_WEIGHT_REFERENCE)
    )
    x, stream, norm = torch.randn(rows, 70).to(BF16), torch.randn(rows, 49).to(BF16), torch.rand(70).to(BF16)
    for given in (x, Normed(x, norm, 1e-5, True)):
        want = FP8_WEIGHT_REFERENCE.linear(given, plain, None, BF16).double()
        assert (ops.matmul.fp8_weight.linear(given, matrix, None, BF16).double() - want).norm() < 5e-3 * want.norm()
    want = FP8_WEIGHT_REFERENCE.linear_add(x, plain, None, stream).double()
    assert (
        ops.matmul.fp8_weight.linear_add(x, matrix, None, stream.clone()).double() - want
    ).norm() < 5e-3 * want.norm()


@pytest.mark.parametrize("rows", [1, 2, 3, 6, 12, 16, 17, 40])
@pytest.mark.parametrize(
    "outputs, inputs, group", [(49, 300, 128), (64, 256, 128), (33, 200, 64), (16, 70, 32), (7, 33, 64)]
)
def test_fp8_weights_with_scales_of_groups(
    ops: Ops, threads: int, rows: int, outputs: int, inputs: int, group: int
) -> None:
    """Scales span the range of float32, so that a wrong one is seen; outputs that fill no block, and groups that are not whole."""
    values = quantize(torch.randn(outputs, inputs)).values
    scales = torch.rand(outputs, -(-inputs // group)).add_(0.5) * 10.0 ** torch.randint(-6, 6, (outputs, 1))
    weight = values.double() * scales.double()[:, torch.arange(inputs) // group]
    x, stream, norm = torch.randn(rows, inputs).to(BF16), torch.randn(rows, outputs), torch.rand(inputs).to(BF16)
    for weight_format in (ops.matmul.fp8_weight, FP8_WEIGHT_REFERENCE):
        matrix = replace(weight_format.pack(values, scales), group=group)
        assert matrix.scales.nbytes == scales.nbytes
        for given in (x, Normed(x, norm, 1e-5, True)):
            x_f64 = x.double() if given is x else rms_norm(x.double(), norm.double(), 1e-5, True)
            errors = weight_format.linear(given, matrix, None, BF16) - x_f64 @ weight.T
            assert (errors.abs() < 8e-3 * (x_f64.abs() @ weight.abs().T)).all()  # inputs, weights and sums are rounded
        errors = weight_format.linear_add(x.float(), matrix, None, stream.clone()) - (x.double() @ weight.T + stream)
        assert (errors.abs() < 4e-3 * (x.double().abs() @ weight.abs().T + stream.abs())).all()


def test_every_e4m3_number_is_read(ops: Ops) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes % 128 != 127]  # 127: not a number
    values = torch.zeros(len(codes), 2).to(FP8)
    values[:, 1] = codes.view(FP8)
    x = torch.full((1, 2), 448.0)  # whose scale is 1
    out = ops.matmul.fp8.linear(x, ops.matmul.fp8.pack(values, torch.ones(len(codes))), None, F32)
    assert torch.equal(out[0], 448.0 * codes.view(FP8).float())


def test_fp8_of_what_is_no_number_is_none(ops: Ops) -> None:
    x = torch.ones(2, 40)
    x[0, 3] = float("nan")
    matrix = ops.matmul.fp8.pack(torch.ones(16, 40).to(FP8), torch.ones(16))
    out = ops.matmul.fp8.linear(x, matrix, None, F32)
    assert out[0].isnan().all() and torch.equal(out[1], torch.full((16,), 40.0))
    assert torch.equal(ops.matmul.fp8.linear(torch.zeros(1, 40), matrix, None, F32), torch.zeros(1, 16))


# --- drawing tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.05, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("rows, vocab, spread", [(16, 4099, 3.0), (1, 50000, 1.0), (90, 17, 2.0), (5, 1, 1.0)])
def test_draws_are_those_of_the_reference(
    ops: Ops, threads: int, rows: int, vocab: int, spread: float, temperature: float
) -> None:
    logits = torch.randn(rows, vocab + 3)[:, :vocab] * spread
    logits[:, : vocab // 3] = float("-inf")
    temperatures = torch.full((rows, 2), temperature)[:, 0]
    ints = torch.randint(-(1 << 31), (1 << 31) - 1, (rows, 5), dtype=torch.int64).int()
    key, position = ints[:, 1:3], ints[:, 4].abs()
    for purpose in Purpose:
        want = sample(logits, temperatures, key, position, purpose)
        assert torch.equal(ops.sampler.sample(logits, temperatures, key, position, purpose), want)


def test_draws_follow_the_distribution(ops: Ops) -> None:
    """Chi-square of 20,000 draws over 8 tokens; the noise is fixed, so the outcome is too."""
    n, logits = 20_000, torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, 3.0, -2.0, 1.5])
    key = torch.tensor([[17, 4]], dtype=torch.int32).expand(n, 2).contiguous()
    drawn = ops.sampler.sample(
        logits.expand(n, 8).contiguous(), torch.ones(n), key, torch.arange(n).int(), Purpose.TOKEN
    )
    expected = torch.softmax(logits, 0) * n
    counts = torch.bincount(drawn, minlength=8)
    assert float(((counts - expected) ** 2 / expected).sum()) < 24.3  # 0.1 % of 7 degrees of freedom


def test_equal_logits_give_the_first_and_nan_gives_none(ops: Ops) -> None:
    zero, key, position = torch.zeros(3), torch.zeros(3, 2).int(), torch.zeros(3).int()
    logits = torch.full((3, 100), float("-inf"))
    logits[0, 40:60] = 2.0
    logits[1] = float("nan")
    assert ops.sampler.sample(logits, zero, key, position, Purpose.TOKEN).tolist() == [40, 0, 0]
    assert int(ops.sampler.sample(logits, zero + 1.0, key, position, Purpose.TOKEN)[1]) == 0
