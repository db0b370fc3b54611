"""Quantized linears that are there in 16 bits too: equal to weights that were converted when they were read, and chosen by rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.core.gpu_blocks import MOST_ROWS, most_rows
from ridgeline.ops import blocks as formulas
from ridgeline.ops.blocks import chained
from ridgeline.ops.reference import INT_REFERENCE, REFERENCE, int_dequantized
from ridgeline.ops.table import MatmulOps, Normed
from ridgeline.quant.blocks import BlockFormat, BlockWeight, round_to_blocks
from ridgeline.quant.format import LinearShape, Part, Share, Weight
from ridgeline.quant.integer import IntFormat, round_to_nearest
from ridgeline.quant.unquantized import UnquantizedFormat

CPU, BF16 = torch.device("cpu"), torch.bfloat16
SIZES = {"q4_k": 144, "q5_k": 176, "q6_k": 210}
"""Bytes of a block of 256 inputs."""
MERGED = LinearShape(512, (Part(32, 2), Part(16, 1), Part(16, 1)), bias=True, split="out")


def checkpoint(shape: LinearShape, names: tuple[str, ...], seed: int = 0) -> dict[tuple[int, str], torch.Tensor]:
    """Random blocks whose float16 scales are numbers, and biases."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    for index, (part, name) in enumerate(zip(shape.parts, names, strict=True)):
        blocks = torch.randint(0, 256, (part.rows, shape.d_in // 256, SIZES[name]), dtype=torch.uint8, generator=draw)
        places = (208,) if name == "q6_k" else (0, 2)
        for place in places:
            scale = (torch.rand(blocks.shape[:2], generator=draw) * 0.01).half().view(torch.uint8)
            blocks[..., place : place + 2] = scale.view(*blocks.shape[:2], 2)
        tensors[index, "weight"] = blocks
        if shape.bias:
            tensors[index, "bias"] = torch.randn(part.rows, generator=draw)
    return tensors


def loaded(form: Any, shape: LinearShape, tensors: dict[tuple[int, str], torch.Tensor], share: Share = Share()) -> Any:
    weight: Weight = form.create(shape, share)
    for (part, name), tensor in tensors.items():
        weight.load(part, name, tensor)
    return weight


@pytest.mark.parametrize("names", [("q4_k",) * 3, ("q5_k", "q5_k", "q6_k"), ("q4_k", "q6_k", "q6_k")])
@pytest.mark.parametrize("share", [Share(), Share(1, 2)], ids=["whole", "rank"])
def test_expanded_weights_are_those_of_a_device_that_keeps_no_blocks(names: tuple[str, ...], share: Share):
    tensors = checkpoint(MERGED, names)
    weight = loaded(BlockFormat(REFERENCE.matmul, BF16, CPU), MERGED, tensors, share)
    dense = loaded(UnquantizedFormat(REFERENCE.matmul.unquantized, BF16, CPU), MERGED, tensors, share)
    assert weight.expand().equal(dense.tensors()[0])
    x = torch.randn(40, 512).to(BF16)
    assert weight.apply(x).equal(dense.apply(x))
    down = LinearShape(1024, (Part(48, 1),), split="in", in_units=4)
    tensors = checkpoint(down, names[:1])
    weight = loaded(BlockFormat(REFERENCE.matmul, BF16, CPU), down, tensors, share)
    dense = loaded(UnquantizedFormat(REFERENCE.matmul.unquantized, BF16, CPU), down, tensors, share)
    assert weight.expand().equal(dense.tensors()[0])


@pytest.mark.parametrize("name", ["q4_k", "q5_k", "q6_k"])
def test_weights_from_tiles_are_exact(name: str, monkeypatch: pytest.MonkeyPatch):
    """On a GPU: from the layout of the kernels, in pieces."""
    pytest.importorskip("triton")
    from ridgeline.ops.triton import block_tiles
    from ridgeline.ops.triton.blocks import BLOCK_TRITON

    monkeypatch.setattr(block_tiles, "MOST_WEIGHTS", 32 * 512)
    assert BLOCK_TRITON.weights is not None
    blocks = round_to_blocks(torch.randn(72, 512) * 0.02, NUMBER_FORMATS[name])
    other = round_to_blocks(torch.randn(16, 512) * 0.02, NUMBER_FORMATS["q6_k"])
    pieces = list(BLOCK_TRITON.weights(chained([block_tiles.pack(blocks), block_tiles.pack(other)])))
    assert [len(piece) for piece in pieces] == [32, 32, 8, 16]
    assert torch.cat(pieces).equal(torch.cat((blocks.dequantized(), other.dequantized())))


def spied(calls: list[str]) -> MatmulOps:
    """Operations that write down which form they multiply."""
    matmul = REFERENCE.matmul

    def spy(form: str, ops: Any) -> Any:
        def named(name: str) -> Any:
            def call(*arguments: Any) -> Any:
                calls.append(f"{form} {name}")
                return getattr(ops, name)(*arguments)

            return call

        return replace(ops, **{name: named(name) for name in ("linear", "linear_add", "linear_activate")})

    forms = {"blocks": matmul.blocks, "integer": matmul.integer}
    spied_forms = {name: spy("blocks", ops) for name, ops in forms.items()}
    return replace(matmul, **spied_forms, unquantized=spy("expanded", matmul.unquantized))


def floats(shape: LinearShape, seed: int = 0) -> dict[tuple[int, str], torch.Tensor]:
    """A checkpoint in floating point."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[tuple[int, str], torch.Tensor] = {}
    for index, part in enumerate(shape.parts):
        tensors[index, "weight"] = torch.randn(part.rows, shape.d_in, generator=draw) * 0.02
        tensors[index, "bias"] = torch.randn(part.rows, generator=draw)
    return tensors


def integers(name: str, matmul: MatmulOps = REFERENCE.matmul, device: torch.device = CPU) -> IntFormat:
    return IntFormat(matmul.integer, NUMBER_FORMATS[name], BF16, device, None, matmul.unquantized)


INTEGERS = ("int8", "int4", "int4-g64-zp", "int3-g32")


@pytest.mark.parametrize("name", INTEGERS)
def test_expanded_integers_are_their_dequantized_codes(name: str):
    weight = loaded(integers(name), MERGED, floats(MERGED))
    stored = [tensor.data_ptr() for tensor in weight.tensors()]
    matrix, expanded = weight.matrix().packed, weight.expand()
    assert expanded.equal(int_dequantized(matrix).to(BF16))
    assert [tensor.data_ptr() for tensor in weight.tensors()] == stored
    other = loaded(integers(name), MERGED, floats(MERGED, seed=1))
    for tensor, value in zip(weight.tensors(), other.tensors(), strict=True):
        tensor.copy_(value)
    assert weight.expand().data_ptr() == expanded.data_ptr() and expanded.equal(other.expand())


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_of_the_kernels_layout_are_exact(name: str, monkeypatch: pytest.MonkeyPatch):
    """On a GPU: in pieces of some outputs."""
    pytest.importorskip("triton")
    from ridgeline.ops.triton.linears import INT_TRITON

    monkeypatch.setattr(formulas, "MOST_WEIGHTS", 32 * 512)
    assert INT_TRITON.weights is not None
    numbers = NUMBER_FORMATS[name]
    codes, scales, zeros = round_to_nearest(torch.randn(72, 512) * 0.02, numbers)
    packed = [ops.pack(codes, scales, zeros, numbers.bits, numbers.group or 512) for ops in (INT_TRITON, INT_REFERENCE)]
    pieces = list(INT_TRITON.weights(packed[0]))
    assert [len(piece) for piece in pieces] == [32, 32, 8]
    assert torch.cat(pieces).equal(int_dequantized(packed[1]))


def test_integers_that_stay_in_one_form():
    """8-bit inputs round x, and an engine in float32 has no second form."""
    matmul = REFERENCE.matmul
    w8a8 = IntFormat(matmul.w8a8, NUMBER_FORMATS["w8a8"], BF16, CPU, None, matmul.unquantized)
    weight = loaded(w8a8, MERGED, floats(MERGED))
    assert weight.expand() is None and weight.apply(torch.ones(512, 512, dtype=BF16)).shape == (512, 64)


@pytest.mark.parametrize("names", [("q4_k",) * 3, ("q4_k", "q4_k", "q6_k"), ("int8",), ("int4-g64-zp",)])
def test_rows_choose_the_form(names: tuple[str, ...]):
    calls = list[str]()
    if names[0] in INTEGERS:
        weight = loaded(integers(names[0], spied(calls)), MERGED, floats(MERGED))
    else:
        weight = loaded(BlockFormat(spied(calls), BF16, CPU), MERGED, checkpoint(MERGED, names))
    most = most_rows(names)
    norm = torch.ones(512, dtype=BF16)
    for expands in (False, True):
        assert not expands or weight.expand() is not None
        for rows in (1, most, most + 1, 512):
            calls.clear()
            x = torch.randn(rows, 512).to(BF16)
            weight.apply(x)
            weight.apply(Normed(x, norm, 1e-5, False))
            weight.add(x, torch.zeros(rows, 64, dtype=BF16))
            weight.activate(x, "silu")
            form = "expanded" if expands and rows > most else "blocks"
            assert calls == [f"{form} {name}" for name in ("linear", "linear", "linear_add", "linear_activate")]


def test_memory_of_both_forms_and_a_reload():
    """Bytes of the stored form are the same; new blocks in its memory, expanded again, are new weights in the same memory."""
    form, names = BlockFormat(REFERENCE.matmul, BF16, CPU), ("q4_k", "q4_k", "q6_k")
    weight = loaded(form, MERGED, checkpoint(MERGED, names))
    stored = [(tensor.data_ptr(), tensor.nbytes) for tensor in weight.tensors()]
    expanded = weight.expand()
    assert [(tensor.data_ptr(), tensor.nbytes) for tensor in weight.tensors()] == stored
    assert expanded.nbytes == 2 * 64 * 512
    other = loaded(form, MERGED, checkpoint(MERGED, names, seed=1))
    before = expanded.clone()
    for tensor, value in zip(weight.tensors(), other.tensors(), strict=True):
        tensor.copy_(value)
    assert expanded.equal(before)
    again = weight.expand()
    assert again.data_ptr() == expanded.data_ptr()
    assert again.equal(other.expand()) and not again.equal(before)


def test_linears_that_stay_in_one_form():
    shape = LinearShape(256, (Part(16, 1), Part(16, 1)))
    form = BlockFormat(REFERENCE.matmul, BF16, CPU)
    mixed = form.create(shape, Share())
    mixed.load(0, "weight", torch.ones(16, 1, 144, dtype=torch.uint8))
    mixed.load(1, "weight", torch.ones(16, 256))
    plain = form.create(shape, Share())
    for part in range(2):
        plain.load(part, "weight", torch.ones(16, 256))
    without = replace(REFERENCE.matmul, blocks=replace(REFERENCE.matmul.blocks, weights=None))
    blocks = BlockFormat(without, BF16, CPU).create(shape, Share())
    for part in range(2):
        blocks.load(part, "weight", torch.ones(16, 1, 144, dtype=torch.uint8))
    for weight in (mixed, plain, blocks):
        assert weight.expand() is None
        assert weight.apply(torch.ones(512, 256, dtype=BF16)).shape == (512, 32)


# --- on a GPU -----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("names", [("q4_k",) * 3, ("q6_k",) * 3, ("q4_k", "q4_k", "q6_k")])
def test_rows_around_the_limit_on_a_gpu(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch):
    """Both forms agree with float64, in graphs too, and the expanded weights are bit for bit those of a CPU."""
    from ridgeline.ops.choose import choose

    device = torch.device("cuda", torch.cuda.current_device())
    ops = choose(device, BF16).matmul
    if ops.blocks.weights is None:
        pytest.skip("these operations do not expand blocks")
    monkeypatch.setattr(formulas, "MOST_WEIGHTS", 32 * 512)
    shape = replace(MERGED, parts=(Part(512, 2), Part(128, 1), Part(128, 1)))
    tensors = checkpoint(shape, names)
    exact = loaded(BlockFormat(REFERENCE.matmul, torch.float32, CPU), shape, tensors)
    dense = loaded(UnquantizedFormat(REFERENCE.matmul.unquantized, BF16, CPU), shape, tensors)
    weight: BlockWeight = loaded(BlockFormat(ops, BF16, device), shape, tensors)
    expanded = weight.expand()
    assert expanded is not None and expanded.cpu().equal(dense.tensors()[0])
    assert torch.equal(weight.expand(), expanded)
    most = min(MOST_ROWS[name] for name in names)
    for rows in (1, most - 1, most, most + 1, 2 * most, 300):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).to(BF16)
        graph, inputs = torch.cuda.CUDAGraph(), x.to(device)
        eager = weight.apply(inputs)
        with torch.cuda.graph(graph):
            captured = weight.apply(inputs)
        graph.replay()
        expected = exact.apply(x.float())
        for ours, theirs in (
            (eager, expected),
            (captured, expected),
            (weight.add(inputs, torch.ones_like(eager)), expected + 1),
            (weight.activate(inputs, "silu"), exact.activate(x.float(), "silu")),
        ):
            error = (ours.cpu().float() - theirs).abs().max() / theirs.abs().max()
            assert float(error) < 2e-2, (rows, float(error))
    # Only the second form is read beyond the limit.
    expanded.zero_()
    assert not weight.apply(torch.ones(most + 1, 512, dtype=BF16, device=device)).sub(weight.tensors()[-1]).any()
    assert weight.apply(torch.ones(most, 512, dtype=BF16, device=device)).sub(weight.tensors()[-1]).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", INTEGERS)
def test_rows_around_the_limit_of_integers_on_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch):
    from ridgeline.ops.choose import choose

    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(formulas, "MOST_WEIGHTS", 32 * 512)
    shape = replace(MERGED, parts=(Part(512, 2), Part(128, 1), Part(128, 1)))
    exact = loaded(replace(integers(name), dtype=torch.float32), shape, floats(shape))
    weight = loaded(integers(name, choose(device, BF16).matmul, device), shape, floats(shape))
    expanded, most = weight.expand(), most_rows([name])
    assert expanded.cpu().equal(exact.expand().to(BF16))
    for rows in (1, most, most + 1, 300):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).to(BF16)
        ours, theirs = weight.apply(x.to(device)).cpu().float(), exact.apply(x.float())
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-2, rows
    expanded.zero_()
    assert not weight.apply(torch.ones(most + 1, 512, dtype=BF16, device=device)).sub(weight.tensors()[-1]).any()
