"""Products with e4m3 weights and unquantized inputs equal float64 products: on a GPU where there is one, else in Triton's
interpreter, which is asked for float32 and float16 only (it computes a bf16 product wrongly)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ridgeline.ops.reference import FP8, FP8_WEIGHT_REFERENCE, REFERENCE, quantize
from ridgeline.ops.table import Fp8Matrix, Normed
from ridgeline.ops.triton.integer import as_codes, pack_e4m3
from ridgeline.ops.triton.integer_matrix import EMULATED_E4M3, conversion_e4m3, dequantize, dequantize_kernel
from ridgeline.ops.triton.integer_shapes import IntVectorTile
from ridgeline.ops.triton.integer_vector import integer_vector_kernel, integer_vector_product
from ridgeline.ops.triton.invariant import INVARIANT
from ridgeline.ops.triton.linears import FP8_WEIGHT_TRITON
from ridgeline.quant.format import LinearShape, Part, Share
from ridgeline.quant.fp8 import Fp8Format
from tests.combinations import crossed

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
DTYPES = [torch.float16, torch.float32, *([torch.bfloat16] if DEVICE == "cuda" else [])]


def close(out: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Relative error in the 2-norm; 16-bit products of many tokens round each weight and the result, float32 ones neither."""
    assert (out.shape, out.dtype) == (want.shape, dtype)
    error = float((out.double() - want).norm() / want.norm())
    assert error < {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype], error


def random_matrix(n: int, k: int, group: int = 0) -> tuple[Fp8Matrix, torch.Tensor]:
    """A packed matrix with every kind of number, and its weights, float64 [n, k]. Scales are no numbers of 16 bits, except those of
    groups, which kernels round to 16 bits."""
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8)
    values = torch.where(codes & 127 == 127, 0, codes).view(FP8).to(DEVICE)
    scales = (torch.rand(n, -(-k // group) if group else 1) + 0.5).div_(2000)
    scales = (scales.bfloat16().float() if group else scales).to(DEVICE)
    spread = scales.double()[:, torch.arange(k) // (group or k)]
    matrix = pack_e4m3(values, scales if group else scales.flatten())
    return replace(matrix, group=group), values.double() * spread


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "group"), [(37, 264, 0), (16, 512, 0), (5, 1, 0), (37, 264, 128), (16, 512, 64), (9, 130, 32)]
)
def test_whole_matrices(n: int, k: int, group: int, dtype: torch.dtype) -> None:
    packed, weight = random_matrix(n, k, group)
    close(dequantize(as_codes(packed, k), dtype), weight, dtype)


def test_every_number_is_read() -> None:
    """To the bit, also subnormal ones."""
    codes = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    codes = codes[codes & 127 != 127]
    packed = pack_e4m3(codes.view(FP8).unsqueeze(0).expand(3, -1).contiguous(), torch.ones(3, device=DEVICE))
    for dtype in DTYPES:
        out = dequantize(as_codes(packed, len(codes)), dtype)
        assert torch.equal(out.float(), codes.view(FP8).float().expand(3, -1))


# --- products ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [0, 128, 32])
@pytest.mark.parametrize(
    ("tokens", "tile"),
    [(1, IntVectorTile(8, 1, 100)), (1, IntVectorTile(2, 4, 3)), (3, IntVectorTile(8, 2, 2))],
    ids=str,
)
def test_few_tokens(tokens: int, tile: IntVectorTile, group: int) -> None:
    """Edges in both directions, and all that stands around the product."""
    dtype = torch.float16
    packed, weight = random_matrix(22, 264, group)
    matrix, gain = as_codes(packed, 264), random(264, dtype=dtype)
    x, bias, stream = random(tokens, 264, dtype=dtype), random(22, dtype=dtype), random(tokens, 22, dtype=dtype)
    plain = x.double() @ weight.T
    close(integer_vector_product(x, matrix, bias, tile, stream.clone()), plain + bias + stream.double(), dtype)
    gated = REFERENCE.tokenwise.activate(plain, "silu")
    close(integer_vector_product(x, matrix, None, tile, kind="silu"), gated, dtype)
    normed = REFERENCE.tokenwise.rms_norm(x.double(), gain.double(), 1e-5, True)
    close(integer_vector_product(Normed(x, gain, 1e-5, True), matrix, None, tile), normed @ weight.T, dtype)


@pytest.mark.parametrize(
    ("tokens", "shape", "dtype"),
    crossed(
        (0, 1, 2, 4, 5, 17, 64, 65, 300),
        ((48, 256, 0), (70, 136, 0), (48, 256, 128), (70, 136, 64)),
        DTYPES,
        # In the interpreter each number of tokens with each shape once, and both with each dtype.
        quick=lambda tokens, shape, dtype: DEVICE == "cuda" or (tokens + shape + shape // 2 + dtype) % 2 == 0,
    ),
)
def test_operations_are_those_of_float64(tokens: int, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Whatever kernels the shape leads to, with a norm that is still to be done."""
    n, k, group = shape
    packed, weight = random_matrix(n, k, group)
    x = Normed(random(tokens, k, dtype=dtype), random(k, dtype=dtype), 1e-5, False)
    bias, stream = random(n, dtype=dtype), random(tokens, n, dtype=dtype)
    values = REFERENCE.tokenwise.rms_norm(x.x, x.weight, x.eps, x.offset)
    want = values.double() @ weight.T + bias.double()
    outs = (
        FP8_WEIGHT_TRITON.linear(x, packed, bias, dtype),
        FP8_WEIGHT_TRITON.linear_add(values, packed, bias, stream.clone()),
        FP8_WEIGHT_TRITON.linear_activate(x, packed, bias, dtype, "silu"),
    )
    wants = want, want + stream.double(), REFERENCE.tokenwise.activate(want, "silu")
    for out, expected in zip(outs, wants, strict=True):
        assert isinstance(out, torch.Tensor) and out.shape == expected.shape
        if tokens:
            close(out, expected, dtype)


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_is_the_same_among_any_number_of_tokens(dtype: torch.dtype, group: int) -> None:
    """Batch-invariant operations: they widen the matrix and multiply as with floats, to the bit."""
    packed, weight = random_matrix(70, 136, group)
    ops, plain = INVARIANT.matmul.fp8_weight, INVARIANT.matmul.unquantized
    widened = plain.pack(dequantize(as_codes(packed, 136), dtype))
    x, stream = random(20, 136, dtype=dtype), random(20, 70, dtype=dtype)
    whole = ops.linear_add(x, packed, None, stream.clone())
    close(whole, x.double() @ weight.T + stream.double(), dtype)
    for part in (slice(0, 1), slice(3, 20)):
        assert torch.equal(ops.linear(x[part], packed, None, dtype), plain.linear(x[part], widened, None))


# --- the format -------------------------------------------------------------------------------------------------------


def loaded(
    shape: LinearShape, share: Share, weight: torch.Tensor, form: Fp8Format
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's term of the product of a fixed x, and the memory of its values."""
    linear = form.create(shape, share)
    for part, rows in enumerate(weight.split([part.rows for part in shape.parts])):
        linear.load(part, "weight", rows)
    x = torch.randn(3, shape.d_in, generator=torch.Generator().manual_seed(5)).to(DEVICE, form.dtype)
    columns = share.span(shape.d_in, shape.in_units) if shape.split == "in" else slice(0, shape.d_in)
    mine = linear.tensors()[0]
    return linear.apply(x[:, columns]), mine


FORM = Fp8Format(FP8_WEIGHT_TRITON, torch.float16, torch.device(DEVICE), inputs=False)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_have_slices_of_the_whole(size: int) -> None:
    """Outputs side by side, inputs as terms of a sum; slices of the inputs are no multiple of what the layout orders."""
    weight = torch.randn(40, 96)
    for split, parts in (("out", (Part(24, 4), Part(16, 4))), ("in", (Part(40, 1),))):
        shape = LinearShape(96, parts, split=split, in_units=4)  # type: ignore[arg-type]
        plain = replace(FORM, ops=FP8_WEIGHT_REFERENCE, dtype=torch.float32)
        want = loaded(shape, Share(), weight, plain)[0].double()
        terms = [loaded(shape, Share(rank, size), weight, FORM)[0].double() for rank in range(size)]
        if split == "in":
            whole = torch.stack(terms).sum(0)
        else:
            pieces = [term.split([24 // size, 16 // size], 1) for term in terms]
            whole = torch.cat([piece[part] for part in range(2) for piece in pieces], 1)
        assert (whole - want).norm() < 2e-3 * want.norm()


def test_experts_leave_inputs_unquantized() -> None:
    """Beside layers in fp8, whose inputs are quantized."""
    device = torch.device(DEVICE)
    form = Fp8Format(REFERENCE.matmul.fp8, torch.float16, device, of_experts=FP8_WEIGHT_TRITON)
    weight, x = torch.randn(16, 64), torch.randn(3, 64).to(DEVICE, torch.float16)
    exact, errors = x.double().cpu() @ weight.double().T, []
    for of_expert in (True, False):
        linear = form.create(LinearShape(64, (Part(16, 1),), of_expert=of_expert), Share())
        linear.load(0, "weight", weight)
        scaled = quantize(weight)
        stored = x.double().cpu() @ (scaled.values.double() * scaled.scales.double()[:, None]).T
        errors.append(float((linear.apply(x).double().cpu() - stored).norm() / exact.norm()))
    assert errors[0] < 1e-3 < 1e-2 < errors[1], errors


# --- compilation ------------------------------------------------------------------------------------------------------


def compile_for_hopper(dtype: torch.dtype, group: int) -> None:
    """The vector kernel with all that may stand around a product, and the conversion of a whole matrix; no GPU is asked."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]
    ptx = EMULATED_E4M3.value if dtype == torch.float32 else conversion_e4m3(dtype, True)
    constants: dict[str, object] = {"SHIFT": 0.0, "GROUP": group, "ZEROS": False, "BITS": 8, "PTX": ptx, "PDL": True}
    constants["POWER"] = 1.0 if dtype == torch.float32 else 2.0**8
    around = {"BIAS": True, "ADD": False, "NORM": True, "OFFSET": True, "KIND": 1, "PRECISION": "tf32"}
    vector = around | {"TOKENS": 1, "ROWS": 8, "SETS": 2, "WARPS": 4}
    matrix = {"ROWS": 32, "BLOCK": 256, "PTX": ptx if dtype == torch.float32 else conversion_e4m3(dtype)}
    for kernel, more in ((integer_vector_kernel, vector), (dequantize_kernel, matrix)):
        fixed = constants | more
        words = "*i32" if kernel is integer_vector_kernel else "*i16"
        types = {"w_ptr": words, "scale_ptr": "*fp32", "zero_ptr": "*fp32", "eps": "fp32"}
        signature = {
            arg: "constexpr" if arg in fixed else types.get(arg, f"*{name}" if arg.endswith("_ptr") else "i32")
            for arg in kernel.arg_names
        }
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(arg),): value for arg, value in fixed.items()})
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
        assert "cvt.rn.f16x2.e4m3x2" not in made.asm["ptx"], "instructions for e4m3 are missing on GPUs before Ada"


@pytest.mark.parametrize(
    ("dtype", "group"),
    crossed(
        (torch.bfloat16, torch.float16, torch.float32),
        (0, 128),
        quick=lambda dtype, group: (dtype, group) in ((0, 1), (2, 0)),
    ),
)
def test_the_kernels_compile(apart: Callable[..., None], dtype: torch.dtype, group: int) -> None:
    apart(compile_for_hopper, dtype, group)
