"""A recurrent draft's tree in one foreign call: see native/recurrent.cpp."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from struct import Struct

import torch

from ridgeline.ops.native.binding import GATES, IntWeights, Kernels
from ridgeline.ops.native_integer import int_weights
from ridgeline.ops.native_rows import STATE, at, state_of
from ridgeline.ops.rows import RowState
from ridgeline.ops.table import RecurrentParts

_RECURRENT = Struct(f"{STATE + 6}q")


class _Parts(ctypes.Structure):
    """Mirror of Parts in recurrent.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("embedding", "inner_norm", "norm", "ids", "parents", "ranks")),
        *((name, IntWeights) for name in ("mix", "gate_up", "down", "head")),
        *((name, c_int64) for name in ("d_model", "d_ff", "outputs", "gate")),
        ("eps", c_float),
        ("offset", c_float),
    )


class NativeRecurrent:
    """See Ops.recurrent; weights stay where they are for good."""

    __slots__ = ("_dtype", "_kept", "_parts", "_run")

    def __init__(self, parts: RecurrentParts, kernels: Kernels) -> None:
        self._run, self._dtype, self._kept = kernels.recurrent, parts.embedding.dtype, parts
        self._parts = _Parts(
            *(
                at(one)
                for one in (parts.embedding, parts.inner_norm, parts.norm, parts.ids, parts.parents, parts.ranks)
            ),
            *(int_weights(one) for one in (parts.mix, parts.gate_up, parts.down, parts.head)),
            parts.embedding.shape[1],
            parts.gate_up.out // 2,
            parts.head.out,
            GATES[parts.activation],
            parts.eps,
            parts.offset,
        )

    def __call__(
        self, state: RowState, rows: torch.Tensor, temperature: torch.Tensor, hidden: torch.Tensor, count: int
    ) -> None:
        assert hidden.dtype is self._dtype
        given = (at(rows), at(temperature), at(hidden), rows.shape[0], count)
        self._run(_RECURRENT.pack(*state_of(state), ctypes.addressof(self._parts), *given))
