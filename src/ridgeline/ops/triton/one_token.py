"""Which decoders run one token through all layers in one kernel on Hopper."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Fp8Matrix, IntMatrix, LayerParts, Matrix, RunLayers
from ridgeline.ops.triton.layers_forms import stages_of
from ridgeline.ops.triton.layers_integers import LINE
from ridgeline.ops.triton.layers_keys import streamable
from ridgeline.ops.triton.layers_launch import Layers
from ridgeline.ops.triton.layers_table import ALIGNED, Layer, Weights, reachable
from ridgeline.ops.triton.peers import WIDEST

FEWEST_STAGES = 6
"""Fewest stages of the ring. If the inputs of a layer leave memory for fewer stages, layers run one by one."""
SMALLEST_BYTES: dict[type, int] = {torch.Tensor: 64 << 20, Fp8Matrix: 48 << 20, IntMatrix: 7 << 20}
"""Fewest bytes of a layer's weights, by form. Below, the grid barriers between products cost more than the kernel saves, or the
size is not measured."""
HEAD_DIMS = (64, 128, 256)
LARGEST_GROUP = 8
"""Most query heads per KV head: each thread holds values of all of them."""


def knows(parts: Sequence[LayerParts]) -> bool:
    """Whether the kernel supports these layers and is faster than separate kernels."""
    first = parts[0]
    dtype, form, shape = first.attention_norm.dtype, type(first.qkv.packed), first.shape
    return (
        dtype in (torch.bfloat16, torch.float16)
        and form in SMALLEST_BYTES
        and all(_known(matrix) for layer in parts for matrix in _matrices(layer))
        and all(norm.dtype == dtype for layer in parts for norm in _norms(layer))
        and all(vector.data_ptr() % ALIGNED == 0 for layer in parts for vector in _vectors(layer))
        and shape.head_dim in HEAD_DIMS
        and shape.n_heads // shape.n_kv_heads <= LARGEST_GROUP
        and len({_form(layer) for layer in parts}) == 1
        and len({_number(matrix) for matrix in _matrices(first)}) == 1
        and sum(_bytes(matrix) for matrix in _matrices(first)) >= SMALLEST_BYTES[form]
        and stages_of(_layer(first)) >= FEWEST_STAGES
        and (first.peers is None or (form is not IntMatrix and len(first.attention_norm) <= WIDEST))
        and (not _post_norms(first) or (form is not IntMatrix and first.peers is None))
        and all(_streams(kind) for kind in zip(*(_matrices(layer) for layer in parts), strict=True))
    )


class OneToken:
    """Run a stream [1, d_model] through `parts` in one kernel. Calls with more tokens, some of the layers or an
    unsupported cache go to `otherwise`."""

    __slots__ = ("_count", "_dtype", "_layers", "_otherwise")

    def __init__(self, parts: Sequence[LayerParts], otherwise: RunLayers) -> None:
        self._otherwise, self._dtype, self._count = otherwise, parts[0].attention_norm.dtype, len(parts)
        self._layers = Layers([_layer(layer) for layer in parts], parts[0].peers)

    def __call__(self, stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
        complete = stream.shape[0] == 1 and len(views) == self._count
        fused = complete and step.key_positions is None and self._attends(views)
        return (self._layers if fused else self._otherwise)(stream, views, step)

    def _attends(self, views: Sequence[KvView]) -> bool:
        first = views[0]
        return streamable([view.kv for view in views]) and all(
            view.kv.dtype == self._dtype
            and view.softcap is None
            and (view.scale, view.page_tokens, view.kv.stride(), view.table.stride())
            == (first.scale, first.page_tokens, first.kv.stride(), first.table.stride())
            for view in views
        )


def _matrices(parts: LayerParts) -> tuple[Matrix, ...]:
    return parts.qkv, parts.out, parts.gate_up, parts.down


def _norms(parts: LayerParts) -> list[torch.Tensor]:
    norms = (parts.attention_norm, parts.feed_forward_norm, parts.shape.q_norm, parts.shape.k_norm)
    return [norm for norm in norms if norm is not None] + _post_norms(parts)


def _post_norms(parts: LayerParts) -> list[torch.Tensor]:
    norms = (parts.attention_post_norm, parts.feed_forward_post_norm)
    return [norm for norm in norms if norm is not None]


def _known(matrix: Matrix) -> bool:
    """Whether the kernel reads this form. Integers must be symmetric, with a scale per row or per LINE inputs and no padding."""
    packed = matrix.packed
    if not isinstance(packed, IntMatrix):
        return True
    inputs = packed.codes.shape[1] * 8 // packed.bits if packed.bits in (4, 8) else 0
    return (
        packed.zeros is None
        and packed.codes.shape[0] == packed.out
        and inputs == packed.d_in
        and (packed.group == LINE.value or packed.group >= packed.d_in)
    )


def _number(matrix: Matrix) -> tuple[object, ...]:
    """The number format of the weights."""
    weights = _weights(matrix)
    return type(matrix.packed), weights.bits, weights.grouped


def _vectors(parts: LayerParts) -> list[torch.Tensor]:
    """Tensors other than weights that the kernel reads with vector loads."""
    weights = [_weights(matrix) for matrix in _matrices(parts)]
    factors = [factor for weight in weights for factor in (weight.scales, weight.bias) if factor is not None]
    return [*_norms(parts), *factors, parts.shape.cos_sin]


def _form(parts: LayerParts) -> tuple[object, ...]:
    """Properties that all layers of one kernel must share."""
    matrices = [(_weights(matrix).values.shape, *_number(matrix), matrix.bias is None) for matrix in _matrices(parts)]
    shape = parts.shape
    heads = (shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.cos_sin.shape[2])
    norms = (shape.q_norm is None, shape.k_norm is None, shape.norm_eps, shape.norm_offset)
    return (*matrices, heads, norms, len(_post_norms(parts)), parts.activation)


def _weights(matrix: Matrix) -> Weights:
    packed = matrix.packed
    if isinstance(packed, Fp8Matrix):
        return Weights(packed.values, packed.scales, matrix.bias)
    if isinstance(packed, IntMatrix):
        return Weights(packed.codes.view(torch.int8), _padded(packed.scales), matrix.bias, packed.bits)
    assert isinstance(packed, torch.Tensor)
    return Weights(packed, None, matrix.bias)


def _padded(scales: torch.Tensor) -> torch.Tensor:
    """Scales of groups with rows padded with zeros to multiples of ALIGNED bytes. Copies if padding is needed."""
    groups = scales.shape[1]
    return F.pad(scales, (0, -groups % (ALIGNED // scales.element_size()))) if groups > 1 else scales


def _bytes(matrix: Matrix) -> int:
    return _weights(matrix).values.nbytes


def _streams(kind: Sequence[Matrix]) -> bool:
    """Whether the copy engine can address the rows and the scales of groups."""
    weights = [_weights(matrix) for matrix in kind]
    values = [weight.values for weight in weights]
    scales = [weight.scales for weight in weights if weight.scales is not None and weight.grouped]
    return reachable(values) and (not scales or reachable(scales, ALIGNED))


def _layer(parts: LayerParts) -> Layer:
    return Layer(
        norms=(parts.attention_norm, parts.feed_forward_norm),
        post_norms=(parts.attention_post_norm, parts.feed_forward_post_norm),
        qkv=_weights(parts.qkv),
        shape=parts.shape,
        out=_weights(parts.out),
        gate_up=_weights(parts.gate_up),
        down=_weights(parts.down),
        activation=parts.activation,
    )
