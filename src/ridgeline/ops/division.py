"""Which tokens of a step each rank has, where ranks divide requests (ops.divided)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Division:
    """How ranks that divide requests hold the T tokens of a step: each has `share` places, with the tokens of its rows in order.

    order: int64 [ranks, share], the token at each place, -1 where there is none. place: int64 [T], rank * share + the token's place
    on its rank; 0 for a token of the scratch row, which no rank has.
    """

    order: torch.Tensor
    place: torch.Tensor

    def joined(self, parts: torch.Tensor) -> torch.Tensor:
        """The places [ranks, share, ...] of all ranks in the order of the step, [T, ...]."""
        return parts.flatten(0, 1).index_select(0, self.place)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens [T, ...] at the places of each rank, [ranks, share, ...]. A place without a token has any of them."""
        return x.index_select(0, self.order.clamp(min=0).flatten()).unflatten(0, self.order.shape)
