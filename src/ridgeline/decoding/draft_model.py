"""A draft model: a small decoder of the same vocabulary says the next tokens one after the other (Leviathan et al. 2023; Chen
et al. 2023).

Its layers lie in the target's pages: a slot of a row holds keys and values of both, so that one lease, one prefix hit and
one compaction serve both. It draws with the target's own noise, see decoding.verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec, ModelSpec
from ridgeline.decoding.drafters import Behind, Views
from ridgeline.models.build import LoadedModel
from ridgeline.ops.noise import Purpose
from ridgeline.ops.rows import Int, RowState, Spread
from ridgeline.ops.sample import greedy
from ridgeline.ops.step import StepInputs

_UNREAD = 2
"""Tokens that a row has not read when all it drafted was kept: its last draft, and what was drawn behind it."""


def check_draft(draft: ModelSpec, target: ModelSpec) -> None:
    """Raises ConfigError if the draft's tokens mean something else, or its context is too short."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"The draft model has {draft.vocab_size} tokens, the served model {target.vocab_size}: their ids mean "
            "different texts. Take a draft with the same tokenizer.",
            param="speculate",
        )
    if draft.max_len < target.max_len:
        raise ConfigError(
            f"The draft model's context of {draft.max_len} tokens is shorter than the served {target.max_len}: lower "
            f"--max-model-len to {draft.max_len}, or take another draft.",
            param="speculate",
        )


class DraftModel:
    """A loaded decoder that drafts chains; see decoding.drafters.DeviceDrafter."""

    parents: tuple[int, ...] = ()

    def __init__(self, model: LoadedModel) -> None:
        self._decoder, self._ops = model.decoder, model.ops
        self.layers: tuple[LayerSpec, ...] = model.spec.layers

    def read(self, tokens: torch.Tensor, views: Views, slots: torch.Tensor, step: StepInputs) -> None:
        """Keys and values of a prompt's part. What its kernels derive from a step, they derive anew for its layers."""
        self._decoder.forward(tokens, views(slots), replace(step))

    def see(self, state: RowState, rows: torch.Tensor, place: torch.Tensor, logits: torch.Tensor) -> None:
        """It learns nothing."""

    def draft(self, behind: Behind, count: int, unread: Sequence[int], views: Views) -> None:
        """Read what is new, then say one token after the other; each is read as the next one is said."""
        rows, known = behind.rows, behind.known
        # The rows themselves stay where they are: only this copy moves along the draft.
        state = replace(behind.state, ints=behind.state.ints.clone())
        place = state.ints[:, Int.POSITION : Int.LENGTH + 1]
        hidden = self._catch_up(replace(behind, state=state), unread, views)
        place += 1
        for node in range(count):
            logits = self._decoder.logits(hidden)
            at = known + node
            if behind.greedy:
                token = greedy(logits)
            else:
                key = state.ints.index_select(0, rows)[:, Int.KEY : Int.KEY + 2]
                token = self._ops.sample(logits, behind.temperature, key, at, Purpose.TOKEN)
            behind.write(at.unsqueeze(1), token.unsqueeze(1))
            if node + 1 < count:
                hidden = self._run(behind, state, None, 1, views)
                place += 1

    def _catch_up(self, behind: Behind, unread: Sequence[int], views: Views) -> torch.Tensor:
        """Read each row's last tokens, `unread` of them or two; hidden states of the last one, [S, d_model]."""
        rows, device = behind.rows, behind.rows.device
        counts = torch.full_like(rows, _UNREAD)
        if unread:
            counts = torch.tensor([*unread, *[_UNREAD] * (len(rows) - len(unread))], dtype=torch.int32).to(device)
        most = max(unread, default=_UNREAD)
        total = sum(unread) + _UNREAD * (len(rows) - len(unread))
        row_of = torch.repeat_interleave(
            torch.arange(len(rows), dtype=torch.int32, device=device), counts, output_size=total
        )
        ends = counts.cumsum(0, dtype=torch.int32)
        number = torch.arange(total, dtype=torch.int32, device=device) - (ends - counts)[row_of.long()]
        back = behind.state.ints[:, Int.POSITION : Int.LENGTH + 1]
        shift = torch.zeros(len(back), dtype=torch.int32, device=device).index_copy_(0, rows.long(), counts - 1)
        back -= shift.unsqueeze(1)
        hidden = self._run(behind, behind.state, Spread(counts, row_of, number), most, views)
        back += shift.unsqueeze(1)
        return hidden.index_select(0, ends - 1)

    def _run(self, behind: Behind, state: RowState, spread: Spread | None, most: int, views: Views) -> torch.Tensor:
        """One pass over the rows' next tokens."""
        rows = behind.rows
        count = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        got = self._ops.gather(state, rows, spread)
        q_start, row_of = count, count[:-1]
        if spread is not None:
            q_start = torch.cat((count[:1], spread.n_query.cumsum(0, dtype=torch.int32)))
            row_of = spread.row_of
        step = StepInputs(rows, q_start, got.length, got.position, row_of, most, behind.longest)
        return self._decoder.forward(got.tokens, views(got.slots), step)
