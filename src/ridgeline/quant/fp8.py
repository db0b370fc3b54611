"""FP8: e4m3 weights with one float32 scale per output channel. The fused operations quantize activations per token.

The checkpoint is in floating point and is quantized tensor by tensor while it loads, or it is already in e4m3 with a
scale per channel or per tensor. In memory every output channel has its own scale, so merged parts and slices need no
special case.
Source: Micikevicius et al. 2022, FP8 Formats for Deep Learning.
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
from ridgeline.quant.format import FLOATS, Cut, Expected, LinearShape, Share, Weight, adds_bias, expected_tensors

Stored = Literal["float", "channel", "tensor"]
"""How a checkpoint stores a linear: floats, or e4m3 values with a scale per output channel or per tensor."""


@dataclass(frozen=True, slots=True)
class Fp8Format:
    """The fp8 weight format on one device."""

    ops: Fp8Ops
    dtype: torch.dtype
    """Of unquantized activations, biases and results."""
    device: torch.device
    stored: Stored = "float"
    inputs: bool = True
    """Whether `ops` quantize the inputs of a linear too."""
    groups_experts: bool = False
    """Whether the device multiplies by experts as they are stored (ops.experts.ExpertOps), not by `ops`."""
    name: str = "fp8"

    def create(self, shape: LinearShape, share: Share) -> Fp8Weight:
        return Fp8Weight(self, shape, share)


class Fp8Weight(Weight):
    """Parts stacked along the outputs: values [outputs, inputs], scales [outputs], biases [outputs]."""

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
        "_is_packed",
    )

    def __init__(self, form: Fp8Format, shape: LinearShape, share: Share) -> None:
        self._form = form
        self.expects: Mapping[tuple[int, str], Expected] = _expected_tensors(shape, form.stored)
        self._missing = set(self.expects)
        self._cut, self._adds_bias = Cut.of(shape, share), adds_bias(shape, share)
        rows, columns = self._cut.size
        self._values = torch.empty(rows, columns, dtype=FP8, device=form.device)
        self._scales = torch.empty(rows, dtype=torch.float32, device=form.device)
        self._bias = torch.zeros(rows, dtype=form.dtype, device=form.device) if shape.bias else None
        self._matrix: Fp8Matrix | None = None
        self._is_packed = not (form.groups_experts and shape.of_expert)

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        rows, target = self._cut.rows[part], self._cut.stacked_rows[part]
        if name == "weight" and self._form.stored == "float":
            # Scales are computed over unsharded rows, so they do not depend on the number of ranks.
            scaled = quantize(tensor[rows].to(self._form.device))
            _check_scales(scaled.scales)
            self._values[target].copy_(scaled.values[:, self._cut.columns])
            self._scales[target].copy_(scaled.scales)
        elif name == "weight":
            self._values[target].copy_(tensor[rows, self._cut.columns])
        elif name == "weight_scale":
            scales = tensor.flatten()[rows] if self._form.stored == "channel" else tensor.flatten()
            _check_scales(scales)
            self._scales[target].copy_(scales.float().expand(rows.stop - rows.start))
        elif self._bias is not None and self._adds_bias:
            self._bias[target].copy_(tensor[rows])
        self._missing.discard((part, name))
        if not self._missing and self._is_packed:
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
        tensors = (self._values, self._scales)
        return tensors if self._bias is None else (*tensors, self._bias)


def _expected_tensors(shape: LinearShape, stored: Stored) -> dict[tuple[int, str], Expected]:
    tensors = expected_tensors(shape)
    if stored == "float":
        return tensors
    for index, part in enumerate(shape.parts):
        tensors[index, "weight"] = Expected((part.rows, shape.d_in), (FP8,))
        tensors[index, "weight_scale"] = Expected((part.rows, 1) if stored == "channel" else (1,), FLOATS)
    return tensors


def _check_scales(scales: torch.Tensor) -> None:
    """Raise UnsupportedModel unless every scale is finite and positive."""
    if not scales.is_meta and not bool(((scales > 0) & (scales < float("inf"))).all()):
        raise UnsupportedModel("cannot be stored in fp8: it has values or scales that are NaN, infinite or negative.")
