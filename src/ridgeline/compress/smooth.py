"""SmoothQuant: move the outliers of activations into the weights, where a grid per channel can hold them (Xiao et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALPHA = 0.5
_SMALLEST = 1e-5


def factors(weights: Sequence[torch.Tensor], largest: torch.Tensor, alpha: float = ALPHA) -> torch.Tensor:
    """s float32 [in] = max|x|^alpha / max|w|^(1 - alpha), by which activations are divided and weights multiplied.

    weights: float32 [out, in] of all linears that read the same activations. largest: float32 [in], max|x| of each.
    alpha 0 leaves the difficulty in the activations, 1 moves all of it (equation 4). An input that was always zero keeps 1.
    """
    held = torch.stack([one.abs().amax(0) for one in weights]).amax(0).clamp(min=_SMALLEST)
    found = largest.clamp(min=_SMALLEST) ** alpha / held ** (1 - alpha)
    return torch.where(largest > 0, found.clamp(min=_SMALLEST), torch.ones_like(found))
