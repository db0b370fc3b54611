"""Drawing tokens: Gumbel-max over tempered, filtered logits.

argmax(z / T + g) with independent standard Gumbel g samples softmax(z / T) (Gumbel 1954; Maddison et al. 2014, section
2). With g = -log(E), E exponential, and multiplied by T, it is argmax(z - T log E): for T = 0 the plain argmax, so
greedy rows and sampled rows are one formula and rows never influence each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.decoding.noise import Purpose, draw_key, exponential

_SHORTLIST = 1024
"""On a CPU, filters look at this many of the largest logits before they sort all of them."""
_IN_CACHE = 1 << 16
"""Logits that a CPU draws from at a time, so that the dozen passes over them stay in its cache."""
_SMALLEST = 1e-5
"""Temperature below which a filter would overflow; it keeps the largest logit alone anyway."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Who draws, for N logit rows. temperature: float32 [N]; key: int32 [N, 2] (noise.row_key); position: int32 [N],
    place in the request of the token to be drawn; tokens: int32 [V], 0 .. V - 1, kept by the caller."""

    temperature: torch.Tensor
    key: torch.Tensor
    position: torch.Tensor
    tokens: torch.Tensor


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


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """logits [N, V] -> the largest one's index, int32 [N]."""
    if logits.device.type == "cpu":
        # The same answer, twenty times sooner than torch gives it.
        return torch.from_numpy(logits.numpy().argmax(axis=1).astype(np.int32))
    return logits.argmax(dim=-1).int()


def sample(logits: torch.Tensor, draws: Draws, purpose: Purpose = Purpose.TOKEN) -> torch.Tensor:
    """logits float32 [N, V], -inf where a token is not allowed -> tokens int32 [N]."""
    key = draw_key(draws.key, draws.position, purpose)
    cold = draws.temperature.neg().unsqueeze(1)
    n_rows, vocab = logits.shape
    piece = max(1, _IN_CACHE // vocab) if logits.device.type == "cpu" else max(1, n_rows)
    drawn = []
    for at in range(0, n_rows, piece):
        part = slice(at, at + piece)
        noise = exponential(key[part], draws.tokens).log_()
        drawn.append(greedy(torch.addcmul(logits[part], cold[part], noise, out=noise)))
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)


def apply_filters(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """logits float32 [N, V] with -inf for what the filters drop: top-k, then top-p (Holtzman et al. 2020) of what is
    left, renormalized, then min-p (Nguyen et al. 2024). Tokens as probable as the last one kept are kept too."""
    heat = filters.temperature.clamp(min=_SMALLEST).unsqueeze(1)
    scaled = logits / heat
    largest = scaled.amax(dim=-1, keepdim=True)
    bound = largest + filters.min_p.log().unsqueeze(1)
    if filters.ranked:
        bound = torch.maximum(bound, _ranked_bound(scaled, filters))
    return logits.masked_fill(scaled < bound, float("-inf"))


def _ranked_bound(scaled: torch.Tensor, filters: Filters) -> torch.Tensor:
    """The smallest tempered logit that top-k and top-p keep, [N, 1]."""
    vocab = scaled.shape[1]
    total = torch.logsumexp(scaled, dim=-1, keepdim=True)
    if 0 < filters.most_k < vocab:
        return _bound(torch.topk(scaled, filters.most_k, dim=-1).values, total, filters)[0]
    if scaled.device.type == "cpu" and vocab > 2 * _SHORTLIST:
        bound, sure = _bound(torch.topk(scaled, _SHORTLIST, dim=-1).values, total, filters)
        if bool(sure.all()):
            return bound
    return _bound(torch.sort(scaled, dim=-1, descending=True).values, total, filters)[0]


def _bound(ordered: torch.Tensor, total: torch.Tensor, filters: Filters) -> tuple[torch.Tensor, torch.Tensor]:
    """(bound [N, 1], whether the given part was long enough to be sure of it [N, 1]). ordered: the largest tempered
    logits [N, M], descending; total: log-sum-exp of all [N, 1]."""
    length = ordered.shape[1]
    top_k = filters.top_k.unsqueeze(1)
    limited = (top_k > 0) & (top_k <= length)
    last = torch.where(limited, top_k, length).long() - 1
    mass = torch.cumsum(torch.exp(ordered - total), dim=-1)
    whole = torch.where(limited, mass.gather(1, last), 1.0)
    target = filters.top_p.unsqueeze(1) * whole
    nucleus = filters.top_p.unsqueeze(1) < 1
    # A token is kept while the mass before it is below the target; the first one always is.
    kept = (mass < target).sum(dim=-1, keepdim=True)
    at = torch.where(nucleus, torch.minimum(kept, last), last)
    off = ~nucleus & ~limited
    bound = ordered.gather(1, at).masked_fill(off, float("-inf"))
    return bound, limited | ((top_k <= 0) & (off | (mass[:, -1:] >= target)))
