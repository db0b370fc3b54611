"""A paged cache small enough to read: rows grow token by token, pages come from one shuffled pool."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ridgeline.core.spec import kv_layout
from ridgeline.core.stages import rank_layout
from ridgeline.kv.store import KvStore
from ridgeline.models.build import LoadedModel
from ridgeline.ops.step import KvView, StepInputs


class PagedRows:
    """Runs a decoder, or a rank's share of one, on rows of a paged cache: one pool of equal pages for all groups.

    Pages behind a window are taken away at once and filled with garbage, so that reading them would show.
    """

    def __init__(self, model: LoadedModel, rows: int = 4, max_tokens: int = 256, page_tokens: int = 16) -> None:
        self.decoder, self.spec = model.decoder, model.spec
        self.layout = rank_layout(kv_layout(model.rank_spec, page_tokens), model.mesh.context.size)
        self.width = -(-max_tokens // page_tokens)
        blocks = rows * self.width * len(self.layout.groups)
        self.store = KvStore(self.layout, model.rank_spec.layers, blocks, torch.device("cpu"))
        self.free = list(range(1, blocks + 1))
        random.Random(0).shuffle(self.free)
        self.tables = [torch.zeros(rows, self.width, dtype=torch.int32) for _ in self.layout.groups]
        self.lengths = [0] * rows

    def step(self, work: Sequence[tuple[int, Sequence[int]]], wanted: torch.Tensor | None = None) -> torch.Tensor:
        """Run (row, new tokens) pairs in one step; float32 logits of every token, rows one after the other, or of those wanted."""
        tokens = self.layout.page_tokens
        q_start, position, row_of = [0], [], []
        for index, (row, new) in enumerate(work):
            start = self.lengths[row]
            position += range(start, start + len(new))
            row_of += [index] * len(new)
            q_start.append(q_start[-1] + len(new))
            self.lengths[row] = start + len(new)
            for table in self.tables:
                for place in range(-(-start // tokens), -(-self.lengths[row] // tokens)):
                    table[row, place] = self.free.pop()
        ints = {"dtype": torch.int32}
        step = StepInputs(
            rows=torch.tensor([row for row, _ in work], **ints),
            q_start=torch.tensor(q_start, **ints),
            length=torch.tensor([self.lengths[row] for row, _ in work], **ints),
            position=torch.tensor(position, **ints),
            row_of=torch.tensor(row_of, **ints),
            max_query=max(len(new) for _, new in work),
            max_length=max(self.lengths),
        )
        flat = torch.tensor([token for _, new in work for token in new], **ints)
        with torch.inference_mode():
            hidden = self.decoder.forward(flat, self._views(step), step, wanted)
            out = self.decoder.logits(hidden) if len(hidden) else hidden.new_empty(0, self.spec.vocab_size)
        self._forget(row for row, _ in work)
        return out

    def _views(self, step: StepInputs) -> list[KvView]:
        tokens = self.layout.page_tokens
        row = step.rows.long()[step.row_of.long()]
        views: list[KvView | None] = [None] * len(self.spec.layers)
        for group, table in zip(self.layout.groups, self.tables, strict=True):
            page = table[row, step.position.long() // tokens].long()
            slots = page * tokens + step.position % tokens
            for index in group.layers:
                layer = self.spec.layers[index]
                scale = self.spec.scale_of(layer)
                views[index] = KvView(self.store.kv[index], table, slots, layer.window, layer.softcap, scale)
        sources = (
            index if layer.share_from is None else layer.share_from for index, layer in enumerate(self.spec.layers)
        )
        return [views[source] for source in sources]  # type: ignore[misc]

    def _forget(self, rows: Sequence[int]) -> None:
        tokens = self.layout.page_tokens
        for group, table in zip(self.layout.groups, self.tables, strict=True):
            if group.window is None:
                continue
            for row in rows:
                for place in range(max(0, self.lengths[row] - group.window + 1) // tokens):
                    page = int(table[row, place])
                    if page:
                        # Bytes of 0x47 read as about 50,000 in float32 and bfloat16.
                        self.store.flat.view(self.store.pages, -1)[page] = 0x47
                        self.free.insert(0, page)
                        table[row, place] = 0
