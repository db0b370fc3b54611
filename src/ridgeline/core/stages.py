"""How the layers of a model are divided into the stages of a pipeline, and how its cache is divided."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import KvGroup, KvLayout, ModelSpec


def stage_spec(spec: ModelSpec, layers: slice) -> ModelSpec:
    """The part of a model that one stage holds. Embedding and head count on each."""
    return replace(spec, layers=spec.layers[layers])


def rank_layout(layout: KvLayout, ranks: int) -> KvLayout:
    """The layout on one of the ranks that divide the slots of every page."""
    page_bytes = max(group.page_bytes(layout.page_tokens // ranks) for group in layout.groups)
    return replace(layout, page_bytes=page_bytes, ranks=ranks)


def stage_layout(layout: KvLayout, layers: slice, spec: ModelSpec) -> KvLayout:
    """The layout of one stage's cache: the groups of all layers, each with the layers that the stage has.

    All stages have the same groups, because a plan assigns pages to groups. spec: the one that `layout` divides.
    """
    first, groups = layers.start or 0, []
    held = range(len(spec.layers))[layers]
    for group in layout.groups:
        members = [layer for layer in group.layers if layer in held]
        token_bytes = sum(spec.layers[layer].kv_bytes(layout.format) for layer in members)
        bounds_bytes = sum(spec.layers[layer].bounds_bytes for layer in members)
        groups.append(KvGroup(tuple(layer - first for layer in members), group.window, token_bytes, bounds_bytes))
    return rank_layout(replace(layout, groups=tuple(groups)), layout.ranks)


def stages(spec: ModelSpec, count: int) -> tuple[slice, ...]:
    """The layers of each stage of a pipeline of `count` stages, so that the stage that reads most bytes of weights reads as few as
    possible. The last stage also reads the head. Raises ConfigError for more stages than layers."""
    if not 1 <= count <= len(spec.layers):
        raise ConfigError(
            f"--pipeline-parallel-size is {count}: give 1 to {len(spec.layers)}, the number of layers.",
            param="pipeline_parallel_size",
        )
    size_of = {layer: replace(spec, layers=(layer,)).layer_bytes for layer in set(spec.layers)}
    sizes = [size_of[layer] for layer in spec.layers]
    head = spec.step_weight_bytes - sum(sizes)
    least = {(0, len(sizes)): 0}
    """(stages, first layer) -> bytes of the largest of so many stages from this layer to the last."""
    cuts: dict[tuple[int, int], int] = {}
    for parts in range(1, count + 1):
        for first in range(len(sizes) - parts, -1, -1) if parts < count else (0,):
            candidates = []
            for end in range(first + 1, len(sizes) + 1):
                if (parts - 1, end) in least:
                    size = sum(sizes[first:end]) + head * (parts == 1)
                    candidates.append((max(size, least[parts - 1, end]), end))
            least[parts, first], cuts[parts, first] = min(candidates)
    bounds, first = [], 0
    for parts in range(count, 0, -1):
        end = cuts[parts, first]
        bounds.append(slice(first, end))
        first = end
    return tuple(bounds)
