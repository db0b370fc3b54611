"""Order-independent sums of probabilities in fixed point: integer multiples of 2^-40 of 1, or of the largest probability.

Libraries choose the order of a row's sum by the number of rows, and round after every addition. A log-probability would then
depend on the other rows of the batch. Sums of integers are exact in any order.
"""

from __future__ import annotations

import torch

UNIT = 1 << 40
"""The integer for probability 1. A vocabulary of 2^22 tokens does not overflow, and the rounding is finer than float32's."""


def masses(logs: torch.Tensor) -> torch.Tensor:
    """exp(logs) * UNIT, rounded, int64. logs: any float type, at most about 0."""
    return torch.exp(logs).mul_(UNIT).round_().long()


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """logits float32 [N, V] -> log of the sum of their exponentials, float32 [N, 1]; -inf for rows of -inf."""
    top = logits.amax(dim=-1, keepdim=True)
    none = top == float("-inf")
    total = masses(logits - top.masked_fill(none, 0.0)).sum(dim=-1, keepdim=True)
    return (top + (total.double() / UNIT).log()).float()
