"""How often a model draws the tokens that a draft model, a recurrent draft or Medusa heads propose.

A draft is kept as long as its tokens are those of the text, and it reads the same tokens before them as the target. So one pass of
both over a text tells what every chain would have kept. The draft draws with the noise that the target draws with (ops.noise).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.distill import MedusaModule
from ridgeline.compress.generate import generate, noise_keys
from ridgeline.compress.recurrent import DEPTH, RecurrentModule, teacher_targets
from ridgeline.ops.noise import Purpose, draw_key, exponential
from ridgeline.ops.sample import sample

PROMPT, LENGTH = 64, 256
"""Tokens of a row that are given, and tokens after them that count."""
TEMPERATURE = 0.8
"""Temperature of sampled texts."""
RANKS = 10
"""Candidates of a Medusa head whose hits are counted."""
DRAWS = 8
"""Draws of a recurrent draft whose hits are counted."""
AT_ONCE = 32
"""Rows per pass."""


@dataclass(frozen=True, slots=True)
class Text:
    """Rows of tokens, of which those after the prompt count."""

    kind: str
    way: str
    """read: a held-out text; sampled, greedy: what the target wrote after the prompt."""
    rows: Tensor
    """int64 [rows, prompt + length]."""
    prompt: int
    temperature: float | None
    """At which the target drew. None: it did not."""
    keys: Tensor
    """int32 [rows, 2], the keys of the noise."""

    @property
    def length(self) -> int:
        """Tokens of a row that count."""
        return self.rows.shape[1] - self.prompt

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows and keys of at most AT_ONCE rows."""
        yield from zip(self.rows.split(AT_ONCE), self.keys.split(AT_ONCE), strict=True)


def texts(target: TrainableDecoder, rows: Mapping[str, Tensor], prompt: int = PROMPT) -> Iterator[Text]:
    """Yield three texts per kind: the rows as they are, and what the target writes after their prompts, sampled and greedy.

    rows: int64 [rows, tokens] by kind of text; all kinds have the same number of tokens.
    """
    every = torch.cat(list(rows.values()))
    keys = noise_keys(7, len(every), every.device)
    temperature = torch.tensor([TEMPERATURE, 0.0], device=every.device).repeat_interleave(len(every))
    length = every.shape[1] - prompt
    written = generate(target, every[:, :prompt].repeat(2, 1), length, temperature, keys.repeat(2, 1))
    sizes = [len(row) for row in rows.values()]
    parts = zip(rows, keys.split(sizes), *(half.split(sizes) for half in (every, *written.chunk(2))), strict=True)
    for kind, noise, read, sampled, greedy in parts:
        yield Text(kind, "read", read, prompt, None, noise)
        yield Text(kind, "sampled", sampled, prompt, TEMPERATURE, noise)
        yield Text(kind, "greedy", greedy, prompt, 0.0, noise)


def draw(logits: Tensor, prompt: int, temperature_value: float, keys: Tensor) -> Tensor:
    """Draw tokens for the positions after the prompt, int32 [rows, length], of logits float32 [rows, length, vocab]."""
    rows, length = logits.shape[:2]
    position = torch.arange(prompt, prompt + length, dtype=torch.int32, device=keys.device).repeat(rows)
    temperature = torch.full((rows * length,), temperature_value, device=keys.device)
    return sample(logits.flatten(0, 1), temperature, keys.repeat_interleave(length, 0), position).view(rows, length)


def scored(model: TrainableDecoder, rows: Tensor, prompt: int) -> Tensor:
    """Return the logits for the tokens after the prompt, float32 [rows, length, vocab]."""
    return model.logits(model.hidden(rows)[:, prompt - 1 : -1]).float()


@torch.no_grad()
def draft_hits(draft: TrainableDecoder, text: Text) -> Tensor:
    """Return whether a draft model draws each token of a text after the tokens before it, bool [rows, length]."""
    temperature = text.temperature or 0.0
    hits = [
        draw(scored(draft, rows, text.prompt), text.prompt, temperature, keys) == rows[:, text.prompt :]
        for rows, keys in text.parts()
    ]
    return torch.cat(hits)


@torch.no_grad()
def head_hits(target: TrainableDecoder, heads: MedusaModule, text: Text) -> Tensor:
    """Return how often the text's token is the candidate of each rank of each head, float64 [heads, RANKS]."""
    ranks = min(RANKS, target.spec.vocab_size)
    hits = torch.zeros(len(heads), ranks, dtype=torch.float64)
    places = text.length - len(heads)
    for rows, _ in text.parts():
        hidden = target.hidden(rows)[:, text.prompt - 1 : text.prompt - 1 + places]
        for index, head in enumerate(heads):
            candidates = target.logits(head(hidden)).topk(ranks, -1).indices
            start = text.prompt + index + 1
            hits[index] += (candidates == rows[:, start : start + places].unsqueeze(-1)).double().sum((0, 1)).cpu()
    return hits / (len(text.rows) * places)


@torch.no_grad()
def recurrent_figures(target: TrainableDecoder, draft: RecurrentModule, text: Text) -> dict[str, Any]:
    """Measure chains after every token of a text.

    Returns:
        kept: how often each place of a chain is kept if all before it were. kept_of_N: tokens kept of N. ranks: for each place, how
        often the draw of each rank is right if the best draws of the places before were.
    """
    drawn_ranks = torch.cat([draw_ranks(target, draft, rows, keys, text) for rows, keys in text.parts()])
    kept, ranks = torch.ones(len(drawn_ranks), dtype=torch.bool, device=drawn_ranks.device), []
    expected = 0.0
    for place in range(DEPTH):
        here = drawn_ranks[kept, place]
        ranks.append([float((here == rank).double().sum()) / max(1, len(here)) for rank in range(DRAWS)])
        kept &= drawn_ranks[:, place] == 0
        expected += float(kept.double().mean())
    return {"kept": [row[0] for row in ranks], f"kept_of_{DEPTH}": expected, "ranks": ranks}


def draw_ranks(target: TrainableDecoder, draft: RecurrentModule, rows: Tensor, keys: Tensor, text: Text) -> Tensor:
    """Return how many tokens a draft prefers to the text's, int64 [chains, DEPTH]; all of its tokens if it has not the text's."""
    targets, state, ranks = teacher_targets(target, draft, rows, TEMPERATURE), None, []
    last = torch.arange(text.prompt - 1, rows.shape[1] - DEPTH, device=rows.device)  # known tokens
    for depth in range(1, DEPTH + 1):
        here = targets.at(depth)
        state = draft(
            targets.hidden.float() if state is None else state, here.text, here.k.float(), here.v.float(), here.rotary
        )
        wanted = here.next_index[:, last - 1]
        for row, key in enumerate(keys):
            logits = draft.lm_head(state[row, last - 1]).float()
            if text.temperature:
                noise = draw_key(key.expand(len(last), 2), (last + depth).int(), Purpose.TOKEN)
                logits -= text.temperature * exponential(noise, draft.ids.int()).log()
            score = logits.gather(1, wanted[row].clamp(min=0).unsqueeze(1)).masked_fill(
                (wanted[row] < 0).unsqueeze(1), -torch.inf
            )
            ranks.append((logits > score).sum(1))
    return torch.stack(ranks).view(DEPTH, -1).T


def chain_rates(hits: Tensor, depth: int) -> list[float]:
    """Return how often each of `depth` places of a chain is kept if all before it were. Chains start at every token.

    hits: bool [rows, tokens], whether the drafted token at each place is right.
    """
    starts = hits.shape[1] - depth + 1
    alive, rates = torch.ones_like(hits[:, :starts]), []
    for place in range(depth):
        reached, alive = alive, alive & hits[:, place : place + starts]
        rates.append(float(alive.sum() / reached.sum().clamp(min=1)))
    return rates


def mean_rates(rates: Sequence[Tensor]) -> list[list[float]]:
    """Return the mean of rates [places][ranks] over texts, rounded, as the accuracies of a draft's config.json."""
    return [[round(float(value), 5) for value in row] for row in torch.stack(list(rates)).mean(0)]
