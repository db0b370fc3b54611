"""What is packed comes back, in the layouts others publish."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.compress.gptq import gptq
from ridgeline.compress.grid import Grid, round_to_nearest
from ridgeline.compress.inputs import llm_int8, w8a8
from ridgeline.compress.prune import Pattern, by_magnitude
from ridgeline.compress.recipes import EXAMPLES, read_recipe
from ridgeline.compress.storage import INT8, Bitmask, Integers, Storage, read_storage
from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.models.stored import KEY
from ridgeline.quant import bitmask

WEIGHT = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "name",
    [
        *("rtn-int4-g32", "rtn-int4-channel-zp", "rtn-int8-g32", "rtn-int3-g32", "gptq-int4-g32-zp", "awq-int4-g32"),
        *(
            "awq-int8-g32",
            "awq-int4-g32-sym",
            "gptq-int3-g32",
            "gptq-int4-g32-actorder",
            "rtn-w8a8",
            "smoothquant-w8a8",
        ),
    ],
)
def test_codes_come_back_and_the_config_says_how(name: str) -> None:
    recipe = read_recipe(name)
    settled = round_to_nearest(WEIGHT, recipe.grid)
    packed = recipe.storage.pack(settled, torch.bfloat16)
    assert torch.equal(recipe.storage.weight(packed), settled.dequantize())
    again = read_storage({KEY: recipe.storage.describe()})
    assert again.product is recipe.storage.product
    assert torch.equal(again.weight(packed), settled.dequantize())


def test_codes_in_an_order_come_back() -> None:
    recipe = read_recipe("gptq-int4-g32-ordered")
    inputs = torch.randn(300, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-1, 1, 96)
    settled = gptq(WEIGHT, inputs.T @ inputs, recipe.grid, recipe.order)
    storage: Storage = read_storage({KEY: recipe.storage.describe()})
    assert isinstance(storage, Integers) and storage.form.order
    assert torch.equal(storage.weight(recipe.storage.pack(settled, torch.float16)), settled.dequantize())


@pytest.mark.parametrize("columns", [96, 91])
def test_a_bitmask_holds_one_bit_a_weight_and_the_rest(columns: int) -> None:
    pruned = by_magnitude(WEIGHT[:, :columns], Pattern(0.5)).bfloat16()
    storage = read_storage({KEY: Bitmask().describe()})
    packed = storage.pack(pruned.float(), torch.bfloat16)
    assert torch.equal(storage.weight(packed), pruned.float())
    assert packed["bitmask"].shape == (64, -(-columns // 8))
    # By hand: the first row's mask, lowest bit first, and where the second row's values begin.
    bits = [(int(packed["bitmask"][0, column // 8]) >> column % 8) & 1 for column in range(columns)]
    assert bits == (pruned[0] != 0).int().tolist()
    assert int(packed["row_offsets"][1]) == sum(bits)
    weights = sum(packed[name].nbytes for name in ("compressed", "bitmask"))
    assert weights < 0.58 * pruned.nbytes


def test_a_bitmask_that_contradicts_its_values_is_refused() -> None:
    packed = bitmask.pack(by_magnitude(WEIGHT, Pattern(0.5)))
    with pytest.raises(UnsupportedModel, match="3071 values, but 3072 bits are set"):
        bitmask.unpack({**packed, "compressed": packed["compressed"][1:]})
    with pytest.raises(
        UnsupportedModel, match=r"bitmask of shape \[64, 12\], which does not fit a matrix of shape \[64, 200\]"
    ):
        bitmask.unpack({**packed, "shape": torch.tensor([64, 200])})
    names = ["a.weight", "b.shape", "b.bitmask", "b.compressed", "b.row_offsets"]
    dense_tensors = dict(bitmask.dense_tensors(names, lambda name: packed.get(name.removeprefix("b."), torch.ones(1))))
    assert list(dense_tensors) == ["a.weight", "b.weight"]
    assert torch.equal(dense_tensors["b.weight"](), by_magnitude(WEIGHT, Pattern(0.5)))


def test_int8_holds_one_kind_alone() -> None:
    with pytest.raises(UnsupportedModel, match="supports only one scale per output"):
        Integers(replace(INT8, group=32)).pack(round_to_nearest(WEIGHT, Grid(8, 32)), torch.bfloat16)


def test_every_example_is_a_recipe_and_others_are_named() -> None:
    for name in EXAMPLES:
        assert read_recipe(name).name == name
    assert read_recipe("wanda-4:8").pattern == Pattern(0.5, 8)
    assert read_recipe("neurons-10").amount == pytest.approx(0.1)
    for name, said in {
        "gptq-int5-g128": "did you mean gptq-int4-g128",
        "rtn-int4-g128-actorder": "only gptq",
        "wanda-0": "a percentage of 0: give 1 to 99",
        "wanda-4:4": "the pattern 4:4: the first number must be",
        "heads-100": "a percentage of 100: give 1 to 99",
    }.items():
        with pytest.raises(ConfigError, match=said):
            read_recipe(name)


# --- products in 8 bits -----------------------------------------------------------------------------------------------


def test_llm_int8_keeps_outliers_whole() -> None:
    chance = torch.Generator().manual_seed(2)
    x = torch.randn(2, 20, 96, generator=chance)
    x[..., 7] *= 300
    exact = x @ WEIGHT.T
    naive, mixed = (float((multiply(x, WEIGHT, None) - exact).square().mean()) for multiply in (w8a8, llm_int8))
    assert mixed < 0.01 * naive
    x[..., 7] = 0
    torch.testing.assert_close(w8a8(x.clamp(-5, 5), WEIGHT, None), llm_int8(x.clamp(-5, 5), WEIGHT, None))
