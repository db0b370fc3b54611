"""Layer table and weight descriptors of the kernel of all layers, and helpers common to all weight formats."""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon import jit
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.ops.table import QkvShape

LINES_OF_STAGE = gl.constexpr(128)
"""Lines of 128 bytes in a stage."""
STAGE = 16384
"""Bytes of a stage."""
MEMORY = 225 << 10
"""Bytes of shared memory for the ring and for a product's input, or for the attention exchange between warps."""
IN_FLIGHT = gl.constexpr(3)
"""Stages that a program has in flight. More stages do not increase bandwidth, but other reads (inputs, keys, barrier counters)
queue behind them. The ring has 12 stages for 6 microseconds."""
SMALLEST_STAGES = 4
"""Minimum stages of a group of rows."""
ALIGNED = 16
"""Alignment of addresses for TMA, in bytes."""

# Fields of a layer in the table, int64. PLACE: places of its weights in their descriptors (qkv, out, gate/up, down). SCALE:
# pointers to their scales, or places of group scales. BIAS_AT: pointers to biases. NORM: pointers to the norms before attention and
# feed-forward. POST_NORM: pointers to the norms behind them, 0 without. HEAD_NORM: pointers to the norms of queries and keys.
# COS_SIN: rotary table. KV: cache. PAGES: page table. SLOT: index of its slot. WINDOW: 0 without one. CACHE: the cache's place in
# its descriptor.
PLACE, SCALE, BIAS_AT = gl.constexpr(0), gl.constexpr(4), gl.constexpr(8)
NORM, POST_NORM, HEAD_NORM, COS_SIN = gl.constexpr(12), gl.constexpr(14), gl.constexpr(16), gl.constexpr(18)
KV, PAGES, SLOT, WINDOW, CACHE, FIELDS = (gl.constexpr(field) for field in range(19, 25))


@jit
def pointer(field_ptr, dtype: gl.constexpr):
    """Load a pointer from the table. It is aligned to ALIGNED bytes."""
    return gl.multiple_of(gl.load(field_ptr).to(gl.pointer_type(dtype)), 16)


@jit
def next_stage(ring, at, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Wait for the next stage to be free, and set the byte count that its barrier expects. at: stages since the kernel began."""
    weights, full, free = ring[0], ring[1], ring[2]
    # fp8 weights have half the bytes, so grid barriers are twice as frequent and their reads matter more than a gapless stream.
    WAITED: gl.constexpr = IN_FLIGHT - 1 if weights.dtype == gl.float8e4nv else IN_FLIGHT
    stage = at % STAGES
    mbarrier.wait(free.index(stage), (at // STAGES & 1) ^ 1)
    if at >= WAITED:
        before = at - WAITED
        mbarrier.wait(full.index(before % STAGES), before // STAGES & 1)
    mbarrier.expect(full.index(stage), BYTES)
    return stage


@jit
def gated(gate, up, KIND: gl.constexpr):
    """act(gate) * up, as activation.gated, which Gluon kernels cannot call."""
    inner = gate
    if KIND == 2:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + gl.exp(-inner)) * up


@dataclass(frozen=True, slots=True)
class Weights:
    """A weight of the kernel: values [rows, k] of 16 bits, or e4m3 with scales float32 [rows], or int8 [rows, k * bits / 8] of
    codes with scales float16 [rows, groups]; bias [rows]."""

    values: torch.Tensor
    scales: torch.Tensor | None
    bias: torch.Tensor | None
    bits: int = 0

    @property
    def inputs(self) -> int:
        return self.values.shape[1] * 8 // self.bits if self.bits else self.values.shape[1]

    @property
    def grouped(self) -> bool:
        """Whether a row has several scales, one per group of inputs."""
        return self.bits > 0 and self.scales is not None and self.scales.shape[1] > 1


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer with all weights in one number format. norms [model]: before attention and before feed-forward. post_norms
    [model]: behind them, None without."""

    norms: tuple[torch.Tensor, torch.Tensor]
    post_norms: tuple[torch.Tensor | None, torch.Tensor | None]
    qkv: Weights
    shape: QkvShape
    out: Weights
    gate_up: Weights
    down: Weights
    activation: str

    @property
    def weights(self) -> tuple[Weights, ...]:
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class Places:
    """Matrices of one shape at arbitrary addresses, for one descriptor: the one at the lowest address, bytes from one place to the
    next, and the place of each matrix."""

    lowest: torch.Tensor
    step: int
    places: tuple[int, ...]


def places(matrices: Sequence[torch.Tensor]) -> Places:
    start = min(matrix.data_ptr() for matrix in matrices)
    offsets = [matrix.data_ptr() - start for matrix in matrices]
    step = math.gcd(*offsets) or matrices[0].nbytes
    lowest = next(matrix for matrix in matrices if matrix.data_ptr() == start)
    return Places(lowest, step, tuple(offset // step for offset in offsets))


def rows_at_a_time(values: torch.Tensor, halves: int) -> int:
    """Rows of a weight per group: few, so that all programs end a product together, but enough for SMALLEST_STAGES stages."""
    row = halves * values.shape[1] * values.element_size()
    return next((rows for rows in (4, 8) if rows * row >= SMALLEST_STAGES * STAGE), 16)


def blocks(where: Places, rows: int) -> TensorDescriptor:
    """TMA descriptor of matrices [rows, k] as [place, rows, pieces of 128 bytes, piece]. Places overlap in memory."""
    values, size = where.lowest, where.lowest.element_size()
    piece = 128 // size
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * size, rank=4)
    shape = [max(where.places) + 1, values.shape[0], values.shape[1] // piece, piece]
    strides = [where.step // size, values.stride(0), piece, 1]
    return TensorDescriptor(values, shape, strides, [1, rows, LINES_OF_STAGE.value // rows, piece], layout)


def reachable(matrices: Sequence[torch.Tensor], piece: int = 128) -> bool:
    """Whether one descriptor can address the matrices: contiguous, rows of complete pieces of bytes, places that are multiples of
    ALIGNED bytes and fit into 31 bits."""
    if not all(matrix.is_contiguous() for matrix in matrices):
        return False
    where = places(matrices)
    row = where.lowest.shape[1] * where.lowest.element_size()
    return row % piece == 0 == (where.step | where.lowest.data_ptr()) % ALIGNED and max(where.places) < 1 << 31


def lines(k: int, values: torch.Tensor) -> int:
    """Lines of 128 bytes in shared memory for k inputs of the dtype of `values`: a power of two."""
    return max(32, triton.next_power_of_2(triton.cdiv(k * values.element_size(), 128)))


def input_lines(layer: Layer) -> tuple[int, ...]:
    """The kernel's LINES."""
    heads, model, features = (lines(weights.inputs, weights.values) for weights in (layer.out, layer.qkv, layer.down))
    # For attention: partial results of warps in float32, before that two copies of 16 heads. Integer lines hold two digits per
    # input.
    group = triton.next_power_of_2(layer.shape.n_heads // layer.shape.n_kv_heads)
    return heads, model, features, max(16 * group, layer.shape.head_dim // 2) // (2 if layer.qkv.bits else 1)


def stages(max_lines: int) -> int:
    """Ring stages that fit beside `max_lines` lines."""
    return (MEMORY - max_lines * 128) // STAGE


def fields(layer: Layer) -> list[int]:
    """Table fields of a layer from BIAS_AT to COS_SIN; 0: none."""
    tensors = [weights.bias for weights in layer.weights]
    tensors += [*layer.norms, *layer.post_norms, layer.shape.q_norm, layer.shape.k_norm, layer.shape.cos_sin]
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
