"""Which layers share the keys and values of an earlier layer (LayerSpec.share_from).

Layers share only with layers of their kind: same window, rotary embedding and shape of keys and values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec, Rope

Layers = tuple[LayerSpec, ...]
_Kind = tuple[int | None, int, int, Rope]


def share_in_groups(layers: Sequence[LayerSpec], size: int) -> Layers:
    """`size` layers of one kind that follow each other share the cache of the first (CLA, Brandon et al. 2024).

    Layers that share already follow their source.
    """
    numbers: Counter[_Kind] = Counter()
    first: dict[_Kind, int] = {}
    shared: list[LayerSpec] = []
    for index, layer in enumerate(layers):
        kind = _kind(layer)
        if layer.share_from is not None:
            source = shared[layer.share_from].share_from
            layer = layer if source is None else replace(layer, share_from=source)
        elif numbers[kind] % size:
            layer = replace(layer, share_from=first[kind])
            numbers[kind] += 1
        else:
            first[kind] = index
            numbers[kind] += 1
        shared.append(layer)
    return tuple(shared)


def share_last(layers: Sequence[LayerSpec], count: int) -> Layers:
    """The last `count` layers read the last layer of their kind before them (Gemma 3n; with one kind as YOCO, Sun et al. 2024).

    Raises ConfigError where a kind has no layer before them.
    """
    writing = layers[: len(layers) - count]
    last = {_kind(layer): index for index, layer in enumerate(writing)}
    shared = list(writing)
    for index, layer in enumerate(layers[len(writing) :], len(writing)):
        if (source := last.get(_kind(layer))) is None:
            kind = "without a window" if layer.window is None else f"with a window of {layer.window}"
            raise ConfigError(
                f"Layer {index} {kind} shares keys and values, but none of the first {len(writing)} layers is of its kind: let "
                "fewer layers share."
            )
        shared.append(replace(layer, share_from=source))
    return tuple(shared)


def joined(layers: Sequence[LayerSpec], more: Sequence[LayerSpec]) -> Layers:
    """The layers of two models in one cache. Indices of the second model's layers follow those of the first."""
    moved = (
        layer if layer.share_from is None else replace(layer, share_from=layer.share_from + len(layers))
        for layer in more
    )
    return (*layers, *moved)


def _kind(layer: LayerSpec) -> _Kind:
    return layer.window, layer.n_kv_heads, layer.head_dim, layer.rope
