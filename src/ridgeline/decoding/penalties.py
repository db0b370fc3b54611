"""Repetition, presence and frequency penalties, computed from the tokens of a row in every step, so no counts are stored."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class TokenHistory:
    """Tokens before each of N logits rows, and penalties. tokens: int32 [N, L], from the start of the row. known: int32 [N], how
    many of them count. prompt_len: int32 [N]. presence, frequency, repetition: float32 [N] (off: 0, 0, 1)."""

    tokens: torch.Tensor
    known: torch.Tensor
    prompt_len: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    repetition: torch.Tensor


def apply_penalties(logits: torch.Tensor, history: TokenHistory) -> torch.Tensor:
    """Penalize logits float32 [N, V] in place: repetition over prompt and output (Keskar et al. 2019, section 4.1), presence and
    frequency over the output only (OpenAI). Only logits of tokens in the history change."""
    place = torch.arange(history.tokens.shape[1], device=logits.device, dtype=torch.int32)
    live = place < history.known.unsqueeze(1)
    output = live & (place >= history.prompt_len.unsqueeze(1))
    # Places beyond `known` repeat the first token, so repeated writes to a logit write the same value.
    index = torch.where(live, history.tokens, history.tokens[:, :1]).long()
    counts = torch.zeros_like(logits).scatter_add_(1, index, output.to(logits.dtype)).gather(1, index)
    value, factor = logits.gather(1, index), history.repetition.unsqueeze(1)
    value = torch.where(value > 0, value / factor, value * factor)
    value -= counts * history.frequency.unsqueeze(1) + counts.clamp(max=1.0) * history.presence.unsqueeze(1)
    return logits.scatter_(1, index, value)
