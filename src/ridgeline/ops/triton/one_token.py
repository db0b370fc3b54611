"""The layers of a decoder for one token on Hopper: attention, and all that lies between two of them in one kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Fp8Matrix, LayerParts, Matrix, Normed, Plain, RunLayers
from ridgeline.ops.triton.attention import attention
from ridgeline.ops.triton.between import Between, Weights, between, lines, stages
from ridgeline.ops.triton.fp8 import FP8_TRITON
from ridgeline.ops.triton.qkv import qkv_write

Linear = Callable[[Plain, torch.Tensor, torch.Tensor | None], torch.Tensor]
ALIGNED = 16
"""Bytes of which the copy engine wants rows to be multiples."""
FEWEST_STAGES = 6
"""Of the ring: with fewer, and so with more inputs than these leave room for, layers run one by one."""
LEAST_BYTES = 160 << 20
"""Of a layer's weights. Below, waiting for all programs between products costs more than it saves: 31 MB (Qwen3-0.6B) take 0.9
times as long in single kernels, 218 MB (Llama-3.1-8B in fp8) 1.08 times."""


def knows(parts: Sequence[LayerParts]) -> bool:
    """Whether the kernel takes these layers, and is faster."""
    dtype, form = parts[0].attention_norm.dtype, type(parts[0].qkv.packed)
    return (
        dtype in (torch.bfloat16, torch.float16)
        and form in (torch.Tensor, Fp8Matrix)
        and all(type(one.packed) is form and _streams(one) for layer in parts for one in _matrices(layer))
        and all(sum(_bytes(one) for one in _matrices(layer)) >= LEAST_BYTES for layer in parts)
    )


class OneToken:
    """Runs a stream [1, d_model] through `parts`; one of more tokens goes `otherwise`. linear: see Ops."""

    __slots__ = ("_betweens", "_counter", "_linear", "_otherwise", "_parts")

    def __init__(self, parts: Sequence[LayerParts], linear: Linear, otherwise: RunLayers) -> None:
        self._parts, self._linear, self._otherwise = tuple(parts), linear, otherwise
        self._counter = torch.zeros(1, dtype=torch.int64, device=parts[0].attention_norm.device)
        self._betweens = tuple(_between(here, there) for here, there in zip(parts, (*parts[1:], None), strict=True))

    def __call__(self, stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
        if stream.shape[0] != 1:
            return self._otherwise(stream, views, step)
        qkv = self._first(stream)
        for parts, behind, view in zip(self._parts, self._betweens, views, strict=True):
            attended, _ = attention(*qkv_write(qkv, parts.shape, view, step), view, step)
            qkv = between(behind, attended, stream, self._counter)
        return stream

    def _first(self, stream: torch.Tensor) -> torch.Tensor:
        """The first layer's qkv."""
        parts = self._parts[0]
        x = Normed(stream, parts.attention_norm, parts.shape.norm_eps, parts.shape.norm_offset)
        packed, bias = parts.qkv.packed, parts.qkv.bias
        if isinstance(packed, Fp8Matrix):
            return FP8_TRITON.linear(x, packed, bias, stream.dtype)
        assert isinstance(packed, torch.Tensor)
        return self._linear(x, packed, bias)


def _matrices(parts: LayerParts) -> tuple[Matrix, ...]:
    return parts.qkv, parts.out, parts.gate_up, parts.down


def _weights(matrix: Matrix) -> Weights:
    packed = matrix.packed
    if isinstance(packed, Fp8Matrix):
        return Weights(packed.values, packed.scales, matrix.bias)
    assert isinstance(packed, torch.Tensor)
    return Weights(packed, None, matrix.bias)


def _bytes(matrix: Matrix) -> int:
    values = _weights(matrix).values
    return values.numel() * values.element_size()


def _streams(matrix: Matrix) -> bool:
    """Whether the copy engine can address the rows, and an input and the ring have room."""
    values = _weights(matrix).values
    row = values.shape[1] * values.element_size()
    aligned = values.is_contiguous() and (row | values.data_ptr()) % ALIGNED == 0
    return aligned and stages(lines(values.shape[1], values)) >= FEWEST_STAGES


def _between(here: LayerParts, there: LayerParts | None) -> Between:
    return Between(
        out=_weights(here.out),
        norm=here.feed_forward_norm,
        gate_up=_weights(here.gate_up),
        down=_weights(here.down),
        qkv_norm=here.feed_forward_norm if there is None else there.attention_norm,
        qkv=None if there is None else _weights(there.qkv),
        eps=here.shape.norm_eps,
        offset=here.shape.norm_offset,
        activation=here.activation,
    )
