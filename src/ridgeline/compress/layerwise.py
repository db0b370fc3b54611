"""Run texts through a decoder one layer at a time. Memory holds one layer and the residual streams of the texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.decoder import Layer, Norm
from ridgeline.compress.inputs import Product, float_product
from ridgeline.compress.statistics import Statistics
from ridgeline.compress.storage import Tensors
from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import ModelSpec
from ridgeline.models.rope import rope_table

CPU = torch.device("cpu")
MAX_BATCH_TOKENS = 4096
"""Maximum tokens per batch of a layer."""
SHARED_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Linear -> the linear with the same input, whose statistics it shares."""


class Model(Protocol):
    """A model that can run layer by layer: a `Checkpoint` or `WithProduct`."""

    @property
    def spec(self) -> ModelSpec: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def product(self) -> Product: ...

    def layer(self, index: int) -> Tensors: ...

    def embedding(self) -> torch.Tensor: ...

    def final_norm(self) -> torch.Tensor: ...

    def head(self) -> torch.Tensor: ...


class WithProduct:
    """A checkpoint whose linears multiply with another product."""

    def __init__(self, checkpoint: Checkpoint, product: Product) -> None:
        self.spec, self.dtype, self.product = checkpoint.spec, checkpoint.dtype, product
        self.layer, self.embedding = checkpoint.layer, checkpoint.embedding
        self.final_norm, self.head = checkpoint.final_norm, checkpoint.head


Streams = list[torch.Tensor]
"""Residual streams of all texts, float32 [rows, T, d_model] per batch of texts of equal length."""


def batches(sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Group neighbouring sequences of equal length into batches of token ids int64 [rows, T], in order."""
    groups: list[list[Sequence[int]]] = []
    for ids in sequences:
        current = groups[-1] if groups else []
        if current and len(current[0]) == len(ids) and (len(current) + 1) * len(ids) <= MAX_BATCH_TOKENS:
            current.append(ids)
        else:
            groups.append([ids])
    return [torch.tensor(rows, dtype=torch.int64) for rows in groups]


class LayerwiseRunner:
    """Runs the layers of one model over given texts without gradients."""

    def __init__(self, spec: ModelSpec, max_tokens: int, device: torch.device = CPU) -> None:
        """Prepare the rotary tables.

        Args:
            max_tokens: tokens of the longest text.
            device: where layers run.
        Raises:
            UnsupportedModel: the texts exceed the context of the model, or its layers share keys and values.
        """
        if any(layer.share_from is not None for layer in spec.layers):
            raise UnsupportedModel(
                f"{spec.architecture} cannot be compressed or compared here: its layers share keys and values, and this command "
                "runs one layer at a time. Serve it with --quantization instead."
            )
        if max_tokens > spec.max_len:
            raise UnsupportedModel(
                f"Texts of {max_tokens} tokens exceed the context of the model ({spec.max_len} tokens): lower --length."
            )
        self.spec, self.device = spec, device
        ropes = {layer.rope for layer in spec.layers}
        self._rotary = {rope: rope_table(rope, max_tokens, device) for rope in ropes}

    def embed(self, ids: Sequence[torch.Tensor], embedding: torch.Tensor, dtype: torch.dtype) -> Streams:
        """Return the streams before the first layer. dtype: type of the checkpoint, to which Gemma's scale is rounded."""
        scale = torch.tensor(self.spec.embed_scale, dtype=dtype).item()
        return [F.embedding(batch, embedding).to(self.device) * scale for batch in ids]

    def module(self, index: int, weights: Tensors, product: Product = float_product) -> Layer:
        """Create layer `index` with float32 weights. Its linears multiply with `product`."""
        with torch.device("meta"):
            layer = Layer(self.spec, self.spec.layers[index])
        placed = {name: tensor.to(self.device) for name, tensor in weights.items()}
        keys = layer.load_state_dict(placed, strict=False, assign=True)
        if keys.missing_keys or keys.unexpected_keys:
            mismatched = ", ".join(sorted((*keys.missing_keys, *keys.unexpected_keys))[:6])
            raise UnsupportedModel(f"Layer {index} of the checkpoint has missing or unknown tensors: {mismatched}.")
        for name in LINEAR_NAMES:
            linear = layer.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            linear.forward = _multiply(linear, product)  # type: ignore[method-assign, assignment]
        return layer

    @torch.inference_mode()
    def run(self, index: int, layer: Layer, streams: Streams) -> Streams:
        """Return the streams after a layer."""
        rotary = self._rotary[self.spec.layers[index].rope]
        return [layer(stream, rotary[: stream.shape[1]])[0] for stream in streams]

    def final_norm(self, weight: torch.Tensor) -> Norm:
        """Create the norm before the head."""
        norm = Norm(self.spec.d_model, self.spec)
        norm.weight = nn.Parameter(weight.to(self.device), requires_grad=False)
        return norm

    def states(self, model: Model, ids: Sequence[torch.Tensor], progress: Callable[[int], None]) -> Streams:
        """Return the final hidden states of all texts. progress: called with the number of finished layers."""
        streams = self.embed(ids, model.embedding(), model.dtype)
        for index in range(len(self.spec.layers)):
            streams = self.run(index, self.module(index, model.layer(index), model.product), streams)
            progress(index + 1)
        norm = self.final_norm(model.final_norm())
        return [norm(stream) for stream in streams]


def _multiply(linear: nn.Linear, product: Product) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: product(x, linear.weight, linear.bias)


@contextmanager
def collect_statistics(layer: Layer) -> Iterator[dict[str, Statistics]]:
    """Collect statistics of the inputs of every linear while texts run through a layer.

    Yields the statistics by name of the linear. Linears with the same input share one object.
    """
    statistics: dict[str, Statistics] = {}
    hooks = []
    for name in LINEAR_NAMES:
        block, _, linear_name = name.rpartition(".")
        if linear_name in SHARED_INPUT:
            statistics[name] = statistics[f"{block}.{SHARED_INPUT[linear_name]}"]
            continue
        linear = layer.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        statistics[name] = Statistics(linear.in_features, linear.weight.device)
        hooks.append(linear.register_forward_pre_hook(_update_hook(statistics[name])))
    try:
        yield statistics
    finally:
        for hook in hooks:
            hook.remove()


def _update_hook(statistics: Statistics) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    return lambda _, inputs: statistics.update(inputs[0].flatten(0, -2))
