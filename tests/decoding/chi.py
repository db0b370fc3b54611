"""Chi-square test of drawn tokens against a distribution."""

from __future__ import annotations

import torch

from ridgeline.ops.noise import row_key
from ridgeline.ops.sample import sample

DRAWS = 20_000


def draws(logits: torch.Tensor, temperature: float = 1.0, seed: int = 7) -> torch.Tensor:
    """Tokens drawn from each row of logits [N, V] by one request, one position after the other."""
    count = len(logits)
    key = torch.tensor([row_key(seed, 0)], dtype=torch.int32).expand(count, 2)
    return sample(logits, torch.full((count,), temperature), key, torch.arange(count, dtype=torch.int32))


def fits(tokens: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether counts of tokens [N] fit probabilities [V]: nothing of probability 0, and a statistic within five standard
    deviations of its mean (cells of fewer than five expected are put together)."""
    counts = torch.bincount(tokens.long(), minlength=len(expected)).double()
    wanted = expected.double() * len(tokens)
    if bool(counts[expected == 0].any()):
        return False
    small = wanted < 5
    counts = torch.cat((counts[~small], counts[small].sum().view(1)))
    wanted = torch.cat((wanted[~small], wanted[small].sum().view(1)))
    live = wanted > 0
    statistic = float(((counts[live] - wanted[live]) ** 2 / wanted[live]).sum())
    freedom = int(live.sum()) - 1
    return statistic < freedom + 5 * (2 * max(freedom, 1)) ** 0.5
