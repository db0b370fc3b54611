"""GPTQ: quantize input after input, and let the inputs still to come make up for the error (Frantar et al. 2023).

The same walk prunes (SparseGPT, Frantar and Alistarh 2023): see prune.py. Both rest on the optimal brain surgeon: with the
second moments H of a linear's inputs, moving weight q of a row by e costs e^2 / [H^-1]_qq at best, and the best answer of the
others is -e [H^-1]_q,: / [H^-1]_qq. Going through the inputs in one order for all rows, every H^-1 that is needed lies in
one Cholesky factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from ridgeline.compress.grid import Codes, Grid, fit, group_index, ranges, snap
from ridgeline.core.errors import UnsupportedModel

DAMPENING = 0.01
BLOCK = 128
"""Inputs whose corrections are gathered before the rest of the matrix sees them: one product instead of many."""
Order = Literal["as stored", "static", "groups"]
"""In which order inputs are taken. static: those of largest second moment first, groups as they are stored. groups: the
same, and groups are made of inputs that follow each other in that order, so that each input needs its group's index."""


def inverse_factor(moment: torch.Tensor, dampening: float = DAMPENING) -> torch.Tensor:
    """Upper Cholesky factor U of (H + d I)^-1 = U^T U, float64 [in, in]; d is `dampening` times the mean of H's diagonal.

    Inputs that were always zero count as independent of all others. Raises UnsupportedModel if H is not positive.
    """
    wide = moment.double().clone()
    diagonal = wide.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += dampening * diagonal.mean()
    lower, failed = torch.linalg.cholesky_ex(wide)
    if int(failed):
        raise UnsupportedModel(
            "the second moments of its inputs are not positive definite: give more calibration texts (--calibration-tokens)."
        )
    upper: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return upper


def sweep(
    weight: torch.Tensor, factor: torch.Tensor, settle: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Walk through the inputs of weight float32 [out, in]: settle(place, block, whole) says what the inputs from `place` on
    become, and the inputs behind make up for the change.

    `settle` is called at every input with the current values of the rest of its block [out, at most BLOCK] and of the
    whole matrix as it stands behind the block; it returns the final column [out]. Returns the settled matrix.
    """
    current = weight.double().clone()
    rows, d_in = current.shape
    for start in range(0, d_in, BLOCK):
        end = min(start + BLOCK, d_in)
        errors = torch.zeros(rows, end - start, dtype=torch.float64, device=weight.device)
        for place in range(start, end):
            column = settle(place, current[:, place:end], current)
            error = (current[:, place] - column) / factor[place, place]
            current[:, place:end] -= error.unsqueeze(1) * factor[place, place:end]
            current[:, place] = column
            errors[:, place - start] = error
        current[:, end:] -= errors @ factor[start:end, end:]
    return current.float()


def gptq(
    weight: torch.Tensor, moment: torch.Tensor, grid: Grid, order: Order = "as stored", dampening: float = DAMPENING
) -> Codes:
    """Codes of weight float32 [out, in] for inputs with second moments `moment` float32 [in, in]."""
    d_in = weight.shape[1]
    turn = (
        torch.arange(d_in) if order == "as stored" else torch.argsort(moment.diagonal(), descending=True, stable=True)
    )
    weight_in_order = weight[:, turn]
    factor = inverse_factor(moment[turn][:, turn], dampening)
    walk = _Walk(weight, grid, turn, static=order == "static")
    sweep(weight_in_order, factor, walk.settle)
    back = torch.argsort(turn)
    codes = walk.codes[:, back].to(torch.uint8)
    zeros = None if grid.symmetric else walk.zeros.to(torch.uint8)
    g_idx = None
    if order == "groups" and grid.groups(d_in) > 1:
        g_idx = group_index(grid, d_in)[back.cpu()].to(torch.int32)
    return Codes(grid, codes, walk.scales, zeros, g_idx)


class _Walk:
    """Codes as they come, in the order of the walk; scales of a group are set when the walk enters it."""

    def __init__(self, weight: torch.Tensor, grid: Grid, turn: torch.Tensor, *, static: bool) -> None:
        rows, d_in = weight.shape
        self._grid, self._width = grid, grid.width(d_in)
        index = group_index(grid, d_in)
        # With groups as stored an input keeps the group it has there; else the walk's own order makes the groups.
        self._group = (index[turn.cpu()] if static else index).tolist()
        self._static = static
        self.scales = weight.new_empty(rows, grid.groups(d_in))
        self.zeros = weight.new_empty(rows, grid.groups(d_in))
        if static:
            self.scales, self.zeros = ranges(weight, grid)
        self.codes = weight.new_empty(rows, d_in)

    def settle(self, place: int, block: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        group = self._group[place]
        if not self._static and place % self._width == 0:
            members = whole[:, place : place + self._width].float()
            self.scales[:, group], self.zeros[:, group] = fit(members.amin(1), members.amax(1), self._grid)
        scale, zero = self.scales[:, group], self.zeros[:, group]
        codes = snap(block[:, 0], scale.double(), zero.double(), self._grid)
        self.codes[:, place] = codes.float()
        return (codes - zero) * scale
