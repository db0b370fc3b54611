"""Sampling in PyTorch: Gumbel-max over tempered logits.

argmax(z / T + g) with independent standard Gumbel g samples softmax(z / T) (Gumbel 1954; Maddison et al. 2014, section 2). With
g = -log(E), E exponential, multiplied by T, this is argmax(z - T log E). For T = 0 it is the argmax, so greedy and sampled rows use
one formula and rows are independent.

Noise belongs to a token. The draw among some tokens is the draw among all, if that is one of them; otherwise it has a larger logit.
A kernel therefore draws among all tokens, checks whether the result is allowed, and if not, draws again among tokens of larger
logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ridgeline.ops.mass import masses
from ridgeline.ops.noise import Purpose, draw_key, exponential
from ridgeline.ops.rows import Int, Knob, RowState

_IN_CACHE = 1 << 16
"""Logits per chunk on a CPU: the dozen passes over a chunk stay in its cache."""
_SMALLEST = 1e-5
"""Lowest temperature of probabilities. Lower ones would overflow, and draw the largest logit as well."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of rows: top_k int32 [N] (below 1: all), top_p float32 [N] (1: all), min_p float32 [N] (0: all)."""

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor

    def of(self, rows: torch.Tensor | slice) -> Limits:
        """The limits of these rows."""
        return Limits(self.top_k[rows], self.top_p[rows], self.min_p[rows])


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """logits [N, V] of any float type -> the largest one's index, int32 [N]."""
    if logits.device.type == "cpu":
        # NumPy returns the same index twenty times faster than torch.
        return torch.from_numpy(logits.float().numpy().argmax(axis=1).astype(np.int32))
    return logits.argmax(dim=-1).int()


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    key: torch.Tensor,
    position: torch.Tensor,
    purpose: Purpose = Purpose.TOKEN,
    limits: Limits | None = None,
    ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Draw tokens int32 [N].

    Args:
        logits: [N, V] of any float dtype, -inf where a token is masked.
        temperature: float32 [N]; 0 is greedy.
        key: int32 [N, 2], see noise.row_key.
        position: int32 [N], place in the request of the token to be drawn.
        limits: None: all tokens are allowed.
        ids: int32 [V], the tokens of the logits; None: their indices. The noise is that of the token.
    """
    if logits.device.type == "cpu" and not temperature.any():
        return _named(greedy(logits), ids)
    keys = draw_key(key, position, purpose)
    cold = temperature.neg().unsqueeze(1)
    n_rows, vocab = logits.shape
    tokens = torch.arange(vocab, dtype=torch.int32, device=logits.device) if ids is None else ids
    piece = max(1, _IN_CACHE // vocab) if logits.device.type == "cpu" else max(1, n_rows)
    drawn = []
    for at in range(0, n_rows, piece):
        part = slice(at, at + piece)
        part_logits = logits[part] if limits is None else within(logits[part], temperature[part], limits.of(part))
        noise = exponential(keys[part], tokens).log_()
        drawn.append(greedy(torch.addcmul(part_logits.float(), cold[part], noise, out=noise)))
    return _named(drawn[0] if len(drawn) == 1 else torch.cat(drawn), ids)


def _named(index: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
    return index if ids is None else ids.index_select(0, index)


DrawRows = Callable[[RowState, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


def draw_with(sample: Callable[..., torch.Tensor]) -> DrawRows:
    """A function that draws tokens for device rows with `sample`, which has the signature of `sample` above."""

    def draw(
        state: RowState, knobs: torch.Tensor, rows: torch.Tensor, logits: torch.Tensor, depth: torch.Tensor | None
    ) -> torch.Tensor:
        """The tokens int32 [N] that device rows int32 [N] draw, with their own noise and limits.

        Args:
            knobs: float32 [R, KNOBS], columns as in Knob.
            logits: [N, V], after the rows' last known tokens and draft nodes.
            depth: int32 [N], offset of the drawn token from the first unknown one; None: 0.
        """
        ints, row_knobs = state.ints.index_select(0, rows), knobs.index_select(0, rows)
        temperature, top_p, min_p = (row_knobs[:, knob] for knob in (Knob.TEMPERATURE, Knob.TOP_P, Knob.MIN_P))
        place = ints[:, Int.KNOWN] if depth is None else ints[:, Int.KNOWN] + depth
        limits = Limits(ints[:, Int.TOP_K], top_p, min_p)
        return sample(logits, temperature, ints[:, Int.KEY : Int.KEY + 2], place, Purpose.TOKEN, limits)

    return draw


draw = draw_with(sample)


def within(logits: torch.Tensor, temperature: torch.Tensor, limits: Limits) -> torch.Tensor:
    """logits [N, V] with -inf for tokens that `limits` exclude: all but the top_k largest; then all but the smallest set with top_p
    of the probability of those (Holtzman et al. 2020); then tokens less than min_p times as likely as the likeliest (Nguyen et al.
    2024). Ties with the last kept token are kept."""
    vocab = logits.shape[1]
    few = (limits.top_k > 0) & (limits.top_k < vocab)
    if logits.device.type == "cpu":  # a CPU finds the rows with limits without a synchronization
        rows = ((few | (limits.top_p < 1) | (limits.min_p > 0)) & (temperature > 0)).nonzero()[:, 0]
        if len(rows) < len(logits):
            if len(rows):
                logits = logits.index_copy(0, rows, within(logits[rows], temperature[rows], limits.of(rows)))
            return logits
    temperature = temperature.double().clamp(min=_SMALLEST).unsqueeze(1)
    ordered = _descending(logits.float())
    top = ordered[:, :1].double()
    mass = masses((ordered.double() - top) / temperature).cumsum(dim=-1)
    last = torch.where(few, limits.top_k, vocab).unsqueeze(1).long() - 1
    nucleus = limits.top_p.double().unsqueeze(1)
    # A token is kept while the mass before it is below the target; the first one always is.
    kept = (mass < nucleus * mass.gather(1, last)).sum(dim=-1, keepdim=True)
    bound = ordered.gather(1, torch.where(nucleus < 1, torch.minimum(kept, last), last))
    unlikely = (logits.double() - top) / temperature < limits.min_p.double().log().unsqueeze(1)
    return logits.masked_fill((logits < bound) | unlikely, float("-inf"))


def _descending(rows: torch.Tensor) -> torch.Tensor:
    if rows.device.type == "cpu":
        # NumPy returns the same order thirty times faster than torch.
        return torch.from_numpy(np.sort(rows.numpy(), axis=1)[:, ::-1].copy())
    return rows.sort(dim=-1, descending=True).values
