"""What whole experts on several ranks change in a step: the work of the busiest rank, and the exchange of tokens.

Ranks that share attention (--expert-parallel) have all tokens: each multiplies those of its experts, and the sum that ends every
block adds the terms. Ranks with requests of their own (--data-parallel-size) gather the tokens of all before what they share, and
exchange terms behind it, so that each sums those of its own tokens (ops.divided). Nothing overlaps with products.
"""

from __future__ import annotations

import math
from collections import Counter
from statistics import NormalDist
from typing import NamedTuple

from ridgeline.core.cost import StepWork
from ridgeline.core.experts import ExpertSpec
from ridgeline.core.spec import LayerSpec, ModelSpec
from ridgeline.planner.layouts import Layout, Stage
from ridgeline.planner.links import Fabric

SKEW = 1.1
"""Tokens of the rank whose experts get most, in means of all ranks, however many tokens a step has: real routers prefer some
experts. Assumed; docs/log/2026-11-27-experts-in-layouts.md compares it with a measurement."""
NOTE = (
    f"Whole experts (EP): a step waits for the rank whose experts get most tokens, taken to have {SKEW} times the mean, and more "
    "where few tokens are divided by chance; expert_rank_imbalance in /metrics measures it. TPn+EP is --tensor-parallel-size n "
    "--expert-parallel. EPn is --data-parallel-size n --expert-parallel: ranks have attention and requests of their own."
)
"""What a ranking with whole experts assumes, in words."""


def largest(mean: float, variance: float, ranks: int) -> float:
    """The largest of `ranks` numbers with this mean and variance, in means: of Gaussians, by Blom's approximation (1958)."""
    deviations = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))
    return 1 + deviations * math.sqrt(variance) / mean if mean else 1.0


def imbalance(tokens: float, experts: ExpertSpec, ranks: int) -> float:
    """The factor by which the rank with most tokens exceeds the mean.

    With even routing the tokens of a rank are about a Poisson number, tokens x choices / ranks in the mean. At least SKEW.
    """
    mean = tokens * experts.per_token / ranks
    return max(SKEW, largest(mean, mean, ranks)) if ranks > 1 and mean else 1.0


def read_imbalance(tokens: int, experts: ExpertSpec) -> float:
    """The factor by which the rank that reads most experts exceeds the mean, with even routing: `held` experts of a rank are each
    read with the chance that some token uses it. At most all of them are."""
    share, held = 1 - experts.missed**tokens, len(experts.held())
    return min(1 / share, largest(held * share, held * share * (1 - share), experts.ranks)) if share else 1.0


class ExpertTimes:
    """Experts of a replica's stages, divided as its layout says. width: bytes of an element of the model's dtype."""

    def __init__(self, layout: Layout, fabric: Fabric, width: int) -> None:
        self._layout, self._fabric, self._width = layout, fabric, width
        self._kinds: dict[Stage, list[_Kind]] = {}

    def busiest(self, stage: Stage, work: StepWork, tokens: int) -> StepWork:
        """The work of the rank with most tokens of experts. tokens: that each rank has of its own; `work` is that of the mean rank
        if it had no tokens of others."""
        layout = self._layout
        if layout.experts == 1:
            return work
        flops, everyone, spec = work.flops, tokens * layout.groups, stage.spec
        read = spec.idle_bytes(tokens, tokens) - spec.idle_bytes(everyone, everyone)
        flops += _shared_flops(spec) * (everyone - tokens)
        for kind in self._of(stage):
            more = everyone * imbalance(everyone, kind.experts, layout.experts) - tokens
            flops += int(kind.layers * kind.token_flops * more)
            mean = kind.layers * kind.held_bytes * (1 - kind.experts.missed**everyone)
            read += int(mean * (read_imbalance(everyone, kind.experts) - 1))
        return work._replace(flops=flops, bytes=work.bytes + read)

    def links(self, stage: Stage, tokens: int) -> float:
        """Seconds in which ranks with requests of their own gather their tokens and exchange terms, once per layer, and in which
        they sum embeddings and gather the last layer's tokens. tokens: of each rank."""
        layout, fabric = self._layout, self._fabric
        if layout.groups == 1:
            return 0.0
        size = tokens * layout.groups * stage.spec.d_model * self._width
        gather = fabric.all_gather(layout.experts, size)
        ends = stage.first * fabric.all_reduce(layout.experts, size) + gather
        return len(stage.spec.layers) * (gather + fabric.all_to_all(layout.experts, size)) + ends

    def _of(self, stage: Stage) -> list[_Kind]:
        """The kinds of layers of a stage that have experts."""
        if stage not in self._kinds:
            counts = Counter(layer for layer in stage.spec.layers if layer.experts is not None)
            self._kinds[stage] = [_kind(stage.spec, layer, layers) for layer, layers in counts.items()]
        return self._kinds[stage]


class _Kind(NamedTuple):
    """Equal layers with experts. token_flops: of a token in the experts of the mean rank. held_bytes: of a rank's experts."""

    experts: ExpertSpec
    layers: int
    token_flops: float
    held_bytes: int


def _shared_flops(spec: ModelSpec) -> int:
    """FLOPs of a token in the feed-forward matrices that ranks share without a choice: of dense layers and of shared experts."""
    names = ("gate_up", "down", "shared_gate_up", "shared_down")
    matrices = (matrix for layer in spec.layers for matrix in spec.matrices(layer))
    return 2 * sum(matrix.elements for matrix in matrices if matrix.name in names and not matrix.chosen)


def _kind(spec: ModelSpec, layer: LayerSpec, layers: int) -> _Kind:
    chosen = [matrix for matrix in spec.matrices(layer) if matrix.chosen]
    assert layer.experts is not None
    flops = 2 * sum(matrix.used * matrix.elements for matrix in chosen)
    return _Kind(layer.experts, layers, flops, sum(map(spec.matrix_bytes, chosen)))
