"""Quantized linears that are there in floating point too: products of few rows read the quantized weights, others these."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ridgeline.ops.table import FloatInput, Normed


class Expanded:
    """The weights of a quantized linear in floating point, on a device with memory for both forms (core.gpu_blocks). Empty until
    `write`."""

    __slots__ = ("_most_rows", "_weights")

    def __init__(self) -> None:
        self._weights: torch.Tensor | None = None
        self._most_rows = 0

    def write(
        self, pieces: Iterable[torch.Tensor], most_rows: int, size: tuple[int, int], dtype: torch.dtype
    ) -> torch.Tensor:
        """Fill the memory, which stays where it is when this is called again, and return it.

        pieces: float32 [outputs, inputs] on the device, one after the other, `size` together. most_rows: of a product that reads
        the quantized weights.
        """
        self._most_rows, first = most_rows, 0
        for piece in pieces:
            if self._weights is None:
                self._weights = torch.empty(size, dtype=dtype, device=piece.device)
            self._weights[first : (first := first + len(piece))].copy_(piece)
        assert self._weights is not None
        return self._weights

    def for_rows(self, x: FloatInput) -> torch.Tensor | None:
        """The weights, if a product of x reads them."""
        rows = len(x.x if isinstance(x, Normed) else x)
        return self._weights if rows > self._most_rows else None
