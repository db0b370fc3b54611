"""What calibration texts tell of the inputs of a linear: second moments and magnitudes, summed as they stream by."""

from __future__ import annotations

import torch

from ridgeline.core.errors import UnsupportedModel


class Statistics:
    """Sums over the tokens that one linear with d_in inputs was given; nothing of the tokens is kept.

    moment: float32 [in, in], sum of x x^T. largest, total: float32 [in], the largest and the sum of |x|. tokens: count.
    """

    __slots__ = ("moment", "largest", "total", "tokens")

    def __init__(self, d_in: int, device: torch.device | None = None) -> None:
        self.moment = torch.zeros(d_in, d_in, device=device)
        self.largest = torch.zeros(d_in, device=device)
        self.total = torch.zeros(d_in, device=device)
        self.tokens = 0

    def see(self, x: torch.Tensor) -> None:
        """Add tokens x [T, in]."""
        x = x.float()
        size = x.abs()
        self.moment.addmm_(x.T, x)
        self.largest = torch.maximum(self.largest, size.amax(0))
        self.total += size.sum(0)
        self.tokens += x.shape[0]

    @property
    def mean_size(self) -> torch.Tensor:
        """Mean of |x| per input, float32 [in]."""
        return self.total / max(1, self.tokens)

    @property
    def norm(self) -> torch.Tensor:
        """Root of the sum of squares per input, float32 [in] (Wanda's ||X_j||)."""
        return self.moment.diagonal().clamp(min=0).sqrt()

    def check(self, name: str) -> None:
        """Raise UnsupportedModel naming the linear if it never saw a token, or saw numbers that are not finite."""
        if not self.tokens:
            raise UnsupportedModel(
                f"{name} cannot be calibrated: it saw no calibration token. Give more calibration texts."
            )
        if not bool(torch.isfinite(self.moment).all()):
            raise UnsupportedModel(f"{name} cannot be calibrated: its inputs are NaN, infinite or beyond float32.")


def output_error(change: torch.Tensor, moment: torch.Tensor) -> torch.Tensor:
    """Squared error that a change [out, in] of the weights makes on the calibration tokens, per output: float32 [out]."""
    return ((change @ moment) * change).sum(1)
