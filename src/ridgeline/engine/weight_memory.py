"""Memory of a decoder's weights: as they are stored, and expanded for steps of many rows (core.gpu_blocks)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ridgeline.models.decoder import Decoder
from ridgeline.ops.releasable import DeviceRange, move
from ridgeline.quant.format import Weight


class WeightMemory:
    """The tensors of a decoder whose weights are all loaded, and linears that are expanded beside them.

    expanded: made from the stored ones on the device. range: memory of the stored ones that a GPU can give back. On a CPU there is
    neither: then this only lists the tensors whose pages a sleep gives back.
    """

    def __init__(self, decoder: Decoder, expands: bool = False, releasable: bool = False) -> None:
        self._decoder, self._linears = decoder, list(linears(decoder)) if expands else []
        self.expanded: list[torch.Tensor] = []
        device = decoder.embedding.device
        self.range = move(self.stored, device) if releasable else None
        self.expand()
        self._expanded_range = move(self.expanded, device) if releasable and self.expanded else None

    @property
    def stored(self) -> list[torch.Tensor]:
        """All tensors but the expanded ones."""
        return self._decoder.all_tensors()

    @property
    def ranges(self) -> list[DeviceRange]:
        """All memory that a GPU can give back."""
        return [memory for memory in (self.range, self._expanded_range) if memory is not None]

    def expand(self) -> None:
        """Write the expanded linears, after the stored ones have changed."""
        self.expanded = [tensor for weight in self._linears if (tensor := weight.expand()) is not None]
        if self.expanded and self.expanded[0].is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the weights in float32


def linears(decoder: Decoder) -> Iterator[Weight]:
    """Every linear of this rank's layers, and its head."""
    for layer in decoder.layers:
        for block in (layer.attention, layer.feed_forward):
            yield from (weight for _, weight in block.linears())
    if decoder.head is not None:
        yield decoder.head
