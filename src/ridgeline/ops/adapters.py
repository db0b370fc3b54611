"""What LoRA adapters add to linears: products grouped by the adapter of each token.

y[t] += B[s] A[s] x[t] for a token t of a row with the adapter in slot s (Hu et al. 2021, arXiv:2106.09685, section 4.1); the scale
is part of B. Tokens are sorted by slot, so that each adapter is multiplied once for all of its tokens, as in Punica (Chen et al.
2023, arXiv:2310.18547, section 4) and S-LoRA (Sheng et al. 2023, arXiv:2311.03285, section 5).

This module is the definition, and the path of a CPU without compiled operations. ops.native_adapters has the operations of a CPU,
ops.triton.adapters the kernels of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol

import torch

from ridgeline.core.adapters import padded_rank
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import LayerParts, Matrix, Ops, RunLayers


@dataclass(frozen=True, slots=True)
class Bank:
    """The slots of adapters, numbered from 1; 0 means none. rank: the largest possible."""

    slots: int
    rank: int


@dataclass(frozen=True, slots=True)
class Pairs:
    """A and B of one linear for all slots, in the model's dtype. A slot holds matrices of its own rank r, without padding.

    a: [slots + 1, parts * max_rank * inputs]; a slot's begin is [parts * r, inputs], the parts of a merged linear one after the
    other. b: [slots + 1, outputs * max_rank]; a slot's begin is [outputs, r]. ends: last output of each part, exclusive.
    ranks: r of each slot; 0: the adapter does not change this linear. device_ranks: the same, int32 on the device.
    """

    a: torch.Tensor
    b: torch.Tensor
    inputs: int
    ends: tuple[int, ...]
    ranks: list[int]
    device_ranks: torch.Tensor

    def of(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A [parts * r, inputs] and B [outputs, r] of a slot, as views."""
        rank, rows = self.ranks[slot], len(self.ends) * self.ranks[slot]
        a = self.a[slot, : rows * self.inputs].view(rows, self.inputs)
        return a, self.b[slot, : self.ends[-1] * rank].view(self.ends[-1], rank)

    @property
    def most_rank(self) -> int:
        """The largest rank of a slot."""
        return self.a.shape[1] // (len(self.ends) * self.inputs)

    def pack(self, slot: int) -> None:
        """Bring both matrices of a slot, just written as `of` has them, to the layout that the operations read."""


@dataclass(frozen=True, slots=True)
class AdaptedMatrix(Matrix):
    """A linear with what adapters add to it, for programs that run whole layers."""

    pairs: Pairs


class AdapterOps(Protocol):
    """Operations that add the products of adapters to a linear. in_programs: programs that run whole layers add them as well."""

    in_programs: ClassVar[bool] = False

    def create(self, bank: Bank, inputs: int, ends: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Pairs:
        """Pairs without any adapter, in the form that the operations take."""
        slots, rank = bank.slots + 1, padded_rank(bank.rank)
        a = torch.zeros(slots, len(ends) * rank * inputs, dtype=dtype, device=device)
        b = torch.zeros(slots, ends[-1] * rank, dtype=dtype, device=device)
        return Pairs(a, b, inputs, ends, [0] * slots, torch.zeros(slots, dtype=torch.int32, device=device))

    def group(self, bank: Bank, step: StepInputs) -> Any:
        """The tokens of a step that run through a linear, by slot; None: no adapter changes any of them."""

    def add(self, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, group: Any) -> torch.Tensor:
        """y [T, outputs] plus what the adapters add for x [T, inputs]. May overwrite y. group: of the step of these tokens."""

    def activate(self, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, group: Any, kind: str) -> torch.Tensor:
        """TokenwiseOps.activate of `add`, [T, outputs / 2]."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Tokens with an adapter, sorted by slot. tokens: int64 [n]; None: all tokens of the step, in order. parts: of each slot, its
    first token among these and the token behind its last one."""

    tokens: torch.Tensor | None
    parts: Sequence[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class HostGroups(AdapterOps):
    """AdapterOps of a device whose host may read which adapters a step uses. gated: TokenwiseOps.activate."""

    gated: Callable[[torch.Tensor, str], torch.Tensor]

    def group(self, bank: Bank, step: StepInputs) -> Groups | None:
        if step.adapters is None:
            return None
        if (cached := step.derived.get("adapters")) is None:
            step.derived["adapters"] = cached = (_groups(step, step.adapters),)
        return cached[0]  # type: ignore[no-any-return]

    def add(self, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, group: Groups) -> torch.Tensor:
        mine = x if group.tokens is None else x.index_select(0, group.tokens)
        added = y if group.tokens is None else y.new_zeros(len(mine), y.shape[1])
        for slot, start, end in group.parts:
            if not (rank := pairs.ranks[slot]):
                continue
            a, b = pairs.of(slot)
            inner = mine[start:end] @ a.T
            begin = 0
            for place, stop in enumerate(pairs.ends):
                part = inner[:, place * rank : (place + 1) * rank]
                added[start:end, begin:stop].addmm_(part, b[begin:stop].T)
                begin = stop
        return y if group.tokens is None else y.index_add_(0, group.tokens, added)

    def activate(self, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, group: Groups, kind: str) -> torch.Tensor:
        return self.gated(self.add(y, x, pairs, group), kind)


def host_adapters(gated: Callable[[torch.Tensor, str], torch.Tensor]) -> Callable[[torch.dtype], AdapterOps]:
    """Ops.adapters in PyTorch, for every dtype. gated: TokenwiseOps.activate."""
    return lambda dtype: HostGroups(gated)


def _groups(step: StepInputs, adapters: torch.Tensor) -> Groups | None:
    slots = adapters[step.rows[step.row_of_inputs()]]
    numbers, counts = (column.tolist() for column in slots.unique(return_counts=True))
    if numbers == [0] or not numbers:
        return None
    parts, place = [], 0
    for number, count in zip(numbers, counts, strict=True):
        if number:
            parts.append((number, place, place := place + count))
    if len(numbers) == 1:
        return Groups(None, parts)
    order = slots.argsort(stable=True)
    return Groups(order[len(order) - place :], parts)


def adapting(ops: Ops, bank: Bank, groups: AdapterOps) -> Ops:
    """Operations of a decoder with adapters: programs that run whole layers serve only steps without them."""

    def layers(parts: Sequence[LayerParts], run: RunLayers) -> RunLayers:
        program = ops.programs.layers(parts, run)

        def chosen(stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
            return (program if groups.group(bank, step) is None else run)(stream, views, step)

        return chosen

    return replace(ops, programs=replace(ops.programs, layers=layers))
