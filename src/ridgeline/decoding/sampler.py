"""What may be drawn: top-k, top-p and min-p over tempered logits. The draw itself is an operation (ops.table)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ridgeline.decoding.mass import WHOLE, log_sum_exp, masses

_SHORTLISTS = (128, 1024)
"""On a CPU, filters look at so many of a row's largest logits, one after the other, before they sort all of them."""
_SMALLEST = 1e-5
"""Temperature below which a filter would overflow; it keeps the largest logit alone anyway."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Per logit row: top_k int32 [N] (below 1: off), top_p float32 [N] (1: off), min_p float32 [N] (0: off),
    temperature float32 [N]. Known to the host: ranked, whether some row has top_k or top_p; most_k, the largest top_k
    if every row has one, else 0."""

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    ranked: bool
    most_k: int


def apply_filters(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """logits float32 [N, V] with -inf for what the filters drop: top-k, then top-p (Holtzman et al. 2020) of what is
    left, renormalized, then min-p (Nguyen et al. 2024). Tokens as probable as the last one kept are kept too."""
    heat = filters.temperature.clamp(min=_SMALLEST).unsqueeze(1)
    scaled = logits / heat
    largest = scaled.amax(dim=-1, keepdim=True)
    bound = largest + filters.min_p.log().unsqueeze(1)
    if filters.ranked:
        bound = torch.maximum(bound, _ranked_bound(scaled, log_sum_exp(scaled), filters, _SHORTLISTS))
    return logits.masked_fill(scaled < bound, float("-inf"))


def _ranked_bound(scaled: torch.Tensor, total: torch.Tensor, filters: Filters, lists: tuple[int, ...]) -> torch.Tensor:
    """The smallest tempered logit that top-k and top-p keep, [N, 1]. total: log-sum-exp of the logits [N, 1]."""
    if 0 < filters.most_k < scaled.shape[1]:
        return _bound(torch.topk(scaled, filters.most_k, dim=-1).values, total, filters)[0]
    if scaled.device.type != "cpu" or not lists or scaled.shape[1] <= 2 * lists[0]:
        return _bound(torch.sort(scaled, dim=-1, descending=True).values, total, filters)[0]
    bound, sure = _bound(torch.topk(scaled, lists[0], dim=-1).values, total, filters)
    if len(left := (~sure[:, 0]).nonzero()[:, 0]):
        rest = replace(filters, top_k=filters.top_k[left], top_p=filters.top_p[left])
        bound[left] = _ranked_bound(scaled[left], total[left], rest, lists[1:])
    return bound


def _bound(ordered: torch.Tensor, total: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """(bound [N, 1], whether the given part was long enough to be sure of it [N, 1]). ordered: the largest tempered
    logits [N, M], descending; total: log-sum-exp of all [N, 1]."""
    length = ordered.shape[1]
    top_k = filters.top_k.unsqueeze(1)
    limited = (top_k > 0) & (top_k <= length)
    last = torch.where(limited, top_k, length).long() - 1
    mass = masses(ordered - total).cumsum(dim=-1).double() / WHOLE
    whole = torch.where(limited, mass.gather(1, last), 1.0)
    target = filters.top_p.unsqueeze(1) * whole
    nucleus = filters.top_p.unsqueeze(1) < 1
    # A token is kept while the mass before it is below the target; the first one always is.
    kept = (mass < target).sum(dim=-1, keepdim=True)
    at = torch.where(nucleus, torch.minimum(kept, last), last)
    off = ~nucleus & ~limited
    bound = ordered.gather(1, at).masked_fill(off, float("-inf"))
    return bound, limited | ((top_k <= 0) & (off | (mass[:, -1:] >= target)))
