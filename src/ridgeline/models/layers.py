"""Layers of the decoder: linears with a weight format and a tensor-parallel split, attention, feed-forward, norms.

Layers are callables whose only state is their weights. The data of a step are arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from ridgeline.core.spec import LayerSpec
from ridgeline.models.building import Build, gather, sum_terms
from ridgeline.models.experts import Experts
from ridgeline.ops.merge import with_sinks
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Activation, Heads, LayerParts, Matrix, QkvShape, apply_norm
from ridgeline.parallel.mesh import Mesh
from ridgeline.quant.format import LinearShape, Part, Share, Weight

UNGATED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu_,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
"""Activations of feed-forward blocks without a gate. Each may overwrite its input."""


class Linear:
    """y = x W^T + b through a weight format; see quant.format.Weight.

    apply(x, step) -> y. activate(x, kind, step) -> act(gate) * up, where y = (gate, up). add(x, stream, step) -> stream + y, the
    residual sum at the end of a block; the result may overwrite the stream. step: the step of the tokens of x, see
    StepInputs.row_of_inputs. With split "in" every rank computes a term of y, and the mesh sums the terms. If the ranks divide the
    stream by tokens (Mesh.stream; Korthikanti et al. 2022, section 4.2.2), a linear with split "out" takes this rank's tokens and
    gathers those of all, and the sum of terms is of this rank's tokens. to_stream(x, stream, step) -> y, divided as the stream.
    matrix() -> the weights for programs that run whole layers; None if these cannot add over ranks, or for other weights.
    """

    __slots__ = ("weight", "apply", "activate", "add", "to_stream", "matrix")

    def __init__(self, build: Build, shape: LinearShape) -> None:
        mesh = build.mesh
        self.weight = weight = build.form.create(shape, Share(mesh.rank, mesh.size))
        self.apply: Callable[[Activation, StepInputs], torch.Tensor] = weight.apply
        self.activate: Callable[[Activation, str, StepInputs], Activation] = weight.activate
        self.add: Callable[[Activation, torch.Tensor, StepInputs], torch.Tensor] = weight.add
        whole = mesh.size == 1 or mesh.peers is not None
        self.matrix: Callable[[], Matrix | None] = weight.matrix if whole else lambda: None
        self.to_stream: Callable[[Activation, torch.Tensor, StepInputs], torch.Tensor]
        self.to_stream = lambda x, stream, step: weight.apply(x, step)
        if mesh.size > 1 and shape.split == "in":
            self.to_stream = lambda x, stream, step: sum_terms(mesh, weight.apply(x, step), stream, step)
            self.add = partial(self._sum_and_add, mesh)
        elif mesh.size > 1 and shape.split == "out":
            gathered = gather(build)
            self.apply = lambda x, step: weight.apply(gathered(x, step), step)
            self.activate = lambda x, kind, step: weight.activate(gathered(x, step), kind, step)

    def _sum_and_add(self, mesh: Mesh, x: Activation, stream: torch.Tensor, step: StepInputs) -> torch.Tensor:
        if step.division is not None or len(stream) < step.inputs:
            return stream + self.to_stream(x, stream, step)
        # The stream is equal on all ranks, so only the first rank adds it to the sum.
        return mesh.all_reduce(self.weight.apply(x, step) if mesh.rank else self.weight.add(x, stream, step))


def join(
    build: Build, last: Linear, post_norm: torch.Tensor | None
) -> Callable[[Activation, torch.Tensor, StepInputs], torch.Tensor]:
    """The end of a block: (x, stream, step) -> stream + last(x). A post norm (Gemma 2 and 3) is applied to last(x)."""
    if post_norm is None and (scale := build.spec.residual_scale) != 1.0:
        return lambda x, stream, step: torch.add(stream, last.to_stream(x, stream, step), alpha=scale)
    if post_norm is None:
        return last.add
    norm_add, norm_arguments = build.ops.tokenwise.norm_add, (post_norm, build.spec.norm_eps, build.spec.norm_offset)

    def joined(x: Activation, stream: torch.Tensor, step: StepInputs) -> torch.Tensor:
        return norm_add(last.to_stream(x, stream, step), *norm_arguments, stream)

    return joined


def mean_square(x: torch.Tensor) -> torch.Tensor:
    """Mean of the squares of x [T, D], float32 [T, 1]. The statistics of a layer norm, because kernels compute them token by token,
    so that they do not depend on the number of tokens; those of a mean do on a GPU."""
    _, mean, inverse = torch.native_layer_norm(x.float(), x.shape[1:], None, None, 0.0)
    return inverse.pow(-2) + mean.square()


class Attention:
    """Merged q, k, v projection, attention over the paged KV cache, output projection added to the residual stream. A layer that
    shares another layer's keys and values projects queries only.

    norm_cuts: (elements in the checkpoint, those of this rank) of a norm of all heads together, by name. sinks: [heads of this
    rank], see ModelSpec.
    """

    __slots__ = (
        "qkv",
        "out",
        "q_norm",
        "k_norm",
        "norm_cuts",
        "sinks",
        "share",
        "shape",
        "_qkv_write",
        "_attend",
        "_join",
    )

    def __init__(self, build: Build, layer: LayerSpec, cos_sin: torch.Tensor, post_norm: torch.Tensor | None) -> None:
        spec, width = build.spec, layer.head_dim
        heads, kv_heads = Part(layer.n_heads * width, layer.n_heads), Part(layer.n_kv_heads * width, layer.n_kv_heads)
        parts = (heads, kv_heads, kv_heads) if layer.written_heads else (heads,)
        self.qkv = Linear(build, LinearShape(spec.d_model, parts, spec.qkv_bias, "out"))
        out_parts = (Part(spec.d_model, 1),)
        self.out = Linear(build, LinearShape(heads.rows, out_parts, spec.out_bias, "in", in_units=layer.n_heads))
        whole, rank_layer = spec.qk_norm == "all", layer.on_rank(build.mesh.size)
        units = (rank_layer.n_heads, rank_layer.n_kv_heads) if whole else (1, 1)
        self.q_norm = build.vector(units[0] * width) if spec.qk_norm else None
        self.k_norm = build.vector(units[1] * width) if spec.qk_norm and layer.written_heads else None
        self.share = Share(build.mesh.rank, build.mesh.size)
        cuts = {"q_norm": heads, "k_norm": kv_heads} if whole else {}
        self.norm_cuts = {name: (part.rows, self.share.span(part.rows, part.units)) for name, part in cuts.items()}
        self.shape = QkvShape(
            n_heads=rank_layer.n_heads,
            n_kv_heads=rank_layer.written_heads,
            head_dim=width,
            cos_sin=cos_sin,
            q_norm=None if whole else self.q_norm,
            k_norm=None if whole else self.k_norm,
            norm_eps=spec.norm_eps,
            norm_offset=spec.norm_offset,
        )
        self._qkv_write, self._attend = build.ops.attention.qkv_write, build.ops.attention.attend
        self._join = join(build, self.out, post_norm)
        self.sinks = build.vector(rank_layer.n_heads) if spec.sinks else None
        if self.sinks is not None:
            self._attend = with_sinks(self._attend, self.sinks)
        if whole:
            self._qkv_write = self._norm_whole(build)

    def _norm_whole(self, build: Build) -> Callable[[torch.Tensor, QkvShape, KvView, StepInputs], Heads]:
        """AttentionOps.qkv_write behind norms of all heads together (OLMoE, OLMo 2)."""
        write, eps, offset = build.ops.attention.qkv_write, build.spec.norm_eps, build.spec.norm_offset
        rms_norm, mesh, q_norm, k_norm = build.ops.tokenwise.rms_norm, build.mesh, self.q_norm, self.k_norm
        assert q_norm is not None and k_norm is not None
        sizes, weight = (len(q_norm), len(k_norm), len(k_norm)), (q_norm, k_norm)

        def normed_write(qkv: torch.Tensor, shape: QkvShape, view: KvView, step: StepInputs) -> Heads:
            q, k, v = qkv.split(sizes, 1)
            if mesh.size == 1:
                q, k = rms_norm(q, q_norm, eps, offset), rms_norm(k, k_norm, eps, offset)
            else:  # ranks have equally many heads, copies of KV heads included: the mean over all is the mean of their means
                means = mesh.all_reduce(torch.cat((mean_square(q), mean_square(k)), 1)) / mesh.size
                scales = torch.rsqrt(means + eps).split(1, 1)
                parts = zip((q, k), scales, weight, strict=True)
                q, k = ((x.float() * scale * (norm.float() + offset)).to(x.dtype) for x, scale, norm in parts)
            return write(torch.cat((q, k, v), 1), shape, view, step)

        return normed_write

    def queries(self, x: Activation, view: KvView, step: StepInputs) -> torch.Tensor:
        """The rotated queries [T, heads, d]. Keys and values are written as by a call."""
        return self._qkv_write(self.qkv.apply(x, step), self.shape, view, step)[0]

    def __call__(
        self, x: Activation, stream: torch.Tensor, view: KvView, step: StepInputs, wanted: torch.Tensor | None
    ) -> torch.Tensor:
        q, k, v = self._qkv_write(self.qkv.apply(x, step), self.shape, view, step)
        if wanted is not None and not len(wanted):
            return stream[:0]
        if wanted is not None and (one_row_per_token := step.one_row_per_token(wanted)) is not None:
            q, stream = q.index_select(0, wanted), stream.index_select(0, wanted)
            k, v = (tensor if tensor is None else tensor.index_select(0, wanted) for tensor in (k, v))
            step, wanted = one_row_per_token, None
        out, _ = self._attend(q, k, v, view, step)
        if wanted is not None:
            out, stream, step = out.index_select(0, wanted), stream.index_select(0, wanted), step.select(wanted)
        return self._join(out.flatten(1), stream, step)

    def linears(self) -> Iterator[tuple[str, Weight]]:
        """Every weight by its name in models.weights."""
        yield "qkv", self.qkv.weight
        yield "out", self.out.weight


class FeedForward:
    """stream + down(act(gate(x)) * up(x)), with merged gate and up (Shazeer 2020). Without a gate: stream + down(act(up(x)))."""

    __slots__ = ("gate_up", "down", "_name", "_activate", "_kind", "_join")

    def __init__(self, build: Build, layer: LayerSpec, post_norm: torch.Tensor | None) -> None:
        spec, half = build.spec, Part(layer.d_ff, layer.d_ff)
        parts = (half, half) if spec.gated else (half,)
        self.gate_up = Linear(build, LinearShape(spec.d_model, parts, spec.mlp_bias, "out"))
        self._name, self._activate = ("gate_up", self.gate_up.activate) if spec.gated else ("up", self._ungated)
        out_parts = (Part(spec.d_model, 1),)
        self.down = Linear(build, LinearShape(layer.d_ff, out_parts, spec.mlp_bias, "in", in_units=layer.d_ff))
        self._kind = spec.activation
        self._join = join(build, self.down, post_norm)

    def __call__(self, x: Activation, stream: torch.Tensor, step: StepInputs) -> torch.Tensor:
        return self._join(self._activate(x, self._kind, step), stream, step)

    def _ungated(self, x: Activation, kind: str, step: StepInputs) -> torch.Tensor:
        return UNGATED[kind](self.gate_up.apply(x, step))

    def linears(self) -> Iterator[tuple[str, Weight]]:
        """Every weight by its name in models.weights."""
        yield self._name, self.gate_up.weight
        yield "down", self.down.weight

    def tensors(self) -> Iterator[torch.Tensor]:
        for _, weight in self.linears():
            yield from weight.tensors()

    def finish_loading(self) -> None:
        """All weights are loaded."""

    def matrices(self) -> tuple[Matrix | None, Matrix | None]:
        """The merged gate and up, and down, for programs that run whole layers."""
        return self.gate_up.matrix(), self.down.matrix()


class DecoderLayer:
    """Each block reads the residual stream [T, d_model], normalized if the model has pre-norms, and adds its output to it."""

    __slots__ = (
        "attention",
        "feed_forward",
        "attention_norm",
        "feed_forward_norm",
        "attention_post_norm",
        "feed_forward_post_norm",
        "_build",
    )

    def __init__(self, build: Build, layer: LayerSpec, cos_sin: torch.Tensor) -> None:
        spec = build.spec
        self.attention_norm = build.norm() if spec.pre_norms else None
        self.feed_forward_norm = build.norm() if spec.pre_norms and not spec.parallel else None
        self.attention_post_norm = build.norm() if spec.post_norms else None
        self.feed_forward_post_norm = build.norm() if spec.post_norms else None
        for_attention = replace(build, mesh=build.mesh.attention)
        self.attention = Attention(for_attention, layer, cos_sin, self.attention_post_norm)
        self.feed_forward = (
            Experts(build, layer.experts) if layer.experts else FeedForward(build, layer, self.feed_forward_post_norm)
        )
        self._build = build

    def __call__(
        self, stream: torch.Tensor, view: KvView, step: StepInputs, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """wanted: int32 [W], the only query tokens whose output is needed, [W, d_model]. All tokens write keys and values."""
        build, x = self._build, self._build.normed(stream, self.attention_norm)
        stream = self.attention(x, stream, view, step, wanted)
        if wanted is not None:
            if not len(wanted):
                return stream
            step = step.select(wanted)
        if not build.spec.parallel:
            x = build.normed(stream, self.feed_forward_norm)
        elif wanted is not None:
            x = apply_norm(x, build.ops.tokenwise.rms_norm).index_select(0, wanted)
        return self.feed_forward(x, stream, step)

    def queries(self, stream: torch.Tensor, view: KvView, step: StepInputs) -> torch.Tensor:
        """See Attention.queries."""
        return self.attention.queries(self._build.normed(stream, self.attention_norm), view, step)

    def parts(self) -> LayerParts | None:
        """Weights for programs that run whole layers; None if the layer is not supported."""
        attention, spec = self.attention, self._build.spec
        qkv, out = attention.qkv.matrix(), attention.out.matrix()
        gate_up, down = self.feed_forward.matrices()
        norm, feed_forward_norm = self.attention_norm, self.feed_forward_norm
        if not (spec.plain and qkv and out and gate_up and down) or norm is None or feed_forward_norm is None:
            return None
        matrices = (norm, qkv, attention.shape, out, feed_forward_norm, gate_up, down, spec.activation)
        return LayerParts(*matrices, self._build.mesh.peers, self.attention_post_norm, self.feed_forward_post_norm)
