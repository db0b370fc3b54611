"""Which weights to set to zero: by magnitude, by magnitude times activation (Wanda, Sun et al. 2024), or with the others
making up for it (SparseGPT, Frantar and Alistarh 2023). All return the pruned matrix float32 [out, in]."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.compress.gptq import BLOCK, DAMPENING, inverse_factor, sweep
from ridgeline.core.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Pattern:
    """share: of the weights that become zero. of: if not 0, `share * of` zeros in every `of` consecutive inputs of a row
    (2:4 is share 0.5 of 4); then d_in must be a multiple of it."""

    share: float
    of: int = 0

    @property
    def zeros(self) -> int:
        """Zeros in every `of` inputs."""
        return round(self.share * self.of)

    def check(self, name: str, weight: torch.Tensor) -> None:
        """Raise UnsupportedModel naming a matrix that the pattern does not fit."""
        if self.of and weight.shape[1] % self.of:
            kept = f"{self.of - self.zeros}:{self.of}"
            raise UnsupportedModel(
                f"tensor {name} cannot be pruned {kept}: its {weight.shape[1]} inputs are not a multiple of {self.of}."
            )


def lowest(score: torch.Tensor, pattern: Pattern, *, by_row: bool) -> torch.Tensor:
    """Where score [out, in] is smallest, bool: as the pattern says, in runs, in each row, or in the whole matrix."""
    if pattern.of:
        runs = score.unflatten(1, (-1, pattern.of))
        return _smallest(runs, pattern.zeros).flatten(1)
    if by_row:
        return _smallest(score, round(pattern.share * score.shape[1]))
    return _smallest(score.flatten(), round(pattern.share * score.numel())).view_as(score)


def _smallest(score: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` smallest along the last dimension, bool; of equal ones the first."""
    order = score.argsort(dim=-1, stable=True)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def by_magnitude(weight: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Zero the smallest |w| of the matrix."""
    return weight.masked_fill(lowest(weight.abs(), pattern, by_row=False), 0.0)


def wanda(weight: torch.Tensor, norm: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Zero the smallest |w| * ||x_j|| of each row. norm: float32 [in]."""
    return weight.masked_fill(lowest(weight.abs() * norm, pattern, by_row=True), 0.0)


def sparsegpt(
    weight: torch.Tensor, moment: torch.Tensor, pattern: Pattern, dampening: float = DAMPENING
) -> torch.Tensor:
    """Zero the weights that cost least at the time the walk reaches them; those behind make up for it.

    Weights are chosen block by block over all rows (section 3.2, adaptive mask), or run by run for a pattern.
    """
    factor = inverse_factor(moment, dampening)
    cost = factor.diagonal()
    chosen = torch.zeros_like(weight, dtype=torch.bool)
    step = pattern.of or BLOCK

    def settle(place: int, block: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        if place % step == 0:
            ahead = slice(place, min(place + step, weight.shape[1]))
            score = (whole[:, ahead] / cost[ahead]).square()
            chosen[:, ahead] = lowest(score, pattern, by_row=False)
        return block[:, 0].masked_fill(chosen[:, place], 0.0)

    return sweep(weight, factor, settle)
