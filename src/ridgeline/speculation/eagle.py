"""EAGLE heads and MTP layers (models.eagle) as a device drafter of chains.

Pair (state of token i, token i + 1) has slot and position i, so the head's layer shares the target's slots. The target's states
exist only while it runs, so keys and values of pairs are written in every step (`read`: prompts, where the next token is known;
`follow`: drawn tokens). That takes no attention and no feed-forward block, and nothing is caught up later. The last pair of a
cached prefix belongs to the request that computed it, whose next token may be another one.

It samples with the target's noise, see ops.verify.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ridgeline.models.build import LoadedModel
from ridgeline.models.decoder import Decoder
from ridgeline.models.eagle import EagleHead
from ridgeline.ops.columns import columns, joined
from ridgeline.ops.rows import Int
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.speculation.device import DeviceDrafter, DraftDraws, DraftRows, DrawnTokens, QueryTokens, Views

_NEVER = 1 << 29
"""Tokens that no request has."""


class Eagle(DeviceDrafter):
    """Drafts chains with a loaded head."""

    def __init__(self, head: EagleHead, target: LoadedModel) -> None:
        self.head, self._ops = head, target.ops
        self._taps, self._d_model = head.taps, target.spec.d_model
        self.layers, self.extra = head.spec.layers, head.width * bool(head.taps)
        self.work = head.work()
        self._steps: dict[tuple[int, ...], tuple[Tensor, Tensor, Tensor]] = {}
        if head.taps:
            target.decoder.divide(head.taps)

    def states(
        self, target: Decoder, tokens: Tensor, views: Sequence[KvView], step: StepInputs, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if not self._taps:
            features = target.forward(tokens, views, step)
            return features if wanted is None else features.index_select(0, wanted), features
        hidden, streams = target.tapped(tokens, views, step, wanted, self._taps)
        features = self.head.fuse(streams)
        drawn = features if wanted is None else features.index_select(0, wanted)
        return joined(self._ops.tokenwise, (hidden, drawn)), features

    def read(self, query: QueryTokens, views: Views) -> None:
        """Write the pairs of query tokens and the tokens after them. Those of drawn tokens are written again by `follow`."""
        assert query.features is not None
        step, known = query.step, query.state.tokens
        after = (step.position + 1).clamp(max=known.shape[1] - 1)
        row = step.rows.index_select(0, step.row_of)
        [view] = views(query.slots)
        self.head.write(
            known.view(-1).index_select(0, row * known.shape[1] + after), query.features, view, replace(step)
        )

    def follow(self, drawn: DrawnTokens, views: Views) -> None:
        gathered, step = drawn.query()
        [view] = views(gathered.slots)
        self.head.write(drawn.tokens, self._features(drawn.states), view, step)

    def draft(self, draft_rows: DraftRows, count: int, views: Views) -> None:
        """Draft node by node: each pass writes one pair and draws the token after it."""
        rows, before, sampler = draft_rows.rows, draft_rows.state, self._ops.sampler
        kept, back, number = self._start(before.ints, len(rows))
        state = replace(before, ints=torch.addcmul(back, before.ints, kept))
        token, features = sampler.gather(before, rows, None).tokens, self._features(draft_rows.hidden)
        draw = DraftDraws(self._ops, draft_rows, self.head.ids)
        for node in range(count):
            gathered = sampler.gather(state, rows, None)
            step = StepInputs(rows, number, gathered.length, gathered.position, number[:-1], 1, draft_rows.longest)
            [view] = views(gathered.slots)
            features = self.head.next(token, features, view, step)
            token = draw(self.head.logits(features), draft_rows.known + node)
            sampler.advance(state, rows, token)

    def _start(self, ints: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """What the row table is multiplied with and what is added before drafting, and numbers from 0 to `count`. The last pair is
        read again, and no row ends. The scratch row (padding) stays. Cached: the run before a graph capture creates them."""
        key = (*ints.shape, count)
        if key not in self._steps:
            kept, back = torch.ones_like(ints), torch.zeros_like(ints)
            kept[1:, Int.DONE] = 0
            back[1:, : Int.KNOWN], back[1:, Int.LIMIT], back[1:, Int.MIN_TOKENS] = -1, _NEVER, _NEVER
            self._steps[key] = kept, back, torch.arange(count + 1, dtype=torch.int32, device=ints.device)
        return self._steps[key]

    def _features(self, states: Tensor) -> Tensor:
        """What `states` gave for the head, [N, width]."""
        return columns(self._ops.tokenwise, states, self._d_model, states.shape[1]) if self._taps else states
