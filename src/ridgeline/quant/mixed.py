"""LLM.int8() (Dettmers et al. 2022): weights and activations in 8 bits, inputs that 8 bits would spoil in floating point.

The paper finds those inputs in the activations of each batch and takes their weights, which it holds in 16 bits, for them.
Weights in 8 bits cannot give theirs back, so here both sides are kept: the columns that 8-bit weights would lose, chosen while
loading, stay in the model's dtype with their inputs; of the other inputs each token leaves those of OUTLIER and above in
floating point, whose weights 8 bits hold well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import NumberFormat
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, Matrix, Ops, Scaled, plain
from ridgeline.quant.format import Cut, Expected, LinearShape, Share, Weight, largest
from ridgeline.quant.integer import IntFormat


def lost_inputs(weight: torch.Tensor, count: int) -> torch.Tensor:
    """weight [N, K] -> the `count` inputs of which 8 bits lose the largest share, int64 [count], ascending.

    All weights of an output share a step, so every column errs about as much, and its relative error is largest where the
    column is smallest: training makes the columns of large inputs small. Columns of zeros lose nothing.
    """
    size = weight.float().square().sum(0)
    return torch.where(size > 0, size, torch.inf).topk(count, largest=False).indices.sort().values


@dataclass(frozen=True, slots=True)
class MixedFormat:
    """numbers: of the integers, and how many inputs are kept. dtype: of activations, biases, results and kept columns."""

    ops: Ops
    numbers: NumberFormat
    dtype: torch.dtype
    device: torch.device
    name: str = "mixed"

    def create(self, shape: LinearShape, share: Share) -> MixedWeight:
        return MixedWeight(self, shape, share)


class MixedWeight(Weight):
    """Integers with the kept columns empty, beside a matrix of those columns. Weights wait in floating point until the last
    part is there, because the parts of a linear keep the same inputs; ranks that share the inputs choose among their own."""

    __slots__ = ("expects", "_columns", "_cut", "_empty", "_form", "_integers", "_kept", "_missing", "_waiting")

    def __init__(self, form: MixedFormat, shape: LinearShape, share: Share) -> None:
        integers = IntFormat(form.ops.matmul.integer, form.numbers, form.dtype, form.device)
        self._form, self._integers, self._cut = form, integers.create(shape, share), Cut.of(shape, share)
        self.expects: Mapping[tuple[int, str], Expected] = self._integers.expects
        self._missing = {part for part, name in self.expects if name == "weight"}
        self._waiting: dict[int, torch.Tensor] = {}
        self._kept: torch.Tensor | None = None
        self._columns: torch.Tensor | None = None
        self._empty: torch.Tensor | None = None

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        if name != "weight":
            self._integers.load(part, name, tensor)
            return
        if not tensor.is_meta and not bool(largest(tensor) < torch.inf):
            raise UnsupportedModel("cannot be quantized to integers: it has values that are NaN or infinite.")
        self._waiting[part] = tensor
        self._missing.discard(part)
        if not self._missing:
            self._settle()

    def _settle(self) -> None:
        """Choose what is kept, and hand the rest to the integers."""
        form, own = self._form, self._cut.columns
        parts = [self._waiting[part].to(form.device) for part in range(len(self._waiting))]
        self._waiting.clear()
        _, inputs = self._cut.size
        kept = lost_inputs(torch.cat([one[:, own] for one in parts]), form.numbers.kept_inputs(inputs))
        rows = [one[mine].index_select(1, kept + own.start) for one, mine in zip(parts, self._cut.rows, strict=True)]
        for part, one in enumerate(parts):
            self._integers.load(part, "weight", one.index_fill(1, kept + own.start, 0.0))
        self._kept, self._columns = kept, form.ops.matmul.plain.pack(torch.cat(rows).to(form.dtype))
        self._empty = torch.zeros(inputs, dtype=torch.bool, device=form.device).index_fill_(0, kept, True)

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        assert not isinstance(x, Scaled)
        given = plain(x, self._form.ops.tokenwise.rms_norm)
        return self._beside(given, self._integers.apply(self._rest(given)))

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self._beside(x, self._integers.add(self._rest(x), stream))

    def _rest(self, x: torch.Tensor) -> torch.Tensor:
        """x without the kept inputs, as the integers multiply it."""
        assert self._empty is not None
        return self._form.ops.matmul.round_inliers(x, self._empty)

    def _beside(self, x: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        """rest + the kept inputs times their columns."""
        assert self._kept is not None and self._columns is not None
        return self._form.ops.matmul.plain.linear_add(x.index_select(1, self._kept), self._columns, None, rest)

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> torch.Tensor:
        return self._form.ops.tokenwise.activate(self.apply(x), kind)

    def matrix(self) -> Matrix | None:
        return None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        assert self._kept is not None and self._columns is not None
        return (*self._integers.tensors(), self._kept, self._columns)
