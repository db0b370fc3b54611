"""One decoder for every supported family, driven by ModelSpec."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from ridgeline.core.errors import ConfigError
from ridgeline.models.building import Build
from ridgeline.models.experts import Experts
from ridgeline.models.layers import DecoderLayer
from ridgeline.models.rope import SPARE_POSITIONS, rope_table
from ridgeline.ops.divided import split_requests
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.striped import split_tokens
from ridgeline.ops.table import LayerParts, RunLayers, apply_norm
from ridgeline.quant.format import BLOCKS, LinearShape, Part, Share, WeightFormat
from ridgeline.quant.unquantized import UnquantizedFormat


class Decoder:
    """Embedding, layers, final norm, head. For inference; it never synchronizes with the host, so CUDA graphs can capture it.

    The embedding is not quantized. Ranks divide the rows of embedding and head (Shoeybi et al. 2019, section 3). A tied head uses
    the embedding matrix, or has a copy of it in a format of its own. A stage of a pipeline has its layers only: the first stage
    embeds, the last one has norm and head.
    """

    __slots__ = (
        "spec",
        "stage",
        "layers",
        "embedding",
        "positions",
        "final_norm",
        "head",
        "scale",
        "copies_embedding",
        "_build",
        "_unquantized",
        "_run",
        "_parts",
    )

    def __init__(self, build: Build, max_len: int, head: WeightFormat) -> None:
        """Allocates weights on build.device, and rotary tables for max_len + SPARE_POSITIONS positions. head: its format.

        Raises ConfigError for a KV format that the operations do not support, and for layers that the mesh cannot split.
        """
        spec, known = build.spec, (build.spec.dtype, *sorted(build.ops.attention.kv_formats))
        if spec.kv.name not in known:
            raise ConfigError(
                f"A KV cache in {spec.kv.name} is not supported by the operations {build.ops.name!r} for a model in "
                f"{spec.dtype}: use {' or '.join(known)}."
            )
        self.spec, self._build, self.stage = spec, build, build.mesh.stage
        layers = spec.layers[self.stage.layers]
        longest = max_len + SPARE_POSITIONS
        tables = {rope: rope_table(rope, longest, build.device) for rope in {layer.rope for layer in layers}}
        self.layers = tuple(DecoderLayer(build, layer, tables[layer.rope]) for layer in layers)
        rows = spec.on_rank(build.mesh.size, build.mesh.attention.size).vocabulary_rows
        shares = self.stage.last and spec.shares_embedding
        self.embedding = torch.empty(
            rows * (self.stage.first or shares), spec.d_model, dtype=build.dtype, device=build.device
        )
        self.positions = build.vector(spec.positions * self.stage.first * spec.d_model).view(-1, spec.d_model)
        self.final_norm = build.norm()
        self._unquantized = UnquantizedFormat(build.ops.matmul.unquantized, build.dtype, build.device)
        shape = LinearShape(spec.d_model, (Part(rows, rows),))
        self.head = head.create(shape, Share()) if self.stage.last and not shares else None
        self.copies_embedding = (
            self.head is not None and spec.tied and BLOCKS not in self.head.expects[0, "weight"].dtypes
        )
        """A tied head in blocks is a tensor of its checkpoint, too."""
        # Gemma rounds the embedding scale to the dtype of the weights.
        self.scale = torch.tensor(spec.embed_scale, dtype=build.dtype).item()
        self._run = self._divided(self._run_layers)
        self._parts: dict[tuple[int, int], RunLayers] = {}
        """What runs the layers from one index to another; see `divide`."""

    def load_embedding(self, tensor: torch.Tensor) -> None:
        """Load the embedding [vocab, d_model], and a tied head. That shares its memory if the operations support it."""
        self.embedding.copy_(self._held(tensor)[: len(self.embedding)])
        if self.copies_embedding:
            self.load_head(tensor)
        elif self.spec.shares_embedding and self.stage.last:
            self.head = self._unquantized.adopt(self.embedding)

    def load_head(self, tensor: torch.Tensor) -> None:
        """Load the head [vocab, d_model]."""
        assert self.head is not None
        self.head.load(0, "weight", self._held(tensor))

    def _held(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of this rank of embedding or head."""
        mesh = self._build.mesh
        rows = self.spec.on_rank(mesh.size, mesh.attention.size).vocabulary_rows
        part = tensor[mesh.rank * rows :][:rows]
        return part if len(part) == rows else torch.cat((part, part.new_zeros(rows - len(part), *part.shape[1:])))

    def restrict_vocabulary(self, ids: torch.Tensor) -> None:
        """Restrict logits to the tokens ids int32 [N], in this order. The head must be tied."""
        assert self.spec.tied
        self.head = self._unquantized.adopt(self.embedding.index_select(0, ids))

    def group_experts(self) -> None:
        """All weights are loaded: hand those of the experts to a device that groups them. Afterwards `all_tensors` is complete."""
        for layer in self.layers:
            layer.feed_forward.finish_loading()

    def finish_loading(self) -> None:
        """All weights are loaded and keep their addresses: let the operations choose a program that runs all layers."""
        self.group_experts()
        if (parts := self.parts()) is not None:
            self._run = self._build.ops.programs.layers(parts, self._run)

    def _divided(self, run: RunLayers) -> RunLayers:
        """`run` as the mesh divides tokens: first those that are multiplied, then the residual stream of these."""
        mesh = self._build.mesh
        if mesh.divides_requests:
            return split_requests(run, mesh.stream)
        return split_tokens(split_tokens(run, mesh.stream, lambda step, tokens: step), mesh.context)

    def parts(self) -> list[LayerParts] | None:
        """Weights for programs that run whole layers; None if a layer is not supported."""
        parts = [layer_parts for layer in self.layers if (layer_parts := layer.parts()) is not None]
        return parts if len(parts) == len(self.layers) else None

    def _run_layers(self, stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
        return self._run_part(0, stream, views, step)

    def forward(
        self, tokens: torch.Tensor, views: Sequence[KvView], step: StepInputs, wanted: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the layers and the final norm.

        Args:
            tokens: int32 [T].
            views: one for each layer.
            wanted: int32 [W], query tokens whose hidden states are needed; None: all. For the other tokens the last layer only
                writes keys and values.
        Returns:
            hidden states after the final norm, [T, d_model] or [W, d_model], in the model's dtype. A stage before the last sends
            the residual stream to the next one and returns it.
        """
        if self.stage.first:
            stream = self._embed(tokens, step)
        else:
            stream = self.stage.receive(self.embedding.new_empty(len(tokens), self.spec.d_model))
        if not self.stage.last:
            stream = self._run(stream, views, step)
            self.stage.send(stream)
            return stream
        if wanted is None or len(wanted) >= len(tokens) or self._build.mesh.divides_requests:
            stream = self._run(stream, views, step)
            stream = stream if wanted is None else stream.index_select(0, wanted)
        else:
            stream = self._run(stream, views[:-1], step)
            stream = self.layers[-1](stream, views[-1], step, wanted)
        return apply_norm(self._build.normed(stream, self.final_norm), self._build.ops.tokenwise.rms_norm)

    def tapped(
        self,
        tokens: torch.Tensor,
        views: Sequence[KvView],
        step: StepInputs,
        wanted: torch.Tensor | None,
        taps: Sequence[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`forward`, with the residual streams before the layers `taps`, [T, len(taps) d_model]. `divide` was called with these.
        Taps behind the last layer, as in a decoder of `with_layers`, are read before it."""
        stream, last, tokenwise = self._embed(tokens, step), len(self.layers) - 1, self._build.ops.tokenwise
        restricted = None if wanted is None or len(wanted) >= len(tokens) else wanted
        streams, begin = stream.new_empty(len(tokens), len(taps) * self.spec.d_model), 0
        known = [min(tap, last) for tap in taps]
        for end in sorted({*known, last + (restricted is None)}):
            if begin < end:
                program = self._parts.get((begin, end), partial(self._run_part, begin))
                stream, begin = program(stream, views[begin:end], step), end
            for tap, out in zip(known, streams.split(self.spec.d_model, 1), strict=True):
                if tap == end:
                    tokenwise.place(stream, out)  # layers may overwrite the stream
        if restricted is not None:
            stream = self.layers[last](stream, views[last], step, restricted)
        elif wanted is not None:
            stream = stream.index_select(0, wanted)
        return apply_norm(self._build.normed(stream, self.final_norm), tokenwise.rms_norm), streams

    def divide(self, taps: Sequence[int]) -> None:
        """All weights are loaded: let the operations choose programs that run the layers between `taps`."""
        last = len(self.layers) - 1
        for begin, end in pairwise(sorted({0, *(min(tap, last) for tap in taps), last + 1})):
            parts = [layer.parts() for layer in self.layers[begin:end]]
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                self._parts[begin, end] = self._build.ops.programs.layers(known, partial(self._run_part, begin))

    def _run_part(self, begin: int, stream: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> torch.Tensor:
        """Run as many layers from `begin` on as there are views."""
        for layer, view in zip(self.layers[begin:], views, strict=False):
            stream = layer(stream, view, step)
        return stream

    def queries(self, tokens: torch.Tensor, views: Sequence[KvView], step: StepInputs) -> Iterator[torch.Tensor]:
        """Run the layers, and give the rotated queries [T, heads, d] of each."""
        stream = self._embed(tokens, step)
        for layer, view in zip(self.layers, views, strict=True):
            yield layer.queries(stream, view, step)
            stream = layer(stream, view, step)

    def _embed(self, tokens: torch.Tensor, step: StepInputs) -> torch.Tensor:
        """The scaled embeddings [T, d_model] of tokens int32 [T], plus those of their positions where the model learned some."""
        stream, learned = self._embed_tokens(tokens), self.positions
        if not len(learned):
            return stream
        # Results of positions beyond the context (SPARE_POSITIONS) are discarded.
        return stream + learned.index_select(0, step.position.clamp(max=len(learned) - 1))

    def _embed_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The scaled embeddings. Ranks that do not hold a token add zeros."""
        build = self._build
        if build.mesh.size == 1:
            return build.ops.tokenwise.embed(self.embedding, tokens, self.scale)
        rows = len(self.embedding)
        local = tokens - build.mesh.rank * rows
        stream = build.ops.tokenwise.embed(self.embedding, local.clamp(0, rows - 1), self.scale)
        return build.mesh.all_reduce(stream.masked_fill_(((local < 0) | (local >= rows))[:, None], 0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [L, d_model] -> logits [L, vocab] of the head. Scaled or capped ones (Gemma 2) are in float32."""
        assert self.head is not None
        out = self._build.mesh.gather_columns(self.head.apply(hidden), self.spec.vocab_size)
        cap, scale = self.spec.final_softcap, self.spec.logit_scale
        out = out if scale == 1.0 else out.float() * scale
        return out if cap is None else self._build.ops.tokenwise.cap(out, cap)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All weights; a tied head is included once, rotary tables are not included."""
        yield from (self.embedding, self.positions, self.final_norm)
        if self.head is not None and not self.spec.shares_embedding:
            yield from self.head.tensors()
        for layer in self.layers:
            yield from _tensors_of(layer)

    def all_tensors(self) -> list[torch.Tensor]:
        """`tensors`, and those of a tied head, which operations may have packed."""
        head = () if self.head is None else self.head.tensors()
        return [*self.tensors(), *(tensor for tensor in head if self.spec.shares_embedding)]

    def expert_loads(self) -> list[torch.Tensor]:
        """Experts.load of each layer that has experts."""
        return [layer.feed_forward.load for layer in self.layers if isinstance(layer.feed_forward, Experts)]

    def layer_kinds(self) -> list[Hashable]:
        """For each layer a key of the kernels that it launches: layers with equal keys launch the same kernels."""
        forms = (
            [(tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16) for tensor in _tensors_of(layer)]
            for layer in self.layers
        )
        # Which layer's cache a sharing layer reads does not matter to kernels.
        specs = (
            layer if layer.written_heads else replace(layer, share_from=0)
            for layer in self.spec.layers[self.stage.layers]
        )
        return [(spec, *form) for spec, form in zip(specs, forms, strict=True)]

    def with_layers(self, layers: Sequence[int]) -> Decoder:
        """A decoder of the layers with these indices, with shared weights, for warm-up. Its results are meaningless."""
        decoder = copy(self)
        decoder.layers = tuple(self.layers[index] for index in layers)
        decoder._run, decoder._parts = decoder._divided(decoder._run_layers), {}
        decoder.finish_loading()
        return decoder


def _tensors_of(layer: DecoderLayer) -> Iterator[torch.Tensor]:
    before = layer.attention_norm, layer.feed_forward_norm
    within = layer.attention.q_norm, layer.attention.k_norm, layer.attention.sinks
    behind = layer.attention_post_norm, layer.feed_forward_post_norm
    yield from (vector for vector in (*before, *within, *behind) if vector is not None)
    for _, weight in layer.attention.linears():
        yield from weight.tensors()
    yield from layer.feed_forward.tensors()
