"""Sums of probabilities that no order of addition changes: a probability is a whole number of parts of 1, or of the largest one.

Libraries add a row in an order that depends on how many rows there are, and round after every addition, so that a
log-probability would depend on who else is in the batch. Whole numbers are added exactly, in any order.
"""

from __future__ import annotations

import torch

WHOLE = 1 << 40
"""Parts of 1: a vocabulary of 2^22 tokens does not overflow, and what rounding drops is below float32's own."""


def masses(logs: torch.Tensor) -> torch.Tensor:
    """exp(logs) in parts of 1 / WHOLE, int64; logs of any float type, at most about 0."""
    return torch.exp(logs).mul_(WHOLE).round_().long()


def log_sum_exp(logits: torch.Tensor) -> torch.Tensor:
    """logits float32 [N, V] -> log of the sum of their exponentials, float32 [N, 1]; minus infinity where all are."""
    top = logits.amax(dim=-1, keepdim=True)
    none = top == float("-inf")
    total = masses(logits - top.masked_fill(none, 0.0)).sum(dim=-1, keepdim=True)
    return (top + (total.double() / WHOLE).log()).float()
