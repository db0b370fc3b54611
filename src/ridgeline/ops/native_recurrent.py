"""A recurrent draft model's tree in one foreign call; see native/recurrent.cpp."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from struct import Struct
from typing import Any

import torch

from ridgeline.ops.native.binding import GATES, IntWeights, Kernels
from ridgeline.ops.native_integer import int_weights
from ridgeline.ops.native_layers import ViewOf
from ridgeline.ops.native_rows import STATE, at, state_of
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import RecurrentParts, Views

_RECURRENT = Struct(f"{STATE + 10}q")
_NORMS = ("query_norm", "inner_norm", "norm")
_MATRICES = ("mix", "query", "out", "gate_up", "down", "head")


class _Parts(ctypes.Structure):
    """Mirror of Parts in recurrent.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("embedding", *_NORMS, "cos_sin", "ids", "parents", "ranks", "sizes")),
        *((name, IntWeights) for name in _MATRICES),
        *((name, c_int64) for name in ("d_model", "queries", "half", "d_ff", "outputs", "gate", "n_sizes")),
        *((name, c_float) for name in ("eps", "offset", "node_cost", "min_chance")),
    )


class NativeRecurrent:
    """See Programs.recurrent. Matrices are in the library's layout. Weights must keep their addresses."""

    __slots__ = ("_attended", "_dtype", "_kept", "_parts", "_run", "_sizes", "_view_of", "_views")

    def __init__(self, parts: RecurrentParts, kernels: Kernels, view_of: ViewOf) -> None:
        self._run, self._dtype, self._kept, self._view_of = kernels.recurrent, parts.embedding.dtype, parts, view_of
        self._views: Views = _no_views
        matrices, norms = parts.matrices, (parts.norms[name] for name in _NORMS)
        self._sizes = torch.tensor(parts.cut.sizes, dtype=torch.int32)
        vectors = (parts.embedding, *norms, parts.cos_sin, parts.ids, parts.parents, parts.ranks, self._sizes)
        self._parts = _Parts(
            *(at(vector) for vector in vectors),
            *(int_weights(matrices[name]) for name in _MATRICES),
            parts.embedding.shape[1],
            matrices["query"].out,
            parts.cos_sin.shape[2],
            matrices["gate_up"].out // 2,
            matrices["head"].out,
            GATES[parts.activation],
            len(parts.cut.sizes),
            parts.eps,
            parts.offset,
            parts.cut.node_cost,
            parts.cut.min_chance,
        )

    def __call__(self, drawn: Any, count: int, views: Views) -> torch.Tensor:
        """drawn: see RunRecurrent."""
        state, rows, temperatures, hidden = drawn.state, drawn.rows, drawn.temperatures, drawn.hidden
        assert hidden.dtype is self._dtype
        if views != self._views:
            self._attend(views, len(state.tables))
        view, cache, _ = self._attended
        worth = torch.empty(rows.shape[0], dtype=torch.int32)
        arguments = (
            at(rows),
            temperatures.data_ptr(),
            temperatures.stride(0),
            at(hidden),
            view,
            cache,
            rows.shape[0],
            count,
            worth.data_ptr(),
        )
        self._run(_RECURRENT.pack(*state_of(state), ctypes.addressof(self._parts), *arguments))
        return worth

    def _attend(self, views: Views, groups: int) -> None:
        """Cache the layer's cache address and tables. Key: `views`. The library sets the other fields of a view (rows, lengths and
        positions)."""
        none = torch.zeros((groups, 1), dtype=torch.int64)
        [view] = views(none)
        assert view.scales is not None or view.kv.dtype is self._dtype
        step = StepInputs(none[0], none[0], none[0], none[0], none[0], 1, 0)
        self._views, self._attended = views, (self._view_of(view, step).value, view.kv.data_ptr(), step)


def _no_views(slots: torch.Tensor) -> list[KvView]:
    return []
