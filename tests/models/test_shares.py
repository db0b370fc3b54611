"""Slicing by rank: shares of a linear put together give the whole one."""

from __future__ import annotations

import pytest
import torch

from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import ModelSpec
from ridgeline.models.building import Build
from ridgeline.models.layers import Linear
from ridgeline.ops.reference import REFERENCE
from ridgeline.ops.step import StepInputs
from ridgeline.parallel.mesh import Mesh
from ridgeline.quant.format import LinearShape, Part, Share
from ridgeline.quant.unquantized import UnquantizedFormat

SPEC = ModelSpec("test", 8, 24, (), 64)
FORM = UnquantizedFormat(REFERENCE.matmul.unquantized, torch.float32, torch.device("cpu"))
ZERO = torch.zeros(1, dtype=torch.int32)
STEP = StepInputs(ZERO, torch.tensor([0, 5], dtype=torch.int32), ZERO + 5, ZERO.expand(5), ZERO.expand(5), 5, 5)


def filled(shape: LinearShape, share: Share):
    noise = torch.Generator().manual_seed(0)
    weight = FORM.create(shape, share)
    for (part, name), expected in weight.expects.items():
        weight.load(part, name, torch.randn(expected.shape, generator=noise))
    return weight


def test_output_shares_cut_every_part():
    shape = LinearShape(24, (Part(32, 4), Part(16, 2), Part(16, 2)), bias=True, split="out")
    x = torch.randn(5, 24)
    whole = filled(shape, Share()).apply(x).split((32, 16, 16), dim=1)
    for rank in range(2):
        mine = filled(shape, Share(rank, 2)).apply(x).split((16, 8, 8), dim=1)
        for part, all_of_it in zip(mine, whole, strict=True):
            torch.testing.assert_close(part, all_of_it.chunk(2, dim=1)[rank])


def test_fewer_key_heads_than_ranks_are_repeated():
    shape = LinearShape(24, (Part(32, 4), Part(16, 2), Part(16, 2)), split="out")
    x = torch.randn(5, 24)
    keys = filled(shape, Share()).apply(x)[:, 32:48].chunk(2, dim=1)
    for rank in range(4):
        mine = filled(shape, Share(rank, 4)).apply(x)
        torch.testing.assert_close(mine[:, 8:16], keys[rank // 2])


def test_input_shares_sum_to_the_whole():
    shape = LinearShape(32, (Part(24, 1),), bias=True, split="in", in_units=4)
    x = torch.randn(5, 32)
    terms = [filled(shape, Share(rank, 4)).apply(x[:, rank * 8 : rank * 8 + 8]) for rank in range(4)]
    torch.testing.assert_close(sum(terms), filled(shape, Share()).apply(x))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_stream_joins_a_sum_over_ranks_once(size: int):
    """What each rank adds up is told to the others: here, rank after rank in one process."""
    shape = LinearShape(32, (Part(24, 1),), bias=True, split="in", in_units=4)
    x, stream, calls = torch.randn(5, 32), torch.randn(5, 24), []

    class Telling(Mesh):
        def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            return x

    for rank in range(size):
        linear = Linear(Build(SPEC, REFERENCE, FORM, Telling(rank, size), torch.float32, torch.device("cpu")), shape)
        noise = torch.Generator().manual_seed(0)
        for (part, name), expected in linear.weight.expects.items():
            linear.weight.load(part, name, torch.randn(expected.shape, generator=noise))
        out = linear.add(x.chunk(size, dim=1)[rank], stream.clone(), STEP)
    want = stream + filled(shape, Share()).apply(x)
    torch.testing.assert_close(sum(calls) if size > 1 else out, want)


def test_uneven_shares_are_refused():
    with pytest.raises(ConfigError, match="3 devices"):
        Share(0, 3).span(32, 4)
    with pytest.raises(ConfigError, match="4 devices"):
        Share(0, 4).span(24, 3)


def test_mesh_of_one_is_the_identity():
    x = torch.randn(3)
    assert Mesh().all_reduce(x) is x
    with pytest.raises(ConfigError, match="Rank 1 of 2 is not connected"):
        Mesh(1, 2).all_reduce(x)
    with pytest.raises(ConfigError, match="Rank 2"):
        Mesh(2, 2)
