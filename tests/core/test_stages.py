"""Stages of a pipeline: how layers, cache and memory are divided."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from ridgeline.core.config import EngineConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.sizing import Memory, Planner
from ridgeline.core.spec import LayerSpec, ModelSpec, Rope, kv_layout
from ridgeline.core.stages import stage_layout, stage_spec, stages

LAYER = LayerSpec(8, 4, 32, 512, Rope())


def model(widths: list[int], windows: tuple[int | None, ...] = (None,), vocab: int = 1000) -> ModelSpec:
    layers = tuple(
        replace(LAYER, d_ff=width, window=windows[index % len(windows)]) for index, width in enumerate(widths)
    )
    return ModelSpec("Test", vocab, 256, layers, 4096)


def largest(spec: ModelSpec, bounds: list[int]) -> int:
    """Bytes of weights that the stage between two bounds reads which reads most; the last also reads the head."""
    parts = [replace(spec, layers=spec.layers[first:end]).layer_bytes for first, end in pairwise(bounds)]
    parts[-1] += spec.step_weight_bytes - spec.layer_bytes
    return max(parts)


@pytest.mark.parametrize("widths", [[512] * 6, [512, 64, 64, 2048, 64, 512, 512], [4096, 64, 64, 64]])
@pytest.mark.parametrize("vocab", [1000, 40_000])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_largest_stage_is_as_small_as_possible(widths: list[int], vocab: int, count: int) -> None:
    spec = model(widths, vocab=vocab)
    parts = stages(spec, count)
    assert [layer for part in parts for layer in range(len(widths))[part]] == list(range(len(widths)))
    bounds = [0, *(part.stop for part in parts)]
    every = combinations(range(1, len(widths)), count - 1)
    assert largest(spec, bounds) == min(largest(spec, [0, *cuts, len(widths)]) for cuts in every)


@pytest.mark.parametrize("count", [0, 7])
def test_more_stages_than_layers_are_refused(count: int) -> None:
    with pytest.raises(ConfigError, match="give 1 to 6, the number of layers"):
        stages(model([512] * 6), count)


@pytest.mark.parametrize("windows", [(None,), (64, 64, None)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_stages_have_the_groups_of_the_model(windows: tuple[int | None, ...], count: int) -> None:
    """A plan assigns pages to groups, so all ranks number them alike; each has the bytes of its layers only."""
    spec = model([512] * 12, windows)
    whole = kv_layout(spec, 16)
    parts = stages(spec, count)
    layouts = [stage_layout(whole, part, spec) for part in parts]
    for layout, part in zip(layouts, parts, strict=True):
        assert [group.window for group in layout.groups] == [group.window for group in whole.groups]
        members = sorted(layer for group in layout.groups for layer in group.layers)
        assert members == list(range(part.stop - part.start))
        for group, of_all in zip(layout.groups, whole.groups, strict=True):
            assert {layer + part.start for layer in group.layers} <= set(of_all.layers)
    bytes_of = [sum(group.token_bytes for group in layout.groups) for layout in layouts]
    assert sum(bytes_of) == spec.kv_bytes_per_token()


def test_stages_hold_more_tokens() -> None:
    spec = model([512] * 12, vocab=100)
    engine = EngineConfig(kv_cache_memory=1 << 26)
    single, three = (
        Planner(spec, replace(engine, pipeline_parallel_size=count), Memory("cpu", 1 << 32)).plan()[0]
        for count in (1, 3)
    )
    assert three.n_pages >= 3 * single.n_pages and three.weight_bytes < single.weight_bytes / 2
    assert (single.steps_in_flight, three.steps_in_flight) == (0, 2), "each stage has a step"
    assert stage_spec(spec, slice(2, 5)).layers == spec.layers[2:5]
