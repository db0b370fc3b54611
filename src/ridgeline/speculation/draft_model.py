"""Draft model: a small decoder with the target's vocabulary that drafts a chain of tokens (Leviathan et al. 2023; Chen et al.
2023).

Its keys and values are stored in the target's pages, so one lease, one prefix hit and one compaction serve both models. It samples
with the target's noise, see ops.verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ridgeline.core.drafting import ModelDrafts
from ridgeline.models.build import LoadedModel
from ridgeline.ops.rows import ChainStart, Int, LastTokens, Spread
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import ChainParts, RunChain
from ridgeline.speculation.device import DeviceDrafter, DraftDraws, DraftRows, QueryTokens, Views

_UNREAD = 2
"""Tokens that the draft model has not read if its whole draft was accepted: the last node, and the token drawn after it."""


class DraftModel(DeviceDrafter):
    """A loaded decoder that drafts chains.

    vocabulary: the only tokens that it proposes, ascending; empty: all. The head is most of the work of a small draft model, and
    most accepted tokens are frequent ones (FR-Spec, Zhao et al. 2025). A vocabulary replaces the head of the decoder.
    """

    catches_up = True

    def __init__(self, model: LoadedModel, vocabulary: Sequence[int] = ()) -> None:
        self._decoder, self._ops = model.decoder, model.ops
        self.layers = model.spec.layers
        self._ids: torch.Tensor | None = None
        if vocabulary:
            self._ids = torch.tensor(vocabulary, dtype=torch.int32, device=model.decoder.embedding.device)
            model.decoder.restrict_vocabulary(self._ids)
        self._usual: dict[int, LastTokens] = {}
        """Number of rows -> inputs that read their last tokens."""
        self.work = ModelDrafts(replace(model.spec, vocab_size=len(vocabulary) or model.spec.vocab_size), _UNREAD)
        parts = _chain_parts(model, self._ids)
        self._chain: RunChain = self._step_by_step
        if parts is not None:
            self._chain = self._ops.programs.chain(parts, self._step_by_step)

    def read(self, query: QueryTokens, views: Views) -> None:
        """Compute keys and values. The step is copied, so that values derived from it are derived anew for these layers."""
        self._decoder.forward(query.tokens, views(query.slots), replace(query.step), query.tokens[:0])

    def draft(self, draft_rows: DraftRows, count: int, views: Views) -> None:
        """Read the last two tokens, then draft token by token; each forward pass reads the token drafted before. A row stops at an
        end token, because no later node could be accepted."""
        # Drafting advances a copy of the counters, not the rows.
        state, rows = replace(draft_rows.state, ints=draft_rows.state.ints.clone()), draft_rows.rows
        # The scratch row (padding) has fewer tokens than are read. It has ended and never advances.
        state.ints[0, : Int.KNOWN] = _UNREAD
        last = self._last_tokens(len(rows), rows.device)
        start = ChainStart(state, rows, draft_rows.temperature, last, count, draft_rows.longest, draft_rows.greedy)
        self._chain(start, views)

    def _last_tokens(self, count: int, device: torch.device) -> LastTokens:
        """Inputs that read the last tokens of `count` rows. Cached: the run before a graph capture creates them."""
        if (known := self._usual.get(count)) is not None:
            return known
        ones = torch.ones(count, dtype=torch.int32, device=device)
        number = torch.arange(_UNREAD * count, dtype=torch.int32, device=device)
        q_start = torch.arange(0, _UNREAD * count + 1, _UNREAD, dtype=torch.int32, device=device)
        last_tokens = LastTokens(ones, q_start, number // _UNREAD, number % _UNREAD - (_UNREAD - 1), _UNREAD)
        self._usual[count] = last_tokens
        return last_tokens

    def _step_by_step(self, start: ChainStart, views: Views) -> None:
        """Draft the chain operation by operation, on any device."""
        state, rows, hidden = start.state, start.rows, self._catch_up(start, views)
        row_of = start.last.q_start // _UNREAD
        draw = DraftDraws(self._ops, start, self._ids)
        for node in range(start.count):
            known = state.ints[:, Int.KNOWN].index_select(0, rows)  # rows at their limit stay where they are
            self._ops.sampler.advance(state, rows, draw(self._decoder.logits(hidden), known))
            if node + 1 < start.count:
                gathered = self._ops.sampler.gather(state, rows, None)
                step = StepInputs(rows, row_of, gathered.length, gathered.position, row_of[:-1], 1, start.longest)
                hidden = self._decoder.forward(gathered.tokens, views(gathered.slots), step)

    def _catch_up(self, start: ChainStart, views: Views) -> torch.Tensor:
        """Read the last tokens of each row. Returns the hidden states of the last one, [S, d_model]."""
        rows, last = start.rows, start.last
        gathered = self._ops.sampler.gather(start.state, rows, Spread(last.n_query, last.row_of, last.place))
        step = StepInputs(
            rows, last.q_start, gathered.length, gathered.position, last.row_of, last.max_tokens, start.longest
        )
        hidden = self._decoder.forward(gathered.tokens, views(gathered.slots), step)
        return hidden[_UNREAD - 1 :: _UNREAD].contiguous()


def _chain_parts(model: LoadedModel, ids: torch.Tensor | None) -> ChainParts | None:
    """Inputs of a program that drafts a whole chain; None if no program supports the decoder."""
    decoder, spec = model.decoder, model.spec
    parts, head = decoder.parts(), None if decoder.head is None else decoder.head.matrix()
    if parts is None or head is None or not isinstance(head.packed, torch.Tensor) or head.bias is not None:
        return None
    if spec.final_softcap is not None:
        return None
    norm = (decoder.final_norm, spec.norm_eps, spec.norm_offset)
    return ChainParts(parts, decoder.embedding, decoder.scale, *norm, head.packed, ids)
