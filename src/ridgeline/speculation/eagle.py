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
from ridgeline.ops.rows import Int, Spread
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.speculation.device import DeviceDrafter, DraftRows, DrawnTokens, QueryTokens, Views, draw_draft


class Eagle(DeviceDrafter):
    """Drafts chains with a loaded head."""

    def __init__(self, head: EagleHead, target: LoadedModel) -> None:
        self.head, self._ops, self._vocab = head, target.ops, target.spec.vocab_size
        self._taps, self._d_model = head.taps, target.spec.d_model
        self.layers, self.extra = head.spec.layers, head.width * bool(head.taps)
        self.work = head.work()

    def states(
        self, target: Decoder, tokens: Tensor, views: Sequence[KvView], step: StepInputs, wanted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if not self._taps:
            features = target.forward(tokens, views, step)
            return features if wanted is None else features.index_select(0, wanted), features
        hidden, streams = target.tapped(tokens, views, step, wanted, self._taps)
        features = self.head.fuse(streams)
        return torch.cat((hidden, features if wanted is None else features.index_select(0, wanted)), dim=1), features

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
        rows, count = drawn.rows, torch.arange(len(drawn.rows) + 1, dtype=torch.int32, device=drawn.rows.device)
        spread = None
        if drawn.number is not None and drawn.depth is not None:
            spread = Spread(drawn.number + 1, count[:-1], drawn.number, drawn.depth - drawn.number)
        gathered = self._ops.sampler.gather(drawn.state, rows, spread)
        step = StepInputs(rows, count, gathered.length, gathered.position, count[:-1], 1, drawn.longest)
        [view] = views(gathered.slots)
        self.head.write(drawn.tokens, self._features(drawn.states), view, step)

    def draft(self, draft_rows: DraftRows, count: int, views: Views) -> None:
        """Draft node by node: each pass writes one pair and draws the token after it."""
        rows, known, before = draft_rows.rows, draft_rows.known, draft_rows.state
        number = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        state = replace(before, ints=before.ints.clone())
        state.ints[0, : Int.KNOWN] = 1  # the scratch row (padding) has no token before its next one
        token = before.tokens.view(-1).index_select(0, rows * before.tokens.shape[1] + known - 1)
        features, drafted = self._features(draft_rows.hidden), []
        for node in range(count):
            at = torch.full_like(rows, node)
            gathered = self._ops.sampler.gather(state, rows, Spread(at, number[:-1], at - 1))
            step = StepInputs(rows, number, gathered.length, gathered.position, number[:-1], 1, draft_rows.longest)
            [view] = views(gathered.slots)
            features = self.head.next(token, features, view, step)
            logits = self.head.logits(features)
            token = draw_draft(self._ops, draft_rows, logits, known + node, self.head.ids, self._vocab)
            drafted.append(token)
        draft_rows.write(
            known.unsqueeze(1) + torch.arange(count, dtype=torch.int32, device=rows.device), torch.stack(drafted, 1)
        )

    def _features(self, states: Tensor) -> Tensor:
        """What `states` gave for the head, [N, width]."""
        return states[:, self._d_model :].contiguous() if self._taps else states
