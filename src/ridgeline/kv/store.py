"""The cache's memory: one flat buffer of pages, and each layer's window into it.

Ownership: the store belongs to the runner. Which page holds what is decided elsewhere (kv.blocks); here pages are only
memory. Page 0 is scratch: padding writes there and nobody reads it.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch

from ridgeline.core.spec import KvLayout, LayerSpec

KV_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}

Order = Literal["page", "layer"]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one layer lies: element offset of its part in page 0, and elements from one page to the next."""

    first: int
    stride: int


class KvStore:
    """Memory of `blocks` pages and the scratch page, for a model whose layers are `layers`.

    order "page": [page][layer][K | V][head][slot][dim], one run of bytes per page, so that offload and hand-over copy
    a page at once. "layer": [layer][page][K | V][head][slot][dim], what most engines do; kept to measure the
    difference. `kv[i]`: layer i's cache [pages, 2, kv_heads, page_tokens, head_dim] as ops.step.KvView wants it;
    `groups[i]`: the group whose page table serves it. A layer with `share_from` has its source's. `runs[group]`: the same memory
    in few views [pages, heads of keys and values, page_tokens, head_dim].
    """

    def __init__(
        self,
        layout: KvLayout,
        layers: Sequence[LayerSpec],
        blocks: int,
        device: torch.device,
        order: Order = "page",
    ) -> None:
        self.layout = layout
        self.pages = blocks + 1
        self.order = order
        dtype = KV_DTYPES[layout.dtype]
        page = layout.page_bytes // dtype.itemsize
        self._regions = _regions(layout, layers, page, order)
        # Zeroed: a masked value must not be NaN, because zero times NaN is NaN.
        self.flat = _zeros(self.pages * sum(self._regions), dtype, device)
        own = self._views(layers)
        self.runs = [self._stacked(group, layers) for group in range(len(layout.groups))]
        sources = [index if one.share_from is None else one.share_from for index, one in enumerate(layers)]
        group_of = {index: number for number, group in enumerate(layout.groups) for index in group.layers}
        self.kv = tuple(own[source] for source in sources)
        self.groups = tuple(group_of[source] for source in sources)

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def copy_pages(self, pairs: Sequence[int]) -> None:
        """Copy page pairs[0] to pairs[1], then pairs[2] to pairs[3], and so on: a later copy sees the earlier ones."""
        for source, target in zip(pairs[::2], pairs[1::2], strict=True):
            first = 0
            for size in self._regions:
                region = self.flat[first : first + size * self.pages].view(self.pages, size)
                region[target].copy_(region[source])
                first += size * self.pages

    def move_slots(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy keys and values of all layers of a group from slots to slots, int64 [M] each (page * page_tokens + place in
        the page): all are read before any is written. Only a scratch slot may be a target more than once."""
        size = self.layout.page_tokens
        pages, places = source // size, source % size
        for run in self.runs[group]:
            run[target // size, :, target % size] = run[pages, :, places]

    def _stacked(self, group: int, layers: Sequence[LayerSpec]) -> list[torch.Tensor]:
        """The group's layers as few views [pages, heads of keys and values, page_tokens, dim]: in page order, neighbours of
        one head size are one view."""
        tokens, runs = self.layout.page_tokens, []
        members = self.layout.groups[group].layers
        for (dim, _), part in groupby(
            zip(members, self._places(members, layers), strict=True),
            key=lambda one: (layers[one[0]].head_dim, one[0] if self.order == "layer" else 0),
        ):
            own = list(part)
            heads = sum(2 * layers[index].n_kv_heads for index, _ in own)
            shape, stride = (self.pages, heads, tokens, dim), own[0][1].stride
            runs.append(self.flat.as_strided(shape, (stride, tokens * dim, dim, 1), own[0][1].first))
        return runs

    def _views(self, layers: Sequence[LayerSpec]) -> dict[int, torch.Tensor]:
        tokens = self.layout.page_tokens
        views = {}
        for group in self.layout.groups:
            for place, index in zip(self._places(group.layers, layers), group.layers, strict=True):
                heads, dim = layers[index].n_kv_heads, layers[index].head_dim
                shape = (self.pages, 2, heads, tokens, dim)
                strides = (place.stride, heads * tokens * dim, tokens * dim, dim, 1)
                views[index] = self.flat.as_strided(shape, strides, place.first)
        return views

    def _places(self, members: Sequence[int], layers: Sequence[LayerSpec]) -> list[_Place]:
        """In page order a layer follows those before it in the page; in layer order it has a region of its own."""
        places, first = [], 0
        for depth, index in enumerate(members):
            stride = self._regions[depth if self.order == "layer" else 0]
            places.append(_Place(first, stride))
            size = layers[index].kv_elements * self.layout.page_tokens
            first += size if self.order == "page" else stride * self.pages
        return places


def _zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros [size]. On a CPU the system hands the memory out, cleared, where it is first touched, and in pages of 2 MiB if it
    can: filling gigabytes would be most of the start-up."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


def _regions(layout: KvLayout, layers: Sequence[LayerSpec], page: int, order: Order) -> list[int]:
    """Elements per page of each region of the buffer: one region in page order, one per depth in layer order."""
    if order == "page":
        return [page]
    return [
        max(layers[group.layers[depth]].kv_elements for group in layout.groups if depth < len(group.layers))
        * layout.page_tokens
        for depth in range(layout.max_width)
    ]
