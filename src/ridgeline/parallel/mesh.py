"""The mesh: which share of the model this process holds, and the collectives between the shares, as one value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ridgeline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Mesh:
    """This process's place among `size` ranks that hold one replica together. With one rank every collective is x."""

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"Rank {self.rank} does not exist in a mesh of {self.size} ranks.")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of every rank's x, same shape on each."""
        return x if self.size == 1 else self._refuse()

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's x side by side along the last dimension, in rank order."""
        return x if self.size == 1 else self._refuse()

    def _refuse(self) -> torch.Tensor:
        raise ConfigError(f"A mesh of {self.size} ranks is not supported yet: run with one device.")


ONE_DEVICE = Mesh()
