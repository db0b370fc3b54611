"""FP8: e4m3 weights with float32 scales per output channel, or per output channel and group of inputs.

The checkpoint is in floating point and is quantized tensor by tensor while it loads, or it is already in e4m3 with a
scale per channel, per tensor or per block of BLOCK outputs and inputs. In memory every output channel has its own scales, so
merged parts and slices need no special case. With one scale the fused operations may quantize activations per token.
Sources: Micikevicius et al. 2022, FP8 Formats for Deep Learning; DeepSeek-V3 (arXiv:2412.19437), section 3.3.2, for blocks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.ops.reference import FP8, quantize
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, Fp8Matrix, Fp8Ops, Matrix, Scaled
from ridgeline.quant.format import (
    FLOATS,
    Cut,
    Expected,
    LinearShape,
    Share,
    Weight,
    adds_bias,
    expected_tensors,
    rank_group,
)

Stored = Literal["float", "channel", "tensor", "block"]
"""How a checkpoint stores a linear: floats, or e4m3 values with a scale per output channel, per tensor or per block."""
BLOCK = 128
"""Outputs and inputs of a block of a checkpoint, of which the last ones may be smaller."""
LARGEST_SCALE = 128.0
"""Scales of groups are below this one, with which weights reach the largest float16. GPU kernels multiply scales by 2^120."""


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
    group: int = 0
    """Inputs of an output channel that share a scale; 0: all."""
    of_experts: Fp8Ops | None = None
    """Operations of weights of experts, whose layout ops.triton.experts reads. None: `ops`."""
    name: str = "fp8"

    def create(self, shape: LinearShape, share: Share) -> Fp8Weight:
        return Fp8Weight(self, shape, share)


class Fp8Weight(Weight):
    """Parts stacked along the outputs: values [outputs, inputs], scales [outputs] or [outputs, groups], biases [outputs]."""

    __slots__ = (
        "expects",
        "_cut",
        "_adds_bias",
        "_form",
        "_ops",
        "_group",
        "_values",
        "_scales",
        "_bias",
        "_missing",
        "_matrix",
    )

    def __init__(self, form: Fp8Format, shape: LinearShape, share: Share) -> None:
        self._form = form
        self.expects: Mapping[tuple[int, str], Expected] = _expected_tensors(shape, form.stored)
        self._missing = set(self.expects)
        self._cut, self._adds_bias = Cut.of(shape, share), adds_bias(shape, share)
        rows, columns = self._cut.size
        self._group = rank_group(form.group, shape, share) if form.group else 0
        groups = (-(-columns // self._group),) if self._group else ()
        self._values = torch.empty(rows, columns, dtype=FP8, device=form.device)
        self._scales = torch.empty(rows, *groups, dtype=torch.float32, device=form.device)
        self._bias = torch.zeros(rows, dtype=form.dtype, device=form.device) if shape.bias else None
        self._matrix: Fp8Matrix | None = None
        self._ops = form.of_experts if form.of_experts and shape.of_expert else form.ops

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        rows, target = self._cut.rows[part], self._cut.stacked_rows[part]
        if name == "weight" and self._form.stored == "float":
            # Scales are computed over unsharded rows, so they do not depend on the number of ranks.
            scaled = quantize_groups(tensor[rows].to(self._form.device), self._form.group)
            _check_scales(scaled.scales)
            self._values[target].copy_(scaled.values[:, self._cut.columns])
            self._scales[target].copy_(self._of_columns(scaled.scales))
        elif name == "weight":
            self._values[target].copy_(tensor[rows, self._cut.columns])
        elif name == "weight_scale":
            _check_scales(tensor, LARGEST_SCALE if self._group else math.inf)
            if self._form.stored == "block":
                scales = self._of_columns(tensor.repeat_interleave(BLOCK, 0)[rows])
            else:
                scales = tensor.flatten()[rows] if self._form.stored == "channel" else tensor.flatten()
            self._scales[target].copy_(scales)
        elif self._bias is not None and self._adds_bias:
            self._bias[target].copy_(tensor[rows])
        self._missing.discard((part, name))
        if not self._missing:
            packed = self._ops.pack(self._values, self._scales)
            self._matrix = replace(packed, group=self._group, rounded=self._form.inputs)
            self._values, self._scales = self._matrix.values, self._matrix.scales

    def _of_columns(self, scales: torch.Tensor) -> torch.Tensor:
        """Scales [rows] or [rows, groups] -> those of this rank's inputs."""
        if not self._group:
            return scales
        columns = torch.arange(self._cut.columns.start, self._cut.columns.stop, self._group, device=scales.device)
        return scales[:, columns // self._form.group]

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        assert self._matrix is not None
        return self._ops.linear(x, self._matrix, self._bias, self._form.dtype)

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        assert self._matrix is not None
        return self._ops.linear_add(x, self._matrix, self._bias, stream)

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> Activation:
        assert self._matrix is not None
        return self._ops.linear_activate(x, self._matrix, self._bias, self._form.dtype, kind)

    def matrix(self) -> Matrix | None:
        return Matrix(self._matrix, self._bias) if self._matrix is not None and self._form.inputs else None

    def stored(self) -> Matrix:
        assert self._matrix is not None
        return Matrix(self._matrix, self._bias)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        tensors = (self._values, self._scales)
        return tensors if self._bias is None else (*tensors, self._bias)


def _expected_tensors(shape: LinearShape, stored: Stored) -> dict[tuple[int, str], Expected]:
    tensors = expected_tensors(shape)
    if stored == "float":
        return tensors
    for index, part in enumerate(shape.parts):
        blocks = (-(-part.rows // BLOCK), -(-shape.d_in // BLOCK))
        scales = {"channel": (part.rows, 1), "tensor": (1,), "block": blocks}[stored]
        tensors[index, "weight"] = Expected((part.rows, shape.d_in), (FP8,))
        tensors[index, "weight_scale"] = Expected(scales, FLOATS)
    return tensors


def quantize_groups(weight: torch.Tensor, group: int) -> Scaled:
    """As `quantize`, with a scale for each `group` inputs of a row [N, K]: values [N, K], scales [N, groups]; [N] if group is 0."""
    if not group:
        return quantize(weight)
    rows, inputs = weight.shape
    scaled = quantize(torch.nn.functional.pad(weight, (0, -inputs % group)).view(-1, group))
    return Scaled(scaled.values.view(rows, -1)[:, :inputs], scaled.scales.view(rows, -1))


def _check_scales(scales: torch.Tensor, limit: float = math.inf) -> None:
    """Raise UnsupportedModel unless every scale is below the limit and not negative."""
    if not scales.is_meta and not bool(((scales >= 0) & (scales < limit)).all()):
        beyond = "infinite" if limit == math.inf else f"{limit:.0f} or more"
        raise UnsupportedModel(f"cannot be stored in fp8: it has values or scales that are NaN, {beyond} or negative.")
