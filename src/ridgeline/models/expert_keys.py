"""Reads the experts of each layer from the keys of config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.core.errors import ConfigError
from ridgeline.core.experts import ExpertSpec
from ridgeline.models.family import Family


def read_experts(family: Family, values: Mapping[str, Any]) -> list[ExpertSpec | None]:
    """The experts of each layer; None for a dense layer.

    A layer is dense if `mlp_only_layers` lists it, or if its number, from 1, is no multiple of `decoder_sparse_step`.
    """
    layers, keys = values["num_hidden_layers"], family.experts
    if keys is None:
        return [None] * layers
    count_key = next((key for key in keys.count if values[key] is not None), keys.count[0])
    shared = _size(values, keys.shared_width) if keys.shared_width else 0
    count, per_token = _size(values, count_key), _size(values, "num_experts_per_tok")
    if per_token > count:
        raise ConfigError(
            f"config.json: num_experts_per_tok is {per_token}: there are only {count} experts ({count_key})."
        )
    normalized = keys.normalized if isinstance(keys.normalized, bool) else values[keys.normalized]
    if not isinstance(normalized, bool):
        raise ConfigError(f"config.json: {keys.normalized} is {normalized!r}: it must be true or false.")
    experts = ExpertSpec(count, per_token, _size(values, keys.width), normalized, shared, bias=keys.bias)
    every = _size(values, "decoder_sparse_step") if "decoder_sparse_step" in values else 1
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(index, int) and 0 <= index < layers for index in dense):
        raise ConfigError(f"config.json: mlp_only_layers is {dense!r}: it must list layers from 0 to {layers - 1}.")
    return [experts if index not in dense and (index + 1) % every == 0 else None for index in range(layers)]


def _size(values: Mapping[str, Any], key: str) -> int:
    value = values[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key} is {value!r}: it must be a positive integer.")
    return value
