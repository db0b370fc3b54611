"""Token recycling: what the target thought likely behind a token last time is drafted behind it again (Luo et al. 2024,
"Turning Trash into Treasure"). No model, no training: a table of each token's likeliest successors, and a fixed tree."""

from __future__ import annotations

import torch

from ridgeline.ops.rows import RowState
from ridgeline.speculation.device import DeviceDrafter, DraftRows, Views

WIDTH = 8
"""Successors kept of each token."""
TREE = (
    (-1, 0), (0, 0), (-1, 1), (1, 0), (0, 1), (2, 0), (-1, 2), (3, 0),
    (1, 1), (6, 0), (4, 0), (5, 0), (7, 0), (-1, 3), (0, 2), (2, 1),
)  # fmt: skip
"""Nodes by how often they are kept on mixed text: (parent, which of its successors)."""


_QUIET, _SELDOM = 1, 256
"""On a CPU, after so many steps for which nothing was drafted only every so many-th is learned from: such a step is not recorded
(ops.capture), and a small model's takes up to twice as long."""


class Recycling(DeviceDrafter):
    """The table of one engine, shared by its requests. It is written by every step (prompts teach nothing: their logits are not
    computed) and decides nothing but how fast a request is."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._table = torch.arange(WIDTH, dtype=torch.int32, device=device).repeat(vocab, 1)
        self.parents = tuple(parent for parent, _ in TREE)
        self._unused = 0
        """Steps since something was drafted; what they decide is for a CPU alone, since a CUDA graph runs all that it captured."""
        self._may_rest = device.type == "cpu"

    def learns(self) -> bool:
        self._unused += 1
        return not self._may_rest or self._unused <= _QUIET or self._unused % _SELDOM == 0

    def see(self, state: RowState, rows: torch.Tensor, place: torch.Tensor, logits: torch.Tensor) -> None:
        """Of tokens that come more than once in a step, some one's successors are kept."""
        before = state.tokens.view(-1).index_select(0, (rows * state.tokens.shape[1] + place - 1).long())
        self._table.index_copy_(0, before.long(), torch.topk(logits, WIDTH, dim=-1).indices.int())

    def draft(self, behind: DraftRows, count: int, views: Views) -> None:
        """Level by level, since a node's successors are looked up by its own token."""
        self._unused = 0
        known = behind.known
        root = behind.state.tokens.view(-1).index_select(
            0, (behind.rows * behind.state.tokens.shape[1] + known - 1).long()
        )
        tokens: list[torch.Tensor] = []
        for parent, rank in TREE[:count]:
            above = root if parent < 0 else tokens[parent]
            tokens.append(self._table[:, rank].index_select(0, above))
        nodes = torch.arange(count, dtype=torch.int32, device=known.device)
        behind.write(known.unsqueeze(1) + nodes, torch.stack(tokens, dim=1))
