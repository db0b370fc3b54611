"""The option --expert-parallel: ranks divide the experts of a layer among them, instead of the width of each.

With --redundant-experts every rank also has a copy of the experts that get most tokens (as DeepSeek-V3, arXiv:2412.19437, section
3.4, does in a deployment). Which these are is decided at the start, from a file with measured loads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ridgeline.core.config import EngineConfig, ModelConfig
from ridgeline.core.errors import ConfigError
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.spec import LayerSpec

_SAMPLE = re.compile(r"expert_tokens(?:_total)?\{[^}]*\bexpert=\"(\d+)/(\d+)\"[^}]*\} ([0-9.eE+]+)")


def whole_experts(layers: Sequence[LayerSpec], model: ModelConfig) -> tuple[LayerSpec, ...]:
    """The layers with experts that stay whole, and which of them are hot. Raises ConfigError for a model without experts, and for a
    file of loads that does not belong to the model."""
    experts = list(experts_of(layers))
    if not experts:
        raise ConfigError("--expert-parallel: this model has no experts. Leave it out.", param="expert_parallel")
    hot = iter(_hot(experts, model) if model.redundant_experts else [()] * len(experts))
    return tuple(
        replace(layer, experts=replace(layer.experts, whole=True, hot=next(hot))) if layer.experts else layer
        for layer in layers
    )


def experts_of(layers: Sequence[LayerSpec]) -> Iterator[ExpertSpec]:
    """The experts of the layers that have some."""
    return (layer.experts for layer in layers if layer.experts is not None)


def _hot(experts: Sequence[ExpertSpec], model: ModelConfig) -> list[tuple[int, ...]]:
    """The experts with most tokens of each layer with experts."""
    loads = read_load(model.expert_load)
    named, known = {layer for layer, _ in loads}, set(range(len(experts)))
    beyond = any(expert >= experts[layer].count for layer, expert in loads if layer in known)
    if named != known or beyond:
        raise ConfigError(
            f"--expert-load {model.expert_load} has tokens of {len(named)} layers with experts, and the model has {len(known)} "
            f"with {experts[0].count} each: measure them on a server of this model without --pipeline-parallel-size.",
            param="expert_load",
        )
    if any(model.redundant_experts >= layer.count for layer in experts):
        raise ConfigError(
            f"--redundant-experts is {model.redundant_experts}: give fewer than the {experts[0].count} experts of a layer.",
            param="redundant_experts",
        )
    return [
        tuple(sorted(_busiest([loads[layer, expert] for expert in range(spec.count)])[: model.redundant_experts]))
        for layer, spec in enumerate(experts)
    ]


def _busiest(tokens: Sequence[int]) -> list[int]:
    """The experts, those with most tokens first."""
    return sorted(range(len(tokens)), key=lambda expert: -tokens[expert])


def read_load(path: str) -> Counter[tuple[int, int]]:
    """(layer, expert) -> tokens, from what /metrics answers; the sum over engines. Raises ConfigError."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--expert-load {path} cannot be read: {error}.", param="expert_load") from error
    loads = Counter[tuple[int, int]]()
    for layer, expert, tokens in _SAMPLE.findall(text):
        loads[int(layer), int(expert)] += int(float(tokens))
    if not loads:
        raise ConfigError(
            f"--expert-load {path} has no sample of expert_tokens_total: store what /metrics of a server with this model answers "
            "after some hundred steps.",
            param="expert_load",
        )
    return loads


def hot_experts(layers: Sequence[LayerSpec]) -> str:
    """The experts of each layer that every rank has a copy of, as text."""
    return str([experts.hot for experts in experts_of(layers)])


def rank_tokens(tokens: Sequence[int], experts: ExpertSpec) -> list[int]:
    """Tokens that each rank multiplies by its experts. tokens: of each expert; the ranks have equal parts of those of hot ones."""
    shared = sum(tokens[expert] for expert in experts.hot) // experts.ranks
    return [
        shared + sum(tokens[expert] for expert in experts.held(rank) if expert not in experts.hot)
        for rank in range(experts.ranks)
    ]


def check_divided_requests(layers: Sequence[LayerSpec], config: EngineConfig) -> None:
    """Raise ConfigError if ranks divide the requests of a model without experts: they would share too little."""
    if config.data_parallel_size > 1 and not any(experts_of(layers)):
        raise ConfigError(
            f"--data-parallel-size {config.data_parallel_size} divides the requests of a model among ranks that share its experts, "
            "and this model has none: start one server per replica behind `ridgeline route`, or use --tensor-parallel-size.",
            param="data_parallel_size",
        )


def check_expert_ranks(model: ModelConfig, config: EngineConfig) -> None:
    """Raise ConfigError for a single rank, which would have nobody to divide the experts with, and for options without effect."""
    if model.expert_parallel and config.layer_ranks == 1:
        raise ConfigError(
            "--expert-parallel divides the experts among --tensor-parallel-size or --data-parallel-size ranks, which are 1: set "
            "either to 2 or more, or leave --expert-parallel out.",
            param="expert_parallel",
        )
    if model.redundant_experts < 0:
        raise ConfigError(
            f"--redundant-experts is {model.redundant_experts}: give 0 or more.", param="redundant_experts"
        )
    if model.redundant_experts and not model.expert_parallel:
        raise ConfigError(
            "--redundant-experts gives ranks copies of experts that they divide: add --expert-parallel.",
            param="redundant_experts",
        )
    if bool(model.redundant_experts) != bool(model.expert_load):
        raise ConfigError(
            "--redundant-experts N copies the N experts with most tokens in --expert-load FILE: give both, or none of them.",
            param="expert_load" if model.expert_load else "redundant_experts",
        )
