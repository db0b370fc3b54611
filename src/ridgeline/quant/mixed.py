"""LLM.int8(): 8-bit weights and activations, with outlier inputs in floating point.

The paper detects outlier inputs in the activations of each batch and multiplies them with 16-bit weights, which it keeps
beside the 8-bit ones. This module keeps weights once:

- Kept inputs: the columns that lose most in 8 bits are chosen while loading. They and their inputs stay in the model's dtype.
- Other inputs: the weights are in 8 bits. Inputs of magnitude OUTLIER and above stay in floating point, and so do their products
  with the dequantized weights. The compiled operations of a CPU take these inputs for all tokens of a call, as published. A GPU
  and --deterministic take each token's own, so that its result does not depend on other tokens.

Source: Dettmers et al. 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import NumberFormat
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, Matrix, Ops
from ridgeline.quant.format import Cut, Expected, LinearShape, Share, Weight, max_abs
from ridgeline.quant.integer import IntFormat


def least_precise_inputs(weight: torch.Tensor, count: int) -> torch.Tensor:
    """Return the `count` inputs of weight [N, K] with the largest relative error in 8 bits, int64 [count], ascending.

    All weights of an output share a scale, so every column has about the same absolute error. The relative error is
    largest for the smallest columns. Training makes the columns of large inputs small. Columns of zeros have no error.
    """
    energy = weight.float().square().sum(0)
    return torch.where(energy > 0, energy, torch.inf).topk(count, largest=False).indices.sort().values


@dataclass(frozen=True, slots=True)
class MixedFormat:
    """The LLM.int8() weight format on one device."""

    ops: Ops
    numbers: NumberFormat
    """Format of the integers, and the number of kept inputs."""
    dtype: torch.dtype
    """Of activations, biases, results and kept columns."""
    device: torch.device
    name: str = "mixed"

    def create(self, shape: LinearShape, share: Share) -> MixedWeight:
        return MixedWeight(self, shape, share)


class MixedWeight(Weight):
    """An integer matrix whose kept columns are zero, and a floating-point matrix of the kept columns.

    All parts of a linear keep the same inputs, so weights stay in floating point until the last part is loaded. A rank
    chooses among the inputs that it holds.
    """

    __slots__ = ("expects", "_cut", "_form", "_integers", "_kept", "_missing", "_pending")

    def __init__(self, form: MixedFormat, shape: LinearShape, share: Share) -> None:
        integers = IntFormat(form.ops.matmul.mixed, form.numbers, form.dtype, form.device)
        self._form, self._integers, self._cut = form, integers.create(shape, share), Cut.of(shape, share)
        self.expects: Mapping[tuple[int, str], Expected] = self._integers.expects
        self._missing = {part for part, name in self.expects if name == "weight"}
        self._pending: dict[int, torch.Tensor] = {}
        self._kept: tuple[torch.Tensor, ...] = ()

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        if name != "weight":
            self._integers.load(part, name, tensor)
            return
        if not tensor.is_meta and not bool(max_abs(tensor) < torch.inf):
            raise UnsupportedModel("cannot be quantized to integers: it has values that are NaN or infinite.")
        self._pending[part] = tensor
        self._missing.discard(part)
        if not self._missing:
            self._quantize()

    def _quantize(self) -> None:
        """Choose the kept inputs and quantize the other columns."""
        form, columns = self._form, self._cut.columns
        parts = [self._pending[part].to(form.device) for part in range(len(self._pending))]
        self._pending.clear()
        _, inputs = self._cut.size
        kept = least_precise_inputs(
            torch.cat([weight[:, columns] for weight in parts]), form.numbers.kept_inputs(inputs)
        )
        rows = [
            weight[own_rows].index_select(1, kept + columns.start)
            for weight, own_rows in zip(parts, self._cut.rows, strict=True)
        ]
        kept_columns = form.ops.matmul.unquantized.pack(torch.cat(rows).to(form.dtype))
        is_kept = torch.zeros(inputs, dtype=torch.bool, device=form.device).index_fill_(0, kept, True)
        self._kept = kept.int(), form.ops.matmul.unquantized.memory(kept_columns)
        self._integers.keep(self._kept[0], kept_columns, is_kept)
        for part, weight in enumerate(parts):
            self._integers.load(part, "weight", weight.index_fill(1, kept + columns.start, 0.0))

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        return self._integers.apply(x, step)

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        return self._integers.add(x, stream, step)

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> torch.Tensor:
        return self._integers.activate(x, kind, step)

    def matrix(self) -> Matrix | None:
        return self._integers.matrix()

    def stored(self) -> Matrix:
        return self._integers.stored()

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (*self._integers.tensors(), *self._kept)
