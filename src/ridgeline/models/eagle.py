"""EAGLE heads and MTP layers: one decoder layer that predicts tokens from the states of the model that it was trained with.

The layer reads pairs of a token and the model's state before it (its features), and predicts the token after. EAGLE-1 and MTP read
the final hidden state: stream = fc(embedding, state). EAGLE-3 reads the residual stream before three layers: features =
fc(streams), and the layer's projections take (embedding, features), both normed. The layer's state after a pair stands in for the
model's state in the next pair.

Sources: Li et al. 2024 (arXiv:2401.15077), Li et al. 2025 (arXiv:2503.01840), DeepSeek-AI 2024 (arXiv:2412.19437, section 2.2).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ridgeline.core.drafting import FollowingDrafts
from ridgeline.core.spec import DTYPE_BYTES
from ridgeline.models.build import DTYPES, LoadedModel
from ridgeline.models.building import Build
from ridgeline.models.eagle_files import LAYER, HeadFiles, check_tensors
from ridgeline.models.layers import DecoderLayer, Linear
from ridgeline.models.rope import SPARE_POSITIONS, rope_table
from ridgeline.models.weights import NORMS, POST_NORMS, Target, layer_targets
from ridgeline.ops.step import KvView, StepInputs
from ridgeline.ops.table import Activation, apply_norm
from ridgeline.parallel.mesh import ONE_DEVICE
from ridgeline.quant.format import Expected, LinearShape, Part
from ridgeline.quant.unquantized import UnquantizedFormat

_OUTER_NORMS = ("embed_norm", "hidden_norm", "final_norm")


class EagleHead:
    """The network. Embedding and head are the target's where the files have none.

    width: of its states and features; that of the target except for EAGLE-3.
    """

    def __init__(self, files: HeadFiles, target: LoadedModel) -> None:
        """Allocates the weights; `targets` says what to load."""
        spec, decoder, device = files.spec, target.decoder, target.decoder.embedding.device
        dtype = DTYPES[target.spec.dtype]
        form = UnquantizedFormat(target.ops.matmul.unquantized, dtype, device)
        self._build = build = Build(spec, target.ops, form, ONE_DEVICE, dtype, device)
        self.spec, self.width, self.taps, self._files, self._target = spec, spec.d_model, files.taps, files, decoder
        [layer] = spec.layers
        self._layer = DecoderLayer(build, layer, rope_table(layer.rope, target.spec.max_len + SPARE_POSITIONS, device))
        taken = len(files.taps) * target.spec.d_model if files.taps else 2 * spec.d_model
        self.fc = Linear(build, LinearShape(taken, (Part(spec.d_model, 1),), "fc.bias" in files.tensors))
        if files.form != "mtp":  # EAGLE-1 has no norm here; that of EAGLE-3 is embed_norm
            self._layer.attention_norm = None
        if files.taps:
            heads = [count * layer.head_dim for count in (layer.n_heads, layer.n_kv_heads, layer.n_kv_heads)]
            parts = tuple(Part(rows, rows // layer.head_dim) for rows in heads)
            self._layer.attention.qkv = Linear(build, LinearShape(2 * spec.d_model, parts, spec.qkv_bias))
        self._norms = {name: build.norm() for name in _OUTER_NORMS if f"{name}.weight" in files.tensors}
        self.ids = None if files.ids is None else files.ids.to(device)
        """int32 [N], the tokens of the logits; None: all."""
        outputs = spec.vocab_size if self.ids is None else len(self.ids)
        has_head, has_embedding = ("head.weight" in files.tensors, "embed_tokens.weight" in files.tensors)
        self._head = Linear(build, LinearShape(spec.d_model, (Part(outputs, outputs),))) if has_head else None
        rows = spec.vocab_size * has_embedding
        self._embedding = torch.empty(rows, spec.d_model, dtype=dtype, device=device) if rows else decoder.embedding
        self._scale = decoder.scale if files.form == "mtp" else 1.0  # EAGLE heads are trained on the stored embedding

    def targets(self) -> dict[str, Target]:
        """Every tensor to load, by its name in HeadFiles.tensors."""
        spec, wanted = self.spec, dict[str, Target]()
        linears = {"fc": self.fc} | ({} if self._head is None else {"head": self._head})
        for name, linear in linears.items():
            for (part, suffix), expected in linear.weight.expects.items():
                kind: Literal["weight", "bias"] = "bias" if suffix == "bias" else "weight"
                wanted[f"{name}.{suffix}"] = Target(expected, kind, partial(linear.weight.load, part, suffix))
        for name, norm in self._norms.items():
            wanted[f"{name}.weight"] = Target(Expected((spec.d_model,)), "norm", norm.copy_)
        if self._embedding is not self._target.embedding:
            shape = Expected(tuple(self._embedding.shape))
            wanted["embed_tokens.weight"] = Target(shape, "weight", self._embedding.copy_)
        of_layer = layer_targets(self._layer, POST_NORMS if spec.post_norms else NORMS)
        return wanted | {LAYER + name: target for name, target in of_layer}

    def finish_loading(self) -> None:
        """All weights are loaded."""
        self._layer.feed_forward.finish_loading()

    def work(self) -> FollowingDrafts:
        """Counts FLOPs and bytes of chains."""
        spec, [layer] = self.spec, self.spec.layers
        matrices = ((name, target) for name, target in self.targets().items() if target.kind == "weight")
        sizes = {name: prod(target.expected.shape) for name, target in matrices}
        sizes.setdefault("head.weight", spec.embedding_params)
        projections = sum(
            sizes[name] for name in sizes if name.startswith(LAYER + "self_attn.") and "o_proj" not in name
        )
        once = 0 if self._files.taps else sizes["fc.weight"]  # a node of EAGLE-3 starts from the layer's own state
        of_layer = sum(size for name, size in sizes.items() if name.startswith(LAYER))
        reads, width = projections + sizes["fc.weight"], DTYPE_BYTES[spec.dtype]
        return FollowingDrafts(once + of_layer + sizes["head.weight"], reads, width, layer, layer.slot_bytes(spec.kv))

    def fuse(self, streams: Tensor) -> Tensor:
        """The features [T, width] of EAGLE-3 from the streams before its taps, [T, taps * d_model]."""
        return self.fc.weight.apply(streams)

    def write(self, tokens: Tensor, features: Tensor, view: KvView, step: StepInputs) -> None:
        """Write keys and values of pairs: tokens int32 [T] and the features [T, width] before them."""
        x, _ = self._inputs(tokens, features)
        self._layer.attention.queries(x, view, step)

    def next(self, tokens: Tensor, features: Tensor, view: KvView, step: StepInputs) -> Tensor:
        """The layer's states [T, width] after pairs, which are features of the next pairs. Writes keys and values, and may
        overwrite the features."""
        x, stream = self._inputs(tokens, features)
        stream = self._layer.attention(x, stream, view, step, None)
        stream = self._layer.feed_forward(self._build.normed(stream, self._layer.feed_forward_norm), stream, step)
        return self._norm(stream, "final_norm") if self._files.state_first else stream

    def logits(self, state: Tensor) -> Tensor:
        """Logits [T, len(ids) or vocabulary] of the token after states [T, width]."""
        normed = self._build.normed(state, None if self._files.state_first else self._norms.get("final_norm"))
        if self._head is None:
            return self._target.logits(apply_norm(normed, self._build.ops.tokenwise.rms_norm))
        return self._head.weight.apply(normed)

    def _inputs(self, tokens: Tensor, features: Tensor) -> tuple[Activation, Tensor]:
        """Input of the layer's projections, and its residual stream [T, width]."""
        build, norms, tokenwise = self._build, self._norms, self._build.ops.tokenwise
        if self._files.norm_before_residual:
            features = self._norm(features, "hidden_norm")
        parts = [
            build.normed(tokenwise.embed(self._embedding, tokens, self._scale), norms.get("embed_norm")),
            build.normed(features, None if self._files.norm_before_residual else norms.get("hidden_norm")),
        ]
        both = tokenwise.joined(parts[::-1] if self._files.state_first else parts)
        if self._files.taps:
            return both, features
        stream = self.fc.weight.apply(both)
        return self._build.normed(stream, self._layer.attention_norm), stream

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return apply_norm(self._build.normed(x, self._norms.get(name)), self._build.ops.tokenwise.rms_norm)


def load_head(files: HeadFiles, target: LoadedModel, folder: Path) -> EagleHead:
    """The head with its weights. Raises ConfigError for tensors that do not fit the target."""
    embedding, head = target.decoder.embedding, files.tensors
    shared = [name for name, ours in (("embed_tokens.weight", embedding),) if name in head and _equal(head[name], ours)]
    if files.form == "mtp" and target.spec.tied and "head.weight" in head and _equal(head["head.weight"], embedding):
        shared.append("head.weight")
    files = replace(files, tensors={name: tensor for name, tensor in head.items() if name not in shared})
    made = EagleHead(files, target)
    wanted = made.targets()
    check_tensors(folder, files.tensors, {name: tuple(target.expected.shape) for name, target in wanted.items()})
    spec, [layer] = target.spec, files.spec.layers
    # The cache's views have the target's scale of scores, and published heads have the usual one.
    ratio = files.spec.scale_of(layer) / spec.scale_of(layer)
    for name, tensor in files.tensors.items():
        scale = ratio if ".q_proj." in name else 1.0
        wanted[name].load(tensor.to(embedding.device, embedding.dtype) * scale)
    made.finish_loading()
    return made


def _equal(tensor: Tensor, ours: Tensor) -> bool:
    """Whether a head's matrix is a copy of the target's."""
    return tensor.shape == ours.shape and torch.equal(tensor.to(ours.device, ours.dtype), ours)
