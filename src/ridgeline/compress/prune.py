"""Unstructured and N:M pruning: magnitude, Wanda and SparseGPT. All functions return the pruned matrix float32 [out, in].

Sources: Sun et al. 2024 (Wanda); Frantar and Alistarh 2023 (SparseGPT).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.compress.gptq import BLOCK, DAMPENING, inverse_factor, sweep
from ridgeline.core.errors import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Pattern:
    """The number and the positions of zeros."""

    share: float
    """Share of the weights that become zero."""
    run_length: int = 0
    """If not 0, every run of this many inputs of a row has the same number of zeros: 2:4 is a share of 0.5 in runs of 4.
    d_in must be a multiple of it."""

    @property
    def zeros(self) -> int:
        """Zeros in every run."""
        return round(self.share * self.run_length)

    def check(self, name: str, weight: torch.Tensor) -> None:
        """Raise UnsupportedModel that names the tensor if its inputs are not a multiple of the run length."""
        if self.run_length and weight.shape[1] % self.run_length:
            ratio = f"{self.run_length - self.zeros}:{self.run_length}"
            raise UnsupportedModel(
                f"tensor {name} cannot be pruned {ratio}: its {weight.shape[1]} inputs are not a multiple of {self.run_length}."
            )


def smallest_mask(score: torch.Tensor, pattern: Pattern, *, by_row: bool) -> torch.Tensor:
    """Mark the smallest scores [out, in] by the pattern: in each run, else in each row (by_row) or in the matrix. Returns bool."""
    if pattern.run_length:
        runs = score.unflatten(1, (-1, pattern.run_length))
        return _k_smallest(runs, pattern.zeros).flatten(1)
    if by_row:
        return _k_smallest(score, round(pattern.share * score.shape[1]))
    return _k_smallest(score.flatten(), round(pattern.share * score.numel())).view_as(score)


def _k_smallest(score: torch.Tensor, count: int) -> torch.Tensor:
    """Mark the `count` smallest along the last dimension, bool. Ties go to the first."""
    order = score.argsort(dim=-1, stable=True)
    return torch.zeros_like(score, dtype=torch.bool).scatter_(-1, order[..., :count], True)


def by_magnitude(weight: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Zero the smallest |w| of the matrix."""
    return weight.masked_fill(smallest_mask(weight.abs(), pattern, by_row=False), 0.0)


def wanda(weight: torch.Tensor, norm: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """Zero the smallest |w| * ||x_j|| of each row. norm: float32 [in]."""
    return weight.masked_fill(smallest_mask(weight.abs() * norm, pattern, by_row=True), 0.0)


def sparsegpt(
    weight: torch.Tensor, moment: torch.Tensor, pattern: Pattern, dampening: float = DAMPENING
) -> torch.Tensor:
    """Zero the weights of lowest cost when the sweep reaches them. Later inputs compensate the error.

    Weights are chosen per block over all rows (section 3.2, adaptive mask), or per run if the pattern has runs.
    """
    factor = inverse_factor(moment, dampening)
    cost = factor.diagonal()
    pruned = torch.zeros_like(weight, dtype=torch.bool)
    step = pattern.run_length or BLOCK

    def choose_column(index: int, block: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        if index % step == 0:
            columns = slice(index, min(index + step, weight.shape[1]))
            score = (matrix[:, columns] / cost[columns]).square()
            pruned[:, columns] = smallest_mask(score, pattern, by_row=False)
        return block[:, 0].masked_fill(pruned[:, index], 0.0)

    return sweep(weight, factor, choose_column)
