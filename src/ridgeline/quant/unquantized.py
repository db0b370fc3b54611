"""Unquantized weights in the model's floating-point type, packed by the operations of the device. Blocks of GGUF are converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, FloatOps, Matrix, Scaled
from ridgeline.quant.blocks import read_blocks
from ridgeline.quant.format import BLOCKS, Cut, Expected, LinearShape, Part, Share, Weight, adds_bias, expected_tensors


@dataclass(frozen=True, slots=True)
class UnquantizedFormat:
    """The unquantized weight format: bfloat16, float16 or float32 on one device."""

    ops: FloatOps
    dtype: torch.dtype
    device: torch.device
    name: str = "unquantized"

    def create(self, shape: LinearShape, share: Share) -> UnquantizedWeight:
        return UnquantizedWeight(self, shape, share)

    def adopt(self, matrix: torch.Tensor) -> UnquantizedWeight:
        """Return a linear that shares a loaded matrix [outputs, inputs], such as a head tied to the embedding."""
        rows, columns = matrix.shape
        return UnquantizedWeight(self, LinearShape(columns, (Part(rows, rows),)), Share(), matrix)


class UnquantizedWeight(Weight):
    """Parts stacked along the outputs in one matrix [outputs, inputs], and their biases in one vector."""

    __slots__ = ("expects", "_ops", "_cut", "_inputs", "_adds_bias", "_matrix", "_bias", "_missing")

    def __init__(
        self, form: UnquantizedFormat, shape: LinearShape, share: Share, loaded: torch.Tensor | None = None
    ) -> None:
        self._ops = form.ops
        self.expects: Mapping[tuple[int, str], Expected] = expected_tensors(shape, BLOCKS)
        self._missing = set(self.expects)
        self._cut, self._inputs = Cut.of(shape, share), shape.d_in
        self._adds_bias = adds_bias(shape, share)
        rows, columns = self._cut.size
        self._bias = torch.zeros(rows, dtype=form.dtype, device=form.device) if shape.bias else None
        if loaded is None:
            self._matrix = torch.empty(rows, columns, dtype=form.dtype, device=form.device)
        else:
            self._missing.clear()
            self._matrix = self._ops.pack(loaded)

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        cut = self._cut
        if name == "weight":
            if tensor.dtype is BLOCKS:
                tensor = read_blocks(tensor, self._inputs).dequantized()
            self._matrix[cut.stacked_rows[part]].copy_(tensor[cut.rows[part], cut.columns])
        elif self._bias is not None and self._adds_bias:
            self._bias[cut.stacked_rows[part]].copy_(tensor[cut.rows[part]])
        self._missing.discard((part, name))
        if not self._missing:
            self._matrix = (self._ops.pack_pruned or self._ops.pack)(self._matrix)

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        assert not isinstance(x, Scaled)
        return self._ops.linear(x, self._matrix, self._bias)

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self._ops.linear_add(x, self._matrix, self._bias, stream)

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> torch.Tensor:
        assert not isinstance(x, Scaled)
        return self._ops.linear_activate(x, self._matrix, self._bias, kind)

    def matrix(self) -> Matrix | None:
        return None if self._missing else Matrix(self._matrix, self._bias)

    def stored(self) -> Matrix:
        return Matrix(self._matrix, self._bias)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        matrix = self._matrix if self._missing else self._ops.memory(self._matrix)
        return (matrix,) if self._bias is None else (matrix, self._bias)
