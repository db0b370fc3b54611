"""Number formats of weights: what a linear layer needs of one, whatever lies behind it.

A format knows how its tensors are named in a checkpoint, how they are cut for a rank, how merged projections lie side
by side, and how to multiply. The decoder and the loader know none of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ridgeline.core.errors import ConfigError

Split = Literal["out", "in"] | None


@dataclass(frozen=True, slots=True)
class Part:
    """One projection of a merged linear: `rows` output features made of `units` that no cut may divide (heads)."""

    rows: int
    units: int


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer of the whole model: `d_in` input features, its parts one below the other.

    split: how ranks share it. "out" cuts every part's rows (a part with fewer units than ranks is repeated), "in" cuts
    the input features into `in_units` indivisible units and leaves a sum over ranks to the caller, None repeats it.
    """

    d_in: int
    parts: tuple[Part, ...]
    bias: bool = False
    split: Split = None
    in_units: int = 1


@dataclass(frozen=True, slots=True)
class Share:
    """Which of `size` equal shares a rank holds."""

    rank: int = 0
    size: int = 1

    def span(self, length: int, units: int) -> slice:
        """The rank's part of `length` features in `units` units; neighbours hold the same if there are fewer units."""
        if units >= self.size:
            if units % self.size:
                raise ConfigError(f"{units} heads or blocks cannot be shared by {self.size} devices: pick a divisor.")
            step = length // self.size
            return slice(self.rank * step, (self.rank + 1) * step)
        if self.size % units:
            raise ConfigError(f"{units} heads cannot be repeated on {self.size} devices: pick a multiple.")
        step = length // units
        first = self.rank * units // self.size * step
        return slice(first, first + step)


class Weight(Protocol):
    """The weights of one linear on one rank: empty when created, usable once every expected tensor was loaded."""

    @property
    def expects(self) -> Mapping[tuple[int, str], tuple[int, ...]]:
        """(part, name in the checkpoint) -> whole shape of every tensor the checkpoint must bring."""
        ...

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        """Take this rank's share of a whole checkpoint tensor. The last one packs the weights for multiplication."""
        ...

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, this rank's inputs] -> [T, this rank's outputs], in x's dtype."""
        ...

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The memory it holds."""
        ...


class WeightFormat(Protocol):
    """How linears hold their numbers."""

    @property
    def name(self) -> str: ...

    def create(self, shape: LinearShape, share: Share) -> Weight:
        """Room for one rank's share of a linear."""
        ...
