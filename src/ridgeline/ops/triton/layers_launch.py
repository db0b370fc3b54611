"""Launches of the kernel that runs one token through all layers of a decoder."""

# mypy: allow-untyped-defs
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.triton.activation import KINDS
from ridgeline.ops.triton.launch import overlap
from ridgeline.ops.triton.layers import layers_kernel
from ridgeline.ops.triton.layers_forms import cut, processors, stages_of
from ridgeline.ops.triton.layers_integers import groups_of
from ridgeline.ops.triton.layers_keys import MOST_PARTS, key_blocks
from ridgeline.ops.triton.layers_table import Layer, fields, input_lines
from ridgeline.ops.triton.peers import NO_VECTORS, Vectors

REGISTERS = 168
"""Registers per thread at launch, for 8 consumer warps and 4 producer warps."""


class Layers:
    """Run a stream [1, model] through `layers`, which differ in values only.

    All programs of the kernel must be resident at once, because they synchronise. Two such kernels may not run on two streams of a
    device at once, nor on a device shared through MPS.
    """

    def __init__(self, layers: Sequence[Layer], peers: Callable[[], Vectors] | None = None) -> None:
        """peers: memory that the ranks which share these layers exchange vectors in; None: one rank."""
        self._layers, self._peers = tuple(layers), peers
        device = layers[0].norms[0].device
        self._programs = processors(device)
        self._cut = cut(layers)
        self._fields = [[*columns, *fields(layer)] for layer, columns in zip(layers, self._cut.columns, strict=True)]
        self._counter = torch.zeros(1, dtype=torch.int64, device=device)
        self._draws = torch.zeros(4 * len(layers), dtype=torch.int64, device=device)
        self._arrivals = torch.zeros(layers[0].shape.n_kv_heads, dtype=torch.int32, device=device)
        self._tables: dict[tuple[tuple[int, ...], ...], tuple[TensorDescriptor, torch.Tensor]] = {}

    def __call__(self, stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
        """Update `stream` in place through all layers and return it."""
        first, view = self._layers[0], views[0]
        shape, dim = first.shape, first.shape.head_dim
        heads, model, features = (weights.inputs for weights in (first.out, first.qkv, first.down))
        rows, post = first.qkv.values.shape[0], first.post_norms[0] is not None
        peers = NO_VECTORS if self._peers is None else self._peers()
        layers_kernel[(self._programs,)](
            *self._cut.blocks,
            *self._cut.scale_blocks,
            *self._table(views),
            stream,
            *(stream.new_empty(size) for size in (rows, heads, features)),
            *(stream.new_empty(model) if post else None for _ in range(2)),
            step.rows,
            step.length,
            step.position,
            view.slots,
            stream.new_empty(MOST_PARTS.value * shape.n_heads * dim, dtype=torch.float32),
            stream.new_empty(MOST_PARTS.value * shape.n_heads, dtype=torch.float32),
            self._arrivals,
            self._counter,
            self._draws,
            peers.addresses,
            peers.sums,
            peers.rank,
            len(self._layers),
            heads,
            model,
            features,
            rows,
            view.table.stride(0),
            *view.kv.stride()[:3],
            shape.norm_eps,
            view.scale * math.log2(math.e),
            ROWS=self._cut.rows,
            LINES=input_lines(first),
            STAGES=stages_of(first),
            GROUPS=groups_of(first, self._programs),
            KIND=KINDS[first.activation],
            OFFSET=shape.norm_offset,
            FORM=(first.qkv.bits, first.qkv.grouped),
            BIASES=sum(1 << index for index, weights in enumerate(first.weights) if weights.bias is not None),
            SHAPE=(shape.n_heads, shape.n_kv_heads, dim, shape.cos_sin.shape[2], view.page_tokens),
            NORMS=(shape.q_norm is not None) + 2 * (shape.k_norm is not None),
            SIZE=peers.size,
            POST=post,
            num_warps=8,
            maxnreg=REGISTERS,
            **overlap(stream.device),
        )
        return stream

    def _table(self, views: Sequence[KvView]) -> tuple[TensorDescriptor, torch.Tensor]:
        """TMA descriptor of the caches and the table of all layers. Key: addresses and windows of the caches. Created at the first
        use of these caches, before a graph is captured."""
        slots = views[0].slots
        view_rows = tuple(
            (
                view.kv.data_ptr(),
                view.table.data_ptr(),
                (view.slots.data_ptr() - slots.data_ptr()) // 8,
                view.window or 0,
            )
            for view in views
        )
        if view_rows not in self._tables:
            blocks, where = key_blocks([view.kv for view in views])
            rows = [
                [*fields, *view_row, place]
                for fields, view_row, place in zip(self._fields, view_rows, where, strict=True)
            ]
            self._tables[view_rows] = blocks, torch.tensor(rows, dtype=torch.int64, device=slots.device)
        return self._tables[view_rows]
