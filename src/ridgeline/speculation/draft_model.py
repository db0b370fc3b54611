"""A draft model: a small decoder of the same vocabulary says the next tokens one after the other (Leviathan et al. 2023; Chen
et al. 2023).

Its layers lie in the target's pages: a slot of a row holds keys and values of both, so that one lease, one prefix hit and
one compaction serve both. It draws with the target's own noise, see ops.verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ridgeline.models.build import LoadedModel
from ridgeline.ops.rows import Int, Spread
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import ChainParts, ChainStart, LastTokens, RunChain
from ridgeline.speculation.device import DeviceDrafter, DraftRows, Views, draw_draft

_UNREAD = 2
"""Tokens that a row has not read when all it drafted was kept: its last draft, and what was drawn behind it."""


class DraftModel(DeviceDrafter):
    """A loaded decoder that drafts chains.

    vocabulary: the only tokens that it says, ascending; empty: all. A head is most of a small draft's work, and the most
    frequent tokens are nearly all that it is right about (FR-Spec, Zhao et al. 2025). It takes the decoder's head over.
    """

    def __init__(self, model: LoadedModel, vocabulary: Sequence[int] = ()) -> None:
        self._decoder, self._ops = model.decoder, model.ops
        self.layers = model.spec.layers
        self._ids: torch.Tensor | None = None
        if vocabulary:
            self._ids = torch.tensor(vocabulary, dtype=torch.int32, device=model.decoder.embedding.device)
            model.decoder.restrict_vocabulary(self._ids)
        self._usual: dict[int, LastTokens] = {}
        """By rows: what is read."""
        parts = _chain_parts(model, self._ids)
        self._chain: RunChain = self._step_by_step
        if parts is not None:
            self._chain = self._ops.programs.chain(parts, self._step_by_step)

    def read(self, tokens: torch.Tensor, views: Views, slots: torch.Tensor, step: StepInputs) -> None:
        """Keys and values of a prompt's part. What its kernels derive from a step, they derive anew for its layers."""
        self._decoder.forward(tokens, views(slots), replace(step), tokens[:0])

    def draft(self, behind: DraftRows, count: int, views: Views) -> None:
        """Read the last two tokens, then say one after the other; each is read as the next one is said. A row that has said its end
        stays there: nothing behind it could be kept."""
        # The rows themselves stay where they are: only this copy moves along the draft.
        state, rows = replace(behind.state, ints=behind.state.ints.clone()), behind.rows
        # The scratch row, which stands in for padding, has not so many tokens to read; it is done, and never moves.
        state.ints[0, : Int.KNOWN] = _UNREAD
        last = self._last_tokens(len(rows), rows.device)
        start = ChainStart(state, rows, behind.temperature, last, count, behind.longest, behind.greedy)
        self._chain(start, views)

    def _last_tokens(self, count: int, device: torch.device) -> LastTokens:
        """What `count` rows have not read. Kept: a first run makes it, before a CUDA graph is captured."""
        if (known := self._usual.get(count)) is not None:
            return known
        ones = torch.ones(count, dtype=torch.int32, device=device)
        number = torch.arange(_UNREAD * count, dtype=torch.int32, device=device)
        q_start = torch.arange(0, _UNREAD * count + 1, _UNREAD, dtype=torch.int32, device=device)
        made = LastTokens(ones, q_start, number // _UNREAD, number % _UNREAD - (_UNREAD - 1), _UNREAD)
        self._usual[count] = made
        return made

    def _step_by_step(self, start: ChainStart, views: Views) -> None:
        """The chain on any device."""
        state, rows, hidden = start.state, start.rows, self._catch_up(start, views)
        row_of = start.last.q_start // _UNREAD
        for node in range(start.count):
            self._ops.sampler.advance(state, rows, self._draw(start, hidden))
            if node + 1 < start.count:
                got = self._ops.sampler.gather(state, rows, None)
                step = StepInputs(rows, row_of, got.length, got.position, row_of[:-1], 1, start.longest)
                hidden = self._decoder.forward(got.tokens, views(got.slots), step)

    def _draw(self, start: ChainStart, hidden: torch.Tensor) -> torch.Tensor:
        """The next token of each row, int32 [S]."""
        known = start.state.ints[:, Int.KNOWN].index_select(0, start.rows)
        logits = self._decoder.logits(hidden)
        return draw_draft(self._ops, start, logits, known, self._ids, self._decoder.spec.vocab_size)

    def _catch_up(self, start: ChainStart, views: Views) -> torch.Tensor:
        """Read each row's last tokens; hidden states of the last one, [S, d_model]."""
        rows, last = start.rows, start.last
        got = self._ops.sampler.gather(start.state, rows, Spread(last.n_query, last.row_of, last.place))
        step = StepInputs(rows, last.q_start, got.length, got.position, last.row_of, last.most, start.longest)
        hidden = self._decoder.forward(got.tokens, views(got.slots), step)
        return hidden[_UNREAD - 1 :: _UNREAD].contiguous()


def _chain_parts(model: LoadedModel, ids: torch.Tensor | None) -> ChainParts | None:
    """What a program that drafts a whole chain needs; None for a decoder that none knows."""
    decoder, spec = model.decoder, model.spec
    parts, head = decoder.parts(), None if decoder.head is None else decoder.head.matrix()
    if parts is None or head is None or not isinstance(head.packed, torch.Tensor) or head.bias is not None:
        return None
    if spec.final_softcap is not None:
        return None
    norm = (decoder.final_norm, spec.norm_eps, spec.norm_offset)
    return ChainParts(parts, decoder.embedding, decoder.scale, *norm, head.packed, ids)
