"""Linears in blocks: shares of ranks, several kinds in one linear, and checkpoint tensors that are refused."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.formats import NUMBER_FORMATS
from ridgeline.ops.reference import REFERENCE
from ridgeline.quant.blocks import BlockFormat, BlockWeight
from ridgeline.quant.format import LinearShape, Part, Share

CPU, F32 = torch.device("cpu"), torch.float32
NAMES = ("int4-g32", "int8-g32", "q4_1", "q5_k", "q6_k", "mxfp4")
MERGED = LinearShape(256, (Part(64, 4), Part(32, 2), Part(32, 2)), bias=True, split="out", of_expert=True)


def filled(name: str, shape: LinearShape, share: Share = Share()) -> BlockWeight:
    """Random weights that are rounded to the format."""
    weight = BlockFormat(REFERENCE.matmul, F32, CPU, NUMBER_FORMATS[name]).create(shape, share)
    for index, ((part, field), expected) in enumerate(weight.expects.items()):
        noise = torch.randn(expected.shape, generator=torch.Generator().manual_seed(index))
        weight.load(part, field, noise)
    return weight


@pytest.mark.parametrize("name", NAMES)
def test_output_shares_hold_slices_of_the_whole(name: str) -> None:
    x = torch.randn(3, 256)
    whole = filled(name, MERGED).apply(x).split((64, 32, 32), 1)
    for rank in range(2):
        expected = torch.cat([part.chunk(2, 1)[rank] for part in whole], 1)
        torch.testing.assert_close(filled(name, MERGED, Share(rank, 2)).apply(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_input_shares_sum_to_the_whole(name: str) -> None:
    shape = LinearShape(512, (Part(24, 1),), bias=True, split="in", in_units=16, of_expert=True)
    x = torch.randn(3, 512)
    terms = [filled(name, shape, Share(rank, 2)).apply(half) for rank, half in enumerate(x.chunk(2, 1))]
    torch.testing.assert_close(sum(terms), filled(name, shape).apply(x), rtol=1e-5, atol=1e-4)


def test_a_cut_within_blocks_is_refused() -> None:
    shape = LinearShape(512, (Part(24, 1),), split="in", in_units=16)
    with pytest.raises(ConfigError, match="Blocks of 256 inputs cannot be split over 4 devices, which hold 128 of 512"):
        filled("q4_k", shape, Share(1, 4))
    filled("int4-g32", shape, Share(1, 4))


@pytest.mark.parametrize("name", NAMES)
def test_predicted_bytes(name: str) -> None:
    weight = filled(name, LinearShape(512, (Part(48, 1),), of_expert=True))
    assert sum(tensor.nbytes for tensor in weight.tensors()) == NUMBER_FORMATS[name].matrix_bytes(48, 512)


def blocks_of(size: int, outputs: int = 16, count: int = 1) -> torch.Tensor:
    """Blocks whose scales are numbers: each byte is 1."""
    return torch.ones(outputs, count, size, dtype=torch.uint8)


def test_kinds_that_are_merged() -> None:
    """Q4_K, Q8_0 and floats: blocks of two kinds are a chain, and with floats all become floats."""
    tensors = [blocks_of(144), blocks_of(34, count=8)]
    form, shape = BlockFormat(REFERENCE.matmul, F32, CPU), LinearShape(256, (Part(16, 1), Part(16, 1)))
    whole = form.create(shape, Share())
    for part, tensor in enumerate(tensors):
        whole.load(part, "weight", tensor)
    assert sum(tensor.nbytes for tensor in whole.tensors()) == sum(tensor.nbytes for tensor in tensors)
    assert whole.matrix() is None
    dense = form.create(shape, Share())
    dense.load(0, "weight", tensors[0])
    dense.load(1, "weight", torch.ones(16, 256))
    assert [tensor.dtype for tensor in dense.tensors()] == [F32]
    x = torch.randn(2, 256)
    torch.testing.assert_close(dense.apply(x)[:, :16], whole.apply(x)[:, :16])


def test_outputs_that_fill_no_block_of_a_cpu_are_not_chained() -> None:
    """24 outputs of Q4_K before others: a kernel's block of 16 outputs would have two kinds."""
    weight = BlockFormat(REFERENCE.matmul, F32, CPU).create(LinearShape(256, (Part(24, 1), Part(16, 1))), Share())
    weight.load(0, "weight", blocks_of(144, 24))
    weight.load(1, "weight", blocks_of(34, count=8))
    assert [tensor.dtype for tensor in weight.tensors()] == [F32]


def test_unknown_blocks_are_refused() -> None:
    weight = BlockFormat(REFERENCE.matmul, F32, CPU).create(LinearShape(256, (Part(16, 1),)), Share())
    with pytest.raises(UnsupportedModel, match="has 1 blocks of 100 bytes for 256 inputs. Known kinds: Q4_0"):
        weight.load(0, "weight", blocks_of(100))
