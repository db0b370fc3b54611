"""The last layer goes on for the wanted tokens alone: their hidden states are as ever, all keys and values are written, and
nothing more is multiplied than the model's formula says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.core.config import ModelConfig
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops.choose import choose
from ridgeline.ops.reference import REFERENCE
from tests.models.families import FAMILIES, save
from tests.models.paged import PagedRows

PROMPTS = [list(range(3, 32)), list(range(50, 61))]
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
WANTED = [[], [39], [28, 39], [3, 4, 5, 28, 0]]


def load(family: str, folder: Path, compiled: bool) -> LoadedModel:
    save(family, folder)
    place = torch.device("cpu")
    ops = choose(place, torch.float32) if compiled else REFERENCE
    return build(folder, model=ModelConfig(), ops=ops, device=place)


@pytest.mark.parametrize("compiled", [False, True], ids=["reference", "compiled"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_the_wanted_are_what_they_are_among_all(family: str, compiled: bool, tmp_path: Path) -> None:
    model = load(family, tmp_path, compiled)
    work = list(enumerate(PROMPTS))
    behind = [(0, [7]), (1, [9, 8])]
    every = PagedRows(model)
    expected, then = every.step(work), every.step(behind)
    for places in WANTED:
        rows = PagedRows(model)
        got = rows.step(work, torch.tensor(places, dtype=torch.int32))
        assert got.shape == (len(places), expected.shape[1])
        torch.testing.assert_close(got, expected[places])
        torch.testing.assert_close(rows.step(behind), then)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_multiplied(family: str, tmp_path: Path) -> None:
    model = load(family, tmp_path, compiled=False)
    for places in WANTED:
        with FlopCounterMode(display=False) as counter:
            PagedRows(model).step(list(enumerate(PROMPTS)), torch.tensor(places, dtype=torch.int32))
        counted = counter.get_flop_counts()["Global"]
        assert sum(counted.get(one, 0) for one in PRODUCTS) == model.spec.linear_flops(40, len(places))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_few_of_a_long_chunk_attend_alone(family: str, tmp_path: Path) -> None:
    """But no more of them than there are rows."""
    model = load(family, tmp_path, compiled=False)
    long = [list(range(3, 60)), list(range(50, 61))]

    def attended(prompts: list[list[int]], wanted: torch.Tensor | None) -> int:
        with FlopCounterMode(display=False) as counter:
            PagedRows(model).step(list(enumerate(prompts)), wanted)
        return counter.get_flop_counts()["Global"].get(torch.ops.aten.bmm, 0)

    # The reference multiplies each query token with every slot of its row.
    cases = [(PROMPTS, places, {0: 0, 1: 11, 2: 29 + 11}.get(len(places))) for places in WANTED]
    for prompts, places, seen in [*cases, (long, [5, 56, 67], None), (long, [56, 67], 57 + 11)]:
        pairs, layers = sum(len(prompt) ** 2 for prompt in prompts), len(model.spec.layers)
        every, found = attended(prompts, None), attended(prompts, torch.tensor(places, dtype=torch.int32))
        assert found * pairs * layers == every * (pairs * (layers - 1) + (pairs if seen is None else seen))
