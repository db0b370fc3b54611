"""Calibration statistics of the inputs of a linear: second moments and magnitudes."""

from __future__ import annotations

import torch

from ridgeline.core.errors import UnsupportedModel


class Statistics:
    """Running sums over the inputs of one linear with d_in inputs. Tokens are not stored.

    Attributes:
        moment: float32 [in, in], sum of x x^T.
        max_abs: float32 [in], maximum of |x|.
        sum_abs: float32 [in], sum of |x|.
        tokens: number of tokens.
    """

    __slots__ = ("moment", "max_abs", "sum_abs", "tokens")

    def __init__(self, d_in: int, device: torch.device | None = None) -> None:
        self.moment = torch.zeros(d_in, d_in, device=device)
        self.max_abs = torch.zeros(d_in, device=device)
        self.sum_abs = torch.zeros(d_in, device=device)
        self.tokens = 0

    def update(self, x: torch.Tensor) -> None:
        """Add tokens x [T, in]."""
        x = x.float()
        magnitude = x.abs()
        self.moment.addmm_(x.T, x)
        self.max_abs = torch.maximum(self.max_abs, magnitude.amax(0))
        self.sum_abs += magnitude.sum(0)
        self.tokens += x.shape[0]

    @property
    def mean_abs(self) -> torch.Tensor:
        """Mean of |x| per input, float32 [in]."""
        return self.sum_abs / max(1, self.tokens)

    @property
    def norm(self) -> torch.Tensor:
        """L2 norm over the tokens per input, float32 [in] (||X_j|| of Wanda)."""
        return self.moment.diagonal().clamp(min=0).sqrt()

    def check(self, name: str) -> None:
        """Raise UnsupportedModel that names the linear if it had no tokens or its inputs were not finite."""
        if not self.tokens:
            raise UnsupportedModel(
                f"{name} cannot be calibrated: it saw no calibration token. Give more calibration texts."
            )
        if not bool(torch.isfinite(self.moment).all()):
            raise UnsupportedModel(f"{name} cannot be calibrated: its inputs are NaN, infinite or beyond float32.")


def output_error(change: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Return the squared error per output, float32 [out], that a change [out, in] of the weights causes on the tokens."""
    return ((change @ moment) * change).sum(1)
