"""The plain format: weights in the model's own floating-point type, packed by the ops for their device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ridgeline.ops.table import Ops
from ridgeline.quant.format import LinearShape, Part, Share


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """bfloat16, float16 or float32 weights on one device."""

    ops: Ops
    dtype: torch.dtype
    device: torch.device
    name: str = "plain"

    def create(self, shape: LinearShape, share: Share) -> PlainWeight:
        return PlainWeight(self, shape, share)

    def adopt(self, matrix: torch.Tensor) -> PlainWeight:
        """A linear over a loaded matrix [outputs, inputs] that somebody else owns: a head tied to the embedding."""
        rows, columns = matrix.shape
        return PlainWeight(self, LinearShape(columns, (Part(rows, rows),)), Share(), matrix)


class PlainWeight:
    """Parts lie one below the other in one [outputs, inputs] matrix; biases in one vector."""

    __slots__ = ("expects", "_shape", "_share", "_places", "_matrix", "_bias", "_missing", "_pack", "_linear")

    def __init__(self, form: PlainFormat, shape: LinearShape, share: Share, loaded: torch.Tensor | None = None) -> None:
        self._shape, self._share = shape, share
        self._pack, self._linear = form.ops.pack, form.ops.linear
        self.expects: Mapping[tuple[int, str], tuple[int, ...]] = _expected(shape)
        self._missing = set(self.expects)
        self._places: list[slice] = []
        rows = 0
        for index in range(len(shape.parts)):
            cut = self._rows(index)
            self._places.append(slice(rows, rows + cut.stop - cut.start))
            rows += cut.stop - cut.start
        columns = self._columns()
        self._bias = torch.zeros(rows, dtype=form.dtype, device=form.device) if shape.bias else None
        if loaded is None:
            self._matrix = torch.empty(rows, columns.stop - columns.start, dtype=form.dtype, device=form.device)
        else:
            self._missing.clear()
            self._matrix = self._pack(loaded)

    def _rows(self, part: int) -> slice:
        one = self._shape.parts[part]
        return self._share.span(one.rows, one.units) if self._shape.split == "out" else slice(0, one.rows)

    def _columns(self) -> slice:
        shape = self._shape
        return self._share.span(shape.d_in, shape.in_units) if shape.split == "in" else slice(0, shape.d_in)

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        if name == "weight":
            self._matrix[self._places[part]].copy_(tensor[self._rows(part), self._columns()])
        elif self._bias is not None and (self._shape.split != "in" or self._share.rank == 0):
            # Partial products are summed over ranks, so only one of them may add the bias.
            self._bias[self._places[part]].copy_(tensor[self._rows(part)])
        self._missing.discard((part, name))
        if not self._missing:
            self._matrix = self._pack(self._matrix)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x, self._matrix, self._bias)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (self._matrix,) if self._bias is None else (self._matrix, self._bias)


def _expected(shape: LinearShape) -> dict[tuple[int, str], tuple[int, ...]]:
    found: dict[tuple[int, str], tuple[int, ...]] = {}
    for index, part in enumerate(shape.parts):
        found[index, "weight"] = (part.rows, shape.d_in)
        if shape.bias:
            found[index, "bias"] = (part.rows,)
    return found
