"""Prompts of which each context-parallel rank has some query tokens: keys travel, and each rank attends for its own tokens.

The ranks send one another the keys and values of the chunk's tokens, which each writes as far as it holds their slots, and then the
pages of the rows. A rank attends with the device's ordinary kernels for chunks to a cache that holds only the gathered pages, which
are in the memory of one layer at a time. In a prompt a token sees as many keys as tokens come before it, so a rank has one segment
of early tokens and one of late tokens (zig-zag; Yang et al. 2024, arXiv:2411.01783, section 3.4): each attends equally long.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ridgeline.core.sizing import GATHERED_SLOTS
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import AttentionOps, Heads, QkvShape

FEWEST_TOKENS = 16
"""Mean query tokens of a row from which keys travel. A byte takes 10 to 20 times as long between devices as from a device's memory,
and keys that do not travel are read once by each query token of the row."""


class Ranks(Protocol):
    """The ranks that hold the keys; the collectives are those of parallel.axis."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor: ...

    def exchange(self, x: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Division:
    """How ranks divide the `count` tokens of a step: into segments of equal length, as many of each rank as `zigzag` says.

    zigzag: rank r of N has segments r and 2 N - 1 - r of 2 N; else segment r of N. Places behind the last token are padding.
    """

    count: int
    ranks: int
    zigzag: bool

    @property
    def segment(self) -> int:
        """Tokens of a segment."""
        return -(-self.count // (2 * self.ranks if self.zigzag else self.ranks))

    @property
    def share(self) -> int:
        """Places of a rank."""
        return self.segment * (2 if self.zigzag else 1)

    def firsts(self, rank: int) -> list[int]:
        """The first token of each segment of a rank."""
        numbers = (rank, 2 * self.ranks - 1 - rank) if self.zigzag else (rank,)
        return [number * self.segment for number in numbers]

    def order(self, device: torch.device) -> torch.Tensor:
        """int32 [ranks, share]: the token at each place of each rank; padding has numbers from `count` on."""
        segments = torch.arange(self.ranks * self.share, dtype=torch.int32, device=device).view(-1, self.segment)
        if not self.zigzag:
            return segments
        return torch.cat((segments[: self.ranks], segments[self.ranks :].flip(0)), 1)

    def tokens(self, rank: int, device: torch.device) -> torch.Tensor:
        """int32 [share]: the tokens of a rank; padding repeats the last token of all."""
        return self.order(device)[rank].clamp(max=self.count - 1)

    def joined(self, parts: torch.Tensor) -> torch.Tensor:
        """The parts [ranks, share, ...] of all ranks as all tokens in order, [count, ...]."""
        parts = parts.flatten(0, 1)
        if not self.zigzag:
            return parts[: self.count]
        token = torch.arange(self.count, device=parts.device)
        number, at = token // self.segment, token % self.segment
        early = number < self.ranks
        place = torch.where(early, number, 2 * self.ranks - 1 - number) * self.share + at
        return parts.index_select(0, torch.where(early, place, place + self.segment))


@dataclass(frozen=True, slots=True)
class _LocalTokens:
    """The query tokens of this rank as a step over the gathered pages, see `Gathering._local`. step: rows are numbers of
    rows of the gathered table."""

    step: StepInputs
    division: Division


@dataclass(frozen=True, slots=True)
class Gathering:
    """Attention of a rank's tokens to gathered keys.

    ops: of the device. held: KvView.slots -> slots of this rank's cache, see striped.Stripes.held.
    """

    ops: AttentionOps
    ranks: Ranks
    held: Callable[[torch.Tensor, int], torch.Tensor]

    def serves(self, view: KvView, step: StepInputs) -> bool:
        """Whether keys travel for these rows: they are chunks of prompts, and their pages are not too many. The host knows it."""
        in_order = step.ancestors is None and step.key_positions is None
        if step.selected is None or not in_order or len(step.position) < FEWEST_TOKENS * len(step.rows):
            return False
        return len(step.rows) * self._pages(view, step) * view.page_tokens * self.ranks.size <= GATHERED_SLOTS

    def _pages(self, view: KvView, step: StepInputs) -> int:
        """Pages of a row that may hold keys."""
        return min(-(-step.max_length // (view.page_tokens * self.ranks.size)), view.table.shape[1])

    def qkv_write(self, qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs) -> Heads:
        """As AttentionOps, for qkv of this rank's tokens: their queries, and keys and values of all tokens written."""
        dim, queries = shape.head_dim, shape.n_heads * shape.head_dim
        local = self._local(step)
        if shape.n_kv_heads:
            # As many query heads as keys go with them, unused, because the operation takes both.
            sent = qkv[:, queries - shape.n_kv_heads * dim :].contiguous()
            merged = self.ranks.all_gather(sent).flatten(0, 1)
            everyone = self._everyone(local.division, view, step)
            self.ops.qkv_write(merged, replace(shape, n_heads=shape.n_kv_heads), *everyone)
        return self.ops.qkv_write(qkv[:, :queries], replace(shape, n_kv_heads=0, k_norm=None), view, local.step)

    def attend(
        self, q: torch.Tensor, view: KvView, step: StepInputs, lse_needed: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As AttentionOps, for queries of this rank's tokens."""
        return self.ops.attend(q, None, None, self._gathered(view, step), self._local(step).step, lse_needed)

    def _everyone(self, division: Division, view: KvView, step: StepInputs) -> tuple[KvView, StepInputs]:
        """View and step that write the tokens of all ranks, in the order in which they are gathered."""
        key = ("gathered tokens", view.slots.data_ptr(), view.page_tokens)
        if (known := step.derived.get(key)) is None:
            order = division.order(view.slots.device).flatten()
            tokens = order.clamp(max=division.count - 1)
            slots = self.held(view.slots.index_select(0, tokens), view.page_tokens)
            # Padding goes to the scratch page.
            slots = torch.where(order < division.count, slots, slots % view.page_tokens)
            position, row_of = (tensor.index_select(0, tokens) for tensor in (step.position, step.row_of))
            step.derived[key] = known = (slots, replace(step, position=position, row_of=row_of, selected=None))
        return replace(view, slots=known[0]), known[1]

    def _local(self, step: StepInputs) -> _LocalTokens:
        """The tokens of this rank. Each of its segments has all rows of the step, most of them without tokens, and a row between
        them has the tokens of no row (padding) and no length."""
        known: _LocalTokens | None = step.derived.get("local tokens")
        if known is not None:
            return known
        count, device, rows = len(step.position), step.position.device, len(step.rows)
        division = Division(count, self.ranks.size, True)
        tokens = division.tokens(self.ranks.rank, device)
        starts, lengths = [], []
        for number, first in enumerate(division.firsts(self.ranks.rank)):
            begin = (step.q_start - first).clamp(0, min(division.segment, max(0, count - first)))
            later = step.q_start[1:] - first - begin[1:]  # tokens of the row in later segments
            lengths += [torch.where(begin[1:] > begin[:-1], step.length - later, 0), step.length.new_zeros(1)]
            starts.append(begin + number * division.segment)
        in_second = torch.arange(division.share, device=device) >= division.segment
        numbers = torch.arange(rows, dtype=torch.int32, device=device)
        row_of = step.row_of.index_select(0, tokens) + in_second.to(torch.int32) * (rows + 1)
        local = StepInputs(
            torch.cat((numbers, numbers[:1], numbers)),
            torch.cat(starts),
            torch.cat(lengths[:-1]),
            step.position.index_select(0, tokens),
            row_of,
            min(step.max_query, division.segment),
            step.max_length,
        )
        step.derived["local tokens"] = known = _LocalTokens(local, division)
        return known

    def _gathered(self, view: KvView, step: StepInputs) -> KvView:
        """The rows' pages of all ranks. A rank's part of a page is a page, because it is a run of slots.

        The keys have just arrived: no kernel may read them before the kernels before it have ended (KvView.chosen).
        """
        count, rows, size = self._pages(view, step), len(step.rows), self.ranks.size
        key = ("gathered pages", view.table.data_ptr(), count)
        if (known := step.derived.get(key)) is None:
            pages = view.table[:, :count].index_select(0, step.rows).flatten()
            number = torch.arange(size * rows * count, dtype=torch.int32, device=pages.device)
            table = number.view(size, rows, count).permute(1, 2, 0).reshape(rows, count * size)
            step.derived[key] = known = (pages, table)
        pages, table = known
        if view.scales is None:
            kv, scales = self.ranks.all_gather(view.kv.index_select(0, pages)).flatten(0, 1), None
        else:
            kv, scales = self._with_scales(view.kv, view.scales, pages)
        return replace(view, kv=kv, scales=scales, table=table, selection=None, chosen=True)

    def _with_scales(
        self, kv: torch.Tensor, scales: torch.Tensor, pages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """These pages of a cache with scales. Kernels rely on scales behind the elements of their page, as in kv.store."""
        # Bytes, because PyTorch does not index tensors of e4m3 on every device.
        parts = [tensor.view(torch.uint8).index_select(0, pages).flatten(1) for tensor in (kv, scales)]
        gathered = self.ranks.all_gather(torch.cat(parts, 1)).flatten(0, 1)
        sizes = [part.shape[1] for part in parts]
        elements, behind = gathered.split_with_sizes(sizes, 1)
        return (
            elements.view(kv.dtype).unflatten(1, kv.shape[1:]),
            behind.view(scales.dtype).unflatten(1, scales.shape[1:]),
        )
