"""FP8: e4m3 weights with one float32 scale per output channel; activations quantized per token by the fused operations.

Weights come from a checkpoint in floating point and are quantized tensor by tensor as they stream in, or they are
published in e4m3 already, with a scale per channel or per tensor. Either way a channel has a scale of its own here, so
merged parts and slices need nothing more (Micikevicius et al. 2022, FP8 Formats for Deep Learning).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.ops.reference import FP8, quantize
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, Fp8Matrix, Fp8Ops, Matrix
from ridgeline.quant.format import FLOATS, Cut, Expected, LinearShape, Share, Weight, adds_bias, expected

Stored = Literal["float", "channel", "tensor"]
"""What a checkpoint holds of a linear: floats, or e4m3 values with a scale per output channel or one for the tensor."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """dtype: of plain activations, biases and results. inputs: whether `ops` quantize a linear's inputs too."""

    ops: Fp8Ops
    dtype: torch.dtype
    device: torch.device
    stored: Stored = "float"
    inputs: bool = True
    name: str = "fp8"

    def create(self, shape: LinearShape, share: Share) -> Fp8Weight:
        return Fp8Weight(self, shape, share)


class Fp8Weight(Weight):
    """Parts lie one below the other: values [outputs, inputs], scales [outputs], biases [outputs]."""

    __slots__ = (
        "expects",
        "_cut",
        "_adds_bias",
        "_form",
        "_values",
        "_scales",
        "_bias",
        "_missing",
        "_matrix",
    )

    def __init__(self, form: Fp8Format, shape: LinearShape, share: Share) -> None:
        self._form = form
        self.expects: Mapping[tuple[int, str], Expected] = _expected(shape, form.stored)
        self._missing = set(self.expects)
        self._cut, self._adds_bias = Cut.of(shape, share), adds_bias(shape, share)
        rows, columns = self._cut.size
        self._values = torch.empty(rows, columns, dtype=FP8, device=form.device)
        self._scales = torch.empty(rows, dtype=torch.float32, device=form.device)
        self._bias = torch.zeros(rows, dtype=form.dtype, device=form.device) if shape.bias else None
        self._matrix: Fp8Matrix | None = None

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        rows, place = self._cut.rows[part], self._cut.places[part]
        if name == "weight" and self._form.stored == "float":
            # Scales are those of whole rows, so that every rank holds the same numbers.
            scaled = quantize(tensor[rows].to(self._form.device))
            _refuse_odd(scaled.scales)
            self._values[place].copy_(scaled.values[:, self._cut.columns])
            self._scales[place].copy_(scaled.scales)
        elif name == "weight":
            self._values[place].copy_(tensor[rows, self._cut.columns])
        elif name == "weight_scale":
            scales = tensor.flatten()[rows] if self._form.stored == "channel" else tensor.flatten()
            _refuse_odd(scales)
            self._scales[place].copy_(scales.float().expand(rows.stop - rows.start))
        elif self._bias is not None and self._adds_bias:
            self._bias[place].copy_(tensor[rows])
        self._missing.discard((part, name))
        if not self._missing:
            self._matrix = self._form.ops.pack(self._values, self._scales)
            self._values, self._scales = self._matrix.values, self._matrix.scales

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        assert self._matrix is not None
        return self._form.ops.linear(x, self._matrix, self._bias, self._form.dtype)

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        assert self._matrix is not None
        return self._form.ops.linear_add(x, self._matrix, self._bias, stream)

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> Activation:
        assert self._matrix is not None
        return self._form.ops.linear_activate(x, self._matrix, self._bias, self._form.dtype, kind)

    def matrix(self) -> Matrix | None:
        return Matrix(self._matrix, self._bias) if self._matrix is not None and self._form.inputs else None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        held = (self._values, self._scales)
        return held if self._bias is None else (*held, self._bias)


def _expected(shape: LinearShape, stored: Stored) -> dict[tuple[int, str], Expected]:
    found = expected(shape)
    if stored == "float":
        return found
    for index, part in enumerate(shape.parts):
        found[index, "weight"] = Expected((part.rows, shape.d_in), (FP8,))
        found[index, "weight_scale"] = Expected((part.rows, 1) if stored == "channel" else (1,), FLOATS)
    return found


def _refuse_odd(scales: torch.Tensor) -> None:
    """A scale must be finite and positive."""
    if not scales.is_meta and not bool(((scales > 0) & (scales < float("inf"))).all()):
        raise UnsupportedModel("cannot be stored in fp8: it has values or scales that are NaN, infinite or negative.")
