"""KvStore: the memory of the KV cache, one flat buffer of pages, with a view for each layer.

Ownership: the runner owns the store. The block pool (kv.blocks) assigns pages; the store only holds their memory. Page 0 is the
scratch page: padding writes there, and its content is never used.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, groupby

import torch

from ridgeline.core.plan import OWN_BLOCKS, StepPlan, Transfer
from ridgeline.core.spec import KvFormat, KvGroup, KvLayout, LayerSpec
from ridgeline.ops.releasable import DeviceRange
from ridgeline.ops.step import Selection

log = logging.getLogger(__name__)


class KvStore:
    """Memory of `blocks` pages and the scratch page, for the layers of one rank. layers: those of `layout` (ModelSpec.on_rank),
    then the layers of a drafter. descriptor: memory file of the pages, which other processes read (kv.transfer); -1: memory of this
    process. releasable: on a GPU the pages are in `range`, whose memory can be given back.

    Layout: [page][layer][K | V | scales][head][slot][dim], then the bounds of the page's keys for layers that select pages. A page
    is contiguous, so that one copy moves it, and pages of all groups have the same size. flat: uint8 [pages * page_bytes].
    kv[i]: cache of layer i, [pages, 2, kv_heads, page_tokens, head_dim], as in ops.step.KvView; a dtype that packs several
    elements has a smaller last dimension; page_tokens: of a page on this rank. scales[i]: [pages, 2,
    kv_heads, page_tokens, scales]; None for a format without scales.
    selections[i]: the bounds and the budget of a layer that selects pages, else None.
    groups[i]: the KV group of layer i. A layer with `share_from` uses the cache of that layer.
    runs[group]: all memory of the group's layers as few views [pages, heads of keys and values, page_tokens, width].
    """

    def __init__(
        self,
        layout: KvLayout,
        layers: Sequence[LayerSpec],
        blocks: int,
        device: torch.device,
        descriptor: int = -1,
        releasable: bool = False,
    ) -> None:
        self.layout = layout
        self.pages = blocks + 1
        # Zeroed: a masked value must not be NaN, because zero times NaN is NaN.
        size = self.pages * layout.page_bytes
        self.range = DeviceRange(size, device.index) if releasable and device.type == "cuda" else None
        self.flat = zeros(size, device, descriptor) if self.range is None else self.range.zeros(size)
        cuts = [self._cut(group, layers) for group in layout.groups]
        self.runs = [runs for runs, _ in cuts]
        parts_of = {index: parts for _, of_layers in cuts for index, parts in of_layers.items()}
        sources = [index if layer.share_from is None else layer.share_from for index, layer in enumerate(layers)]
        group_of = {index: number for number, group in enumerate(layout.groups) for index in group.layers}
        self.kv = tuple(parts_of[source][0] for source in sources)
        self.scales = tuple(parts_of[source][1] if layout.format.scale_dtype else None for source in sources)
        self.groups = tuple(group_of[source] for source in sources)
        selections = {index: made for group in layout.groups for index, made in self._selections(group, layers)}
        self.selections = tuple(selections.get(source) for source in sources)

    def _cut(
        self, group: KvGroup, layers: Sequence[LayerSpec]
    ) -> tuple[list[torch.Tensor], dict[int, list[torch.Tensor]]]:
        """The runs of a group (adjacent parts of equal dtype and width form one run), and the parts of each layer (see _parts)."""
        kv_format, tokens = self.layout.format, self.layout.page_tokens // self.layout.ranks
        if sum(layers[index].kv_bytes(kv_format) for index in group.layers) != group.token_bytes:
            raise AssertionError("the layout was cut for other layers: are they those of one rank?")
        pages, first, runs = self.flat.view(self.pages, -1), 0, []
        parts_of: dict[int, list[torch.Tensor]] = {}
        parts = [(index, *part) for index in group.layers for part in _parts(layers[index], kv_format)]
        for (dtype, width), neighbours in groupby(parts, key=lambda part: part[2:]):
            heads = {index: 2 * count for index, count, *_ in neighbours}
            shape = (sum(heads.values()), tokens, width)
            end = first + math.prod(shape) * dtype.itemsize
            run = pages[:, first:end].view(dtype).unflatten(1, shape)
            for index, part in zip(heads, run.split([*heads.values()], 1), strict=True):
                parts_of.setdefault(index, []).append(part.unflatten(1, (2, -1)))
            runs.append(run)
            first = end
        return runs, parts_of

    def _selections(self, group: KvGroup, layers: Sequence[LayerSpec]) -> Iterator[tuple[int, Selection]]:
        """The layers of a group that select pages, and their bounds, which follow the keys and values of all its layers."""
        pages, first = self.flat.view(self.pages, -1), group.token_bytes * self.layout.page_tokens
        for index in group.layers:
            layer, end = layers[index], first + layers[index].bounds_bytes
            if layer.budget is not None:
                bounds = pages[:, first:end].view(torch.bfloat16).unflatten(1, (2, layer.n_kv_heads, layer.head_dim))
                yield index, Selection(layer.budget, bounds)
            first = end

    def copy_pages(self, pairs: Sequence[int]) -> None:
        """Copy page pairs[0] to pairs[1], then pairs[2] to pairs[3], and so on, in order: later copies see the earlier ones."""
        pages = self.flat.view(self.pages, -1)
        for source, target in zip(pairs[::2], pairs[1::2], strict=True):
            pages[target].copy_(pages[source])

    @torch.inference_mode()
    def transfer(self, transfers: Sequence[Transfer]) -> dict[int, bool]:
        """Copy between pages of the store, in stream order; transfers of other origins are refused. Returns for each ticket whether
        its content arrived."""
        for transfer in transfers:
            if transfer.origin == OWN_BLOCKS:
                self.copy_pages([*chain.from_iterable(zip(transfer.pages, transfer.blocks, strict=True))])
            else:
                log.error(
                    "Transfer %d from %r is not supported: the blocks are computed.", transfer.ticket, transfer.origin
                )
        return {transfer.ticket: transfer.origin == OWN_BLOCKS for transfer in transfers}


class Transfers:
    """Runs the stores and transfers of plans. This one has the store's own blocks only; `kv.copies` has tiers below them."""

    def __init__(self, store: KvStore) -> None:
        self.store = store

    @property
    def busy(self) -> bool:
        """Stores or transfers of earlier plans have not ended."""
        return False

    def step(self, plan: StepPlan) -> dict[int, bool]:
        """Cancel, store and transfer as the plan says, before anything else of its step. Returns the tickets that have ended
        (StepResult.transfers)."""
        return self.store.transfer(plan.transfers)

    def forget(self, plan: StepPlan) -> None:
        """The step has failed: its stores and transfers have ended without content."""

    def close(self) -> None:
        """End the copies. Called when the device has run all steps."""


def _parts(layer: LayerSpec, kv_format: KvFormat) -> list[tuple[int, torch.dtype, int]]:
    """Parts of a slot of a layer, equal for keys and values: (heads, dtype, width) of the elements, then of their scales."""
    stored: torch.dtype = getattr(torch, kv_format.dtype)
    parts = [(layer.n_kv_heads, stored, layer.head_dim * kv_format.bits // (8 * stored.itemsize))]
    if kv_format.scale_dtype:
        parts.append((layer.n_kv_heads, getattr(torch, kv_format.scale_dtype), kv_format.scales(layer.head_dim)))
    return parts


def zeros(size: int, device: torch.device, descriptor: int = -1) -> torch.Tensor:
    """Zeros, uint8 [size]. On a CPU this is a mapping, anonymous or of a memory file, with huge pages where possible: the system
    zeroes pages at first touch, because zeroing gigabytes would dominate the start-up."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    if descriptor >= 0:
        for length in (0, size):  # what an engine before this one has left is dropped
            os.ftruncate(descriptor, length)
        memory = mmap.mmap(descriptor, size)
    else:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
