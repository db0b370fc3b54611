"""Medusa heads as a device drafter: a fixed tree of their candidates behind the last drawn token (Cai et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ridgeline.speculation.device import DeviceDrafter, DraftRows, Views
from ridgeline.speculation.heads import MedusaHeads, tree

UNMEASURED = ((0.6, 0.12, 0.06, 0.03), (0.4, 0.1, 0.05), (0.25, 0.08, 0.04), (0.15, 0.05))
"""Accuracies by head and rank for a folder without them (the order of magnitude of figure 8 in Cai et al.). They only shape the
tree."""


class Medusa(DeviceDrafter):
    """The drafter. logits_of: the target's head. nodes: most nodes of a draft."""

    def __init__(self, heads: MedusaHeads, logits_of: Callable[[torch.Tensor], torch.Tensor], nodes: int) -> None:
        self._heads, self._logits_of = heads, logits_of
        self.nodes = tree((heads.accuracies or UNMEASURED)[: heads.heads], nodes)
        self.parents = tuple(node.parent for node in self.nodes)

    def draft(self, draft_rows: DraftRows, count: int, views: Views) -> None:
        """Compute the candidates of all heads at once, then write the candidate of each node."""
        nodes = self.nodes[:count]
        top = [
            max(node.rank + 1 for node in nodes if node.head == head) for head in sorted({node.head for node in nodes})
        ]
        candidates = self._heads.candidates(draft_rows.hidden, top, self._logits_of)
        tokens = torch.stack([candidates[:, node.head, node.rank] for node in nodes], dim=1)
        number = torch.arange(count, dtype=torch.int32, device=tokens.device)
        draft_rows.write(draft_rows.known.unsqueeze(1) + number, tokens)
