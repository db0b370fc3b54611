"""Experts of a feed-forward block: their sizes, their matrices, and how many of them a step is expected to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.core.errors import ConfigError

MatrixName = Literal["qkv", "out", "router", "gate_up", "down", "shared_gate_up", "shared_down", "shared_gate", "head"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """One weight matrix of a layer as it is multiplied: queries, keys and values fused, gate and up fused.

    copies: the layer holds so many, one for each expert. used: a token is multiplied by so many of them, in the mean where ranks
    divide the experts. Both are those of the rank that has most. plain: kept in the model's dtype whatever the number format of the
    layers is. chosen: of experts that the router chooses; a rank may hold one of them. parts: (outputs, number format) of the
    projections in order, where the checkpoint has several formats; (): that of the layers.
    """

    name: MatrixName
    outputs: int
    inputs: int
    bias: bool = False
    copies: int = 1
    used: float = 1
    plain: bool = False
    chosen: bool = False
    parts: tuple[tuple[int, str], ...] = ()

    @property
    def elements(self) -> int:
        """Elements of one copy."""
        return self.outputs * self.inputs


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """The experts of one layer (Shazeer et al. 2017): a router chooses `per_token` of `count` experts for each token.

    The router's probabilities are the softmax over all experts. The chosen experts' outputs are summed with their probabilities,
    which `normalized` divides by their sum. That equals a softmax over the chosen logits, as Mixtral describes its router.
    width: inner width of an expert. shared_width: of the expert that every token uses (Qwen2-MoE), scaled by the sigmoid of a gate;
    0: there is none. whole: ranks divide the experts among them (expert parallelism), not the width of each. ranks: that divide
    them, with `whole`. hot: experts of which every rank has a copy; the ranks divide their tokens. bias: router and experts have
    biases.
    """

    count: int
    per_token: int
    width: int
    normalized: bool = False
    shared_width: int = 0
    whole: bool = False
    ranks: int = 1
    hot: tuple[int, ...] = ()
    bias: bool = False

    def held(self, rank: int = 0) -> range:
        """A rank's part of the experts. If ranks do not divide them, the first ones have one more than the last ones."""
        first, end = (-(-self.count * place // self.ranks) for place in (rank % self.ranks, rank % self.ranks + 1))
        return range(first, end)

    def copies(self, rank: int = 0) -> tuple[int, ...]:
        """The experts on a rank: its part, and copies of the hot ones of other parts."""
        held = self.held(rank)
        return (*held, *(expert for expert in self.hot if expert not in held))

    @property
    def active_width(self) -> int:
        """Inner width of all experts that one token uses."""
        return self.per_token * self.width + self.shared_width

    @property
    def missed(self) -> float:
        """The chance that a token does not use a given expert, if all experts are equally likely."""
        return 1 - self.per_token / self.count

    def on_rank(self, ranks: int) -> ExpertSpec:
        """Every rank holds its part of each expert's width, or its part of the experts. Raises ConfigError."""
        if self.whole and self.count < ranks:
            raise ConfigError(
                f"{self.count} experts cannot be divided among {ranks} devices: use at most {self.count} devices, or leave "
                "--expert-parallel out.",
                param="expert_parallel",
            )
        if (not self.whole and self.width % ranks) or self.shared_width % ranks:
            raise ConfigError(
                f"Experts of width {self.width} (shared: {self.shared_width}) cannot be split over {ranks} devices: use a "
                "number of devices that divides both."
            )
        shared_width = self.shared_width // ranks
        if self.whole:
            return replace(self, ranks=ranks, shared_width=shared_width)
        return replace(self, width=self.width // ranks, shared_width=shared_width)

    def matrices(self, d_model: int) -> Iterator[Matrix]:
        """The matrices of the block in the order of their use."""
        yield Matrix("router", self.count, d_model, self.bias, plain=True)
        held, used = max(map(len, map(self.copies, range(self.ranks)))), self.per_token * len(self.held()) / self.count
        yield Matrix("gate_up", 2 * self.width, d_model, self.bias, held, used, chosen=True)
        yield Matrix("down", d_model, self.width, self.bias, held, used, chosen=True)
        if self.shared_width:
            yield Matrix("shared_gate", 1, d_model, plain=True)
            yield Matrix("shared_gate_up", 2 * self.shared_width, d_model)
            yield Matrix("shared_down", d_model, self.shared_width)


Idle = tuple[float, int]
"""(chance that a token does not use a given expert, bytes of one matrix of all experts of a layer)."""


def idle_bytes(experts: Mapping[Idle, int], tokens: int) -> int:
    """Bytes of the experts that none of `tokens` tokens uses, expected for uniform and independent routing.

    experts: how many matrices of each kind.

    Of E experts with k per token a step reads E (1 - (1 - k/E)^T) in the mean. Real routers are not uniform: they read fewer.
    """
    return sum(count * round(size * missed**tokens) for (missed, size), count in experts.items())
