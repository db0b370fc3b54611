"""Products with integer weights equal float64 products with the dequantized ones: on a GPU where there is one, else in
Triton's interpreter, which is asked for float32 and float16 only (it computes a bf16 product wrongly)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from ridgeline.core.experts import Matrix as Linear
from ridgeline.core.formats import NumberFormat
from ridgeline.core.gpu_layout import held_format
from ridgeline.ops.reference import REFERENCE, dequantized
from ridgeline.ops.table import IntMatrix, Normed
from ridgeline.ops.triton.integer import pack
from ridgeline.ops.triton.integer_matrix import dequantize
from ridgeline.ops.triton.integer_shapes import IntVectorTile
from ridgeline.ops.triton.integer_vector import integer_vector_product
from ridgeline.ops.triton.linears import INT_TRITON

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
# (bits, group, zero points)
FORMATS = [
    (4, 128, False),
    (4, 32, True),
    (4, 96, False),
    (4, 1 << 20, True),
    (3, 64, False),
    (8, 1 << 20, False),
    (8, 32, True),
    (8, 128, True),
]
CASES = [(form, torch.float16) for form in FORMATS] + [(FORMATS[0], DTYPE), (FORMATS[5], DTYPE)]
# (tokens, tile)
TILES = [(1, IntVectorTile(8, 1, 100)), (1, IntVectorTile(2, 4, 3)), (3, IntVectorTile(8, 2, 2))]
# All pairs on a GPU; in the interpreter one tile for each case, each tile with several formats.
FEW_TOKENS = (
    [(*few, *case) for few in TILES for case in CASES]
    if DEVICE == "cuda"
    else [
        pytest.param(*TILES[place], *case, marks=[] if at in (0, 4, 7, 8) else [pytest.mark.long])
        for at, (place, case) in enumerate(zip((0, 2, 1, 0, 2, 1, 1, 2, 1, 0), CASES, strict=True))
    ]
)


def close(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative error in the 2-norm; 16-bit products round each weight and the result, float32 ones neither."""
    assert (out.shape, out.dtype) == (want.shape, dtype)
    error = float((out.double() - want).norm() / want.norm())
    assert error < {torch.float32: 1e-4, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype], error


def matrix(n: int, k: int, form: tuple[int, int, bool]) -> tuple[IntMatrix, torch.Tensor]:
    """Random codes packed for the device, and the weights that they stand for, float64 [n, k]."""
    bits, group, asymmetric = form
    groups = -(-k // group)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)
    scales = (torch.rand(n, groups) + 0.5).div_(64).half().float()
    zeros = torch.randint(0, 1 << bits, (n, groups), dtype=torch.uint8) if asymmetric else None
    exact = dequantized(codes, scales, zeros, bits, group).double().to(DEVICE)
    moved = [None if tensor is None else tensor.to(DEVICE) for tensor in (codes, scales, zeros)]
    assert moved[0] is not None and moved[1] is not None
    return pack(moved[0], moved[1], moved[2], bits, group), exact


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


@pytest.mark.parametrize(("form", "dtype"), CASES)
@pytest.mark.parametrize(("n", "k"), [(37, 264), (16, 512)])
def test_whole_matrices(n: int, k: int, form: tuple[int, int, bool], dtype: torch.dtype) -> None:
    packed, weight = matrix(n, k, form)
    close(dequantize(packed, dtype), weight, dtype)
    bits, group, zeros = form
    held = sum(tensor.nbytes for tensor in (packed.codes, packed.scales, packed.zeros) if tensor is not None)
    counted = held_format(NumberFormat(bits, group, zeros), "cuda", Linear("qkv", n, k))
    assert held == counted.matrix_bytes(n, k)


@pytest.mark.parametrize(("tokens", "tile", "form", "dtype"), FEW_TOKENS)
def test_few_tokens(tokens: int, tile: IntVectorTile, form: tuple[int, int, bool], dtype: torch.dtype) -> None:
    """Fewer programs than groups of rows, and more; edges in both directions; all that stands around the product."""
    packed, weight = matrix(22, 264, form)
    x, bias, stream = random(tokens, 264, dtype=dtype), random(22, dtype=dtype), random(tokens, 22, dtype=dtype)
    product = x.double() @ weight.T
    close(integer_vector_product(x, packed, None, tile), product, dtype)
    close(integer_vector_product(x, packed, bias, tile), product + bias.double(), dtype)
    want = product + bias.double() + stream.double()
    close(integer_vector_product(x, packed, bias, tile, stream), want, dtype)
    close(
        integer_vector_product(x, packed, None, tile, kind="silu"), REFERENCE.tokenwise.activate(product, "silu"), dtype
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("offset", [False, True])
def test_few_tokens_are_normed_as_they_are_read(bits: int, offset: bool) -> None:
    packed, weight = matrix(24, 2064, (bits, 128, False))
    scale = torch.tensor([[30.0], [1.0], [3.0], [0.1], [8.0]], device=DEVICE, dtype=torch.float16)
    x = Normed(scale * random(5, 2064, dtype=torch.float16), random(2064, dtype=torch.float16), 1e-1, offset)
    want = REFERENCE.tokenwise.rms_norm(x.x.double(), x.weight.double(), x.eps, x.offset) @ weight.T
    close(integer_vector_product(x, packed, None, IntVectorTile(16, 2, 1)), want, torch.float16)


@pytest.mark.parametrize("bits", [4, 8])
def test_one_token_with_an_outlier_keeps_the_others(bits: int) -> None:
    """An input a thousand times larger, whose group's weights are a thousand times smaller."""
    packed, _ = matrix(64, 1024, (bits, 128, False))
    x = random(1, 1024, dtype=torch.float16)
    x[0, 40] *= 1000
    packed.scales[:, 0] /= 1000
    want = x.double() @ dequantize(packed, torch.float32).double().T
    out = integer_vector_product(x, packed, None, IntVectorTile(4, 2, 7))
    assert float((out.double() - want).norm() / want.norm()) < 1e-3


@pytest.mark.parametrize("tokens", [0, 1, 2, 8, 9])
@pytest.mark.parametrize("form", [(4, 128, False), (8, 1 << 20, False), (3, 32, True)])
def test_operations_agree_with_the_reference(tokens: int, form: tuple[int, int, bool]) -> None:
    """Whatever kernels the shape leads to, with a norm that is still to be done."""
    packed, weight = matrix(48, 256, form)
    dtype = DTYPE
    x = Normed(random(tokens, 256, dtype=dtype), random(256, dtype=dtype), 1e-5, False)
    bias, stream = random(48, dtype=dtype), random(tokens, 48, dtype=dtype)
    values = REFERENCE.tokenwise.rms_norm(x.x.double(), x.weight.double(), x.eps, x.offset)
    want = values @ weight.T + bias.double()
    both = INT_TRITON.linear(x, packed, bias), INT_TRITON.linear_activate(x, packed, bias, "silu")
    added = INT_TRITON.linear_add(values.to(dtype), packed, bias, stream.clone())
    if tokens:
        close(both[0], want, dtype)
        close(both[1], REFERENCE.tokenwise.activate(want, "silu"), dtype)
        close(added, want + stream.double(), dtype)
    assert both[1].shape == (tokens, 24)
