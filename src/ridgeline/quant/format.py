"""Number formats of weights: what a linear layer needs of one, whatever lies behind it.

A format knows how its tensors are named in a checkpoint, how they are cut for a rank, how merged projections lie side
by side, and how to multiply. The decoder and the loader know none of that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from ridgeline.core.spec import units_on_rank
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, Matrix

Split = Literal["out", "in"] | None
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, slots=True)
class Part:
    """One projection of a merged linear: `rows` output features made of `units` that no cut may divide (heads)."""

    rows: int
    units: int


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer of the whole model: `d_in` input features, its parts one below the other.

    split: how ranks share it. "out" cuts every part's rows (a part with fewer units than ranks is repeated), "in" cuts
    the input features into `in_units` indivisible units and leaves a sum over ranks to the caller, None repeats it.
    """

    d_in: int
    parts: tuple[Part, ...]
    bias: bool = False
    split: Split = None
    in_units: int = 1


@dataclass(frozen=True, slots=True)
class Share:
    """Which of `size` equal shares a rank holds."""

    rank: int = 0
    size: int = 1

    def span(self, length: int, units: int) -> slice:
        """The rank's part of `length` features in `units` units; neighbours hold the same if there are fewer units."""
        count, step = units_on_rank(units, self.size), length // units
        first = self.rank * units // self.size * step
        return slice(first, first + count * step)


@dataclass(frozen=True, slots=True)
class Expected:
    """One tensor that a checkpoint must bring: its whole shape, and the dtypes it may have."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS


def expected(shape: LinearShape) -> dict[tuple[int, str], Expected]:
    """What a checkpoint in floating point brings for a linear."""
    found: dict[tuple[int, str], Expected] = {}
    for index, part in enumerate(shape.parts):
        found[index, "weight"] = Expected((part.rows, shape.d_in))
        if shape.bias:
            found[index, "bias"] = Expected((part.rows,))
    return found


def largest(tensor: torch.Tensor) -> torch.Tensor:
    """Magnitude of the largest value, float32 [] where the tensor lies; NaN if any is. Bound by reading it: on a CPU 20 times as
    fast as isfinite."""
    low, high = torch.aminmax(tensor.half() if tensor.itemsize == 1 else tensor)
    return torch.maximum(-low.float(), high.float())


def adds_bias(shape: LinearShape, share: Share) -> bool:
    """Partial products are summed over ranks, so only one of them may add the bias."""
    return shape.split != "in" or share.rank == 0


@dataclass(frozen=True, slots=True)
class Cut:
    """What one rank holds of a linear: which rows of each part, where they lie below each other, which columns."""

    rows: tuple[slice, ...]
    places: tuple[slice, ...]
    columns: slice

    @staticmethod
    def of(shape: LinearShape, share: Share) -> Cut:
        rows, places, end = [], [], 0
        for part in shape.parts:
            cut = share.span(part.rows, part.units) if shape.split == "out" else slice(0, part.rows)
            rows.append(cut)
            places.append(slice(end, end := end + cut.stop - cut.start))
        inputs = share.span(shape.d_in, shape.in_units) if shape.split == "in" else slice(0, shape.d_in)
        return Cut(tuple(rows), tuple(places), inputs)

    @property
    def size(self) -> tuple[int, int]:
        """(outputs, inputs) of this rank."""
        return self.places[-1].stop, self.columns.stop - self.columns.start


class Weight(Protocol):
    """The weights of one linear on one rank: empty when created, usable once every expected tensor was loaded.

    step: the step whose tokens x holds (StepInputs.row_of_inputs), for weights that differ by request, as adapters do. A
    linear of a layer always passes it. Number formats ignore it.
    """

    @property
    def expects(self) -> Mapping[tuple[int, str], Expected]:
        """(part, name in the checkpoint) -> every tensor the checkpoint must bring."""
        ...

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        """Take this rank's share of a whole checkpoint tensor. The last one packs the weights for multiplication.

        Raises UnsupportedModel for numbers that the format cannot hold.
        """
        ...

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        """x [T, this rank's inputs] -> [T, this rank's outputs], in the model's dtype."""
        ...

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        """stream [T, outputs] + apply(x). The caller gives the stream up: the result may lie in its memory."""
        ...

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> Activation:
        """act(gate) * up of apply(x) = (gate, up), each [T, this rank's outputs / 2], as a linear of this format takes
        it; kind as in TokenwiseOps.activate."""
        ...

    def matrix(self) -> Matrix | None:
        """Itself for operations that run whole layers; None if it takes more than floating-point numbers in their order."""
        ...

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The memory it holds."""
        ...


class WeightFormat(Protocol):
    """How linears hold their numbers."""

    @property
    def name(self) -> str: ...

    def create(self, shape: LinearShape, share: Share) -> Weight:
        """Room for one rank's share of a linear."""
        ...
