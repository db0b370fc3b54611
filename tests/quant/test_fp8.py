"""The fp8 format: what a number becomes, shares, merged parts, published layouts, and what is refused."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.ops.reference import FP8, FP8_REFERENCE, REFERENCE, quantize
from ridgeline.ops.table import Normed
from ridgeline.quant.format import LinearShape, Part, Share, max_abs
from ridgeline.quant.fp8 import Fp8Format, Fp8Weight, Stored

CPU = torch.device("cpu")
QKV = LinearShape(24, (Part(32, 4), Part(16, 2), Part(16, 2)), bias=True, split="out")


def form(stored: Stored = "float", dtype: torch.dtype = torch.float32) -> Fp8Format:
    return Fp8Format(FP8_REFERENCE, dtype, CPU, stored)


def filled(shape: LinearShape, share: Share = Share(), dtype: torch.dtype = torch.float32) -> Fp8Weight:
    noise = torch.Generator().manual_seed(0)
    weight = form(dtype=dtype).create(shape, share)
    for (part, name), expected in weight.expects.items():
        weight.load(part, name, torch.randn(expected.shape, generator=noise))
    return weight


def test_representable_numbers_survive() -> None:
    """Every finite e4m3 number, in rows whose largest is 448, comes back as it was."""
    every = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    every = every[every.isfinite()].view(2, 127)
    scaled = quantize(every)
    assert torch.equal(scaled.scales, torch.ones(2))
    assert torch.equal(scaled.values.float(), every)


@pytest.mark.parametrize("magnitude", [1e-20, 1e-3, 1.0, 1e30])
def test_error_is_that_of_three_mantissa_bits(magnitude: float) -> None:
    x = torch.randn(7, 300, generator=torch.Generator().manual_seed(1)) * magnitude
    scaled = quantize(x)
    back = scaled.values.double() * scaled.scales.double().unsqueeze(1)
    floor = scaled.scales.double().unsqueeze(1) * 2**-10
    assert ((back - x.double()).abs() <= torch.maximum(x.double().abs() / 15.9, floor * 1.01)).all()
    if magnitude > 1e-12:
        assert torch.equal(scaled.values.float().abs().amax(1), torch.full((7,), 448.0))


def test_rows_of_zeros_stay_zero() -> None:
    scaled = quantize(torch.zeros(2, 5))
    assert not scaled.values.float().any() and (scaled.scales > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(1, 1), (3, 7), (33, 130)])
def test_product_is_the_formula(dtype: torch.dtype, size: tuple[int, int]) -> None:
    outputs, inputs = size
    shape = LinearShape(inputs, (Part(outputs, 1),), bias=True)
    noise = torch.Generator().manual_seed(3)
    matrix, bias, x = (
        torch.randn(shape, generator=noise).to(dtype) for shape in ((outputs, inputs), (outputs,), (5, inputs))
    )
    weight = form(dtype=dtype).create(shape, Share())
    weight.load(0, "weight", matrix)
    weight.load(0, "bias", bias)
    w, given = quantize(matrix), quantize(x)
    want = (given.values.double() @ w.values.double().t()) * given.scales.unsqueeze(1) * w.scales + bias.double()
    out = weight.apply(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), want, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)
    assert torch.equal(out, weight.apply(given))


def test_what_joins_a_product_is_the_plain_operation() -> None:
    """A norm before it, the stream added to it; an activation comes out quantized, as the next linear takes it."""
    x, gain, stream = (torch.randn(3, 64, generator=torch.Generator().manual_seed(s)).bfloat16() for s in range(3))
    weight = filled(LinearShape(64, (Part(64, 1),)), dtype=torch.bfloat16)
    normed = Normed(x, gain[0], 1e-5, False)
    product = weight.apply(REFERENCE.tokenwise.rms_norm(x, gain[0], 1e-5, False))
    assert torch.equal(weight.apply(normed), product)
    assert torch.equal(weight.add(normed, stream.clone()), stream + product)
    gated, want = weight.activate(normed, "silu"), quantize(REFERENCE.tokenwise.activate(product, "silu"))
    assert torch.equal(gated.values.float(), want.values.float()) and torch.equal(gated.scales, want.scales)


def test_output_shares_hold_slices_of_the_whole() -> None:
    whole = filled(QKV).tensors()
    for rank in range(2):
        for mine, all_of_it in zip(filled(QKV, Share(rank, 2)).tensors(), whole, strict=True):
            parts = all_of_it.float().split((32, 16, 16))
            assert torch.equal(mine.float(), torch.cat([part.chunk(2)[rank] for part in parts]))


def test_input_shares_hold_slices_and_sum_to_the_whole() -> None:
    shape = LinearShape(32, (Part(24, 1),), bias=True, split="in", in_units=4)
    x, whole = torch.randn(5, 32), filled(shape)
    terms = []
    for rank in range(4):
        mine = filled(shape, Share(rank, 4))
        assert torch.equal(mine.tensors()[0].float(), whole.tensors()[0].float()[:, rank * 8 : rank * 8 + 8])
        assert torch.equal(mine.tensors()[1], whole.tensors()[1])
        terms.append(mine.apply(x[:, rank * 8 : rank * 8 + 8]))
    # Each rank scales its own part of a token, so the sum differs by the rounding of activations.
    torch.testing.assert_close(sum(terms), whole.apply(x), rtol=0, atol=0.8)
    error = (sum(terms) - whole.apply(x)).norm() / whole.apply(x).norm()
    assert error < 0.05


@pytest.mark.parametrize("stored", ["channel", "tensor"])
def test_published_scales_reach_their_rows(stored: Stored) -> None:
    """Merged parts keep each its own scales; a rank keeps those of its rows."""
    noise = torch.Generator().manual_seed(0)
    values = [torch.randn(part.rows, 24, generator=noise).to(FP8) for part in QKV.parts]
    scales = [torch.rand((part.rows, 1) if stored == "channel" else (1,), generator=noise) + 0.1 for part in QKV.parts]
    wide = [value.float() * scale for value, scale in zip(values, scales, strict=True)]
    for size in (1, 2, 4):
        for rank in range(size):
            weight = form(stored).create(QKV, Share(rank, size))
            for part in range(3):
                weight.load(part, "weight_scale", scales[part].bfloat16().float())
                weight.load(part, "bias", torch.zeros(QKV.parts[part].rows))
                weight.load(part, "weight", values[part])
            mine = weight.tensors()[0].float() * weight.tensors()[1].unsqueeze(1)
            cuts = [Share(rank, size).span(part.rows, part.units) for part in QKV.parts]
            want = torch.cat([part[cut] for part, cut in zip(wide, cuts, strict=True)])
            torch.testing.assert_close(mine, want, rtol=2**-8, atol=0)
            x = torch.randn(2, 24, generator=noise)
            torch.testing.assert_close(weight.apply(x), x @ want.t(), rtol=0.1, atol=0.5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_cannot_be_held_are_refused(bad: float) -> None:
    weight = form().create(LinearShape(4, (Part(2, 1),)), Share())
    with pytest.raises(UnsupportedModel, match="NaN, infinite"):
        weight.load(0, "weight", torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, bad, 0.0, 0.0]]))
    stored = form("channel").create(LinearShape(4, (Part(2, 1),)), Share())
    with pytest.raises(UnsupportedModel, match="NaN, infinite"):
        stored.load(0, "weight_scale", torch.tensor([[1.0], [-bad]]))


def test_largest_magnitude_of_codes() -> None:
    """That of the values, which the loader compares; NaN for either of its two codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[codes & 127 != 127]
    noise = torch.Generator().manual_seed(0)
    for count in (1, 2, 3, 50):
        values = finite[torch.randint(len(finite), (count,), generator=noise)].view(1, -1).view(FP8)
        assert max_abs(values) == values.float().abs().max()
    for bad in (0x7F, 0xFF):
        assert max_abs(torch.cat((finite, codes[bad].view(1))).view(FP8)).isnan()
