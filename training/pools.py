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
        self.shares = torch.tensor([shares[name] for name in pools])
        self.rows = [pool.rows(tokens, self.generator) for pool in pools.values()]

    def batch(self, size: int) -> Tensor:
        """Rows [size, tokens + 1] int64."""
        drawn = torch.multinomial(self.shares, size, replacement=True, generator=self.generator)
        return torch.stack([next(self.rows[index]) for index in drawn.tolist()]).long()


def load(folder: Path, device: torch.device) -> dict[str, Pool]:
    return {name: Pool(folder, f"train-{name}", device) for name in MAIN}
