"""The last layer goes on for the wanted tokens alone: their hidden states are as ever, all keys and values are written, and
nothing more is multiplied than the model's formula says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ridgeline.core.config import ModelConfig
from ridgeline.models.build import LoadedModel, build
from ridgeline.ops.choose import choose
from ridgeline.ops.reference import REFERENCE
from tests.combinations import crossed
from tests.models.families import FAMILIES, OTHER_LAYERS, SHARING, save
from tests.models.paged import PagedRows

PROMPTS = [list(range(3, 32)), list(range(50, 61))]
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm)
WANTED = [[], [39], [28, 39], [3, 4, 5, 28, 0]]
MODELS = sorted([*FAMILIES, *OTHER_LAYERS, *SHARING])


Load = Callable[[str, bool], LoadedModel]
Counted = Callable[..., dict[Any, int]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A family's model, built once: load(family, compiled)."""
    place = torch.device("cpu")

    @cache
    def folder(family: str) -> Path:
        save(family, made := tmp_path_factory.mktemp(family))
        return made

    @cache
    def load(family: str, compiled: bool) -> LoadedModel:
        ops = choose(place, torch.float32) if compiled else REFERENCE
        return build(folder(family), model=ModelConfig(), ops=ops, device=place)

    return load


@pytest.fixture(scope="module")
def counted(load: Load) -> Counted:
    """Operations of one step by kind of product, counted once: counted(family, prompts, wanted tokens or None)."""

    @cache
    def count(family: str, prompts: tuple[tuple[int, ...], ...], places: tuple[int, ...] | None) -> dict[Any, int]:
        wanted = None if places is None else torch.tensor(places, dtype=torch.int32)
        with FlopCounterMode(display=False) as counter:
            PagedRows(load(family, False)).step(list(enumerate(prompts)), wanted)
        return counter.get_flop_counts()["Global"]

    def counted(family: str, prompts: list[list[int]], places: list[int] | None) -> dict[Any, int]:
        return count(family, tuple(map(tuple, prompts)), None if places is None else tuple(places))

    return counted


@pytest.mark.parametrize("compiled", [False, True], ids=["reference", "compiled"])
@pytest.mark.parametrize("family", MODELS)
def test_the_wanted_are_what_they_are_among_all(family: str, compiled: bool, load: Load) -> None:
    model = load(family, compiled)
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


@pytest.mark.parametrize("family", crossed(MODELS, quick=lambda family: family % 3 == 0))
def test_what_is_multiplied(family: str, load: Load, counted: Counted) -> None:
    for places in WANTED:
        products = counted(family, PROMPTS, places)
        assert sum(products.get(name, 0) for name in PRODUCTS) == load(family, False).spec.linear_flops(40, len(places))


@pytest.mark.parametrize("family", crossed(MODELS, quick=lambda family: family % 6 == 1))
def test_few_of_a_long_chunk_attend_alone(family: str, load: Load, counted: Counted) -> None:
    """But no more of them than there are rows."""
    long = [list(range(3, 60)), list(range(50, 61))]

    def attended(prompts: list[list[int]], places: list[int] | None) -> int:
        return counted(family, prompts, places).get(torch.ops.aten.bmm, 0)

    # The reference multiplies each query token with every slot of its row.
    cases = [(PROMPTS, places, {0: 0, 1: 11, 2: 29 + 11}.get(len(places))) for places in WANTED]
    for prompts, places, seen in [*cases, (long, [5, 56, 67], None), (long, [56, 67], 57 + 11)]:
        pairs, layers = sum(len(prompt) ** 2 for prompt in prompts), len(load(family, False).spec.layers)
        every, selected = attended(prompts, None), attended(prompts, places)
        assert selected * pairs * layers == every * (pairs * (layers - 1) + (pairs if seen is None else seen))
