"""The option --expert-parallel: ranks divide the experts of a layer among them, instead of the width of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec


def whole_experts(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """The layers with experts that stay whole. Raises ConfigError for a model without experts."""
    if not any(layer.experts for layer in layers):
        raise ConfigError("--expert-parallel: this model has no experts. Leave it out.", param="expert_parallel")
    return tuple(
        replace(layer, experts=replace(layer.experts, whole=True)) if layer.experts else layer for layer in layers
    )


def check_expert_ranks(model: ModelConfig, config: EngineConfig) -> None:
    """Raise ConfigError for a single rank, which would have nobody to divide the experts with."""
    if model.expert_parallel and config.tensor_parallel_size == 1:
        raise ConfigError(
            "--expert-parallel divides the experts among --tensor-parallel-size ranks, which is 1: set it to 2 or more, or leave "
            "--expert-parallel out.",
            param="expert_parallel",
        )
