"""SmoothQuant: scale outliers of activations down and the weights that read them up (Xiao et al. 2023)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

ALPHA = 0.5
_SMALLEST = 1e-5


def factors(weights: Sequence[torch.Tensor], max_abs: torch.Tensor, alpha: float = ALPHA) -> torch.Tensor:
    """Return s float32 [in] = max|x|^alpha / max|w|^(1 - alpha). Activations are divided and weights multiplied by s.

    An input that was always zero gets 1.

    Args:
        weights: float32 [out, in] of all linears that read the same activations.
        max_abs: float32 [in], max|x| of each input.
        alpha: 0 moves no outlier into the weights, 1 moves all (equation 4).
    """
    max_weight = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).clamp(min=_SMALLEST)
    scale = max_abs.clamp(min=_SMALLEST) ** alpha / max_weight ** (1 - alpha)
    return torch.where(max_abs > 0, scale.clamp(min=_SMALLEST), torch.ones_like(scale))
