"""GPTQ: quantize the inputs of a linear one after the other; later inputs compensate the error of earlier ones.

`sweep` also serves SparseGPT (prune.py). Both follow the optimal brain surgeon. H are the second moments of a linear's
inputs. A change e of weight q of a row costs at least e^2 / [H^-1]_qq, and the other weights of the row compensate it best
by -e [H^-1]_q,: / [H^-1]_qq. All rows use the same order of inputs, so one Cholesky factor contains every H^-1 needed.
Sources: Frantar et al. 2023 (GPTQ); Frantar and Alistarh 2023 (SparseGPT).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from ridgeline.compress.grid import Codes, Grid, fit_groups, fit_members, group_index, nearest_codes
from ridgeline.core.errors import UnsupportedModel

DAMPENING = 0.01
BLOCK = 128
"""Inputs per block. The corrections of a block are applied to the later inputs by one product."""
Order = Literal["as stored", "static", "groups"]
"""Order in which inputs are quantized.

static: largest second moment first; groups consist of neighbours in the checkpoint.
groups: largest second moment first; groups consist of neighbours in that order, so the checkpoint stores the group of each input.
"""


def inverse_factor(moment: torch.Tensor, dampening: float = DAMPENING) -> torch.Tensor:
    """Return the upper Cholesky factor U of (H + d I)^-1 = U^T U, float64 [in, in].

    d is `dampening` times the mean of H's diagonal. An input that was always zero gets the diagonal value 1.
    Raises UnsupportedModel if H is not positive definite.
    """
    damped = moment.double().clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += dampening * diagonal.mean()
    lower, failed = torch.linalg.cholesky_ex(damped)
    if int(failed):
        raise UnsupportedModel(
            "the second moments of its inputs are not positive definite: give more calibration texts (--calibration-tokens)."
        )
    upper: torch.Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return upper


def sweep(
    weight: torch.Tensor, factor: torch.Tensor, choose_column: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Replace the inputs of a weight one after the other, and let later inputs compensate each change.

    Args:
        weight: float32 [out, in].
        factor: from `inverse_factor`.
        choose_column: called with (index, block, matrix) for every input, returns its final column [out]. block: current
            values of the inputs from `index` to the end of the block. matrix: current values of all inputs; those after the
            block lack the corrections of this block.
    Returns:
        The new matrix, float32 [out, in].
    """
    current = weight.double().clone()
    rows, d_in = current.shape
    for start in range(0, d_in, BLOCK):
        end = min(start + BLOCK, d_in)
        errors = torch.zeros(rows, end - start, dtype=torch.float64, device=weight.device)
        for index in range(start, end):
            column = choose_column(index, current[:, index:end], current)
            error = (current[:, index] - column) / factor[index, index]
            current[:, index:end] -= error.unsqueeze(1) * factor[index, index:end]
            current[:, index] = column
            errors[:, index - start] = error
        current[:, end:] -= errors @ factor[start:end, end:]
    return current.float()


def gptq(
    weight: torch.Tensor, moment: torch.Tensor, grid: Grid, order: Order = "as stored", dampening: float = DAMPENING
) -> Codes:
    """Quantize weight float32 [out, in] for inputs with second moments `moment` float32 [in, in]."""
    d_in = weight.shape[1]
    permutation = (
        torch.arange(d_in) if order == "as stored" else torch.argsort(moment.diagonal(), descending=True, stable=True)
    )
    weight_in_order = weight[:, permutation]
    factor = inverse_factor(moment[permutation][:, permutation], dampening)
    quantizer = _Quantizer(weight, grid, permutation, static=order == "static")
    sweep(weight_in_order, factor, quantizer.choose_column)
    inverse = torch.argsort(permutation)
    codes = quantizer.codes[:, inverse].to(torch.uint8)
    zeros = None if grid.symmetric else quantizer.zeros.to(torch.uint8)
    g_idx = None
    if order == "groups" and grid.groups(d_in) > 1:
        g_idx = group_index(grid, d_in)[inverse.cpu()].to(torch.int32)
    return Codes(grid, codes, quantizer.scales, zeros, g_idx)


class _Quantizer:
    """Collects the codes in the order of the sweep. The scales of a group are fitted when the sweep enters it."""

    def __init__(self, weight: torch.Tensor, grid: Grid, permutation: torch.Tensor, *, static: bool) -> None:
        rows, d_in = weight.shape
        self._grid, self._width = grid, grid.width(d_in)
        group_of_input = group_index(grid, d_in)
        # Static groups consist of neighbours in the checkpoint. Other groups consist of neighbours in the sweep.
        self._group = (group_of_input[permutation.cpu()] if static else group_of_input).tolist()
        self._static = static
        self.scales = weight.new_empty(rows, grid.groups(d_in))
        self.zeros = weight.new_empty(rows, grid.groups(d_in))
        if static:
            self.scales, self.zeros = fit_groups(weight, grid)
        self.codes = weight.new_empty(rows, d_in)

    def choose_column(self, index: int, block: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        group = self._group[index]
        if not self._static and index % self._width == 0:
            members = matrix[:, index : index + self._width].float()
            self.scales[:, group], self.zeros[:, group] = fit_members(members, self._grid)
        scale, zero = self.scales[:, group], self.zeros[:, group]
        codes = nearest_codes(block[:, 0], scale.double(), zero.double(), self._grid)
        self.codes[:, index] = codes.float()
        return (codes - zero) * scale
