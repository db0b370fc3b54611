"""Device drafters: what computes the next step's drafts at the end of a step, without the host.

Their tokens stand in the rows behind what a row knows, node by node, where the next step's gather finds them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ridgeline.core.spec import LayerSpec
from ridgeline.ops.noise import Purpose
from ridgeline.ops.rows import Int, RowState
from ridgeline.ops.sample import greedy
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import ChainStart, Ops

Views = Callable[[torch.Tensor], Sequence[KvView]]
"""slots int64 [groups, T] of query tokens -> views of a drafter's own layers, then of those of the target that it attends to."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows that have just drawn. rows: int32 [S]; temperatures: float32 [R], of all rows; hidden: [S, d_model], where the
    target drew the last token of each. longest: most slots any row holds. greedy: no row samples."""

    state: RowState
    rows: torch.Tensor
    temperatures: torch.Tensor
    hidden: torch.Tensor
    longest: int
    greedy: bool

    def write(self, place: torch.Tensor, tokens: torch.Tensor) -> None:
        """tokens int32 [S, n] at places int32 [S, n] of the rows."""
        width = self.state.tokens.shape[1]
        at = self.rows.unsqueeze(1) * width + place
        self.state.tokens.view(-1).index_copy_(0, at.long().flatten(), tokens.flatten())

    @property
    def temperature(self) -> torch.Tensor:
        """Of each row that has drawn, float32 [S]."""
        return self.temperatures.index_select(0, self.rows)

    @property
    def known(self) -> torch.Tensor:
        """Tokens that each row knows, int32 [S]."""
        return self.state.ints[:, Int.KNOWN].index_select(0, self.rows)


def draw_draft(
    ops: Ops,
    behind: DraftRows | ChainStart,
    logits: torch.Tensor,
    place: torch.Tensor,
    ids: torch.Tensor | None,
    vocab: int,
) -> torch.Tensor:
    """The token of each row, int32 [S], at its place int32 [S], with the noise that the target has there. logits [S, N]: of tokens
    ids int32 [N]; None: of all `vocab`."""
    if behind.greedy:
        token = greedy(logits)
        return token if ids is None else ids.index_select(0, token)
    if ids is not None:
        # The noise belongs to the token, so that the draft draws with the target's.
        every = logits.new_full((len(logits), vocab), float("-inf"))
        logits = every.index_copy_(1, ids.long(), logits)
    key = behind.state.ints.index_select(0, behind.rows)[:, Int.KEY : Int.KEY + 2]
    return ops.sampler.sample(logits, behind.temperature, key, place, Purpose.TOKEN)


class DeviceDrafter:
    """Functions of device buffers that never wait for the device, as DeviceStep is. A drafter states what it does; by itself this
    has no layers, reads and learns nothing, and drafts chains of no nodes."""

    layers: tuple[LayerSpec, ...] = ()
    """Its own layers, whose keys and values lie in the target's pages."""
    attended: tuple[int, ...] = ()
    """Layers of the target whose keys and values it reads."""
    parents: tuple[int, ...] = ()
    """Of its largest draft; those of a smaller one are their first. Empty: chains."""

    def learns(self) -> bool:
        """Asked once for each step that no graph runs: whether `see` has a use for its logits."""
        return False

    def read(self, tokens: torch.Tensor, views: Views, slots: torch.Tensor, step: StepInputs) -> None:
        """Query tokens int32 [T]: of a step that holds a part of a prompt, or said while nothing was drafted."""

    def see(self, state: RowState, rows: torch.Tensor, place: torch.Tensor, logits: torch.Tensor) -> None:
        """The target's logits [N, V] for the tokens at places int32 [N] of device rows int32 [N]: those behind the
        tokens at the places before."""

    def draft(self, behind: DraftRows, count: int, views: Views) -> torch.Tensor | None:
        """Write `count` nodes behind what each row knows, all of which but the last two tokens it has read. -> int32 [S] on the
        host, how many of the first ones are worth verifying; None: all."""
        return None


class NoDrafter(DeviceDrafter):
    """Drafts nothing."""
