"""Weights in blocks: products of every device against float64, exact layouts, and matrices of several formats."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.core.formats import NUMBER_FORMATS, NumberFormat
from ridgeline.ops import blocks as formulas
from ridgeline.ops.blocks import SCALINGS, Blocks, arrays, chained, pack_six
from ridgeline.ops.native.arena import LANES
from ridgeline.ops.reference import REFERENCE, block_pack, block_unpack
from ridgeline.ops.table import Normed, Ops
from ridgeline.quant.blocks import round_to_blocks

FORMATS = sorted(name for name, numbers in NUMBER_FORMATS.items() if numbers.in_blocks)
PLAIN = ("int4-g32", "int8-g32")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random_blocks(numbers: NumberFormat, outputs: int, inputs: int) -> Blocks:
    """Random codes and scales, of which every value may occur."""
    codes = torch.randint(1 << numbers.bits, (outputs, inputs), dtype=torch.uint8)
    groups = inputs // numbers.group
    if numbers.scaling == "e8m0":
        return Blocks(codes, torch.randint(115, 126, (outputs, groups), dtype=torch.uint8), 4, 32, "e8m0")
    extra = None
    scales = (torch.rand(outputs, groups) * 0.02 - 0.01).half()
    if numbers.scaling == "float16_minimum":
        extra = (torch.rand(outputs, groups) * 0.2 - 0.1).half()
    elif numbers.scaling == "super_6bit":
        six = torch.randint(64, (2, outputs, groups), dtype=torch.uint8)
        scales, extra = pack_six(six[0], six[1]), (torch.rand(outputs, groups // 4) * 0.001).half()
    elif numbers.scaling == "super_8bit":
        scales = torch.randint(-128, 128, (outputs, groups), dtype=torch.int8)
        extra = (torch.rand(outputs, groups // 16) * 0.0001).half()
    return Blocks(codes, scales, numbers.bits, numbers.group, numbers.scaling, extra)


def in_float64(blocks: Blocks, x: torch.Tensor) -> torch.Tensor:
    return x.double() @ blocks.dequantized().double().t()


def close(result: torch.Tensor, expected: torch.Tensor, tolerance: float) -> bool:
    return float((result.double() - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("name", FORMATS)
def test_memory_and_values_are_kept(name: str) -> None:
    numbers = NUMBER_FORMATS[name]
    blocks = random_blocks(numbers, 48, 512)
    matrix = block_pack(blocks)
    assert sum(tensor.nbytes for tensor in arrays(matrix)) == numbers.matrix_bytes(48, 512)
    assert torch.equal(block_unpack(matrix).dequantized(), blocks.dequantized())
    half = blocks.columns(slice(256, 512))
    assert torch.equal(half.dequantized(), blocks.dequantized()[:, 256:])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 8, 21])
def test_native_products(name: str, tokens: int, ops: Ops) -> None:
    """48 outputs of 4 pieces, and 40, whose last block is not full."""
    for outputs, inputs in ((48, 512), (40, 256)):
        blocks = random_blocks(NUMBER_FORMATS[name], outputs, inputs)
        matrix, bias = ops.matmul.blocks.pack(blocks), torch.randn(outputs)
        padded = -(-outputs // LANES) * LANES
        assert sum(tensor.nbytes for tensor in arrays(matrix)) == NUMBER_FORMATS[name].matrix_bytes(padded, inputs)
        x = torch.randn(tokens, inputs)
        expected = in_float64(blocks, x) + bias
        assert close(ops.matmul.blocks.linear(x, matrix, bias), expected, 1e-4)
        stream = torch.randn(tokens, outputs)
        total = expected + stream
        assert close(ops.matmul.blocks.linear_add(x, matrix, bias, stream), total, 1e-4)
        rounded = x.bfloat16()
        result = ops.matmul.blocks.linear(rounded, matrix, bias.bfloat16())
        assert close(result, in_float64(blocks, rounded) + bias.bfloat16(), 8e-3)


@pytest.mark.parametrize("name", FORMATS)
def test_native_gates_and_norms(name: str, ops: Ops) -> None:
    blocks = random_blocks(NUMBER_FORMATS[name], 64, 256)
    native, reference = ops.matmul.blocks, REFERENCE.matmul.blocks
    x, weight = torch.randn(3, 256), torch.rand(256)
    for source in (x, Normed(x, weight, 1e-5, False)):
        result = native.linear_activate(source, native.pack(blocks), None, "silu")
        expected = reference.linear_activate(source, reference.pack(blocks), None, "silu")
        assert close(result, expected.double(), 4e-4)  # a product of two sums


@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_native_matrices_of_several_formats(tokens: int, ops: Ops, threads: int) -> None:
    """As queries and keys of one kind and values of another one."""
    names = ["q4_k", "q6_k", "int8-g32", "int4-g32", "q5_0", "mxfp4"]
    whole = [random_blocks(NUMBER_FORMATS[name], 32, 512) for name in names]
    matrix = chained([ops.matmul.blocks.pack(blocks) for blocks in whole])
    x, bias, stream = torch.randn(tokens, 512), torch.randn(192), torch.randn(tokens, 192)
    expected = torch.cat([in_float64(blocks, x) for blocks in whole], 1) + bias
    assert close(ops.matmul.blocks.linear(x, matrix, bias), expected, 1e-4)
    assert close(ops.matmul.blocks.linear_add(x, matrix, bias, stream.clone()), expected + stream, 1e-4)
    gate, up = ops.matmul.blocks.linear(x, matrix, bias).double().chunk(2, 1)
    result = ops.matmul.blocks.linear_activate(x, matrix, bias, "silu")
    assert close(result, gate * torch.sigmoid(gate) * up, 1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_native_results_do_not_depend_on_other_tokens(name: str, ops: Ops) -> None:
    matrix = ops.matmul.blocks.pack(random_blocks(NUMBER_FORMATS[name], 32, 256))
    x = torch.randn(13, 256)
    together = ops.matmul.blocks.linear(x, matrix, None)
    assert all(
        torch.equal(together[at : at + 1], ops.matmul.blocks.linear(x[at : at + 1], matrix, None)) for at in range(13)
    )


def gpu_inputs(tokens: int, inputs: int) -> torch.Tensor:
    """In float16 on a GPU, and in float32 in the interpreter."""
    return torch.randn(tokens, inputs, device=DEVICE, dtype=torch.float16 if DEVICE == "cuda" else torch.float32)


def on_device(blocks: Blocks) -> Blocks:
    extra = None if blocks.extra is None else blocks.extra.to(DEVICE)
    return replace(blocks, codes=blocks.codes.to(DEVICE), scales=blocks.scales.to(DEVICE), extra=extra)


TOLERANCE = 1e-2 if DEVICE == "cuda" else 1e-5


@pytest.mark.parametrize("name", [*FORMATS, *PLAIN])
def test_triton_products(name: str) -> None:
    """1 token, a tile of 16 with padding, and more than the kernel takes; 50 outputs do not fill the last tile."""
    pytest.importorskip("triton")
    from ridgeline.ops.triton.blocks import BLOCK_TRITON, MOST_TOKENS, dequantize

    blocks = on_device(random_blocks(NUMBER_FORMATS[name], 50, 512 if NUMBER_FORMATS[name].row == 256 else 96))
    matrix = BLOCK_TRITON.pack(blocks)
    inputs = matrix.d_in
    exact = dequantize(matrix, torch.float32)
    assert torch.equal(exact, blocks.dequantized()) or name in FORMATS
    assert close(exact, blocks.dequantized().double(), 1e-6)
    for tokens in (1, 5, MOST_TOKENS + 1):
        x = gpu_inputs(tokens, inputs)
        bias = torch.randn(50, device=DEVICE, dtype=x.dtype)
        expected = in_float64(blocks, x) + bias
        assert close(BLOCK_TRITON.linear(x, matrix, bias), expected, TOLERANCE)
        stream = torch.randn_like(expected, dtype=x.dtype)
        total = expected + stream
        assert close(BLOCK_TRITON.linear_add(x, matrix, bias, stream), total, TOLERANCE)


def test_triton_matrices_of_several_formats() -> None:
    pytest.importorskip("triton")
    from ridgeline.ops.triton.blocks import BLOCK_TRITON
    from ridgeline.ops.triton.invariant import INVARIANT

    whole = [on_device(random_blocks(NUMBER_FORMATS[name], 32, 512)) for name in ("q4_k", "int8-g32", "q6_k", "q5_1")]
    for ops in (BLOCK_TRITON, INVARIANT.matmul.blocks):
        matrix = chained([ops.pack(blocks) for blocks in whole])
        x, weight = gpu_inputs(3, 512), torch.rand(512, device=DEVICE, dtype=gpu_inputs(1, 1).dtype)
        bias = torch.randn(128, device=DEVICE, dtype=x.dtype)
        expected = torch.cat([in_float64(blocks, x) for blocks in whole], 1) + bias
        assert close(ops.linear(x, matrix, bias), expected, TOLERANCE)
        gate, up = expected.chunk(2, 1)
        result = ops.linear_activate(x, matrix, bias, "silu")
        assert close(result, gate * torch.sigmoid(gate) * up, TOLERANCE)
        assert ops.linear(Normed(x, weight, 1e-5, False), matrix, bias).shape == (3, 128)


@pytest.mark.parametrize("name", ["q4_k", "int8-g32"])
def test_large_matrices_are_dequantized_in_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from ridgeline.ops.triton import block_tiles
    from ridgeline.ops.triton.blocks import BLOCK_TRITON, MOST_TOKENS, pieces
    from ridgeline.ops.triton.invariant import INVARIANT

    for module in (formulas, block_tiles):
        monkeypatch.setattr(module, "MOST_WEIGHTS", 32 * 256)
    blocks = on_device(random_blocks(NUMBER_FORMATS[name], 80, 256))
    x = gpu_inputs(MOST_TOKENS + 1, 256)
    bias = torch.randn(80, device=DEVICE, dtype=x.dtype)
    for ops in (BLOCK_TRITON, INVARIANT.matmul.blocks):
        matrix = ops.pack(blocks)
        assert [piece.out for piece in pieces(matrix)] == [32, 32, 16]
        assert close(ops.linear(x, matrix, bias), in_float64(blocks, x) + bias, TOLERANCE)


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_are_rounded_to_the_nearest_codes(name: str) -> None:
    """The error is that of a format with so many bits: below half a step of the largest weight of a group."""
    numbers = NUMBER_FORMATS[name]
    weight = torch.randn(32, 512) * 0.02
    blocks = round_to_blocks(weight, numbers)
    error = float((blocks.dequantized() - weight).norm() / weight.norm())
    assert 0.2 / 2**numbers.bits < error < 2.0 / 2**numbers.bits
    on_meta = round_to_blocks(weight.to("meta"), numbers)
    assert [tensor.shape for tensor in arrays(block_pack(on_meta))] == [
        tensor.shape for tensor in arrays(block_pack(blocks))
    ]


POINTERS = {"": ("*fp16", "*fp16"), "float16_minimum": ("*fp16", "*fp16"), "super_6bit": ("*u8", "*fp16")}
POINTERS |= {"super_8bit": ("*i8", "*fp16"), "e8m0": ("*u8", "*u8")}
"""Types of scales and of the second array."""


def check_compiles(name: str, bits: int, scaling: str) -> str:
    """Compile a kernel for a Hopper GPU; the names of its instructions."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ridgeline.ops.triton import blocks

    kernel, tile = getattr(blocks, name), blocks.tile_for(1, 4096)
    scale, extra = POINTERS[scaling]
    constants = {"SCALING": SCALINGS.index(scaling), "BITS": bits, "ROWS": tile.rows, "UNITS": tile.units}
    constants |= {"WIDE": tile.outputs, "BIAS": True, "ADD": True} if name == "product_kernel" else {}
    types = {"scale_ptr": scale, "extra_ptr": extra, "codes_ptr": "*u8"}
    signature = {
        argument: "constexpr"
        if argument in constants
        else types.get(argument, "*bf16" if "_ptr" in argument else "i32")
        for argument in kernel.arg_names
    }
    aligned = [argument for argument in signature if argument.endswith(("_ptr", "puts", "stride"))]
    apart = {(kernel.arg_names.index(argument),): [["tt.divisibility", 16]] for argument in aligned}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    source = ASTSource(kernel, signature, constants, apart)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return " ".join(part for part in ("mma", "cp.async") if part in made.asm["ptx"])


@pytest.mark.parametrize(
    ("bits", "scaling"),
    [
        (4, "super_6bit"),
        (4, "e8m0"),
        *(
            pytest.param(*form, marks=pytest.mark.long)
            for form in ((6, "super_8bit"), (5, "super_6bit"), (5, ""), (5, "float16_minimum"))
        ),
    ],
)
def test_the_kernels_compile_for_hopper(bits: int, scaling: str, apart) -> None:
    pytest.importorskip("triton")
    assert apart(check_compiles, "product_kernel", bits, scaling) == "mma cp.async"
    apart(check_compiles, "dequantize_kernel", bits, scaling)
