"""Integer weights of 8, 4 or 3 bits with a scale per group of inputs or per output channel.

Activations are in floating point, or are rounded to 8 bits before a product (W8A8, and LLM.int8() in quant.mixed).
The checkpoint is in floating point and is rounded to nearest tensor by tensor while it loads, or it is already in
integers (quant.layouts). Scales are computed over unsharded rows and groups, so they do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.gpu_blocks import most_rows
from ridgeline.core.spec import NumberFormat
from ridgeline.ops.reference import rms_norm
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, FloatInput, FloatOps, IntMatrix, IntOps, Matrix, Scaled, apply_norm
from ridgeline.quant.both_forms import Expanded
from ridgeline.quant.format import Cut, Expected, LinearShape, Share, Weight, adds_bias, expected_tensors, rank_group
from ridgeline.quant.layouts import Decoded, Published, decode

SMALLEST_SCALE = 2.0**-24
"""The smallest positive float16 (subnormal)."""
LARGEST_SCALE = 65504.0
"""The largest finite float16."""
ROUNDED = 1 << 26
"""Weights that are rounded at once: each takes some 16 bytes meanwhile, and a head may have a billion."""


def round_to_nearest(
    weight: torch.Tensor, form: NumberFormat
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantize a weight to the nearest codes.

    Symmetric codes have one more step below 0 than above. The scale takes the sign that maps a group's largest magnitude
    to the lowest code exactly. On real weights the error is about that of zero points. With zero points, the codes span
    the group's range including 0.

    Args:
        weight: [N, K].
    Returns:
        codes uint8 [N, K], scales float32 [N, groups] with float16 values, zeros uint8 [N, groups] or None.
    Raises:
        UnsupportedModel: values are NaN, infinite or too large for a float16 scale.
    """
    if weight.numel() > ROUNDED and len(weight) > 1:
        pieces = [round_to_nearest(piece, form) for piece in weight.split(max(1, ROUNDED // weight.shape[1]))]
        codes, scales, zeros = zip(*pieces, strict=True)
        return torch.cat(codes), torch.cat(scales), None if zeros[0] is None else torch.cat(zeros)
    return _rounded(weight, form)


def _rounded(weight: torch.Tensor, form: NumberFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """See round_to_nearest."""
    rows, inputs = weight.shape
    group, max_code = form.group or inputs, (1 << form.bits) - 1
    pad = -inputs % group
    groups = torch.nn.functional.pad(weight.float(), (0, pad)).view(rows, -1, group)
    if form.zeros:
        low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
        scales = _as_float16((high - low) / max_code)
        zeros = (-low / scales).round().clamp(0, max_code)
        shift = zeros.unsqueeze(-1)
    else:
        half = float(1 << form.bits - 1)
        extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
        scales = _as_float16(extreme / -half)
        zeros, shift = None, torch.tensor(half, device=weight.device)
    codes = (groups / scales.unsqueeze(-1)).round().add_(shift).clamp_(0, max_code).to(torch.uint8)
    return codes.view(rows, -1)[:, :inputs], scales, None if zeros is None else zeros.to(torch.uint8)


def _as_float16(scales: torch.Tensor) -> torch.Tensor:
    """Round scales to float16 values in float32. None is 0, because weights are divided by them."""
    if not scales.is_meta and not bool((scales.abs() <= LARGEST_SCALE).all()):
        raise UnsupportedModel(
            "cannot be quantized to integers: it has values that are NaN, infinite or too large for a float16 scale."
        )
    return torch.where(scales.abs() < SMALLEST_SCALE, SMALLEST_SCALE, scales).half().float()


@dataclass(frozen=True, slots=True)
class IntFormat:
    """The integer weight format on one device."""

    ops: IntOps
    numbers: NumberFormat
    """Bits, group size and zero points."""
    dtype: torch.dtype
    """Of activations, biases and results."""
    device: torch.device
    published: Published | None = None
    """Layout of a checkpoint in integers. None: the checkpoint is in floating point."""
    floats: FloatOps | None = None
    """Operations for linears in both forms. None: this format has one."""
    name: str = "integer"

    def create(self, shape: LinearShape, share: Share) -> IntWeight:
        return IntWeight(self, shape, share)


class IntWeight(Weight):
    """Parts stacked along the outputs. Codes take one byte each until the last tensor is loaded, and are packed then."""

    __slots__ = (
        "expects",
        "_bias",
        "_codes",
        "_cut",
        "_adds_bias",
        "_expanded",
        "_form",
        "_group",
        "_inputs",
        "_kept",
        "_matrix",
        "_missing",
        "_order",
        "_pending",
        "_scales",
        "_shape",
        "_zeros",
    )

    def __init__(self, form: IntFormat, shape: LinearShape, share: Share) -> None:
        self._form, self._shape = form, shape
        self.expects: Mapping[tuple[int, str], Expected] = _expected_tensors(shape, form.published)
        self._missing = set(self.expects)
        self._cut, self._adds_bias = Cut.of(shape, share), adds_bias(shape, share)
        self._group = rank_group(form.numbers.group or shape.d_in, shape, share)
        rows, _ = self._cut.size
        self._bias = torch.zeros(rows, dtype=form.dtype, device=form.device) if shape.bias else None
        self._pending: dict[int, dict[str, torch.Tensor]] = {}
        self._codes: torch.Tensor | None = None
        self._matrix: IntMatrix | None = None
        self._kept: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._order: torch.Tensor | None = None
        self._expanded = Expanded()

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        if name == "bias":
            if self._bias is not None and self._adds_bias:
                self._bias[self._cut.stacked_rows[part]].copy_(tensor[self._cut.rows[part]])
        elif self._form.published is None:
            rows = self._cut.rows[part]
            self._store(part, (*round_to_nearest(tensor[rows].to(self._form.device), self._form.numbers), None))
        else:
            self._collect(part, name, tensor, self._form.published)
        self._missing.discard((part, name))
        if not self._missing:
            self._pack()

    def _collect(self, part: int, name: str, tensor: torch.Tensor, published: Published) -> None:
        """Keep a tensor of a part, and decode the part when all its tensors are loaded."""
        tensors = self._pending.setdefault(part, {})
        tensors[name] = tensor
        if any(
            other_part == part and tensor_name not in tensors and tensor_name != "bias"
            for other_part, tensor_name in self.expects
        ):
            return
        codes, scales, zeros, order = decode(published, self._pending.pop(part))
        if codes.shape != (self._shape.parts[part].rows, self._shape.d_in):
            raise UnsupportedModel(
                f"belongs to a matrix of shape {list(codes.shape)}, but config.json requires another shape."
            )
        if not bool((scales.abs() <= LARGEST_SCALE).all()):
            raise UnsupportedModel("has scales that are NaN, infinite or beyond float16.")
        rows = self._cut.rows[part]
        self._store(part, (codes[rows], scales[rows], None if zeros is None else zeros[rows], order))

    def _store(self, part: int, decoded: Decoded) -> None:
        """Copy this rank's columns of the decoded rows of a part."""
        codes, scales, zeros, order = decoded
        rows, inputs = self._cut.size
        if self._codes is None:
            device, count = self._form.device, -(-inputs // self._group)
            self._codes = torch.empty(rows, inputs, dtype=torch.uint8, device=device)
            self._scales = torch.empty(rows, count, dtype=torch.float32, device=device)
            self._zeros = (
                torch.empty(rows, count, dtype=torch.uint8, device=device) if self._form.numbers.zeros else None
            )
            self._order = self._permutation(order)
        elif self._order is not None and not torch.equal(self._order, self._permutation(order)):  # type: ignore[arg-type]
            raise UnsupportedModel(
                "has another order of inputs (act-order) than the projections it is merged with, which is not supported."
            )
        target, columns = self._cut.stacked_rows[part], self._cut.columns
        source = columns if self._order is None else self._order
        self._codes[target].copy_(codes[:, source])
        full_group = self._form.numbers.group or self._shape.d_in
        groups = torch.arange(columns.start, columns.stop, self._group, device=scales.device) // full_group
        self._scales[target].copy_(scales[:, groups])
        if self._zeros is not None and zeros is not None:
            self._zeros[target].copy_(zeros[:, groups])

    def _permutation(self, order: torch.Tensor | None) -> torch.Tensor | None:
        """Return the inputs sorted by group, int32 (act-order). None: the checkpoint stores them in that order."""
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
        matrix = self._form.ops.pack(self._codes, self._scales, self._zeros, bits, self._group)
        self._matrix = replace(matrix, kept=self._kept)
        self._codes = None

    def _in_group_order(self, x: Activation) -> FloatInput:
        """Return x with its inputs sorted by group."""
        assert not isinstance(x, Scaled)
        return x if self._order is None else apply_norm(x, rms_norm).index_select(1, self._order)

    def expand(self) -> torch.Tensor | None:
        form, matrix = self._form, self._matrix
        most = most_rows([f"int{form.numbers.bits}"])
        if form.floats is None or form.ops.weights is None or matrix is None or not most:
            return None
        return self._expanded.write(form.ops.weights(matrix), most, self._cut.size, form.dtype)

    def _form_for(self, x: FloatInput) -> tuple[Any, IntMatrix | torch.Tensor | None]:
        """(operations, the form of the weights) for the rows of x."""
        expanded = self._expanded.for_rows(x)
        return (self._form.ops, self._matrix) if expanded is None else (self._form.floats, expanded)

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        x = self._in_group_order(x)
        ops, matrix = self._form_for(x)
        return ops.linear(x, matrix, self._bias)  # type: ignore[no-any-return]

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        x = x if self._order is None else x.index_select(1, self._order)
        ops, matrix = self._form_for(x)
        return ops.linear_add(x, matrix, self._bias, stream)  # type: ignore[no-any-return]

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> torch.Tensor:
        x = self._in_group_order(x)
        ops, matrix = self._form_for(x)
        return ops.linear_activate(x, matrix, self._bias, kind)  # type: ignore[no-any-return]

    def keep(self, kept: torch.Tensor, columns: torch.Tensor, is_kept: torch.Tensor) -> None:
        """Multiply these inputs with `columns` in floating point; see IntMatrix.kept. Call this before the last `load`."""
        self._kept = (kept, columns, is_kept)

    def matrix(self) -> Matrix | None:
        if self._matrix is None or self._order is not None:
            return None
        rounds_elsewhere = self._form.numbers.inputs_8bit and self._matrix.inputs == "float"
        return None if rounds_elsewhere else Matrix(self._matrix, self._bias)

    def stored(self) -> Matrix:
        assert self._matrix is not None
        return Matrix(self._matrix, self._bias)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        assert self._matrix is not None
        optional = (self._matrix.codes, self._matrix.scales, self._matrix.zeros, self._bias, self._order)
        return tuple(tensor for tensor in optional if tensor is not None)


def _expected_tensors(shape: LinearShape, published: Published | None) -> dict[tuple[int, str], Expected]:
    tensors = expected_tensors(shape)
    if published is None:
        return tensors
    for index, part in enumerate(shape.parts):
        del tensors[index, "weight"]
        tensors.update(
            {(index, name): expected for name, expected in published.expected_tensors(part.rows, shape.d_in).items()}
        )
    return tensors
