"""Axis: ranks that work together along one dimension of the mesh, and their collectives. With one rank these are the identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ridgeline.core.errors import ConfigError, EngineFailed
from ridgeline.parallel.group import Group


@dataclass(frozen=True, slots=True)
class Axis:
    """Rank of this process among `size` ranks.

    group: of the ranks, see parallel.connect. None: the rank can be built and loaded, but not run. Collectives raise EngineFailed
    if another rank has ended or does not answer within the timeout of the group. On a GPU they only enqueue work; the first rank
    watches the others (engine.group) and aborts the group of a lost one.
    """

    rank: int = 0
    size: int = 1
    group: Group | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"Rank {self.rank} does not exist in a mesh of {self.size} ranks.")

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of x over all ranks, bitwise equal on each. The result may overwrite x."""
        if self.size == 1:
            return x
        x = x.contiguous()
        self._run(lambda group: group.all_reduce(x))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x [...] of all ranks, in their order: [size, ...]."""
        if self.size == 1:
            return x.unsqueeze(0)
        x, parts = x.contiguous(), x.new_empty((self.size, *x.shape))
        self._run(lambda group: group.all_gather(parts, x))
        return parts

    def gather_columns(self, x: torch.Tensor, length: int) -> torch.Tensor:
        """The parts x [..., n] of all ranks side by side, cut to [..., length]. With one rank x as it is."""
        return x if self.size == 1 else torch.cat(self.all_gather(x).unbind(0), -1)[..., :length]

    def exchange(self, x: torch.Tensor) -> torch.Tensor:
        """x [size, ...]: what this rank has for each rank. Returns what each rank has for this one, [size, ...]."""
        if self.size == 1:
            return x
        x = x.contiguous()
        received = torch.empty_like(x)
        self._run(lambda group: group.exchange(received, x))
        return received

    def sum_rows(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """Sum of x [T, ...] over all ranks: all rows if `rows` is T, else the part of this rank, of `rows` rows (a reduce-scatter;
        ranks have consecutive parts, the last ones padded with zeros)."""
        if rows == len(x):
            return self.all_reduce(x)
        if padding := rows * self.size - len(x):
            x = torch.cat((x, x.new_zeros(padding, *x.shape[1:])))
        return self.exchange(x.unflatten(0, (self.size, rows))).sum(0)

    def _run(self, collective: Callable[[Group], None]) -> None:
        if self.group is None:
            raise ConfigError(f"Rank {self.rank} of {self.size} is not connected to the other ranks.")
        try:
            collective(self.group)
        except RuntimeError as error:
            raise EngineFailed(f"Rank {self.rank} of {self.size} lost the other ranks: {error}") from error


ALONE = Axis()
