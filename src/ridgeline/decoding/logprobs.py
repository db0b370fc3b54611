"""Log-probabilities of the unprocessed logits: before temperature, penalties and truncation."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ridgeline.core.plan import TokenLogprobs
from ridgeline.ops.mass import log_sum_exp

SCORE_BYTES = 256 << 20
"""Most bytes of logits that `score` holds at a time."""


class Ranked(NamedTuple):
    """Log-probabilities at N places. token: int32 [N]. stats: float32 [N, 3], log-probability of the token, its rank (exact up to
    2^24), log-sum-exp of the logits. top_ids: int32 [N, n] and top_logprobs: float32 [N, n], the alternatives."""

    token: torch.Tensor
    stats: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor


def rank(logits: torch.Tensor, token: torch.Tensor, top: int) -> Ranked:
    """Rank tokens. logits: [N, V], any float dtype. token: int32 [N]; a negative one is scored as token 0, and the caller drops
    it."""
    logits = logits.float()
    total = log_sum_exp(logits)
    chosen = logits.gather(1, token.clamp(min=0).long().unsqueeze(1))
    place = (logits > chosen).sum(dim=-1, keepdim=True) + 1
    stats = torch.cat((chosen - total, place.float(), total), dim=1)
    ids = _largest(logits, min(top, logits.shape[1]))
    return Ranked(token, stats, ids.int(), logits.gather(1, ids) - total)


def _largest(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Indices int64 [N, count] of the largest logits of each row. Ties go to the lower index, which `topk` alone does not
    guarantee. The bits of float32 values sort like integers if the bits of negative values are inverted."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 maps -0.0 to 0.0
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    last = logits.shape[1] - 1
    place = torch.arange(last, -1, -1, device=logits.device)
    return last - torch.topk((order << 32) + place, count, dim=-1).values.bitwise_and(0xFFFFFFFF)


def score(
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    token: torch.Tensor,
    top: int,
    vocab: int,
    most_bytes: int = SCORE_BYTES,
) -> Ranked:
    """`rank` for hidden [N, D]. Logits are computed by `logits_of` in chunks of at most most_bytes."""
    piece = max(1, most_bytes // (4 * vocab))
    parts = [
        rank(logits_of(hidden[at : at + piece]), token[at : at + piece], top) for at in range(0, hidden.shape[0], piece)
    ]
    return parts[0] if len(parts) == 1 else Ranked(*(torch.cat(column) for column in zip(*parts, strict=True)))


def to_records(ranked: Ranked, tops: list[int]) -> list[TokenLogprobs]:
    """Convert a Ranked on the host to records, one per place. tops[i]: number of alternatives of place i."""
    columns = zip(*(column.tolist() for column in ranked), tops, strict=True)
    return [
        TokenLogprobs(token, stats[0], int(stats[1]), tuple(ids[:top]), tuple(values[:top]), stats[2])
        for token, stats, ids, values, top in columns
    ]
