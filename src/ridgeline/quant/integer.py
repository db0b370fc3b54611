"""Integer weights: 8, 4 or 3 bits, a scale per group of inputs or per output channel; activations in floating point, or
rounded to 8 bits before a product (W8A8; with kept columns beside it LLM.int8(), quant.mixed).

Weights come from a checkpoint in floating point and are rounded to nearest tensor by tensor as they stream in, or they
are published in integers already (quant.layouts). Scales are those of whole rows and groups, so every rank holds the
same numbers as one device would.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ridgeline.core.errors import ConfigError, UnsupportedModel
from ridgeline.core.spec import NumberFormat
from ridgeline.ops.reference import ROW_CODES, rms_norm
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, IntMatrix, IntOps, Matrix, Plain, Scaled, plain
from ridgeline.quant.format import Cut, Expected, LinearShape, Share, Weight, adds_bias, expected
from ridgeline.quant.layouts import Decoded, Published, decode

SMALLEST_SCALE = 2.0**-24
"""The smallest number above 0 that float16 holds."""
LARGEST_SCALE = 65504.0


def round_to_nearest(
    weight: torch.Tensor, form: NumberFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """weight [N, K] -> codes uint8 [N, K], scales float32 [N, groups] that float16 holds, zeros uint8 [N, groups] or None.

    Symmetric: codes reach one step further below 0 than above, so the scale has the sign that puts a group's largest
    magnitude at that end, exactly; on real weights this loses about as little as zero points do. With zero points codes
    span the group's range, 0 included. Raises UnsupportedModel for numbers that no scale covers.
    """
    rows, inputs = weight.shape
    group, most = form.group or inputs, (1 << form.bits) - 1
    pad = -inputs % group
    groups = torch.nn.functional.pad(weight.float(), (0, pad)).view(rows, -1, group)
    if form.zeros:
        low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
        scales = _held((high - low) / most)
        zeros = (-low / scales).round().clamp(0, most)
        shift = zeros.unsqueeze(-1)
    else:
        half = float(1 << form.bits - 1)
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        scales = _held(extreme / -half)
        zeros, shift = None, torch.tensor(half, device=weight.device)
    codes = (groups / scales.unsqueeze(-1)).round().add_(shift).clamp_(0, most).to(torch.uint8)
    return codes.view(rows, -1)[:, :inputs], scales, None if zeros is None else zeros.to(torch.uint8)


def _held(scales: torch.Tensor) -> torch.Tensor:
    """Scales as float16 holds them; none is 0, because weights are divided by them."""
    if not scales.is_meta and not bool((scales.abs() <= LARGEST_SCALE).all()):
        raise UnsupportedModel(
            "cannot be quantized to integers: it has values that are NaN, infinite or too large for a float16 scale."
        )
    return torch.where(scales.abs() < SMALLEST_SCALE, SMALLEST_SCALE, scales).half().float()


@dataclass(frozen=True, slots=True)
class IntFormat:
    """numbers: bits, group and zero points. dtype: of activations, biases and results. published: how the checkpoint holds
    its integers; None: it holds floats."""

    ops: IntOps
    numbers: NumberFormat
    dtype: torch.dtype
    device: torch.device
    published: Published | None = None
    name: str = "integer"

    def create(self, shape: LinearShape, share: Share) -> IntWeight:
        return IntWeight(self, shape, share)


class IntWeight(Weight):
    """Parts lie one below the other, as in the plain format. Codes take a byte each until the last tensor is there."""

    __slots__ = (
        "expects",
        "_bias",
        "_codes",
        "_cut",
        "_adds_bias",
        "_form",
        "_group",
        "_inputs",
        "_matrix",
        "_missing",
        "_order",
        "_scales",
        "_shape",
        "_waiting",
        "_zeros",
    )

    def __init__(self, form: IntFormat, shape: LinearShape, share: Share) -> None:
        self._form, self._shape = form, shape
        self.expects: Mapping[tuple[int, str], Expected] = _expected(shape, form.published)
        self._missing = set(self.expects)
        self._cut, self._adds_bias = Cut.of(shape, share), adds_bias(shape, share)
        self._group = _own_group(form.numbers.group or shape.d_in, shape, share)
        rows, _ = self._cut.size
        self._bias = torch.zeros(rows, dtype=form.dtype, device=form.device) if shape.bias else None
        self._waiting: dict[int, dict[str, torch.Tensor]] = {}
        self._codes: torch.Tensor | None = None
        self._matrix: IntMatrix | None = None
        self._order: torch.Tensor | None = None

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        if name == "bias":
            if self._bias is not None and self._adds_bias:
                self._bias[self._cut.places[part]].copy_(tensor[self._cut.rows[part]])
        elif self._form.published is None:
            rows = self._cut.rows[part]
            self._place(part, (*round_to_nearest(tensor[rows].to(self._form.device), self._form.numbers), None))
        else:
            self._wait(part, name, tensor, self._form.published)
        self._missing.discard((part, name))
        if not self._missing:
            self._pack()

    def _wait(self, part: int, name: str, tensor: torch.Tensor, published: Published) -> None:
        """Keep one tensor of a part until the others are there."""
        kept = self._waiting.setdefault(part, {})
        kept[name] = tensor
        if any(one == part and other not in kept and other != "bias" for one, other in self.expects):
            return
        codes, scales, zeros, order = decode(published, self._waiting.pop(part))
        if codes.shape != (self._shape.parts[part].rows, self._shape.d_in):
            raise UnsupportedModel(
                f"belongs to a matrix of shape {list(codes.shape)}, but config.json requires another shape."
            )
        if not bool((scales.abs() <= LARGEST_SCALE).all()):
            raise UnsupportedModel("has scales that are NaN, infinite or beyond float16.")
        rows = self._cut.rows[part]
        self._place(part, (codes[rows], scales[rows], None if zeros is None else zeros[rows], order))

    def _place(self, part: int, loaded: Decoded) -> None:
        """This rank's columns of the rows it holds of a part."""
        codes, scales, zeros, order = loaded
        rows, inputs = self._cut.size
        if self._codes is None:
            device, groups = self._form.device, -(-inputs // self._group)
            self._codes = torch.empty(rows, inputs, dtype=torch.uint8, device=device)
            self._scales = torch.empty(rows, groups, dtype=torch.float32, device=device)
            self._zeros = (
                torch.empty(rows, groups, dtype=torch.uint8, device=device) if self._form.numbers.zeros else None
            )
            self._order = self._permutation(order)
        elif self._order is not None and not torch.equal(self._order, self._permutation(order)):  # type: ignore[arg-type]
            raise UnsupportedModel(
                "has another order of inputs (act-order) than the projections it is merged with, which is not supported."
            )
        place, columns = self._cut.places[part], self._cut.columns
        own = columns if self._order is None else self._order
        self._codes[place].copy_(codes[:, own])
        whole = self._form.numbers.group or self._shape.d_in
        held = torch.arange(columns.start, columns.stop, self._group, device=scales.device) // whole
        self._scales[place].copy_(scales[:, held])
        if self._zeros is not None and zeros is not None:
            self._zeros[place].copy_(zeros[:, held])

    def _permutation(self, order: torch.Tensor | None) -> torch.Tensor | None:
        """The inputs, int32, in the order in which groups lie one behind the other (act-order); None: they do already."""
        if not self._form.numbers.ordered:
            if order is not None:
                raise UnsupportedModel(
                    "has an order of inputs (act-order) that quantization_config does not declare: set desc_act or actorder there."
                )
            return None
        inputs = self._shape.d_in
        if self._cut.size[1] != inputs:
            raise UnsupportedModel("has an order of inputs (act-order) across devices: serve it on one device.")
        group = self._form.numbers.group or inputs
        if order is None:
            return torch.arange(inputs, dtype=torch.int32, device=self._form.device)
        if not bool((torch.bincount(order, minlength=-(-inputs // group))[:-1] == group).all()):
            raise UnsupportedModel("has groups of different sizes, which is not supported.")
        return order.argsort(stable=True).int().to(self._form.device)

    def _pack(self) -> None:
        assert self._codes is not None
        bits = self._form.numbers.bits
        self._matrix = self._form.ops.pack(self._codes, self._scales, self._zeros, bits, self._group)
        self._codes = None

    def _given(self, x: Activation) -> Plain:
        """x with its inputs in the order of the groups."""
        assert not isinstance(x, Scaled)
        return x if self._order is None else plain(x, rms_norm).index_select(1, self._order)

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        assert self._matrix is not None
        return self._form.ops.linear(self._given(x), self._matrix, self._bias)

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        assert self._matrix is not None and isinstance(x, torch.Tensor)
        x = x if self._order is None else x.index_select(1, self._order)
        return self._form.ops.linear_add(x, self._matrix, self._bias, stream)

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> torch.Tensor:
        assert self._matrix is not None
        return self._form.ops.linear_activate(self._given(x), self._matrix, self._bias, kind)

    def matrix(self) -> Matrix | None:
        if self._matrix is None or self._order is not None or self._form.numbers.inputs_8bit:
            return None
        return Matrix(self._matrix, self._bias)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        assert self._matrix is not None
        found = (self._matrix.codes, self._matrix.scales, self._matrix.zeros, self._bias, self._order)
        return tuple(one for one in found if one is not None)


def _expected(shape: LinearShape, published: Published | None) -> dict[tuple[int, str], Expected]:
    found = expected(shape)
    if published is None:
        return found
    for index, part in enumerate(shape.parts):
        del found[index, "weight"]
        found.update({(index, name): one for name, one in published.expected(part.rows, shape.d_in).items()})
    return found


def _own_group(group: int, shape: LinearShape, share: Share) -> int:
    """The group of a rank: smaller than the whole one, scales repeated, where a rank's inputs begin inside a group."""
    cut = Cut.of(shape, share)
    if cut.size[1] == shape.d_in or group >= shape.d_in:
        return group
    step = cut.size[1]
    own = math.gcd(group, step)
    if own % ROW_CODES:
        raise ConfigError(
            f"Groups of {group} inputs cannot be split over {share.size} devices, which hold {step} of {shape.d_in} "
            f"inputs each: use fewer devices, or a group size that divides {step}."
        )
    return own
