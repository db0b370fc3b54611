"""Rows of tokens drawn from the pools that data.py wrote, in the proportions of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

# Shares of tokens. Short kinds are repeated more often than books; conversations come mostly at the end, while the step size falls.
MAIN = {
    "prose": 0.35, "docs": 0.27, "code": 0.25, "math": 0.010, "dialogue": 0.010,
    "chat-prose": 0.02, "chat-docs": 0.03, "chat-code": 0.03, "chat-math": 0.010, "chat-dialogue": 0.006,
    "chat-tools": 0.012, "chat-talk": 0.002,
}  # fmt: skip
FINAL = {
    "prose": 0.27, "docs": 0.18, "code": 0.19, "math": 0.015, "dialogue": 0.012,
    "chat-prose": 0.07, "chat-docs": 0.075, "chat-code": 0.09, "chat-math": 0.030, "chat-dialogue": 0.018,
    "chat-tools": 0.042, "chat-talk": 0.008,
}  # fmt: skip

# The second run. CHAT: conversations of every kind in every row, beginning with one. TEXT: documents of every kind, and conversations
# after documents.
CHAT = {
    "chat-tools": 0.27, "chat-talk": 0.13, "chat-code": 0.20, "chat-docs": 0.17, "chat-prose": 0.16, "chat-math": 0.05,
    "chat-dialogue": 0.02,
}  # fmt: skip
TEXT = {
    "prose": 0.32, "docs": 0.25, "code": 0.25, "math": 0.02, "dialogue": 0.01,
    "chat-tools": 0.05, "chat-talk": 0.02, "chat-code": 0.03, "chat-docs": 0.02, "chat-prose": 0.02, "chat-math": 0.005,
    "chat-dialogue": 0.005,
}  # fmt: skip
END_OF_TEXT, TURN_START, TURN_END, ASSISTANT = 0, 1, 2, 453  # ids; "<|im_start|>" and the first token of "assistant"
HEADER = 4  # tokens of "<|im_start|>assistant\n"
BLENDED = 16 * 2**20  # tokens put in order at once


class Pool:
    """The documents of one pool, on the device, in a new random order in every epoch."""

    def __init__(self, folder: Path, name: str, device: torch.device) -> None:
        self.ids = torch.from_numpy(np.load(folder / f"{name}.ids.npy").astype(np.int16)).to(device)
        self.lengths = torch.from_numpy(np.load(folder / f"{name}.lengths.npy").astype(np.int64)).to(device)
        self.starts = self.lengths.cumsum(0) - self.lengths
        self.whole = "chat-" in name  # rows of conversations begin with one, as a served prompt does
        self.epochs = 0

    def shuffled(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """All tokens [n] in a new order of documents, and where each document starts."""
        self.epochs += 1
        order = torch.randperm(len(self.lengths), generator=generator).to(self.ids.device)
        lengths = self.lengths[order]
        starts = lengths.cumsum(0) - lengths
        index = torch.arange(len(self.ids), device=self.ids.device) + (self.starts[order] - starts).repeat_interleave(
            lengths
        )
        return self.ids[index], starts

    def rows(self, tokens: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Rows [tokens + 1] int16 without end; every epoch cuts the stream at other places."""
        while True:
            stream, documents = self.shuffled(generator)
            if len(stream) <= 2 * tokens:
                stream = stream.repeat(2 * tokens // len(stream) + 2)
            phase = int(torch.randint(tokens, (1,), generator=generator))
            starts = torch.arange(phase, len(stream) - tokens - 1, tokens, device=stream.device)
            if self.whole:
                nearest = documents[torch.searchsorted(documents, starts).clamp(max=len(documents) - 1)] + 1
                starts = nearest[nearest + tokens < len(stream)]
            for start in starts.tolist():
                yield stream[start : start + tokens + 1]


class Mixture:
    """Batches of rows, each row from a pool drawn by its share."""

    def __init__(self, pools: dict[str, Pool], shares: dict[str, float], tokens: int, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens = tokens
        self.shares = torch.tensor([shares[name] for name in pools])
        self.rows = [pool.rows(tokens, self.generator) for pool in pools.values()]

    def batch(self, size: int) -> Tensor:
        """Rows [size, tokens + 1] int64."""
        drawn = torch.multinomial(self.shares, size, replacement=True, generator=self.generator)
        return torch.stack([next(self.rows[index]) for index in drawn.tolist()]).long()


def answers_only(ids: Tensor) -> Tensor:
    """Conversations [n] int16 with every token x outside the assistant's turns as ~x, which is not scored (model.py)."""
    at = torch.arange(len(ids), device=ids.device)
    begins = ids == TURN_START
    turn = torch.where(begins, at, 0).cummax(0).values  # where the turn of each token begins
    ended = torch.where(ids == TURN_END, at, -1).cummax(0).values.roll(1)  # the last end before each token
    said = (ids[(turn + 1).clamp(max=len(ids) - 1)] == ASSISTANT) & (at >= turn + HEADER) & (ended < turn)
    return torch.where(said, ids, ~ids)


class Deck:
    """The documents of one pool in random order, shuffled anew when all are dealt."""

    def __init__(self, pool: Pool, first: int) -> None:
        self.pool, self.first = pool, first
        self.order = torch.empty(0, dtype=torch.long, device=pool.ids.device)

    def deal(self, tokens: int, generator: torch.Generator) -> Tensor:
        """Numbers of the next documents, of at least `tokens` tokens together, counted from `first`."""
        dealt = []
        while tokens > 0:
            if len(self.order) == 0:
                self.order = torch.randperm(len(self.pool.lengths), generator=generator).to(self.order.device)
                self.pool.epochs += 1
            sizes = self.pool.lengths[self.order].cumsum(0)
            count = min(int(torch.searchsorted(sizes, tokens)) + 1, len(sizes))
            dealt.append(self.order[:count] + self.first)
            tokens -= int(sizes[count - 1])
            self.order = self.order[count:]
        return torch.cat(dealt)


class Blend:
    """Batches of rows in which documents of several pools follow one another in random order.

    A row begins with a document's second token with probability `whole` (as a served prompt begins, without <|endoftext|>),
    now and then with its <|endoftext|>, and anywhere else otherwise. Of conversations only the assistant's turns are scored.
    """

    def __init__(self, pools: dict[str, Pool], shares: dict[str, float], tokens: int, seed: int, whole: float) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens, self.whole, self.shares = tokens, whole, shares
        used = [pools[name] for name in shares]
        self.ids = torch.cat([answers_only(pool.ids) if pool.whole else pool.ids for pool in used])
        self.lengths = torch.cat([pool.lengths for pool in used])
        self.starts = self.lengths.cumsum(0) - self.lengths
        firsts = np.cumsum([0, *(len(pool.lengths) for pool in used)])
        self.decks = [Deck(pool, int(first)) for pool, first in zip(used, firsts, strict=False)]
        self.waiting: list[Tensor] = []

    def stream(self, wanted: int) -> tuple[Tensor, Tensor]:
        """About `wanted` tokens [n] of documents in random order, and where each document begins."""
        shares = self.shares.values()
        dealt = [deck.deal(int(wanted * s), self.generator) for deck, s in zip(self.decks, shares, strict=True)]
        order = torch.cat(dealt)
        order = order[torch.randperm(len(order), generator=self.generator).to(order.device)]
        lengths = self.lengths[order]
        begins = lengths.cumsum(0) - lengths
        moved = (self.starts[order] - begins).repeat_interleave(lengths)
        return self.ids[torch.arange(len(moved), device=moved.device) + moved], begins

    def refill(self, size: int) -> None:
        """Deal, shuffle and cut a new stream into batches of `size` rows."""
        stream, begins = self.stream(max(BLENDED, 4 * size * self.tokens))
        at = torch.arange(0, len(stream) - self.tokens - 1, self.tokens, device=stream.device)
        draw = torch.rand(len(at), generator=self.generator).to(at.device)
        nearest = begins[torch.searchsorted(begins, at).clamp(max=len(begins) - 1)]
        at = torch.where(draw < self.whole, nearest + 1, torch.where(draw < self.whole + 0.15, nearest, at))
        at = at[at + self.tokens < len(stream)]
        at = at[torch.randperm(len(at), generator=self.generator).to(at.device)]
        span = torch.arange(self.tokens + 1, device=at.device)
        self.waiting = [stream[rows[:, None] + span] for rows in at.split(size) if len(rows) == size]

    def batch(self, size: int) -> Tensor:
        """Rows [size, tokens + 1] int64; tokens not to be scored as ~id."""
        if not self.waiting:
            self.refill(size)
        return self.waiting.pop().long()


def load(folder: Path, device: torch.device) -> dict[str, Pool]:
    return {name: Pool(folder, f"train-{name}", device) for name in MAIN}
