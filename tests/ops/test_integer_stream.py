"""Integer and e4m3 weights in CUDA C++: which configurations are shipped, that the kernel compiles to products that do not wait for
each other, and on a Hopper GPU results, and weights to the bit."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline.ops.reference import REFERENCE, dequantized
from ridgeline.ops.table import IntMatrix

pytest.importorskip("triton")

from triton import knobs

from ridgeline.ops.triton import cuda, integer_stream, kernels
from ridgeline.ops.triton.integer import pack
from ridgeline.ops.triton.integer_matrix import dequantize
from ridgeline.ops.triton.integer_shapes import IntStreamTile, stream_for
from ridgeline.ops.triton.integer_stream import Form, integer_stream_product
from ridgeline.ops.triton.launch import is_hopper
from ridgeline.ops.triton.products import ProductShape
from ridgeline.ops.triton.shapes import MEMORY, PROCESSORS
from tests.ops.test_integer_ring import E4M3, random_e4m3

HOPPER = torch.cuda.is_available() and is_hopper(torch.device("cuda"))
DEVICE = "cuda" if HOPPER else "cpu"
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
REGISTERS = 1 << 16
SIZES = [
    (48, 64),
    (4096, 1024),
    (6144, 4096),
    (2560, 9728),
    (4096, 14336),
    (19456, 2560),
    (28672, 4096),
    (128256, 4096),
]


def of(bits: int, group: int, n: int, k: int) -> IntMatrix:
    none = torch.empty(0)
    return IntMatrix(none, none, None, bits, group, n, k)


COUNTS = [1, 2, 5, 8, 9, 16, 17, 32, 33, 64]
GROUPS = [32, 96, 128, 1 << 20]


def check_configuration(tokens: int, n: int, k: int, group: int, gate: bool, bits: int) -> None:
    """A processor's programs fit its memory; those that wait for each other all run; tokens are one tile; a thread holds
    scales of no more than four spans."""
    tile = stream_for(tokens, n, k, gate, bits, group)
    if tile is None:
        assert tokens > 32 and not gate
        return
    stages, shared = integer_stream.ring(tile, bits)
    assert stages >= 2 and tokens <= tile.batch <= 2 * max(tokens, 8)
    assert (
        tile.each * (shared + integer_stream.DRIVER_BYTES + integer_stream.BARRIERS)
        <= MEMORY + integer_stream.DRIVER_BYTES
    )
    tiles = -(-n // tile.rows)
    assert tile.split == 1 or tile.split * tiles <= tile.each * PROCESSORS
    assert tile.split == 1 or not gate
    assert tile.step % 128 == 0 and (group >= k or tile.step // min(tile.step, group & -group) <= 4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("gate", [False, True])
def test_configurations_fit_the_chip(gate: bool, bits: int) -> None:
    """Of every product with every number of tokens: see check_configuration."""
    for tokens, (n, k), group in itertools.product(COUNTS, SIZES, GROUPS):
        check_configuration(tokens, n, k, group, gate, bits)


def test_who_takes_what(hopper: Callable[[bool], None]) -> None:
    """More than 64 tokens are the ring's, and more than 32 but for gate and up; where streams do not run, one token is a vector."""

    def chosen(*tokens: int, bits: int = 4, **more: Any) -> list[str]:
        device, dtype = torch.device("cuda"), torch.bfloat16
        group = 128 if bits == 4 else 1 << 20
        given = {"aligned": True, "bits": bits, "group": group} | more
        shapes = (ProductShape(count, 4096, 4096, dtype, dtype, device, **given) for count in tokens)
        return [
            kernel_for[0].removeprefix("integer_")
            for shape in shapes
            if (kernel_for := kernels.INTEGER.kernel_for(shape))
        ]

    assert chosen(1, 2, 32, 33, 65) == ["stream", "stream", "stream", "ring", "ring"]
    assert chosen(1, 33, bits=8) == ["stream", "ring"] and chosen(64, kind="silu") == ["stream"]
    assert chosen(1, norm=True) == [] and chosen(1, 4, 5, aligned=False) == ["vector", "vector"]
    hopper(False)
    assert chosen(1, 8) == ["vector", "ring"] and chosen(1, 2, norm=True) == ["vector"]


def test_gates_take_the_tile_that_deals_evenly() -> None:
    """That which leaves the fullest processor the fewest rows: 256 either way, and 192 for 256."""
    wide, narrow = stream_for(16, 28672, 4096, True, 4, 128), stream_for(16, 19456, 2560, True, 4, 128)
    assert isinstance(wide, IntStreamTile) and isinstance(narrow, IntStreamTile)
    assert (wide.rows, narrow.rows) == (128, 64)


@pytest.mark.skipif(not cuda.available(), reason="needs the compiler that comes with torch for CUDA")
@pytest.mark.parametrize(
    ("tile", "form", "sides"),
    [
        (IntStreamTile(16, 2, 256, 2), Form(4, 128, 8), 2),
        (IntStreamTile(64, 2, 128, 2), Form(4, 128, 8), 2),
        (IntStreamTile(32, 1, 256, 2), Form(4, 128, 8), 1),
        (IntStreamTile(16, 1, 128, 2), Form(4, 32, None), 1),
        (IntStreamTile(16, 1, 128, 2), Form(8, 0, 128), 1),
        (IntStreamTile(16, 2, 128, 2), Form(8, 0, 0, True), 2),
        (IntStreamTile(64, 2, 128, 2), Form(8, 0, 0, True), 2),
        (IntStreamTile(64, 2, 128, 2), Form(8, 128, 0, True), 2),
        (IntStreamTile(16, 1, 128, 2), Form(8, 32, 0, True), 1),
    ],
    ids=str,
)
def test_it_compiles(tile: IntStreamTile, form: Form, sides: int, tmp_path: Path) -> None:
    """Also without a card. A stage's products wait for those 64 inputs before, the last for all: the assembler adds a wait to each
    product where it cannot tell that nobody touches its registers."""
    (tmp_path / "code").write_bytes(cuda.compiled(integer_stream.source(tile, form, torch.bfloat16, sides)))
    command = (knobs.nvidia.nvdisasm.path, "-c", str(tmp_path / "code"))
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert code.count("HGMMA.64x") == tile.step // 16
    assert code.count("WARPGROUP.DEPBAR") == tile.step // 64 + 1


FORMATS = [
    (4, 128, False),
    (4, 64, False),
    (4, 32, True),
    (4, 1 << 20, True),
    (3, 96, False),
    (8, 1 << 20, False),
    (8, 64, True),
    *E4M3,
]
SMALL = IntStreamTile(16, 1, 128, 2, split=4)
TILES = {
    (4, 128, False): (IntStreamTile(16, 2, 256, 2), IntStreamTile(32, 1, 256, 2, split=2)),
    (4, 64, False): (IntStreamTile(8, 2, 128, 2),),
    (4, 32, True): (IntStreamTile(64, 2, 128, 2, split=2),),
    (8, 1 << 20, False): (IntStreamTile(64, 2, 128, 2),),
    (0, 1 << 20, False): (IntStreamTile(64, 2, 128, 2), IntStreamTile(8, 2, 128, 2)),
    (0, 128, False): (IntStreamTile(64, 2, 128, 2), IntStreamTile(8, 2, 128, 2)),
}
CASES = [
    *((form, torch.bfloat16, tile) for form in FORMATS for tile in (SMALL, *TILES.get(form, ()))),
    *((form, torch.float16, SMALL) for form in FORMATS),
    (FORMATS[0], torch.float16, IntStreamTile(16, 2, 256, 2)),
]


def random(n: int, k: int, form: tuple[int, int, bool]) -> tuple[IntMatrix, torch.Tensor]:
    """Packed, and the weights in float64."""
    bits, group, asymmetric = form
    groups = -(-k // group)
    if not bits:
        return random_e4m3(n, k, group)
    codes = torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8, device=DEVICE)
    # Of a size with which products of gate and up stay finite in float16.
    scales = (torch.rand(n, groups, device=DEVICE) + 0.5).div_(1024).half().float()
    zeros = torch.randint(0, 1 << bits, (n, groups), dtype=torch.uint8, device=DEVICE) if asymmetric else None
    return pack(codes, scales, zeros, bits, group), dequantized(codes, scales, zeros, bits, group).double()


def run(
    x: torch.Tensor, matrix: IntMatrix, bias: torch.Tensor | None, tile: IntStreamTile, *rest: object
) -> torch.Tensor:
    out = integer_stream_product(x, matrix, bias, tile, *rest)  # type: ignore[arg-type]
    assert out is not None
    return out


def off(out: torch.Tensor, want: torch.Tensor) -> float:
    return float((out.double() - want).norm() / want.norm())


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(("form", "dtype", "tile"), CASES, ids=str)
def test_products(form: tuple[int, int, bool], dtype: torch.dtype, tile: IntStreamTile) -> None:
    """Alone, onto a stream, and with gate and up; with edges in every direction, and each run like the one before."""
    torch.manual_seed(0)
    allowed = 6e-3 if dtype == torch.bfloat16 else 1e-3
    for tokens, n, k in ((7, 1000, 1048), (70, 278, 2048), (16, 4096, 4096)):
        matrix, weight = random(n, k, form)
        x = torch.randn(tokens, k, dtype=dtype, device=DEVICE)
        bias, stream = torch.randn(n, dtype=dtype, device=DEVICE), torch.randn(tokens, n, dtype=dtype, device=DEVICE)
        want = x.double() @ weight.T
        assert off(run(x, matrix, None, tile), want) < allowed
        added = run(x, matrix, bias, tile, stream.clone())
        assert off(added, want + bias.double() + stream.double()) < allowed
        for _ in range(3):
            assert torch.equal(added, run(x, matrix, bias, tile, stream.clone()))
        gated = run(x, matrix, bias, tile, None, "gelu_tanh")
        assert off(gated, REFERENCE.tokenwise.activate(want + bias.double(), "gelu_tanh")) < allowed


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 2.0**-12, 2.0**14])
def test_weights_to_the_bit(dtype: torch.dtype, form: tuple[int, int, bool], size: float) -> None:
    """One input each: the product is the weight as it is when the whole matrix is widened, also where scales are large or small."""
    matrix, _ = random(200, 512, form)
    # Scales of groups of e4m3 values are below LARGEST_SCALE.
    largest = 128.0 if form in E4M3 else 2.0**14
    factor = 1024 * min(size, largest) if dtype == torch.bfloat16 else 1024
    matrix.scales.copy_((matrix.scales.float() * factor).to(matrix.scales.dtype))
    tile, weight = replace(SMALL, split=1), dequantize(matrix, dtype)
    for first in range(0, 512, 80):
        x = torch.eye(512, dtype=dtype, device=DEVICE)[first : first + 80]
        assert torch.equal(run(x, matrix, None, tile), weight[:, first : first + 80].T)
