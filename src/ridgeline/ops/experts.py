"""Experts: choose them for each token, and run each on the tokens that chose it.

`by_expert` is the definition, and the path of devices whose host may read which experts were chosen. It multiplies once per expert
that has tokens: a step of one token reads only its own experts.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import NamedTuple

import torch

RunExpert = Callable[[int, torch.Tensor | None], torch.Tensor]
"""(expert, numbers of its tokens int64 [n], or None for all) -> the expert's output for these tokens [n, D]."""


class Chosen(NamedTuple):
    """The experts of each of T tokens. experts: int64 [T, k]. shares: float32 [T, k], what their outputs are multiplied by."""

    experts: torch.Tensor
    shares: torch.Tensor


def route(logits: torch.Tensor, per_token: int, normalized: bool) -> Chosen:
    """Choose the likeliest experts. logits: [T, experts] in any floating-point type. See ExpertSpec."""
    shares, experts = torch.softmax(logits.float(), -1).topk(per_token)
    return Chosen(experts, shares / shares.sum(-1, keepdim=True) if normalized else shares)


def divide_copies(chosen: Chosen, is_hot: torch.Tensor, mine: torch.Tensor) -> Chosen:
    """`chosen` without the choices of hot experts that other ranks compute: these name an expert that does not exist.

    is_hot: bool [experts], of which every rank has a copy. mine: bool [T], tokens whose hot experts this rank computes.
    """
    elsewhere = is_hot[chosen.experts] & ~mine.unsqueeze(1)
    return chosen._replace(experts=chosen.experts.masked_fill(elsewhere, len(is_hot)))


def by_expert(width: int, chosen: Chosen, counts: list[int], run: RunExpert, held: Container[int]) -> torch.Tensor:
    """Sum of the chosen experts' outputs times their shares, float32 [T, D = width]; of those in `held`. counts: tokens of each
    expert.

    A token's terms are added in the order of the experts, so that its sum does not depend on the other tokens.
    """
    n_tokens, per_token = chosen.experts.shape
    out = torch.zeros(n_tokens, width, device=chosen.shares.device)
    if n_tokens == 1:  # the same sum, without gathering
        for expert, share in sorted(zip(chosen.experts[0].tolist(), chosen.shares[0].tolist(), strict=True)):
            if expert in held:
                out += run(expert, None).float() * share
        return out
    order = chosen.experts.flatten().argsort(stable=True)
    tokens, shares = order // per_token, chosen.shares.flatten().index_select(0, order).unsqueeze(1)
    start = 0
    for expert, count in enumerate(counts):
        part = slice(start, start := start + count)
        if count and expert in held:
            out.index_add_(0, tokens[part], run(expert, tokens[part]).float() * shares[part])
    return out
