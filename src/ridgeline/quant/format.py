"""Interfaces of weight formats: what a linear layer needs from a number format.

A format knows the names of its tensors in a checkpoint, how a rank slices them, how merged projections are laid out,
and how to multiply. The decoder and the loader do not know these details.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ridgeline.core.errors import ConfigError
from ridgeline.core.ranks import units_on_rank
from ridgeline.ops.reference import ROW_CODES
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, Matrix

Split = Literal["out", "in"] | None
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
BLOCKS = torch.uint8
"""Of a tensor in blocks, [outputs, blocks, bytes of a block], whose inputs its kind says (quant.blocks)."""


@dataclass(frozen=True, slots=True)
class Part:
    """One projection of a merged linear: `rows` output features in `units` indivisible units (heads)."""

    rows: int
    units: int


@dataclass(frozen=True, slots=True)
class LinearShape:
    """The unsharded shape of a linear layer: `d_in` input features, and parts stacked along the outputs.

    split: how ranks share the layer.
        "out": the rows of every part are split. A part with fewer units than ranks is replicated.
        "in": the input features are split in `in_units` indivisible units. The caller sums the results over ranks.
        None: every rank holds the whole layer.
    of_expert: the router of a layer chooses it.
    """

    d_in: int
    parts: tuple[Part, ...]
    bias: bool = False
    split: Split = None
    in_units: int = 1
    of_expert: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a rank: number `rank` of `size` equal shares."""

    rank: int = 0
    size: int = 1

    def span(self, length: int, units: int) -> slice:
        """Return the rank's slice of `length` features in `units` units. With fewer units than ranks, neighbours share one."""
        count, step = units_on_rank(units, self.size), length // units
        first = self.rank * units // self.size * step
        return slice(first, first + count * step)


@dataclass(frozen=True, slots=True)
class Expected:
    """One tensor that a checkpoint must contain: its unsharded shape and the dtypes it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS

    def shape_of(self, tensor: torch.Tensor) -> tuple[int, ...]:
        """The shape of a tensor; in blocks, with the inputs that are expected, which the kind of the blocks is checked for."""
        in_blocks = tensor.dtype is BLOCKS and BLOCKS in self.dtypes and tensor.dim() == len(self.shape) + 1
        return (*tensor.shape[:-2], self.shape[-1]) if in_blocks else tuple(tensor.shape)


def expected_tensors(shape: LinearShape, *others: torch.dtype) -> dict[tuple[int, str], Expected]:
    """List the tensors that a floating-point checkpoint contains for a linear, by (part, name). others: dtypes that weights may
    have, too."""
    tensors: dict[tuple[int, str], Expected] = {}
    for index, part in enumerate(shape.parts):
        tensors[index, "weight"] = Expected((part.rows, shape.d_in), (*FLOATS, *others))
        if shape.bias:
            tensors[index, "bias"] = Expected((part.rows,))
    return tensors


def max_abs(tensor: torch.Tensor) -> torch.Tensor:
    """Return max|x|, float32 [] on the tensor's device; NaN if any value is NaN.

    aminmax is limited by memory bandwidth. On a CPU it is 20 times as fast as isfinite. Codes of 8-bit floats are reduced as
    integers: positive values ascend with their code as int8, magnitudes of negative ones as uint8. NaN is the last code of each.
    """
    if tensor.itemsize == 1:
        codes = tensor.view(torch.int8).amax().view(torch.uint8), tensor.view(torch.uint8).amax()
        tensor = torch.stack(codes).view(tensor.dtype).float()
    low, high = torch.aminmax(tensor)
    return torch.maximum(-low.float(), high.float())


def adds_bias(shape: LinearShape, share: Share) -> bool:
    """Whether this rank adds the bias. Partial products are summed over ranks, so only one rank may add it."""
    return shape.split != "in" or share.rank == 0


@dataclass(frozen=True, slots=True)
class Cut:
    """The slice of a linear that one rank holds."""

    rows: tuple[slice, ...]
    """Rows of each part in the checkpoint."""
    stacked_rows: tuple[slice, ...]
    """Rows of each part in the rank's stacked matrix."""
    columns: slice
    """Input features."""

    @staticmethod
    def of(shape: LinearShape, share: Share) -> Cut:
        rows, stacked_rows, end = [], [], 0
        for part in shape.parts:
            selection = share.span(part.rows, part.units) if shape.split == "out" else slice(0, part.rows)
            rows.append(selection)
            stacked_rows.append(slice(end, end := end + selection.stop - selection.start))
        columns = share.span(shape.d_in, shape.in_units) if shape.split == "in" else slice(0, shape.d_in)
        return Cut(tuple(rows), tuple(stacked_rows), columns)

    @property
    def size(self) -> tuple[int, int]:
        """(outputs, inputs) of this rank."""
        return self.stacked_rows[-1].stop, self.columns.stop - self.columns.start


def rank_group(group: int, shape: LinearShape, share: Share) -> int:
    """Return the group size on one rank.

    It is smaller than `group` if a rank's inputs start inside a group. The scale of the group is then repeated.
    """
    cut = Cut.of(shape, share)
    if cut.size[1] == shape.d_in or group >= shape.d_in:
        return group
    rank_inputs = cut.size[1]
    size = math.gcd(group, rank_inputs)
    if size % ROW_CODES:
        raise ConfigError(
            f"Groups of {group} inputs cannot be split over {share.size} devices, which hold {rank_inputs} of {shape.d_in} "
            f"inputs each: use fewer devices, or a group size that divides {rank_inputs}."
        )
    return size


class Weight(Protocol):
    """The weights of one linear on one rank: empty when created, usable after every expected tensor is loaded.

    step: the step whose tokens x holds (StepInputs.row_of_inputs), for weights that depend on the request, such as
    adapters. A linear of a layer always passes it. Number formats ignore it.
    """

    @property
    def expects(self) -> Mapping[tuple[int, str], Expected]:
        """Every tensor that the checkpoint must contain, by (part, name in the checkpoint)."""
        ...

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        """Copy this rank's share of an unsharded checkpoint tensor. After the last one, pack the weights for multiplication.

        Raises UnsupportedModel for values that the format cannot represent.
        """
        ...

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        """Multiply x [T, this rank's inputs]. Returns [T, this rank's outputs] in the model's dtype."""
        ...

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        """Return stream [T, outputs] + apply(x). The result may overwrite the stream's memory."""
        ...

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> Activation:
        """Return act(gate) * up, where apply(x) = (gate, up), each [T, this rank's outputs / 2].

        The result is in the form that a linear of this format takes. kind: as in TokenwiseOps.activate.
        """
        ...

    def matrix(self) -> Matrix | None:
        """Return the matrix for operations that run whole layers; None if they cannot use this weight."""
        ...

    def stored(self) -> Matrix:
        """Return the loaded weights as the format keeps them, for operations on experts (ops.experts)."""
        ...

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the weight keeps in memory."""
        ...

    def expand(self) -> torch.Tensor | None:
        """Keep the loaded weights in floating point too, for steps of many rows (core.gpu_blocks). Called again, after the stored
        form has changed, it writes to the same memory. Returns that memory, which `tensors` leaves out; None: there is one form.
        """
        return None


class WeightFormat(Protocol):
    """A factory for the weights of linears in one number format."""

    @property
    def name(self) -> str: ...

    def create(self, shape: LinearShape, share: Share) -> Weight:
        """Allocate one rank's share of a linear."""
        ...
