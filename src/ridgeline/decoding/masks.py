"""Logits processors that restrict tokens: packed masks, additive biases, and suppression of end tokens before min_tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

EARLY_STOP_BIAS = -1e9
"""Bias of an end token before min_tokens. Finite, so that an end token can be drawn if a grammar allows no other token."""


def mask_words(vocab: int) -> int:
    return -(-vocab // 32)


def pack_allowed(allowed: Iterable[int], vocab: int) -> bytes:
    """A packed mask (see StepPlan.masks) that allows these token ids; ids outside the vocabulary are ignored."""
    bits = np.zeros(mask_words(vocab) * 32, dtype=np.uint8)
    ids = np.fromiter(allowed, dtype=np.int64)
    bits[ids[(ids >= 0) & (ids < vocab)]] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def read_mask(mask: bytes, vocab: int) -> np.ndarray:
    """A packed mask as int32 words for the whole vocabulary. Tokens beyond the end of a short mask are not allowed."""
    words = np.zeros(mask_words(vocab), dtype=np.int32)
    stored = np.frombuffer(mask[: len(words) * 4], dtype=np.int32)
    words[: len(stored)] = stored
    return words


def apply_mask(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Set logits [N, V] to -inf where the packed words int32 [N, ceil(V / 32)] have a 0 bit. Returns a new tensor."""
    bits = torch.arange(32, device=words.device, dtype=torch.int32)
    allowed = (words.unsqueeze(-1) >> bits).bitwise_and_(1).flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(allowed == 0, float("-inf"))


def suppress_stop_tokens(logits: torch.Tensor, stop_ids: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
    """Add EARLY_STOP_BIAS to stop_ids int32 [N, S] (-1: none) of logits [N, V] where early, bool [N]. In place."""
    wanted = (stop_ids >= 0) & early.unsqueeze(1)
    return logits.scatter_add_(1, stop_ids.clamp(min=0).long(), wanted.to(logits.dtype).mul_(EARLY_STOP_BIAS))


def add_bias(logits: torch.Tensor, row: torch.Tensor, token: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Add bias float32 [M] to logits [N, V] at (row int32 [M], token int32 [M]). In place; repeated places add up."""
    return logits.index_put_((row.long(), token.long()), bias, accumulate=True)
