"""Let a model write many texts at once, for training data: whole batches in step, no engine, no scheduler."""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.ops.noise import row_key
from ridgeline.ops.sample import sample


def keys_of(seed: int, rows: int, device: torch.device) -> Tensor:
    """Noise keys int32 [rows, 2]: row i is choice i of a request with this seed."""
    return torch.tensor([row_key(seed, row) for row in range(rows)], dtype=torch.int32, device=device)


@torch.no_grad()
def write(model: TrainableDecoder, prompts: Tensor, length: int, temperature: Tensor, keys: Tensor) -> Tensor:
    """Prompts int64 [rows, n] with `length` tokens after each, [rows, n + length]; end tokens end nothing.

    temperature: float32 [rows], 0 is greedy. keys: int32 [rows, 2]; the token at place t of its row is drawn with the noise of
    position t, as the engine draws it (ops.noise).
    """
    rows, start = prompts.shape
    cache = model.cache(rows, start + length)
    ids = torch.cat((prompts, prompts.new_zeros(rows, length)), dim=1)
    fresh = slice(0, start)
    for place in range(start, start + length):
        hidden = model.hidden(ids[:, fresh], cache)[:, -1]
        position = torch.full((rows,), place, dtype=torch.int32, device=ids.device)
        ids[:, place] = sample(model.logits(hidden).float(), temperature, keys, position)
        fresh = slice(place, place + 1)
    return ids
