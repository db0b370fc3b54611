"""The acceptance rule: how many drafts of a step are kept. Pure functions.

A deterministic drafter proposes token d with probability 1. The rule of Leviathan et al. (2023, section 2.3) and Chen
et al. (2023, algorithm 2) then keeps d with probability min(1, p(d) / 1) = p(d), and after a refusal draws from p with d
removed, renormalized. Drawing y from p once, keeping d if y = d and returning y otherwise, is the same law in one draw:
P(y = d) = p(d), and y given y != d is p without d. It also makes speculation exact: the draw is the one that plain
decoding would have made at that position (decoding.noise), so tokens are equal, not only their distribution. For greedy
rows it is the exact match.
"""

from __future__ import annotations

import torch


def accept(drawn: torch.Tensor, drafts: torch.Tensor, n_draft: torch.Tensor) -> torch.Tensor:
    """Drafts kept per row, int32 [S]: the longest prefix of drafts that equals what was drawn.

    drawn: int32 [S, K + 1], a token drawn from the target after each of 0 .. K drafts. drafts: int32 [S, K]. n_draft:
    int32 [S], how many drafts the row really has. The row gains drawn[:, : accepted + 1].
    """
    place = torch.arange(drafts.shape[1], device=drafts.device, dtype=torch.int32)
    right = (drawn[:, :-1] == drafts) & (place < n_draft.unsqueeze(1))
    return right.int().cumprod(dim=1).sum(dim=1).int()


def until_end(ends: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """Tokens a row gains, int32 [S]: accepted + 1, or fewer if one of them ends the request (it is the last one).

    ends: bool [S, K + 1], whether each drawn token is a stop or reaches the limit.
    """
    open_before = ends.int().cumsum(dim=1) - ends.int() == 0
    place = torch.arange(ends.shape[1], device=ends.device, dtype=torch.int32)
    return (open_before & (place <= accepted.unsqueeze(1))).sum(dim=1).int()
