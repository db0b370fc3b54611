"""Generate many texts of equal length in one batch, for training data, without engine and scheduler."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.ops.noise import row_key
from ridgeline.ops.sample import sample


def noise_keys(seed: int, rows: int, device: torch.device) -> Tensor:
    """Return noise keys int32 [rows, 2]. Row i has the key of choice i of a request with this seed."""
    return torch.tensor([row_key(seed, row) for row in range(rows)], dtype=torch.int32, device=device)


@torch.no_grad()
def generate(model: TrainableDecoder, prompts: Tensor, length: int, temperature: Tensor, keys: Tensor) -> Tensor:
    """Generate `length` tokens after each prompt. End tokens do not stop a row.

    Args:
        prompts: int64 [rows, n].
        temperature: float32 [rows]. 0 is greedy.
        keys: int32 [rows, 2]. The token at position t is drawn with the noise of position t, as in the engine (ops.noise).
    Returns:
        Prompts and generated tokens, int64 [rows, n + length].
    """
    rows, start = prompts.shape
    cache = model.cache(rows, start + length)
    ids = torch.cat((prompts, prompts.new_zeros(rows, length)), dim=1)
    new_tokens = slice(0, start)
    for position in range(start, start + length):
        hidden = model.hidden(ids[:, new_tokens], cache)[:, -1]
        positions = torch.full((rows,), position, dtype=torch.int32, device=ids.device)
        ids[:, position] = sample(model.logits(hidden).float(), temperature, keys, positions)
        new_tokens = slice(position, position + 1)
    return ids
