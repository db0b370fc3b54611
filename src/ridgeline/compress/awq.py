"""AWQ: activation-aware weight quantization.

The weights of an input are multiplied by a factor s and its activations are divided by s. The function stays the same, and
a large s reduces the rounding error of that input. s = mean|x|^a. The exponent a and the clipping of each group's range are
searched for the smallest output error.
Source: Lin et al. 2024.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ridgeline.compress.grid import Codes, Grid, encode, fit, round_to_nearest, split_groups
from ridgeline.compress.statistics import Statistics, output_error

STEPS = 20
"""Steps of the search for the exponent from 0 to 1, as in the paper."""
CLIP_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
"""Clipped shares of a group's range that the search tries."""


def scales_for(
    weights: Sequence[torch.Tensor],
    statistics: Statistics,
    grid: Grid,
    tie: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> torch.Tensor:
    """Search the factors s float32 [in] with the smallest output error of the linears that share an input.

    Args:
        weights: float32 [out, in] of each linear.
        tie: makes values [in] equal where the model ties inputs.
    """
    mean_abs = tie(statistics.mean_abs).clamp(min=1e-4)
    best, best_error = torch.ones_like(mean_abs), float("inf")
    for step in range(STEPS + 1):
        scale = mean_abs ** (step / STEPS)
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(min=1e-4)
        error = 0.0
        for weight in weights:
            change = round_to_nearest(weight * scale, grid).dequantize() / scale - weight
            error += float(output_error(change, statistics.moment).sum())
        if error < best_error:
            best, best_error = scale, error
    return best


def cut_to_error(weight: torch.Tensor, moment: torch.Tensor, grid: Grid) -> Codes:
    """Quantize a weight with the range of each group clipped to the share in CLIP_SHARES with the smallest output error.

    Groups are searched independently, as if the other groups were exact.

    Args:
        weight: float32 [out, in].
        moment: float32 [in, in], second moments of the inputs.
    """
    width = grid.width(weight.shape[1])
    group_scales, group_zeros = [], []
    for group_index, group in enumerate(split_groups(weight, grid)):
        columns = slice(group_index * width, group_index * width + group.shape[1])
        best_error = weight.new_full((weight.shape[0],), float("inf"))
        scales, zeros = weight.new_ones(weight.shape[0]), weight.new_zeros(weight.shape[0])
        for share in CLIP_SHARES:
            candidate = fit(group.amin(1) * share, group.amax(1) * share, grid)
            change = (
                encode(group, candidate[0].unsqueeze(1), candidate[1].unsqueeze(1), _one_group(grid)).dequantize()
                - group
            )
            error = output_error(change, moment[columns, columns])
            better = error < best_error
            best_error = torch.where(better, error, best_error)
            scales, zeros = torch.where(better, candidate[0], scales), torch.where(better, candidate[1], zeros)
        group_scales.append(scales)
        group_zeros.append(zeros)
    return encode(weight, torch.stack(group_scales, 1), torch.stack(group_zeros, 1), grid)


def _one_group(grid: Grid) -> Grid:
    """Return the grid of a single group."""
    return Grid(grid.bits, 0, grid.symmetric, grid.scale_dtype)
