"""The layers of the one decoder: a linear that knows its format and split, attention, feed-forward, their norms.

Layers are plain callables without state of their own beyond weights; step data arrives as arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ridgeline.core.spec import LayerSpec, ModelSpec
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Activation, Ops, QkvShape
from ridgeline.parallel.mesh import Mesh
from ridgeline.quant.format import LinearShape, Part, Share, WeightFormat


@dataclass(frozen=True, slots=True)
class Build:
    """What building a layer takes: the model's facts, the operations, the format of its linears, the place."""

    spec: ModelSpec
    ops: Ops
    form: WeightFormat
    mesh: Mesh
    dtype: torch.dtype
    device: torch.device

    def vector(self, size: int) -> torch.Tensor:
        """Room for a norm's weight."""
        return torch.empty(size, dtype=self.dtype, device=self.device)


class Linear:
    """y = x W^T + b through a weight format. With split "in" every rank holds a term of the sum; the mesh adds them.

    inputs: the norms and the activation that make x in the form this linear takes.
    """

    __slots__ = ("weight", "inputs", "apply")

    def __init__(self, build: Build, shape: LinearShape) -> None:
        mesh = build.mesh
        self.weight = build.form.create(shape, Share(mesh.rank, mesh.size))
        self.inputs = self.weight.inputs
        self.apply: Callable[[Activation], torch.Tensor] = self.weight.apply
        if shape.split == "in" and mesh.size > 1:
            self.apply = lambda x: mesh.all_reduce(self.weight.apply(x))


class Attention:
    """Merged q, k, v projection, attention over the paged cache, output projection."""

    __slots__ = ("qkv", "out", "q_norm", "k_norm", "shape", "_qkv_write", "_attention")

    def __init__(self, build: Build, layer: LayerSpec, cos_sin: torch.Tensor) -> None:
        spec, width = build.spec, layer.head_dim
        heads, kv_heads = Part(layer.n_heads * width, layer.n_heads), Part(layer.n_kv_heads * width, layer.n_kv_heads)
        parts = (heads, kv_heads, kv_heads)
        self.qkv = Linear(build, LinearShape(spec.d_model, parts, spec.qkv_bias, "out"))
        whole = (Part(spec.d_model, 1),)
        self.out = Linear(build, LinearShape(heads.rows, whole, spec.out_bias, "in", in_units=layer.n_heads))
        self.q_norm = build.vector(width) if spec.qk_norm else None
        self.k_norm = build.vector(width) if spec.qk_norm else None
        share = Share(build.mesh.rank, build.mesh.size)
        own, own_kv = share.span(layer.n_heads, layer.n_heads), share.span(layer.n_kv_heads, layer.n_kv_heads)
        self.shape = QkvShape(
            n_heads=own.stop - own.start,
            n_kv_heads=own_kv.stop - own_kv.start,
            head_dim=width,
            cos_sin=cos_sin,
            q_norm=self.q_norm,
            k_norm=self.k_norm,
            norm_eps=spec.norm_eps,
            norm_offset=spec.norm_offset,
        )
        self._qkv_write, self._attention = build.ops.qkv_write, build.ops.attention

    def __call__(self, x: Activation, view: KvView, step: StepInputs) -> torch.Tensor:
        q, k, v = self._qkv_write(self.qkv.apply(x), self.shape, view, step)
        out, _ = self._attention(q, k, v, view, step)
        return self.out.apply(out.flatten(1))


class FeedForward:
    """down(act(gate(x)) * up(x)) with gate and up merged (Shazeer 2020)."""

    __slots__ = ("gate_up", "down", "_activate", "_kind")

    def __init__(self, build: Build, layer: LayerSpec) -> None:
        spec, half = build.spec, Part(layer.d_ff, layer.d_ff)
        self.gate_up = Linear(build, LinearShape(spec.d_model, (half, half), spec.mlp_bias, "out"))
        whole = (Part(spec.d_model, 1),)
        self.down = Linear(build, LinearShape(layer.d_ff, whole, spec.mlp_bias, "in", in_units=layer.d_ff))
        self._activate, self._kind = self.down.inputs.activate, spec.activation

    def __call__(self, x: Activation) -> torch.Tensor:
        return self.down.apply(self._activate(self.gate_up.apply(x), self._kind))


class DecoderLayer:
    """Pre-norm layer on (x, residual): x is what the last block added, residual the stream before it was added.

    With post norms (Gemma 2 and 3) each block's output is normed before it joins the stream.
    """

    __slots__ = (
        "attention",
        "feed_forward",
        "attention_norm",
        "feed_forward_norm",
        "attention_post_norm",
        "feed_forward_post_norm",
        "_post_norm",
        "_first_norm",
        "_attention_norm",
        "_feed_forward_norm",
        "_eps",
        "_offset",
    )

    def __init__(self, build: Build, layer: LayerSpec, cos_sin: torch.Tensor) -> None:
        spec, d_model = build.spec, build.spec.d_model
        self.attention = Attention(build, layer, cos_sin)
        self.feed_forward = FeedForward(build, layer)
        self.attention_norm = build.vector(d_model)
        self.feed_forward_norm = build.vector(d_model)
        self.attention_post_norm = build.vector(d_model) if spec.post_norms else None
        self.feed_forward_post_norm = build.vector(d_model) if spec.post_norms else None
        # A norm makes what the linear behind it takes; a post norm joins the plain stream.
        self._post_norm = build.ops.rms_norm
        self._first_norm = self.attention.qkv.inputs.rms_norm
        self._attention_norm = self.attention.qkv.inputs.add_rms_norm
        self._feed_forward_norm = self.feed_forward.gate_up.inputs.add_rms_norm
        self._eps, self._offset = spec.norm_eps, spec.norm_offset

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None, view: KvView, step: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps, offset = self._eps, self._offset
        if residual is None:
            normed, residual = self._first_norm(x, self.attention_norm, eps, offset), x
        else:
            normed, residual = self._attention_norm(x, residual, self.attention_norm, eps, offset)
        x = self.attention(normed, view, step)
        if self.attention_post_norm is not None:
            x = self._post_norm(x, self.attention_post_norm, eps, offset)
        normed, residual = self._feed_forward_norm(x, residual, self.feed_forward_norm, eps, offset)
        x = self.feed_forward(normed)
        if self.feed_forward_post_norm is not None:
            x = self._post_norm(x, self.feed_forward_post_norm, eps, offset)
        return x, residual
