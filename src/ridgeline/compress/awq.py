"""AWQ: give inputs of large activations a finer share of the grid (Lin et al. 2024).

Multiplying the weights of an input by s and dividing its activations by s keeps the function; where s is large, rounding
costs less. s = mean|x|^a; a is searched by the error of the outputs, and so is how far each group's range may be cut.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ridgeline.compress.grid import Codes, Grid, encode, fit, round_to_nearest, spans
from ridgeline.compress.statistics import Statistics, output_error

STEPS = 20
"""Exponents tried from 0 to 1, as in the paper."""
CUTS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5)
"""Shares of a group's range that are tried."""


def scales_for(
    weights: Sequence[torch.Tensor],
    statistics: Statistics,
    grid: Grid,
    spread: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
) -> torch.Tensor:
    """Factors s float32 [in] for linears (float32 [out, in] each) that share their input, least error of all outputs.

    spread: makes values [in] equal where the model ties inputs together.
    """
    size = spread(statistics.mean_size).clamp(min=1e-4)
    best, least = torch.ones_like(size), float("inf")
    for step in range(STEPS + 1):
        scale = size ** (step / STEPS)
        scale = (scale / (scale.max() * scale.min()).sqrt()).clamp(min=1e-4)
        error = 0.0
        for weight in weights:
            change = round_to_nearest(weight * scale, grid).dequantize() / scale - weight
            error += float(output_error(change, statistics.moment).sum())
        if error < least:
            best, least = scale, error
    return best


def cut_to_error(weight: torch.Tensor, moment: torch.Tensor, grid: Grid) -> Codes:
    """Codes of weight float32 [out, in], each group's range cut to the share of CUTS whose outputs err least.

    moment: float32 [in, in] of the inputs the weights will meet. Groups are judged one by one, as if others were exact.
    """
    width = grid.width(weight.shape[1])
    all_scales, all_zeros = [], []
    for place, part in enumerate(spans(weight, grid)):
        inside = slice(place * width, place * width + part.shape[1])
        least = weight.new_full((weight.shape[0],), float("inf"))
        scales, zeros = weight.new_ones(weight.shape[0]), weight.new_zeros(weight.shape[0])
        for cut in CUTS:
            found = fit(part.amin(1) * cut, part.amax(1) * cut, grid)
            change = encode(part, found[0].unsqueeze(1), found[1].unsqueeze(1), _alone(grid)).dequantize() - part
            error = output_error(change, moment[inside, inside])
            better = error < least
            least = torch.where(better, error, least)
            scales, zeros = torch.where(better, found[0], scales), torch.where(better, found[1], zeros)
        all_scales.append(scales)
        all_zeros.append(zeros)
    return encode(weight, torch.stack(all_scales, 1), torch.stack(all_zeros, 1), grid)


def _alone(grid: Grid) -> Grid:
    """The grid of one group by itself."""
    return Grid(grid.bits, 0, grid.symmetric, grid.scale_dtype)
