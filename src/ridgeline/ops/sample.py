"""Drawing tokens in plain PyTorch: Gumbel-max over tempered logits.

argmax(z / T + g) with independent standard Gumbel g samples softmax(z / T) (Gumbel 1954; Maddison et al. 2014, section
2). With g = -log(E), E exponential, and multiplied by T, it is argmax(z - T log E): for T = 0 the plain argmax, so
greedy rows and sampled rows are one formula and rows never influence each other.
"""

from __future__ import annotations

import numpy as np
import torch

from ridgeline.ops.noise import Purpose, draw_key, exponential

_IN_CACHE = 1 << 16
"""Logits that a CPU draws from at a time, so that the dozen passes over them stay in its cache."""


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """logits [N, V] of any float type -> the largest one's index, int32 [N]."""
    if logits.device.type == "cpu":
        # The same answer, twenty times sooner than torch gives it.
        return torch.from_numpy(logits.float().numpy().argmax(axis=1).astype(np.int32))
    return logits.argmax(dim=-1).int()


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    key: torch.Tensor,
    position: torch.Tensor,
    purpose: Purpose = Purpose.TOKEN,
) -> torch.Tensor:
    """logits [N, V] of any float type, -inf where a token is not allowed; temperature float32 [N], 0 is greedy; key int32 [N, 2]
    (noise.row_key); position int32 [N], place in the request of the token to be drawn -> tokens int32 [N]."""
    keys = draw_key(key, position, purpose)
    cold = temperature.neg().unsqueeze(1)
    n_rows, vocab = logits.shape
    tokens = torch.arange(vocab, dtype=torch.int32, device=logits.device)
    piece = max(1, _IN_CACHE // vocab) if logits.device.type == "cpu" else max(1, n_rows)
    drawn = []
    for at in range(0, n_rows, piece):
        part = slice(at, at + piece)
        noise = exponential(keys[part], tokens).log_()
        drawn.append(greedy(torch.addcmul(logits[part].float(), cold[part], noise, out=noise)))
    return drawn[0] if len(drawn) == 1 else torch.cat(drawn)
