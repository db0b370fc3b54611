"""Device drafters compute the drafts of the next step on the device, at the end of a step, without the host.

They write draft tokens into the row table after the known tokens of each row, where the gather of the next step reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ridgeline.core.drafting import NO_DRAFT_WORK, DraftWork
from ridgeline.core.spec import LayerSpec
from ridgeline.models.decoder import Decoder
from ridgeline.ops.noise import Purpose
from ridgeline.ops.rows import ChainStart, Gathered, Int, RowState
from ridgeline.ops.sample import greedy
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Ops

Views = Callable[[torch.Tensor], Sequence[KvView]]
"""Slots int64 [groups, T] of query tokens -> views of the drafter's own layers, then of the target's layers that it attends to."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows that have just drawn a token. rows: int32 [S], device rows. temperatures: float32 [R], of all rows. hidden: [S, W],
    the target's states (DeviceDrafter.states) from which the last tokens were drawn. longest: most slots of a row. greedy: all rows
    are greedy."""

    state: RowState
    rows: torch.Tensor
    temperatures: torch.Tensor
    hidden: torch.Tensor
    longest: int
    greedy: bool

    def write(self, place: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write tokens int32 [S, n] at places int32 [S, n] of the rows."""
        width = self.state.tokens.shape[1]
        at = self.rows.unsqueeze(1) * width + place
        self.state.tokens.view(-1).index_copy_(0, at.long().flatten(), tokens.flatten())

    @property
    def temperature(self) -> torch.Tensor:
        """Temperature of each row, float32 [S]."""
        return self.temperatures.index_select(0, self.rows)

    @property
    def known(self) -> torch.Tensor:
        """Number of known tokens of each row, int32 [S]."""
        return self.state.ints[:, Int.KNOWN].index_select(0, self.rows)


@dataclass(frozen=True, slots=True)
class QueryTokens:
    """Query tokens of a step, int32 [T], as a drafter reads them. slots: int64 [groups, T], where their keys go. features: [T, F],
    the target's states of them that DeviceDrafter.states returned; None: the target did not run."""

    state: RowState
    tokens: torch.Tensor
    slots: torch.Tensor
    step: StepInputs
    features: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DrawnTokens:
    """Tokens int32 [N] that a step drew, one after the last known token of each row that draws and after each node of its draft.
    states: [N, W], as in DraftRows.hidden. query: gathers the tokens with these states; only within DeviceDrafter.follow."""

    tokens: torch.Tensor
    states: torch.Tensor
    query: Callable[[], tuple[Gathered, StepInputs]]


class DraftDraws:
    """Draws the draft tokens of rows, with the noise of the target.

    ids: int32 [N], the tokens of the logits; None: their indices.
    """

    def __init__(self, ops: Ops, draft_rows: DraftRows | ChainStart, ids: torch.Tensor | None) -> None:
        self._ops, self._ids, self._greedy = ops, ids, draft_rows.greedy
        if not draft_rows.greedy:
            self._temperature = draft_rows.temperature
            ints = draft_rows.state.ints.index_select(0, draft_rows.rows)
            self._key = ints[:, Int.KEY : Int.KEY + 2]

    def __call__(self, logits: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        """The tokens int32 [S] at places int32 [S], from logits [S, N]."""
        if self._greedy:
            token = greedy(logits)
            return token if self._ids is None else self._ids.index_select(0, token)
        noise = self._temperature, self._key, place
        if self._ids is not None:
            return self._ops.sampler.sample_among(logits, self._ids, *noise)
        return self._ops.sampler.sample(logits, *noise, Purpose.TOKEN)


class DeviceDrafter:
    """Interface of device drafters, with defaults that do nothing. Methods enqueue work on device buffers and never synchronize."""

    layers: tuple[LayerSpec, ...] = ()
    """Layers of the drafter. Their keys and values are stored in the target's pages."""
    attended: tuple[int, ...] = ()
    """Layers of the target whose keys and values it reads."""
    parents: tuple[int, ...] = ()
    """Parents of the largest draft's nodes; a smaller draft is a prefix. Empty: chains."""
    catches_up = False
    """It reads tokens that rows gained while drafting was off, from their ids alone."""
    extra = 0
    """Elements that `states` appends to the hidden state of each token."""

    work: DraftWork = NO_DRAFT_WORK
    """Counts its FLOPs and bytes."""

    def learns(self) -> bool:
        """Whether `see` needs the logits of the next step. Called once for each step that no graph runs."""
        return False

    def states(
        self,
        target: Decoder,
        tokens: torch.Tensor,
        views: Sequence[KvView],
        step: StepInputs,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the target; arguments as of Decoder.forward. Returns the hidden states, [T or wanted, d_model + extra], and what
        `read` needs of all query tokens, [T, F]."""
        return target.forward(tokens, views, step, wanted), None

    def read(self, query: QueryTokens, views: Views) -> None:
        """Read query tokens of a step with a prompt chunk, or tokens gained while drafting was off."""

    def follow(self, drawn: DrawnTokens, views: Views) -> None:
        """Observe the tokens that a step drew and the states from which it drew them. Called in every step that draws."""

    def see(self, state: RowState, rows: torch.Tensor, place: torch.Tensor, logits: torch.Tensor) -> None:
        """Observe the target's logits [N, V], which predict the tokens at places int32 [N] of device rows int32 [N]."""

    def draft(self, draft_rows: DraftRows, count: int, views: Views) -> torch.Tensor | None:
        """Write `count` draft nodes after the known tokens of each row. The drafter has read all of them except the last two.

        Returns:
            int32 [S] on the host: number of leading nodes that are worth verifying. None: all nodes.
        """
        return None


class NoDrafter(DeviceDrafter):
    """Drafts nothing."""
