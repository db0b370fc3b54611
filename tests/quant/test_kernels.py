"""The Triton kernels of 8-bit linears equal the reference: on a GPU where there is one, else in the interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ridgeline.ops.reference import REFERENCE, fp8_activate, quantize
from ridgeline.ops.table import Activation, Fp8Matrix, Normed, Scaled, apply_norm

pytest.importorskip("triton")

from ridgeline.ops.triton import cublas, fp8, fp8_shapes, fp8_vector
from ridgeline.ops.triton import quantize as inputs
from ridgeline.ops.triton.launch import is_hopper
from ridgeline.ops.triton.linears import FP8_TRITON
from ridgeline.ops.triton.shapes import ResidentTile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
ERROR = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}


@pytest.fixture(scope="module", autouse=True)
def carried(interpreter: Any) -> Iterator[None]:
    """Triton 3.6's interpreter drops the carry when a value rounds up to the next power of two in e4m3."""
    convert = interpreter._convert_float

    def converted(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if str(source) != "fp32" or str(target) != "fp8e4nv":
            return convert(values, source, target, rounding)
        wide = torch.from_numpy(values.view("float32").copy())
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_convert_float", converted)
        yield


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def same(mine: Scaled, want: Scaled, dtype: torch.dtype) -> None:
    """Equal but where a float32 sum in another order rounds to the neighbour."""
    torch.testing.assert_close(mine.scales, want.scales, rtol=2 * ERROR[dtype], atol=0)
    far = (mine.values.float() - want.values.float()).abs() > 0.126 * want.values.float().abs().clamp(min=2**-6)
    assert not far.any()
    assert (mine.values.float() != want.values.float()).float().mean() < 0.02


def test_quantize_rounds_as_the_reference() -> None:
    x = torch.cat((noise(9, 300), noise(9, 300, seed=1) * 1e-4))
    x[3] = 0.0
    x[4, 7] = 1e4
    mine, want = inputs.quantize(x), quantize(x)
    assert torch.equal(mine.scales, want.scales)
    assert torch.equal(mine.values.float(), want.values.float())


@pytest.mark.parametrize("size", [104, 160, 200, 400])
def test_rows_wider_than_a_program(size: int) -> None:
    """Kept whole, with a rest or two of a kind, or read twice."""
    x = noise(3, size)
    for mine, want in (
        (inputs.quantize(x, widest_row=64), quantize(x)),
        (inputs.activate(x, "silu", widest_row=64), fp8_activate(x, "silu")),
    ):
        same(mine, want, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 64, 200])
def test_norms(dtype: torch.dtype, size: int) -> None:
    x, weight = noise(5, size).to(dtype), noise(size, seed=1).to(dtype)
    for offset in (False, True):
        want = quantize(REFERENCE.tokenwise.rms_norm(x, weight, 1e-5, offset))
        same(inputs.rms_norm(x, weight, 1e-5, offset), want, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activate(dtype: torch.dtype, kind: str) -> None:
    x = (3 * noise(5, 2 * 96)).to(dtype)
    same(inputs.activate(x, kind), fp8_activate(x, kind), dtype)


def matrix(outputs: int, inputs: int) -> Fp8Matrix:
    scaled = quantize(noise(outputs, inputs, seed=5) * (1 + torch.arange(outputs, device=DEVICE)).unsqueeze(1))
    return FP8_TRITON.pack(scaled.values, scaled.scales)


def exact(x: Activation, weights: Fp8Matrix, bias: torch.Tensor | None) -> torch.Tensor:
    """The formula in float64."""
    given = x if isinstance(x, Scaled) else quantize(apply_norm(x, REFERENCE.tokenwise.rms_norm))
    wide = given.values.double() * given.scales.double().unsqueeze(1)
    out = wide @ (weights.values.double() * weights.scales.double().unsqueeze(1)).t()
    return out if bias is None else out + bias.double()


def check(out: torch.Tensor, want: torch.Tensor, slack: float = 0.0) -> None:
    error = float((out.double() - want).norm() / want.norm())
    assert error <= ERROR[out.dtype] + slack, error


# All pairs on a GPU; in the interpreter one element type for each number of tokens.
TOKENS = (
    [(tokens, dtype) for tokens in (1, 2, 17, 40, 64, 100, 128, 200, 300) for dtype in DTYPES]
    if DEVICE == "cuda"
    else [(1, torch.float32), (2, torch.float16), (17, torch.float16), (40, torch.float32)]
)
SHAPES = [(96, 64), (70, 300), (64, 1040)]


@pytest.mark.parametrize(
    ("shape", "tokens", "dtype"),
    [
        pytest.param(shape, *case, marks=[pytest.mark.long] * (DEVICE != "cuda" and at != which % 3))
        for at, shape in enumerate(SHAPES)
        for which, case in enumerate(TOKENS)
    ],
)
def test_products(tokens: int, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Also shapes that no tile divides, with and without bias, and from a plain x."""
    weights, x = matrix(*shape), noise(tokens, shape[1]).to(dtype)
    bias = noise(shape[0], seed=7).to(dtype)
    # The tensor core's own sums of 128 products keep about 13 bits.
    slack = 2e-3 if DEVICE == "cuda" else 0.0
    stream = (100 * noise(tokens, shape[0], seed=8)).to(dtype)
    normed = Normed(x, noise(shape[1], seed=9).to(dtype), 1e-5, False)
    for given, added in ((quantize(x), None), (quantize(x), bias), (x, None), (normed, bias)):
        want = exact(given, weights, added)
        # A value that rounds to its neighbour in 8 bits is off by more than a sum is.
        odd = 1e-2 if given is normed else 0.0
        check(FP8_TRITON.linear(given, weights, added, dtype), want, slack + odd)
        check(FP8_TRITON.linear_add(given, weights, added, stream.clone()), stream.double() + want, slack + odd)
    assert not weights.counters.any()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu" or not is_hopper(torch.device(DEVICE)), reason="needs a Hopper GPU")
@pytest.mark.parametrize("tokens", [129, 300, 1025])
@pytest.mark.parametrize("shape", [(96, 64), (256, 1040)])
def test_many_tokens_by_cublas(tokens: int, shape: tuple[int, int]) -> None:
    """What joins a stream while it is stored, in a graph too, whatever was asked in between."""
    weights, x = matrix(*shape), quantize(noise(tokens, shape[1]).bfloat16())
    stream = (100 * noise(tokens, shape[0], seed=8)).bfloat16()
    assert not cublas.product(x, weights, stream.half(), True)
    joined, alone, few = stream.clone(), torch.empty_like(stream), stream[:50].clone()
    # What torch knows of cuBLAS is made when it is first asked for, which no capture may hold.
    assert cublas.product(x, weights, alone, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert cublas.product(x, weights, joined, True)
        assert cublas.product(x, weights, alone, False)
    assert cublas.product(Scaled(x.values[:50], x.scales[:50]), weights, few, True)
    joined.copy_(stream)
    graph.replay()
    want = exact(x, weights, None)
    check(alone, want, 2e-3)
    check(joined, stream.double() + want, 2e-3)
    check(few, stream[:50].double() + want[:50], 2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shape", [(96, 64), (44, 304)])
def test_gate_and_up(dtype: torch.dtype, tokens: int, shape: tuple[int, int]) -> None:
    """Also where groups of rows end within a half; one token's result is plain, others are quantized."""
    weights, x = matrix(*shape), noise(tokens, shape[1]).to(dtype)
    bias = noise(shape[0], seed=7).to(dtype)
    normed = Normed(x, noise(shape[1], seed=9).to(dtype), 1e-5, True)
    for given, added in ((x, None), (normed, bias)):
        gate_up = (exact(given, weights, added) / 100).float()
        scaled = Fp8Matrix(weights.values, weights.scales / 100, weights.counters)
        out = FP8_TRITON.linear_activate(given, scaled, None if added is None else added / 100, dtype, "silu")
        want = REFERENCE.tokenwise.activate(gate_up, "silu").double()
        wide = out.values.double() * out.scales.double().unsqueeze(1) if isinstance(out, Scaled) else out
        assert isinstance(wide, torch.Tensor)
        # Values of 8 bits are off by up to 6 %, 2.5 % in the mean square.
        check(wide.to(dtype), want, 3e-2 if isinstance(out, Scaled) else 1e-2)


@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("programs", [3, 40])
def test_one_token_however_rows_are_shared(stages: int, programs: int) -> None:
    weights, x = matrix(42, 1040), noise(1, 1040).half()
    tile = ResidentTile(4, 2, programs, stages)
    check(fp8_vector.product(x, weights, None, tile), exact(x, weights, None))
    stream = noise(1, 42, seed=3).half()
    check(fp8_vector.product(x, weights, None, tile, stream.clone()), stream.double() + exact(x, weights, None))


@pytest.mark.parametrize("outputs", [64, 4096, 6144, 28672, 128256])
@pytest.mark.parametrize("inputs", [64, 1040, 4096, 4112, 8192, 14336, 16384])
def test_a_pipeline_fits_a_processor(outputs: int, inputs: int) -> None:
    tile = fp8_shapes.resident_for(outputs, inputs)
    block = 1 << (inputs - 1).bit_length()
    assert tile.rows * block * (tile.stages - 1) <= 200 * 1024
    assert block <= 64 * 32 * tile.warps


def test_no_tokens() -> None:
    weights = matrix(32, 64)
    assert FP8_TRITON.linear(noise(0, 64), weights, None, torch.float16).shape == (0, 32)
    assert inputs.activate(noise(0, 64), "silu").values.shape == (0, 32)


def test_shared_tiles_repeat_and_add_up() -> None:
    """Programs that split the inputs leave the same bits whenever they run, and counters at zero."""
    weights, x = matrix(130, 1000), quantize(noise(20, 1000))
    launch = fp8.Small(64, 64, 24, 4, 3, exact=True)
    split, turns = fp8.splits(130, 1000, 20, 32, launch)
    assert split > 2 and (split - 1) * turns < 16 <= split * turns
    outs = []
    for _ in range(3):
        out = torch.empty(20, 130, device=DEVICE)
        fp8.small(x, weights, None, out, launch)
        outs.append(out)
    check(outs[0], exact(x, weights, None))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[1], outs[2])
    assert not weights.counters.any()


@pytest.mark.parametrize("outputs", [64, 4096, 6144, 28672, 128])
@pytest.mark.parametrize("inputs", [64, 4096, 14336, 2064])
def test_splits_cover_the_inputs(outputs: int, inputs: int) -> None:
    for tile, (launch, _) in fp8_shapes.SMALL.items():
        split, turns = fp8.splits(outputs, inputs, tile, tile, launch)
        blocks = -(-inputs // launch.inputs)
        assert (split - 1) * turns < blocks <= split * turns
        assert launch.outputs >= fp8.SMALLEST_OUTPUTS
