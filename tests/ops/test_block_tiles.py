"""The kernels of ops.triton.block_tiles, whose CUDA C++ runs on this machine's CPU, against float64; and their layout."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import byref, c_void_p
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from test_blocks import close, in_float64, random_blocks

from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.ops.blocks import Blocks, chained
from ridgeline.ops.reference import REFERENCE, clamped_swiglu
from ridgeline.ops.table import IntMatrix
from ridgeline.ops.triton import block_tiles
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.block_tiles import Form, Tile, _Pairs, arrays_of, pack, pieces_of, units_of, unpack
from ridgeline.ops.triton.blocks import pieces as pieces_of_all

FORMS = ["q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "mxfp4"]
BF16, F16 = torch.bfloat16, torch.float16
CALLS = """
extern "C" void product(u32 programs, const Arrays* from, const u16* x, const u16* bias, const u16* stream, u16* out, u32 tokens,
                        u32 rows, u32 inputs, u32 units, u32 kind, u32 pitch) {
  launch(programs, THREADS, [=] { block_product(*from, x, bias, stream, out, tokens, rows, inputs, units, kind, pitch); });
}
extern "C" void experts(u32 programs, const Arrays* from, const Pairs* pairs, const u16* x, const u16* bias, const float* shares,
                        void* out, u32 rows, u32 inputs, u32 units, u32 kind, u32 sorted, u32 per_row, u32 held) {
  launch(programs, THREADS,
         [=] { block_experts(*from, *pairs, x, bias, shares, out, rows, inputs, units, kind, sorted, per_row, held); });
}
extern "C" void weights(u32 programs, const Arrays* from, u16* out, u32 rows, u32 inputs, u32 units) {
  launch(programs, 256, [=] { block_weights(*from, out, rows, inputs, units); });
}
"""


def blocks_of(name: str, outputs: int, units: int) -> Blocks:
    """A last unit that is not full, where the format allows it."""
    numbers = NUMBER_FORMATS[name]
    return random_blocks(numbers, outputs, 256 * units - (0 if numbers.row == 256 else 32))


@pytest.mark.parametrize("name", FORMS)
def test_layout_keeps_all_bits(name: str) -> None:
    numbers, blocks = NUMBER_FORMATS[name], random_blocks(NUMBER_FORMATS[name], 48, 512)
    matrix = pack(blocks)
    extra = 0 if matrix.extra is None else matrix.extra.nbytes
    assert matrix.codes.nbytes + matrix.scales.nbytes + extra == numbers.matrix_bytes(48, 512)
    padded = blocks_of(name, 40, 2)
    kept = unpack(pack(padded))
    assert torch.equal(kept.codes, padded.codes)
    assert torch.equal(kept.dequantized(), padded.dequantized())


def test_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(NUMBER_FORMATS["q6_k"], 50, 256)
    monkeypatch.setattr(block_tiles, "MOST_WEIGHTS", 32 * 256)
    pieces = [unpack(piece).dequantized() for piece in pieces_of(pack(blocks))]
    assert [len(piece) for piece in pieces] == [32, 18]
    assert torch.equal(torch.cat(pieces), blocks.dequantized())
    in_chain = pieces_of_all(chained([pack(blocks), pack(blocks)]))
    assert [piece.out for piece in in_chain] == [32, 18] * 2 and all(len(piece.codes) == 2 for piece in in_chain)


class Library:
    """The kernels of a form, compiled for a CPU."""

    def __init__(
        self, folder: Path, matrix: IntMatrix, dtype: torch.dtype, tile: Tile, sides: int = 1, resident: bool = False
    ) -> None:
        if (compiler := shutil.which("g++")) is None:
            pytest.skip("there is no C++ compiler")
        self.matrix, self.dtype, self.tile, self.sides = matrix, dtype, tile, sides
        source = block_tiles.source(tile, Form(matrix.bits, matrix.scaling, dtype, 1, sides, resident))
        macros = [line for line in source.splitlines() if line.startswith("#define ")]
        kernels = (Path(block_tiles.__file__).parent / "block_tiles.cu").read_text()
        text = "\n".join((*macros, "#define ON_CPU", '#include "cuda_on_cpu.h"', kernels, CALLS))
        (folder / "kernels.cpp").write_text(text)
        flags = [
            "-std=c++20",
            "-O0",
            "-ffp-contract=off",
            "-w",
            "-shared",
            "-fPIC",
            "-pthread",
            f"-I{Path(__file__).parent}",
        ]
        subprocess.run([compiler, *flags, "-o", folder / "kernels.so", folder / "kernels.cpp"], check=True)
        self.code = ctypes.CDLL(str(folder / "kernels.so"))

    def product(
        self, x: torch.Tensor, bias: torch.Tensor, stream: torch.Tensor | None, kind: str | None
    ) -> torch.Tensor:
        matrix = self.matrix
        features = matrix.out // self.sides
        out = torch.empty(len(x), features, dtype=self.dtype) if stream is None else stream
        tensors = [c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in (x, bias, stream, out)]
        # Two programs, of which one has more rows.
        self.code.product(
            2,
            byref(arrays_of(matrix)),
            *tensors,
            len(x),
            matrix.out,
            matrix.d_in,
            units_of(matrix),
            KINDS[kind],
            features,
        )
        return out

    def weights(self) -> torch.Tensor:
        matrix, units = self.matrix, units_of(self.matrix)
        out = torch.empty(matrix.out, matrix.d_in, dtype=self.dtype)
        programs = -(-len(matrix.codes) * units // 8)
        self.code.weights(programs, byref(arrays_of(matrix)), c_void_p(out.data_ptr()), matrix.out, matrix.d_in, units)
        return out


@pytest.mark.parametrize(
    ("name", "dtype", "tile", "resident"),
    [
        ("q4_k", BF16, Tile(1, 2, 1), True),
        ("q5_1", BF16, Tile(2, 1, 1, 2), True),
        pytest.param("q5_k", F16, Tile(1, 2, 1, 0), False, marks=pytest.mark.long),
        pytest.param("q6_k", BF16, Tile(1, 4, 1, 2), False, marks=pytest.mark.long),
    ],
)
def test_products(name: str, dtype: torch.dtype, tile: Tile, resident: bool, tmp_path: Path) -> None:
    """Of three units; four warps along them have none, or one."""
    blocks = blocks_of(name, 72, 3)
    library = Library(tmp_path, pack(blocks), dtype, tile, resident=resident)
    tolerance = 8e-3 if dtype is BF16 else 1e-3
    assert close(library.weights(), blocks.dequantized().double(), tolerance)
    x, bias, stream = (torch.randn(3, n).to(dtype) for n in (blocks.codes.shape[1], 72, 72))
    expected = in_float64(blocks, x) + bias[0].double()
    assert close(library.product(x, bias[0], None, None), expected, tolerance)
    total = expected + stream.double()
    assert close(library.product(x, bias[0], stream, None), total, tolerance)


def test_gates(tmp_path: Path) -> None:
    blocks = blocks_of("q4_k", 96, 2)
    library = Library(tmp_path, pack(blocks), BF16, Tile(2, 2, 1), sides=2)
    x, bias = torch.randn(5, 512).bfloat16(), torch.randn(96).bfloat16()
    merged = in_float64(blocks, x) + bias.double()
    for kind in ("silu", "gelu_tanh", "swiglu_clamped"):
        expected = clamped_swiglu(merged) if kind == "swiglu_clamped" else REFERENCE.tokenwise.activate(merged, kind)
        assert close(library.product(x, bias, None, kind), expected.double(), 8e-3)


def test_experts(tmp_path: Path) -> None:
    """Gate, up and down of three experts for pairs in an order and without: the first expert has no pair, the last is not held."""
    experts, width, d_model, per_token = 3, 32, 288, 2
    sides = [
        [random_blocks(NUMBER_FORMATS["mxfp4"], *shape) for _ in range(experts)] for shape in ((64, 288), (288, 32))
    ]
    x, shares = torch.randn(3, d_model).bfloat16(), torch.rand(6)
    chosen = torch.tensor([1, 3, 2, 1, 1, 2], dtype=torch.int32)
    order = torch.tensor([0, 3, 4, 2, 5, 1], dtype=torch.int32)
    places = torch.tensor([[-1, 1, 2, -1], [0, 0, 3, 5], [0, 3, 5, 6]], dtype=torch.int32)
    libraries, stored = [], []
    for number, blocks in enumerate(sides):
        packed = [pack(each) for each in blocks]
        matrix = replace(
            packed[0],
            codes=torch.stack([each.codes for each in packed]),
            scales=torch.stack([each.scales for each in packed]),
        )
        stored.append(matrix)
        (folder := tmp_path / str(number)).mkdir()
        libraries.append(Library(folder, matrix, BF16, Tile(2, 1, 1), 2 - number, resident=number == 0))
    for is_sorted in (True, False):
        inner, out = torch.zeros(6, width).bfloat16(), torch.zeros(6, d_model)
        lists = _Pairs(*(tensor.data_ptr() for tensor in (chosen, order, *places)))
        for number, (source, per_row, target) in enumerate(((x, per_token, inner), (inner, 1, out))):
            matrix, bias = stored[number], torch.randn(experts, stored[number].out).bfloat16()
            groups = -(-matrix.out // 32)
            libraries[number].code.experts(
                groups * (4 if is_sorted else 6), byref(arrays_of(matrix)), byref(lists), c_void_p(source.data_ptr()),
                c_void_p(bias.data_ptr()), c_void_p(shares.data_ptr()), c_void_p(target.data_ptr()), matrix.out, matrix.d_in,
                units_of(matrix), KINDS["swiglu_clamped"], int(is_sorted), per_row, experts,
            )  # fmt: skip
            for pair, expert in enumerate(chosen.tolist()):
                if expert == experts:
                    assert not target[pair].any()
                    continue
                values = in_float64(sides[number][expert], source[pair // per_row][None]) + bias[expert].double()
                expected = clamped_swiglu(values) if number == 0 else values * shares[pair]
                assert close(target[pair][None], expected, 8e-3)


@pytest.mark.parametrize("tokens", [0, 65, 2000])
def test_other_numbers_of_tokens_are_left_to_other_operations(tokens: int) -> None:
    matrix = pack(random_blocks(NUMBER_FORMATS["q4_k"], 64, 512))
    x = torch.zeros(tokens, 512, dtype=BF16)
    assert block_tiles.product(x, matrix, None, None) is None
    assert not block_tiles.product_into(x, matrix, None, torch.empty(tokens, 64, dtype=BF16))
