"""Token recycling: drafts after a token the successors that the target found most probable at its last occurrence (Luo et al. 2024,
"Turning Trash into Treasure"). It needs no weights: a table holds the successors of each token, and the tree is fixed."""

from __future__ import annotations

import torch

from ridgeline.ops.rows import RowState
from ridgeline.speculation.device import DeviceDrafter, DraftRows, Views

WIDTH = 8
"""Number of successors stored for each token."""
TREE = (
    (-1, 0), (0, 0), (-1, 1), (1, 0), (0, 1), (2, 0), (-1, 2), (3, 0),
    (1, 1), (6, 0), (4, 0), (5, 0), (7, 0), (-1, 3), (0, 2), (2, 1),
)  # fmt: skip
"""Nodes in descending order of acceptance on mixed text: (parent, rank of the successor)."""


_QUIET, _SELDOM = 1, 256
"""On a CPU, after _QUIET steps without drafts only every _SELDOM-th step is learned from: such a step is not captured
(ops.capture), and takes up to twice as long with a small model."""


class Recycling(DeviceDrafter):
    """The drafter. All requests of an engine share the table. Every step writes to it, except for prompt tokens, whose logits are
    not computed. It affects only speed, never tokens."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self._table = torch.arange(WIDTH, dtype=torch.int32, device=device).repeat(vocab, 1)
        self.parents = tuple(parent for parent, _ in TREE)
        self._unused = 0
        """Steps since the last draft. Only a CPU skips steps: a CUDA graph always runs all that it captured."""
        self._may_skip = device.type == "cpu"

    def learns(self) -> bool:
        self._unused += 1
        return not self._may_skip or self._unused <= _QUIET or self._unused % _SELDOM == 0

    def see(self, state: RowState, rows: torch.Tensor, place: torch.Tensor, logits: torch.Tensor) -> None:
        """Store the successors. If a token occurs several times in a step, any one of the occurrences wins."""
        before = state.tokens.view(-1).index_select(0, (rows * state.tokens.shape[1] + place - 1).long())
        self._table.index_copy_(0, before.long(), torch.topk(logits, WIDTH, dim=-1).indices.int())

    def draft(self, draft_rows: DraftRows, count: int, views: Views) -> None:
        """Write the nodes in order: the token of a node selects the successors for its children."""
        self._unused = 0
        known = draft_rows.known
        root = draft_rows.state.tokens.view(-1).index_select(
            0, (draft_rows.rows * draft_rows.state.tokens.shape[1] + known - 1).long()
        )
        tokens: list[torch.Tensor] = []
        for parent, rank in TREE[:count]:
            parent_token = root if parent < 0 else tokens[parent]
            tokens.append(self._table[:, rank].index_select(0, parent_token))
        nodes = torch.arange(count, dtype=torch.int32, device=known.device)
        draft_rows.write(known.unsqueeze(1) + nodes, torch.stack(tokens, dim=1))
