"""What LoRA adapters add to linears, by the compiled library; see native/adapters.h."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from ridgeline.core.adapters import padded_rank
from ridgeline.ops.adapters import AdapterOps, Bank, HostGroups, Pairs
from ridgeline.ops.native.arena import LANES, Arena
from ridgeline.ops.native.binding import AdaptersOf, Library
from ridgeline.ops.step import StepInputs


@dataclass(frozen=True, slots=True)
class NativePairs(Pairs):
    """Pairs of which B is in blocks of 16 outputs. pointer: of the kernels' struct, which it keeps alive."""

    pointer: c_void_p

    def pack(self, slot: int) -> None:
        """See Pairs. B [outputs, r] -> [outputs / 16, r / 2, 16, 2], in float32 [outputs / 16, r, 16]."""
        rank, outputs, near = self.ranks[slot], self.ends[-1], 4 // self.b.itemsize
        blocks = -(-outputs // LANES)
        b = self.b.new_zeros(blocks * LANES, rank)
        b[:outputs] = self.of(slot)[1]
        packed = b.view(blocks, LANES, rank // near, near).transpose(1, 2)
        self.b[slot, : b.numel()] = packed.flatten()


@dataclass(frozen=True, slots=True)
class NativeAdapters(AdapterOps):
    """AdapterOps of a CPU. gated: TokenwiseOps.activate."""

    library: Library
    arena: Arena
    gated: Callable[[torch.Tensor, str], torch.Tensor]
    in_programs: ClassVar[bool] = True

    def create(
        self, bank: Bank, inputs: int, ends: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> NativePairs:
        slots, rank = bank.slots + 1, padded_rank(bank.rank)
        take = self.arena.take if device.type == "cpu" else partial(torch.empty, device=device)
        a = take(slots, len(ends) * rank * inputs, dtype=dtype)
        b = take(slots, -(-ends[-1] // LANES) * LANES * rank, dtype=dtype)
        ranks, numbers = torch.zeros(slots, dtype=torch.int32, device=device), (c_int64 * len(ends))(*ends)
        sizes = a.stride(0), b.stride(0), inputs, len(ends), rank
        struct = AdaptersOf(a.data_ptr(), b.data_ptr(), ranks.data_ptr(), ctypes.addressof(numbers), *sizes)
        pointer = c_void_p(ctypes.addressof(struct))
        pointer.kept = struct, numbers  # type: ignore[attr-defined]
        return NativePairs(a, b, inputs, ends, [0] * slots, ranks, pointer)

    def group(self, bank: Bank, step: StepInputs) -> c_void_p | None:
        return grouped(self.library, bank.slots, step)

    def add(self, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, group: c_void_p) -> torch.Tensor:
        assert isinstance(pairs, NativePairs) and x.dtype is y.dtype is pairs.a.dtype and y.is_contiguous()
        x = x if x.is_contiguous() else x.contiguous()
        self.library.kernels[y.dtype].adapt(group, pairs.pointer, x.data_ptr(), y.data_ptr())
        return y

    def activate(self, y: torch.Tensor, x: torch.Tensor, pairs: Pairs, group: c_void_p, kind: str) -> torch.Tensor:
        return self.gated(self.add(y, x, pairs, group), kind)


def adapters_of(
    library: Library, arena: Arena, gated: Callable[[torch.Tensor, str], torch.Tensor], dtype: torch.dtype
) -> AdapterOps:
    """See Ops.adapters."""
    return NativeAdapters(library, arena, gated) if dtype in library.kernels else HostGroups(gated)


def grouped(library: Library, slots: int, step: StepInputs) -> c_void_p | None:
    """Pointer to the tokens of a step by slot (Groups in adapters.h); None: no row has an adapter. It keeps their memory alive."""
    if step.adapters is None:
        return None
    if (pointer := step.derived.get("adapters")) is None:
        count, selected = step.inputs, step.selected
        words = torch.empty(2 + 2 * min(slots, count) + count, dtype=torch.int32)
        rows, row_of = step.rows.contiguous(), step.row_of.contiguous()
        selected = None if selected is None else selected.contiguous()
        library.adapter_groups(
            step.adapters.data_ptr(),
            step.adapters.stride(0),
            rows.data_ptr(),
            row_of.data_ptr(),
            0 if selected is None else selected.data_ptr(),
            count,
            slots,
            words.data_ptr(),
        )
        step.derived["adapters"] = pointer = c_void_p(words.data_ptr())
        pointer.kept = words, step.adapters, rows, row_of, selected  # type: ignore[attr-defined]
    return pointer  # type: ignore[no-any-return]
