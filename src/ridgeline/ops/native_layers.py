"""All layers of a decoder in one foreign call; see native/layers.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import c_void_p

import torch

from ridgeline.ops.adapters import AdaptedMatrix
from ridgeline.ops.native.binding import GATES, IntWeights, Layer, Library, MatrixOf
from ridgeline.ops.native_adapters import NativePairs, grouped
from ridgeline.ops.native_integer import int_weights
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import IntMatrix, LayerParts, Matrix, RunLayers

SPARSE = torch.uint8
"""Of packed weights in the layout of native/sparse.h."""
ViewOf = Callable[[KvView, StepInputs], ctypes.c_void_p]


class NativeLayers:
    """Run a stream [T, d_model] through `parts`, in place. Weights and caches must keep their addresses.

    view_of: returns the pointer to the kernels' struct of a layer's view. otherwise: for a cache in another number format.
    """

    __slots__ = ("_library", "_otherwise", "_parts", "_pointers", "_run", "_slots", "_structs", "_view_of")

    def __init__(self, parts: Sequence[LayerParts], library: Library, view_of: ViewOf, otherwise: RunLayers) -> None:
        kernels = library.kernels[parts[0].attention_norm.dtype]
        self._parts, self._run, self._view_of, self._otherwise = tuple(parts), kernels.layers, view_of, otherwise
        self._library, qkv = library, parts[0].qkv
        self._slots = len(qkv.pairs.ranks) - 1 if isinstance(qkv, AdaptedMatrix) else 0
        """Of adapters; 0: the layers have none."""
        self._structs = layer_structs(parts)
        self._pointers = c_void_p * len(parts)

    def __call__(self, stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
        if not views or (views[0].scales is None and views[0].kv.dtype is not stream.dtype):
            return self._otherwise(stream, views, step)
        stream = stream if stream.is_contiguous() else stream.contiguous()
        known: dict[tuple[int, int, int | None, float | None], int | None] = {}
        view_pointers = []
        for view in views:
            kv = view.kv
            alike = (id(view.slots), kv.shape[2], view.window, view.softcap)
            if alike not in known:
                known[alike] = self._view_of(view, step).value
            view_pointers.append(known[alike])
        pointers = self._pointers(*view_pointers)
        pointers.step = step  # type: ignore[attr-defined]  # keeps the tensors behind the pointers alive for replays
        self._run(
            self._structs,
            len(views),
            pointers,
            self._pointers(*(view.kv.data_ptr() for view in views)),
            stream.data_ptr(),
            *stream.shape,
            grouped(self._library, self._slots, step) if self._slots else None,
        )
        return stream


def layer_structs(parts: Sequence[LayerParts]) -> ctypes.Array[Layer]:
    """Structs that describe the layers to the kernels. The caller keeps the weights alive."""
    return (Layer * len(parts))(*(_layer(layer) for layer in parts))


def _layer(parts: LayerParts) -> Layer:
    shape = parts.shape
    return Layer(
        parts.attention_norm.data_ptr(),
        parts.feed_forward_norm.data_ptr(),
        _pointer(shape.q_norm),
        _pointer(shape.k_norm),
        _matrix(parts.qkv),
        _matrix(parts.out),
        _matrix(parts.gate_up),
        _matrix(parts.down),
        shape.cos_sin.data_ptr(),
        shape.n_heads,
        shape.n_kv_heads,
        shape.cos_sin.shape[2],
        outputs_of(parts.gate_up) // 2,
        GATES[parts.activation],
        shape.norm_eps,
        shape.norm_offset,
    )


def outputs_of(matrix: Matrix) -> int:
    packed = matrix.packed
    if isinstance(packed, IntMatrix):
        return packed.out
    assert isinstance(packed, torch.Tensor)
    return packed.shape[0]


def _matrix(matrix: Matrix) -> MatrixOf:
    packed, bias = matrix.packed, _pointer(matrix.bias)
    pairs = matrix.pairs if isinstance(matrix, AdaptedMatrix) else None
    adapters = pairs.pointer if isinstance(pairs, NativePairs) else None
    if isinstance(packed, IntMatrix):
        return MatrixOf(None, bias, None, int_weights(packed), adapters)
    assert isinstance(packed, torch.Tensor)
    if packed.dtype is SPARSE:
        return MatrixOf(None, bias, packed.data_ptr(), IntWeights(), adapters)
    return MatrixOf(packed.data_ptr(), bias, None, IntWeights(), adapters)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
