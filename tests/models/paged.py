"""A paged cache small enough to read: rows grow token by token, pages come from one shuffled pool."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from ridgeline.core.spec import DTYPE_BYTES, kv_layout
from ridgeline.models.build import DTYPES, LoadedModel
from ridgeline.ops.step import KvView, StepInputs


class PagedRows:
    """Runs a decoder on rows of a paged cache, laid out as `kv_layout` cuts it: one pool of equal pages for all groups.

    Pages behind a window are taken away at once and filled with garbage, so that reading them would show.
    """

    def __init__(self, model: LoadedModel, rows: int = 4, max_tokens: int = 256, page_tokens: int = 16) -> None:
        spec = model.spec
        self.decoder, self.spec = model.decoder, spec
        self.layout = kv_layout(spec, page_tokens)
        self.width = -(-max_tokens // page_tokens)
        pages = 1 + rows * self.width * len(self.layout.groups)
        self.pool = torch.zeros(pages, self.layout.page_bytes, dtype=torch.uint8)
        self.free = list(range(1, pages))
        random.Random(0).shuffle(self.free)
        self.tables = [torch.zeros(rows, self.width, dtype=torch.int32) for _ in self.layout.groups]
        self.lengths = [0] * rows
        self.views: list[torch.Tensor] = [self._layer_view(index) for index in range(len(spec.layers))]

    def _layer_view(self, index: int) -> torch.Tensor:
        """[pages, 2, kv_heads, page_tokens, head_dim] of one layer inside its group's pages."""
        layer, tokens, width = self.spec.layers[index], self.layout.page_tokens, DTYPE_BYTES[self.spec.dtype]
        group = next(one for one in self.layout.groups if index in one.layers)
        first = sum(self.spec.layers[one].kv_elements for one in group.layers[: group.layers.index(index)])
        cut = self.pool[:, first * tokens * width : (first + layer.kv_elements) * tokens * width]
        typed = cut.view(DTYPES[self.spec.dtype])
        return typed.view(-1, 2, layer.n_kv_heads, tokens, layer.head_dim)

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
                views[index] = KvView(self.views[index], table, slots, layer.window, layer.softcap, scale)
        return views  # type: ignore[return-value]

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
                        self.pool[page] = 0x47
                        self.free.insert(0, page)
                        table[row, place] = 0
