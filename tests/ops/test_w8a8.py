"""8-bit inputs times 8-bit weights: kernels equal the plain formula, on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.core.spec import NUMBER_FORMATS
from ridgeline.ops.reference import OUTLIER, REFERENCE, in_8_bits, round_inliers
from ridgeline.ops.table import IntMatrix, Normed
from ridgeline.ops.triton import kernels, w8a8
from ridgeline.ops.triton.fp8_shapes import Large
from ridgeline.ops.triton.integer import pack
from ridgeline.ops.triton.integer_matrix import dequantize
from ridgeline.ops.triton.linears import W8A8_TRITON
from ridgeline.ops.triton.products import ProductShape, multiply
from ridgeline.quant.format import LinearShape, Part, Share
from ridgeline.quant.integer import IntFormat, round_to_nearest
from tests.combinations import crossed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
ROUNDED = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 5e-3}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def matrix_of(outputs: int, inputs: int) -> IntMatrix:
    codes = torch.randint(0, 256, (outputs, inputs), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    scales = (noise(outputs, 1, seed=4) / 100).half().float()
    return pack(codes.to(DEVICE), scales, None, 8, 1 << 20)


def exact(x: torch.Tensor, matrix: IntMatrix) -> torch.Tensor:
    """Of x as 8 bits hold it, in float64; in_8_bits of float32, because that of 16-bit numbers rounds once more."""
    return in_8_bits(x.float()).double() @ dequantize(matrix, torch.float32).double().t()


def close(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    assert (out.shape, out.dtype) == (want.shape, dtype)
    assert float((out.double() - want).norm() / want.norm()) < ROUNDED[dtype]


@pytest.mark.parametrize("widest", [64, 16384])
def test_codes_are_the_rounded_inputs_in_the_order_of_the_weights(widest: int) -> None:
    """Packed as weights, codes lie as the kernel leaves them; 100 inputs leave 28 places empty."""
    x = noise(5, 100)
    x[2] = 0.0
    x[3, 7] = 300.0
    mine = w8a8.codes(x, widest)
    steps = x.abs().amax(-1).clamp(min=1e-30) / 127
    torch.testing.assert_close(mine.scales, steps, rtol=1e-6, atol=0)
    held = torch.nn.functional.pad((x / steps.unsqueeze(1)).round(), (0, 28))
    want = pack((held + 128).to(torch.uint8), steps.unsqueeze(1), None, 8, 1 << 20).codes
    assert torch.equal(mine.values.view(torch.uint8), want)


@pytest.mark.parametrize(
    ("tokens", "dtype"),
    crossed((1, 20, 130), DTYPES, quick=lambda tokens, dtype: DEVICE == "cuda" or tokens % 2 == dtype),
)
def test_products(tokens: int, dtype: torch.dtype) -> None:
    matrix, bias = matrix_of(72, 328), noise(72, seed=5).to(dtype)
    x, gain = noise(tokens, 328, seed=6).to(dtype), noise(328, seed=7).to(dtype)
    want = exact(x, matrix)
    close(W8A8_TRITON.linear(x, matrix, None), want, dtype)
    close(W8A8_TRITON.linear(x, matrix, bias), want + bias.double(), dtype)
    stream = noise(tokens, 72, seed=8).to(dtype)
    close(W8A8_TRITON.linear_add(x, matrix, bias, stream.clone()), want + bias.double() + stream.double(), dtype)
    gated = REFERENCE.tokenwise.activate(W8A8_TRITON.linear(x, matrix, None).double(), "silu")
    close(W8A8_TRITON.linear_activate(x, matrix, None, "silu"), gated, dtype)
    normed = REFERENCE.tokenwise.rms_norm(x, gain, 1e-5, True)
    linear = W8A8_TRITON.linear(Normed(x, gain, 1e-5, True), matrix, None)
    # An input between two steps may fall to the other side.
    assert float((linear.double() - exact(normed, matrix)).norm() / exact(normed, matrix).norm()) < 5e-3


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("add", [False, True])
def test_many_tiles_in_bands(biased: bool, add: bool) -> None:
    """Five tiles of tokens in bands of two, and two of outputs, the last of which are not full."""
    matrix, x, bias = matrix_of(72, 328), noise(130, 328, seed=6).half(), noise(72, seed=5).half()
    stream = noise(130, 72, seed=8).half()
    out = stream.clone()
    w8a8.large(w8a8.codes(x), matrix, bias if biased else None, out, Large(32, 64, 64, 4, 2, band=2), add)
    want = exact(x, matrix) + biased * bias.double() + add * stream.double()
    close(out, want, torch.float16)


def test_weights_that_are_served() -> None:
    """From floats to products; operations that run whole layers must not take them for weight-only ones."""
    form = IntFormat(W8A8_TRITON, NUMBER_FORMATS["w8a8"], torch.float16, torch.device(DEVICE))
    weight = form.create(LinearShape(96, (Part(40, 1), Part(24, 1))), Share())
    whole, x = noise(64, 96, seed=1), noise(3, 96, seed=2).half()
    for part, rows in enumerate(whole.split((40, 24))):
        weight.load(part, "weight", rows)
    codes, scales, _ = round_to_nearest(whole, NUMBER_FORMATS["w8a8"])
    want = in_8_bits(x.float()).double() @ ((codes.double() - 128) * scales.double()).t()
    close(weight.apply(x), want, torch.float16)
    assert weight.matrix() is None


def test_a_token_s_results_do_not_depend_on_the_others() -> None:
    """The kernels of few and many tokens, with and without split sums, to the last bit."""
    matrix, bias, x = matrix_of(200, 1096), noise(200, seed=5).half(), noise(140, 1096, seed=6).half()
    whole = W8A8_TRITON.linear(x, matrix, bias)
    for tokens in (1, 17, 70):
        assert torch.equal(W8A8_TRITON.linear(x[:tokens], matrix, bias), whole[:tokens])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(("outputs", "inputs"), [(6144, 4096), (4096, 8192), (1000, 1096)])
def test_rings_and_small_products_agree_to_the_last_bit(outputs: int, inputs: int) -> None:
    matrix, bias, x = matrix_of(outputs, inputs), noise(outputs).half(), noise(128, inputs, seed=6).half()
    stream = noise(128, outputs, seed=7).half()
    for tokens in (5, 33, 64, 128):
        given, onto = w8a8.codes(x[:tokens]), stream[:tokens]
        (_, k), n, result = given.values.shape, matrix.codes.shape[0], []
        for registry in (kernels.W8A8, kernels.W8A8.without("ring")):
            for added, add in ((bias, False), (bias, True), (None, True)):
                shape = ProductShape(tokens, n, k, torch.int8, x.dtype, x.device, True, add=add, bias=added is not None)
                result.append(multiply(registry, shape, given, matrix, added, onto.clone() if add else None))
        assert all(torch.equal(item, other) for item, other in zip(result[:3], result[3:], strict=True))


def test_nothing_is_multiplied_for_no_tokens() -> None:
    matrix = matrix_of(64, 64)
    assert W8A8_TRITON.linear(noise(0, 64), matrix, None).shape == (0, 64)


@pytest.mark.parametrize("widest", [64, 16384])
def test_outliers_stay_as_they_are(widest: int) -> None:
    x = noise(4, 200, seed=9)
    x[1, [3, 150]] = torch.tensor([OUTLIER, -40.0], device=DEVICE)
    empty = torch.zeros(200, dtype=torch.bool, device=DEVICE)
    empty[10:42] = True
    x[:, 11] = 5.9  # left out, it must not count for the scale
    torch.testing.assert_close(w8a8.round_inliers(x, empty, widest), round_inliers(x, empty), rtol=1e-6, atol=1e-7)
