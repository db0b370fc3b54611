"""Linears with LoRA adapters (Hu et al. 2021, arXiv:2106.09685) on top of a number format, which does not know about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ridgeline.core.adapters import AdapterPlan, padded_rank
from ridgeline.ops.adapters import AdaptedMatrix, AdapterOps, Bank, adapting
from ridgeline.ops.step import StepInputs
from ridgeline.ops.table import Activation, Matrix, Normed, Ops, Scaled, TokenwiseOps, apply_norm
from ridgeline.quant.format import Cut, Expected, LinearShape, Share, Weight, WeightFormat

Factors = tuple[torch.Tensor, torch.Tensor]
"""A [rank, inputs] and B [outputs, rank] of one projection, unsharded, with the scale in B."""


class AdaptedWeight(Weight):
    """A linear whose result differs by the adapter of a token's row. On several ranks each has the part of A or B that belongs to
    its part of the base weight, so that what is added is divided, or summed, with the result of the base."""

    __slots__ = ("expects", "_base", "bank", "_ops", "_tokenwise", "_dtype", "_cut", "pairs", "part_shapes")

    def __init__(self, form: AdaptedFormat, shape: LinearShape, share: Share) -> None:
        self._base = form.base.create(shape, share)
        self.expects: Mapping[tuple[int, str], Expected] = self._base.expects
        self.bank, self._ops, self._tokenwise, self._dtype = form.bank, form.ops, form.tokenwise, form.dtype
        self._cut = cut = Cut.of(shape, share)
        self.part_shapes = [(part.rows, shape.d_in) for part in shape.parts]
        """Outputs and inputs of each part, unsharded."""
        ends = tuple(rows.stop for rows in cut.stacked_rows)
        self.pairs = form.ops.create(form.bank, cut.size[1], ends, form.dtype, form.device)

    def store(self, slot: int, parts: Sequence[Factors | None]) -> None:
        """Give a slot the factors of each part of this linear; None: the adapter does not change the part."""
        pairs, cut = self.pairs, self._cut
        rank = padded_rank(max((len(factors[0]) for factors in parts if factors is not None), default=0))
        pairs.ranks[slot] = rank
        a, b = pairs.of(slot)
        a.zero_()
        b.zero_()
        for place, factors in enumerate(parts):
            if factors is not None:
                size = len(factors[0])
                a[place * rank : place * rank + size].copy_(factors[0][:, cut.columns])
                b[cut.stacked_rows[place], :size].copy_(factors[1][cut.rows[place]])
        pairs.pack(slot)
        pairs.device_ranks[slot].fill_(rank)

    # --- Weight -------------------------------------------------------------------------------------------------------

    def load(self, part: int, name: str, tensor: torch.Tensor) -> None:
        self._base.load(part, name, tensor)

    def apply(self, x: Activation, step: StepInputs | None = None) -> torch.Tensor:
        group = None if step is None else self._ops.group(self.bank, step)
        if group is None:
            return self._base.apply(x, step)
        tensor = self._tensor(x)
        return self._ops.add(self._base.apply(_once(x, tensor), step), tensor, self.pairs, group)

    def add(self, x: Activation, stream: torch.Tensor, step: StepInputs | None = None) -> torch.Tensor:
        group = None if step is None else self._ops.group(self.bank, step)
        if group is None:
            return self._base.add(x, stream, step)
        tensor = self._tensor(x)
        return self._ops.add(self._base.add(_once(x, tensor), stream, step), tensor, self.pairs, group)

    def activate(self, x: Activation, kind: str, step: StepInputs | None = None) -> Activation:
        group = None if step is None else self._ops.group(self.bank, step)
        if group is None:
            return self._base.activate(x, kind, step)
        tensor = self._tensor(x)
        return self._ops.activate(self._base.apply(_once(x, tensor), step), tensor, self.pairs, group, kind)

    def _tensor(self, x: Activation) -> torch.Tensor:
        if isinstance(x, Scaled):
            return (x.values.float() * x.scales.unsqueeze(1)).to(self._dtype)
        return apply_norm(x, self._tokenwise.rms_norm)

    def matrix(self) -> Matrix | None:
        """The weights of the base and those of adapters, which some programs do not read (ops.adapters.adapting)."""
        base = self._base.matrix()
        return None if base is None else AdaptedMatrix(base.packed, base.bias, self.pairs)

    def stored(self) -> Matrix:
        """The weights of the base: no adapter changes experts."""
        return self._base.stored()

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Those of the base; `pairs` has the adapters'."""
        return self._base.tensors()

    def expand(self) -> torch.Tensor | None:
        return self._base.expand()


def _once(x: Activation, normed: torch.Tensor) -> Activation:
    """The input of the base: a norm is not computed again."""
    return normed if isinstance(x, Normed) else x


@dataclass(frozen=True, slots=True)
class AdaptedFormat:
    """A format whose linears have adapters. dtype: of the model."""

    base: WeightFormat
    bank: Bank
    ops: AdapterOps
    tokenwise: TokenwiseOps
    dtype: torch.dtype
    device: torch.device
    name: str = "adapted"

    def create(self, shape: LinearShape, share: Share) -> AdaptedWeight:
        return AdaptedWeight(self, shape, share)


def adapted(
    base: WeightFormat, ops: Ops, plan: AdapterPlan, dtype: torch.dtype, device: torch.device
) -> tuple[WeightFormat, Ops]:
    """Format and operations of a model with slots for adapters; those given if it has none."""
    if not plan.slots:
        return base, ops
    bank, groups = Bank(plan.slots, plan.rank), ops.adapters(dtype)
    form = AdaptedFormat(base, bank, groups, ops.tokenwise, dtype, device)
    return form, ops if groups.in_programs else adapting(ops, bank, groups)
