"""A draft model's chain in one foreign call; see native/chain.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from struct import Struct

import torch

from ridgeline.ops.native.binding import Kernels
from ridgeline.ops.native_layers import ViewOf, layer_structs
from ridgeline.ops.native_rows import STATE, at, state_of
from ridgeline.ops.rows import ChainStart
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import ChainParts, Views

_CHAIN = Struct(f"{STATE + 15}q")


class _Parts(ctypes.Structure):
    """Mirror of Parts in chain.cpp."""

    _fields_ = (
        ("layers", c_void_p),
        ("n_layers", c_int64),
        ("d_model", c_int64),
        *((name, c_void_p) for name in ("embedding", "norm", "head", "ids")),
        ("outputs", c_int64),
        *((name, c_float) for name in ("eps", "offset", "scale")),
        ("fixed", c_int32),
    )


class NativeChain:
    """See Programs.chain. Weights must keep their addresses."""

    __slots__ = ("_dtype", "_kept", "_parts", "_pointers", "_run", "_view_of")

    def __init__(self, parts: ChainParts, kernels: Kernels, view_of: ViewOf, fixed: bool) -> None:
        self._run, self._view_of, self._dtype = kernels.chain, view_of, parts.embedding.dtype
        structs = layer_structs(parts.layers)
        self._kept = parts, structs
        self._pointers = c_void_p * len(parts.layers)
        self._parts = _Parts(
            ctypes.addressof(structs),
            len(parts.layers),
            parts.embedding.shape[1],
            parts.embedding.data_ptr(),
            parts.norm.data_ptr(),
            parts.head.data_ptr(),
            None if parts.ids is None else parts.ids.data_ptr(),
            parts.head.shape[0],
            parts.eps,
            parts.offset,
            parts.scale,
            fixed,
        )

    def __call__(self, start: ChainStart, views: Views) -> None:
        state, rows, last = start.state, start.rows, start.last
        count = rows.shape[0]
        slots = torch.empty((state.tables.shape[0], count), dtype=torch.int64)
        position, length = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=torch.int32)
        number = torch.arange(count + 1, dtype=torch.int32)
        step = StepInputs(rows, number, length, position, number[:-1], 1, start.longest)
        step_views: Sequence[KvView] = views(slots)
        assert all(view.scales is not None or view.kv.dtype is self._dtype for view in step_views)
        view_pointers = self._pointers(*(self._view_of(view, step).value for view in step_views))
        caches = self._pointers(*(view.kv.data_ptr() for view in step_views))
        self._run(
            _CHAIN.pack(
                *state_of(state),
                ctypes.addressof(self._parts),
                at(rows),
                at(start.temperature),
                count,
                start.count,
                ctypes.addressof(view_pointers),
                ctypes.addressof(caches),
                position.data_ptr(),
                length.data_ptr(),
                slots.data_ptr(),
                at(last.n_query),
                at(last.q_start),
                at(last.row_of),
                at(last.place),
                last.row_of.shape[0],
            )
        )
