"""Tokens of each expert, read from the device now and then, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ridgeline.core.expert_parallel import rank_tokens
from ridgeline.core.experts import ExpertSpec

EVERY = 64
"""Steps from one reading to the next. A reading is one small kernel and one copy."""


class ExpertLoad:
    """Reads the counters of a decoder's experts (models.experts.Experts.load), one for each layer that has experts.

    experts: of these layers, on a rank.

    On a GPU a copy to the host starts with one reading and is taken with the next.
    """

    __slots__ = ("_copied", "_experts", "_loads", "_seen", "_waiting")

    def __init__(self, loads: Sequence[torch.Tensor] = (), experts: Sequence[ExpertSpec] = ()) -> None:
        self._loads, self._experts = tuple(loads), experts
        self._seen: torch.Tensor | None = None
        self._waiting: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def take(self, step: int) -> list[list[int]]:
        """Tokens of each expert by layer, since the last reading that returned any; [] in most steps."""
        if not self._loads or step % EVERY:
            return []
        ready, self._waiting = self._waiting, None
        if self._loads[0].is_cuda:
            if self._copied is not None:
                self._copied.synchronize()  # the copy started EVERY steps ago
            now = torch.stack(self._loads)
            self._waiting = torch.empty(now.shape, dtype=now.dtype, pin_memory=True)
            self._waiting.copy_(now, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            ready = torch.stack(self._loads)
        if ready is None:
            return []
        since = ready if self._seen is None else ready - self._seen
        self._seen = ready
        return since.tolist()  # type: ignore[no-any-return]

    def by_rank(self, tokens: list[list[int]]) -> list[list[int]]:
        """(Token, choice) pairs that each rank computes, by layer, of a reading. [] if ranks do not divide the experts."""
        pairs = zip(tokens, self._experts, strict=True)
        return [rank_tokens(counts, experts) for counts, experts in pairs if experts.ranks > 1]
