"""The cache's memory: one flat buffer of pages, and each layer's window into it.

Ownership: the store belongs to the runner. Which page holds what is decided elsewhere (kv.blocks); here pages are only
memory. Page 0 is scratch: padding writes there and nobody reads it.
"""

from __future__ import annotations

import logging
import math
import mmap
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, groupby

import torch

from ridgeline.core.plan import OWN_BLOCKS, Transfer
from ridgeline.core.spec import KvFormat, KvGroup, KvLayout, LayerSpec

log = logging.getLogger(__name__)


class KvStore:
    """Memory of `blocks` pages and the scratch page, for layers of one rank: `layers` are those that `layout` was cut from
    (ModelSpec.on_rank), then its guests.

    [page][layer][K | V | scales][head][slot][dim]: a page is one run of bytes, so that offload and hand-over copy it at once,
    and pages of all groups are interchangeable. flat: uint8 [pages * page_bytes].
    kv[i]: layer i's cache [pages, 2, kv_heads, page_tokens, head_dim] as ops.step.KvView wants it; a type that packs several
    elements has so many fewer in the last dimension. scales[i]: [pages, 2, kv_heads, page_tokens, scales], or None for a format
    without. groups[i]: the group whose page table serves it. A layer with `share_from` has its source's.
    runs[group]: all memory of the group's layers in few views [pages, heads of keys and values, page_tokens, width].
    """

    def __init__(self, layout: KvLayout, layers: Sequence[LayerSpec], blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.pages = blocks + 1
        # Zeroed: a masked value must not be NaN, because zero times NaN is NaN.
        self.flat = _zeros(self.pages * layout.page_bytes, device)
        cuts = [self._cut(group, layers) for group in layout.groups]
        self.runs = [runs for runs, _ in cuts]
        parts_of = {index: parts for _, of_layers in cuts for index, parts in of_layers.items()}
        sources = [index if layer.share_from is None else layer.share_from for index, layer in enumerate(layers)]
        group_of = {index: number for number, group in enumerate(layout.groups) for index in group.layers}
        self.kv = tuple(parts_of[source][0] for source in sources)
        self.scales = tuple(parts_of[source][1] if layout.format.scale_dtype else None for source in sources)
        self.groups = tuple(group_of[source] for source in sources)

    def _cut(
        self, group: KvGroup, layers: Sequence[LayerSpec]
    ) -> tuple[list[torch.Tensor], dict[int, list[torch.Tensor]]]:
        """The runs of a group, one for neighbours of one type and width, and each layer's parts of them (see _parts)."""
        kv_format, tokens = self.layout.format, self.layout.page_tokens
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

    def copy_pages(self, pairs: Sequence[int]) -> None:
        """Copy page pairs[0] to pairs[1], then pairs[2] to pairs[3], and so on: a later copy sees the earlier ones."""
        pages = self.flat.view(self.pages, -1)
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


def _parts(layer: LayerSpec, kv_format: KvFormat) -> list[tuple[int, torch.dtype, int]]:
    """What a layer holds of each slot, for keys and for values: (heads, type, width). The values, then their scales."""
    stored: torch.dtype = getattr(torch, kv_format.dtype)
    parts = [(layer.n_kv_heads, stored, layer.head_dim * kv_format.bits // (8 * stored.itemsize))]
    if kv_format.scale_dtype:
        parts.append((layer.n_kv_heads, getattr(torch, kv_format.scale_dtype), kv_format.scales(layer.head_dim)))
    return parts


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    """Zeros uint8 [size]. On a CPU the system hands the memory out, cleared, where it is first touched, and in pages of 2 MiB
    if it can: filling gigabytes would be most of the start-up."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
