"""The cache's memory: one flat buffer of pages, and each layer's window into it.

Ownership: the store belongs to the runner. Which page holds what is decided elsewhere (kv.blocks); here pages are only
memory. Page 0 is scratch: padding writes there and nobody reads it.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, groupby

import torch

from ridgeline.core.plan import OWN_BLOCKS, Transfer
from ridgeline.core.spec import KvLayout, LayerSpec

log = logging.getLogger(__name__)


class KvStore:
    """Memory of `blocks` pages and the scratch page, for a model whose layers are `layers`.

    [page][layer][K | V][head][slot][dim]: a page is one run of bytes, so that offload and hand-over copy it at once, and pages of
    all groups are interchangeable. `kv[i]`: layer i's cache [pages, 2, kv_heads, page_tokens, head_dim] as ops.step.KvView
    wants it; `groups[i]`: the group whose page table serves it. A layer with `share_from` has its source's. `runs[group]`: the
    same memory in few views [pages, heads of keys and values, page_tokens, head_dim].
    """

    def __init__(self, layout: KvLayout, layers: Sequence[LayerSpec], blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.pages = blocks + 1
        dtype: torch.dtype = getattr(torch, layout.dtype)
        self._page = layout.page_bytes // dtype.itemsize
        # Zeroed: a masked value must not be NaN, because zero times NaN is NaN.
        self.flat = _zeros(self.pages * self._page, dtype, device)
        own = self._views(layers)
        self.runs = [self._stacked(group.layers, layers) for group in layout.groups]
        sources = [index if one.share_from is None else one.share_from for index, one in enumerate(layers)]
        group_of = {index: number for number, group in enumerate(layout.groups) for index in group.layers}
        self.kv = tuple(own[source] for source in sources)
        self.groups = tuple(group_of[source] for source in sources)

    def copy_pages(self, pairs: Sequence[int]) -> None:
        """Copy page pairs[0] to pairs[1], then pairs[2] to pairs[3], and so on: a later copy sees the earlier ones."""
        pages = self.flat.view(self.pages, self._page)
        for source, target in zip(pairs[::2], pairs[1::2], strict=True):
            pages[target].copy_(pages[source])

    @torch.inference_mode()
    def transfer(self, transfers: Sequence[Transfer]) -> dict[int, bool]:
        """Copy between pages of the store, in stream order, and refuse every other origin; returns whether each ticket's
        content arrived."""
        for transfer in transfers:
            if transfer.origin == OWN_BLOCKS:
                self.copy_pages([*chain.from_iterable(zip(transfer.pages, transfer.blocks, strict=True))])
            else:
                log.error(
                    "Transfer %d from %r is not supported: the blocks are computed.", transfer.ticket, transfer.origin
                )
        return {transfer.ticket: transfer.origin == OWN_BLOCKS for transfer in transfers}

    def _stacked(self, members: Sequence[int], layers: Sequence[LayerSpec]) -> list[torch.Tensor]:
        """Layers of a group as few views [pages, heads of keys and values, page_tokens, dim]: one for neighbours of one size."""
        first, tokens, runs = 0, self.layout.page_tokens, []
        for dim, part in groupby((layers[index] for index in members), key=lambda one: one.head_dim):
            heads = sum(2 * one.n_kv_heads for one in part)
            shape, strides = (self.pages, heads, tokens, dim), (self._page, tokens * dim, dim, 1)
            runs.append(self.flat.as_strided(shape, strides, first))
            first += heads * tokens * dim
        return runs

    def _views(self, layers: Sequence[LayerSpec]) -> dict[int, torch.Tensor]:
        tokens, views = self.layout.page_tokens, {}
        for group in self.layout.groups:
            first = 0
            for index in group.layers:
                heads, dim = layers[index].n_kv_heads, layers[index].head_dim
                shape = (self.pages, 2, heads, tokens, dim)
                strides = (self._page, heads * tokens * dim, tokens * dim, dim, 1)
                views[index] = self.flat.as_strided(shape, strides, first)
                first += 2 * heads * tokens * dim
        return views


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [size]. On a CPU the system hands the memory out, cleared, where it is first touched, and in pages of 2 MiB if it
    can: filling gigabytes would be most of the start-up."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
