"""Outputs that fill no block of 16 on a CPU: copying a weight's tensors copies all of them, in every number format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.core.spec import NUMBER_FORMATS
from ridgeline.ops import native_cpu
from ridgeline.quant.blocks import BlockFormat
from ridgeline.quant.format import LinearShape, Part, Share, Weight
from ridgeline.quant.fp8 import Fp8Format
from ridgeline.quant.integer import IntFormat
from ridgeline.quant.mixed import MixedFormat
from ridgeline.quant.unquantized import UnquantizedFormat

CPU, FLOAT = torch.device("cpu"), torch.bfloat16
SHAPE = LinearShape(256, (Part(27, 27),), bias=True)
NAMES = ["", "blocks of floats", *(name for name in NUMBER_FORMATS if "-g" not in name and "ordered" not in name)]


def filled(name: str, seed: int) -> Weight:
    """A linear with random weights in a number format."""
    ops, why = native_cpu.load()
    if ops is None:
        pytest.skip(f"native operations: {why}")
    matmul, numbers = ops.matmul, NUMBER_FORMATS.get(name)
    if numbers is None:
        floats = UnquantizedFormat(matmul.unquantized, FLOAT, CPU)
        weight: Weight = (BlockFormat(matmul, FLOAT, CPU) if name else floats).create(SHAPE, Share())
    elif name.startswith("fp8"):
        products = matmul.fp8 if numbers.inputs_8bit else matmul.fp8_weight
        weight = Fp8Format(products, FLOAT, CPU, inputs=numbers.inputs_8bit, group=numbers.group).create(SHAPE, Share())
    elif numbers.in_blocks:
        weight = BlockFormat(matmul, FLOAT, CPU, numbers).create(replace(SHAPE, of_expert=True), Share())
    elif numbers.kept:
        weight = MixedFormat(ops, numbers, FLOAT, CPU).create(SHAPE, Share())
    else:
        integer = matmul.w8a8 if numbers.inputs_8bit else matmul.integer
        weight = IntFormat(integer, numbers, FLOAT, CPU).create(SHAPE, Share())
    generator = torch.Generator().manual_seed(seed)
    for (part, key), expected in weight.expects.items():
        values = torch.randn(expected.shape, generator=generator)
        if key == "weight":
            values[:, :4] /= 50  # the columns that LLM.int8() keeps
        weight.load(part, key, values.to(FLOAT))
    return weight


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_of_all_tensors_is_a_copy_of_the_weight(name: str) -> None:
    x = torch.randn(3, SHAPE.d_in, generator=torch.Generator().manual_seed(9)).to(FLOAT)
    changed, other = filled(name, 1), filled(name, 2)
    assert not changed.apply(x).equal(other.apply(x))
    for tensor in changed.tensors():
        tensor.view(torch.uint8).zero_()  # as after a sleep
    for tensor, value in zip(changed.tensors(), other.tensors(), strict=True):
        tensor.copy_(value)
    assert changed.apply(x).equal(other.apply(x))
