"""Integer weight formats: how numbers are rounded, shares, merged parts, published layouts, orders of inputs, refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.spec import NUMBER_FORMATS, NumberFormat
from ridgeline.ops.reference import (
    INT_REFERENCE,
    REFERENCE,
    dequantized,
    in_8_bits,
    round_inliers,
    unpack_bits,
)
from ridgeline.ops.table import Normed
from ridgeline.quant.format import LinearShape, Part, Share
from ridgeline.quant.integer import IntFormat, IntWeight, round_to_nearest
from ridgeline.quant.layouts import Published, encode

CPU = torch.device("cpu")
QKV = LinearShape(96, (Part(64, 4), Part(32, 2), Part(32, 2)), bias=True, split="out")
FORMS = [NumberFormat(bits, group, zeros) for bits in (3, 4, 8) for group in (0, 32, 64) for zeros in (False, True)]


def form(numbers: NumberFormat, published: Published | None = None, dtype: torch.dtype = torch.float32) -> IntFormat:
    return IntFormat(INT_REFERENCE, numbers, dtype, CPU, published)


def noise(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def filled(numbers: NumberFormat, shape: LinearShape, share: Share = Share()) -> IntWeight:
    weight = form(numbers).create(shape, share)
    for index, ((part, name), expected) in enumerate(weight.expects.items()):
        weight.load(part, name, noise(*expected.shape, seed=index))
    return weight


def wide(weight: IntWeight) -> torch.Tensor:
    """The numbers a weight multiplies by."""
    matrix = weight.matrix()
    assert matrix is not None and not isinstance(matrix.packed, torch.Tensor)
    packed = matrix.packed
    return dequantized(
        unpack_bits(packed.codes, packed.bits, packed.d_in), packed.scales, packed.zeros, packed.bits, packed.group
    )


def rounded(weight: torch.Tensor, numbers: NumberFormat) -> torch.Tensor:
    return dequantized(*round_to_nearest(weight, numbers), numbers.bits, numbers.group or weight.shape[1])


@pytest.mark.parametrize("numbers", FORMS, ids=str)
@pytest.mark.parametrize("inputs", [64, 100])
def test_no_number_is_further_than_a_step(numbers: NumberFormat, inputs: int) -> None:
    """Nor the last group's, which 100 inputs leave shorter, nor those of a row of zeros."""
    weight = noise(7, inputs)
    weight[3] = 0.0
    weight[4] = weight[4].abs()
    _, scales, zeros = round_to_nearest(weight, numbers)
    group = numbers.group or inputs
    assert scales.shape == (7, -(-inputs // group)) and (zeros is not None) == numbers.zeros
    step = scales[:, torch.arange(inputs) // group].abs()
    error = (rounded(weight, numbers) - weight).abs() / step
    # Half a step, but at the ends: scales are rounded to float16, zero points to codes, and one end is a code shorter.
    assert (error < 1.0 + (1 << numbers.bits) * 2.0**-11).all() and (error <= 0.5001).float().mean() > 0.8
    extreme = weight.abs().amax(-1) == weight.abs().max()
    assert numbers.zeros or error[extreme].min() <= (1 << numbers.bits) * 2.0**-11
    assert not rounded(weight, numbers)[3].any()


def test_finer_formats_err_less() -> None:
    weight = noise(32, 256)
    error = {
        name: (rounded(weight, NUMBER_FORMATS[name]) - weight).norm() for name in NUMBER_FORMATS if name[:3] == "int"
    }
    assert error["int8"] < 0.1 * error["int4-g32"] < 0.1 * error["int4"] and error["int4"] < 0.6 * error["int3"]
    assert error["int4-g32"] < error["int4-g64"] < error["int4-g128"] < error["int4-channel"]
    assert error["int4-g128-zp"] < error["int4-g128"]


@pytest.mark.parametrize("numbers", FORMS, ids=str)
def test_what_joins_a_product_is_the_plain_operation(numbers: NumberFormat) -> None:
    x, gain, stream = noise(3, 96), noise(96, seed=1), noise(3, 64, seed=2)
    weight = filled(numbers, LinearShape(96, (Part(64, 1),), bias=True))
    product = x @ wide(weight).t() + noise(64, seed=1)
    torch.testing.assert_close(weight.apply(x), product, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.add(x, stream.clone()), stream + product, rtol=1e-4, atol=1e-4)
    normed = Normed(x, gain, 1e-5, False)
    want = REFERENCE.tokenwise.activate(weight.apply(REFERENCE.tokenwise.rms_norm(x, gain, 1e-5, False)), "silu")
    torch.testing.assert_close(weight.activate(normed, "silu"), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("numbers", FORMS, ids=str)
def test_predicted_bytes(numbers: NumberFormat) -> None:
    for outputs, inputs in ((64, 96), (48, 100)):
        weight = filled(numbers, LinearShape(inputs, (Part(outputs, 1),)))
        assert sum(tensor.nbytes for tensor in weight.tensors()) == numbers.matrix_bytes(outputs, inputs)


@pytest.mark.parametrize("numbers", FORMS, ids=str)
def test_output_shares_hold_slices_of_the_whole(numbers: NumberFormat) -> None:
    whole = wide(filled(numbers, QKV)).split((64, 32, 32))
    for rank in range(2):
        mine = wide(filled(numbers, QKV, Share(rank, 2)))
        assert torch.equal(mine, torch.cat([part.chunk(2)[rank] for part in whole]))


@pytest.mark.parametrize("numbers", [*FORMS, NumberFormat(4, 128), NumberFormat(4, 128, True)], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_input_shares_hold_slices_and_sum_to_the_whole(numbers: NumberFormat, size: int) -> None:
    """Of 192 inputs: cuts at 64 and 96 fall inside groups of 64 and 128, whose scales are repeated."""
    shape = LinearShape(192, (Part(24, 1),), bias=True, split="in", in_units=6)
    x, whole = noise(5, 192, seed=9), filled(numbers, shape)
    terms, step = [], 192 // size
    for rank in range(size):
        mine = filled(numbers, shape, Share(rank, size))
        assert torch.equal(wide(mine), wide(whole)[:, rank * step : (rank + 1) * step])
        terms.append(mine.apply(x[:, rank * step : (rank + 1) * step]))
    torch.testing.assert_close(sum(terms), whole.apply(x), rtol=1e-4, atol=1e-4)


def test_a_cut_that_no_group_fits_is_refused() -> None:
    shape = LinearShape(160, (Part(24, 1),), split="in", in_units=10)
    with pytest.raises(ConfigError, match="Groups of 64 inputs cannot be split over 2 devices"):
        form(NumberFormat(4, 64)).create(shape, Share(0, 2))
    form(NumberFormat(4)).create(shape, Share(0, 2))


@pytest.mark.parametrize("layout", ["pack-quantized", "gptq", "awq"])
@pytest.mark.parametrize("zeros", [False, True], ids=["symmetric", "zeros"])
@pytest.mark.parametrize("share", [Share(), Share(1, 2)], ids=["whole", "half"])
def test_published_weights_are_the_formula(layout: str, zeros: bool, share: Share) -> None:
    numbers = NumberFormat(4, 32, zeros)
    published = Published(layout, 4, 32, zeros)  # type: ignore[arg-type]
    weight, want = form(numbers, published).create(QKV, share), []
    for index, part in enumerate(QKV.parts):
        codes, scales, points = round_to_nearest(noise(part.rows, 96, seed=index), numbers)
        if points is not None:
            points = points.clamp(min=1)
        rows = share.span(part.rows, part.units)
        want.append(dequantized(codes, scales, points, 4, 32)[rows])
        for name, tensor in encode(published, codes, scales, points).items():
            assert (index, name) in weight.expects
            weight.load(index, name, tensor)
        weight.load(index, "bias", torch.zeros(part.rows))
    assert torch.equal(wide(weight), torch.cat(want))


@pytest.mark.parametrize("layout", ["pack-quantized", "gptq"])
def test_ordered_inputs_meet_their_own_weights(layout: str) -> None:
    """Act-order: groups of inputs that do not lie side by side."""
    numbers, published = NumberFormat(4, 32, ordered=True), Published(layout, 4, 32, order=True)  # type: ignore[arg-type]
    g_idx = torch.arange(96)[torch.randperm(96, generator=torch.Generator().manual_seed(0))] // 32
    codes, scales, _ = round_to_nearest(noise(64, 96), numbers)
    want = (codes.float() - 8) * scales[:, g_idx]
    shape, x = LinearShape(96, (Part(64, 1),)), noise(3, 96, seed=1)
    weight = form(numbers, published).create(shape, Share())
    for name, tensor in encode(published, codes, scales, g_idx=g_idx).items():
        weight.load(0, name, tensor)
    torch.testing.assert_close(weight.apply(x), x @ want.t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(weight.add(x, torch.ones(3, 64)), 1 + x @ want.t(), rtol=1e-4, atol=1e-4)
    assert sum(tensor.nbytes for tensor in weight.tensors()) == numbers.matrix_bytes(64, 96)
    cut = form(numbers, published).create(LinearShape(96, (Part(64, 1),), split="in", in_units=3), Share(0, 3))
    with pytest.raises(UnsupportedModel, match="serve it on one device"):
        for name, tensor in encode(published, codes, scales, g_idx=g_idx).items():
            cut.load(0, name, tensor)


def test_orders_that_disagree_are_refused() -> None:
    numbers, published = NumberFormat(4, 32, ordered=True), Published("gptq", 4, 32, order=True)
    weight = form(numbers, published).create(LinearShape(64, (Part(32, 1), Part(32, 1))), Share())
    codes, scales, _ = round_to_nearest(noise(32, 64), numbers)
    for name, tensor in encode(published, codes, scales).items():
        weight.load(0, name, tensor)
    with pytest.raises(UnsupportedModel, match="than the projections it is merged with"):
        for name, tensor in encode(published, codes, scales, g_idx=1 - torch.arange(64) // 32).items():
            weight.load(1, name, tensor)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_cannot_be_held_are_refused(bad: float) -> None:
    for numbers in (NumberFormat(4), NumberFormat(8, 32, zeros=True)):
        weight = form(numbers).create(LinearShape(4, (Part(2, 1),)), Share())
        with pytest.raises(UnsupportedModel, match="NaN, infinite"):
            weight.load(0, "weight", torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, bad, 0.0, 0.0]]))
    published = Published("pack-quantized", 4, 0)
    weight = form(NumberFormat(4), published).create(LinearShape(4, (Part(2, 1),)), Share())
    codes, scales, _ = round_to_nearest(noise(2, 4), NumberFormat(4))
    with pytest.raises(UnsupportedModel, match="scales that are NaN"):
        for name, tensor in encode(published, codes, scales * bad).items():
            weight.load(0, name, tensor)


@pytest.mark.parametrize("mixed", [False, True], ids=["w8a8", "llm-int8"])
def test_inputs_in_8_bits(mixed: bool) -> None:
    """The formula in integers: sums of integer products times both scales; inputs of 6 and above beside them in floats."""
    x, weight = noise(4, 96, seed=3), noise(16, 96, seed=4)
    x[1, 5], x[2, 7], x[3] = 60.0, -7.0, 0.0
    ops, given = REFERENCE.matmul.w8a8, x
    if mixed:
        ops, given = INT_REFERENCE, round_inliers(x, torch.zeros(96, dtype=torch.bool))
    eight = IntFormat(ops, NumberFormat(8, inputs_8bit=True), torch.float32, CPU)
    mine = eight.create(LinearShape(96, (Part(16, 1),)), Share())
    mine.load(0, "weight", weight)
    codes, scales, _ = round_to_nearest(weight, NumberFormat(8))
    far = x.abs() >= (6.0 if mixed else torch.inf)
    near = x.masked_fill(far, 0.0)
    step = near.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    integers = (near / step).round().long() @ (codes.long() - 128).t()
    want = integers.double() * step.double() * scales.double().t()
    want = want + (x - near).double() @ rounded(weight, NumberFormat(8)).double().t()
    torch.testing.assert_close(mine.apply(given).double(), want, rtol=1e-4, atol=1e-4)
    assert mine.matrix() is None


def test_outliers_spoil_w8a8_and_not_llm_int8() -> None:
    """One input a hundred times the others leaves those no steps, unless it stays in floats."""
    x, weight = noise(8, 256, seed=5), noise(32, 256, seed=6)
    weight[:, 3] /= 100
    x[:, 3] *= 100
    exact = x @ weight.t()

    def error(inputs: Callable[[torch.Tensor], torch.Tensor]) -> float:
        int_format = IntFormat(INT_REFERENCE, NumberFormat(8), torch.float32, CPU)
        mine = int_format.create(LinearShape(256, (Part(32, 1),)), Share())
        mine.load(0, "weight", weight)
        return float((mine.apply(inputs(x)) - exact).norm() / exact.norm())

    assert 4 * error(lambda x: round_inliers(x, torch.zeros(256, dtype=torch.bool))) < error(in_8_bits)
