"""A draft model: a small decoder of the same vocabulary says the next tokens one after the other (Leviathan et al. 2023; Chen
et al. 2023).

Its layers lie in the target's pages: a slot of a row holds keys and values of both, so that one lease, one prefix hit and
one compaction serve both. It draws with the target's own noise, see decoding.verify.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec, ModelSpec
from ridgeline.decoding.drafters import Behind, Views, draw_among
from ridgeline.models.build import LoadedModel
from ridgeline.ops.rows import Int, RowState, Spread
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import ChainParts, ChainStart, LastTokens, RunChain

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


def read_vocabulary(folder: Path, draft: ModelSpec) -> tuple[int, ...]:
    """`draft_vocabulary` of a draft's config.json: the tokens that it may say, ascending; empty for all. Raises ConfigError."""
    found = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("draft_vocabulary", [])
    known = isinstance(found, list) and all(type(one) is int and 0 <= one < draft.vocab_size for one in found)
    if not known or len(set(found)) < len(found):
        raise ConfigError(
            f"draft_vocabulary in {folder / 'config.json'} must list different token ids below {draft.vocab_size}; "
            "without it the draft says all tokens.",
            param="speculate",
        )
    if found and not draft.tied:
        raise ConfigError(
            f"draft_vocabulary in {folder / 'config.json'} needs a head that is tied to the embedding: remove it.",
            param="speculate",
        )
    return tuple(sorted(found))


class DraftModel:
    """A loaded decoder that drafts chains; see decoding.drafters.DeviceDrafter.

    vocabulary: the only tokens that it says, ascending; empty: all. A head is most of a small draft's work, and the most
    frequent tokens are nearly all that it is right about (FR-Spec, Zhao et al. 2025). It takes the decoder's head over.
    """

    attended: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def __init__(self, model: LoadedModel, vocabulary: Sequence[int] = ()) -> None:
        self._decoder, self._ops = model.decoder, model.ops
        self.layers: tuple[LayerSpec, ...] = model.spec.layers
        self._ids: torch.Tensor | None = None
        if vocabulary:
            self._ids = torch.tensor(vocabulary, dtype=torch.int32, device=model.decoder.embedding.device)
            model.decoder.narrow(self._ids)
        self._usual: dict[int, LastTokens] = {}
        """By rows: what is read if all of them drafted in the step before."""
        self._chain: RunChain = _chain_of(model, self._ids) or self._step_by_step

    def learns(self) -> bool:
        return False

    def read(self, tokens: torch.Tensor, views: Views, slots: torch.Tensor, step: StepInputs) -> None:
        """Keys and values of a prompt's part. What its kernels derive from a step, they derive anew for its layers."""
        self._decoder.forward(tokens, views(slots), replace(step), tokens[:0])

    def see(self, state: RowState, rows: torch.Tensor, place: torch.Tensor, logits: torch.Tensor) -> None:
        """It learns nothing."""

    def draft(self, behind: Behind, count: int, unread: Sequence[int], views: Views) -> None:
        """Read what is new, then say one token after the other; each is read as the next one is said. A row that has said its
        end stays there: nothing behind it could be kept."""
        # The rows themselves stay where they are: only this copy moves along the draft.
        state, rows = replace(behind.state, ints=behind.state.ints.clone()), behind.rows
        # The scratch row, which stands in for padding, has not so many tokens to read; it is done, and never moves.
        state.ints[0, : Int.KNOWN] = max(unread, default=_UNREAD)
        last = self._last_tokens(len(rows), unread, rows.device)
        start = ChainStart(state, rows, behind.temperature, last, count, behind.longest, behind.greedy)
        self._chain(start, views)

    def _last_tokens(self, count: int, unread: Sequence[int], device: torch.device) -> LastTokens:
        """What `count` rows have not read; on a CPU that of rows that all drafted in the step before is kept (a CUDA graph
        must make its own)."""
        if device.type != "cpu" or any(one != _UNREAD for one in unread):
            return _last_tokens(count, unread, device)
        if (known := self._usual.get(count)) is None:
            known = self._usual[count] = _last_tokens(count, (), device)
        return known

    def _step_by_step(self, start: ChainStart, views: Views) -> None:
        """The chain on any device."""
        state, rows, hidden = start.state, start.rows, self._catch_up(start, views)
        row_of = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        for node in range(start.count):
            self._ops.advance(state, rows, self._draw(start, hidden))
            if node + 1 < start.count:
                got = self._ops.gather(state, rows, None)
                step = StepInputs(rows, row_of, got.length, got.position, row_of[:-1], 1, start.longest)
                hidden = self._decoder.forward(got.tokens, views(got.slots), step)

    def _draw(self, start: ChainStart, hidden: torch.Tensor) -> torch.Tensor:
        """The next token of each row, int32 [S]."""
        known = start.state.ints[:, Int.KNOWN].index_select(0, start.rows)
        logits = self._decoder.logits(hidden)
        return draw_among(self._ops, start, logits, known, self._ids, self._decoder.spec.vocab_size)

    def _catch_up(self, start: ChainStart, views: Views) -> torch.Tensor:
        """Read each row's last tokens; hidden states of the last one, [S, d_model]."""
        rows, last = start.rows, start.last
        got = self._ops.gather(start.state, rows, Spread(last.n_query, last.row_of, last.place))
        step = StepInputs(rows, last.q_start, got.length, got.position, last.row_of, last.most, start.longest)
        hidden = self._decoder.forward(got.tokens, views(got.slots), step)
        return hidden.index_select(0, last.q_start[1:] - 1)


def _last_tokens(count: int, unread: Sequence[int], device: torch.device) -> LastTokens:
    """The last `unread` tokens each of `count` rows; of further rows, two."""
    ones = torch.ones(count, dtype=torch.int32, device=device)
    if all(one == _UNREAD for one in unread):
        number = torch.arange(_UNREAD * count, dtype=torch.int32, device=device)
        q_start = torch.arange(0, _UNREAD * count + 1, _UNREAD, dtype=torch.int32, device=device)
        return LastTokens(ones, q_start, number // _UNREAD, number % _UNREAD - (_UNREAD - 1), _UNREAD)
    each = np.array([*unread, *[_UNREAD] * (count - len(unread))], dtype=np.int32)
    ends = each.cumsum(dtype=np.int32)
    of = np.arange(count, dtype=np.int32).repeat(each)
    back = np.arange(len(of), dtype=np.int32) + 1 - ends[of]
    # Each begins at a multiple of 64 bytes: kernels are compiled apart for pointers that are aligned otherwise.
    packed = np.zeros((3, -(-max(count + 1, len(of)) // 16) * 16), dtype=np.int32)
    packed[0, 1 : count + 1], packed[1, : len(of)], packed[2, : len(of)] = ends, of, back
    sent = torch.from_numpy(packed).to(device)
    return LastTokens(ones, sent[0, : count + 1], sent[1, : len(of)], sent[2, : len(of)], int(each.max()))


def _chain_of(model: LoadedModel, ids: torch.Tensor | None) -> RunChain | None:
    """What drafts a chain at once, where the operations know how."""
    decoder, spec = model.decoder, model.spec
    parts, head = decoder.parts(), None if decoder.head is None else decoder.head.matrix()
    if parts is None or head is None or not isinstance(head.packed, torch.Tensor) or head.bias is not None:
        return None
    if spec.final_softcap is not None:
        return None
    norm = (decoder.final_norm, spec.norm_eps, spec.norm_offset)
    return model.ops.chain(ChainParts(parts, decoder.embedding, decoder.scale, *norm, head.packed, ids))
