"""Calibration and judging texts through a decoder one layer at a time: memory holds one layer and the texts' streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.decoder import Layer, Norm
from ridgeline.compress.inputs import Product, plain
from ridgeline.compress.statistics import Statistics
from ridgeline.compress.storage import Tensors
from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import ModelSpec
from ridgeline.models.rope import rope_table

CPU = torch.device("cpu")
ROW_TOKENS = 4096
"""Most tokens that go through a layer together."""
SHARED_INPUT = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}
"""Linears that read the very input of another, whose statistics serve them."""


class Model(Protocol):
    """What can be walked: a checkpoint, or one whose linears are told to multiply in another way."""

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


class Rounded:
    """A checkpoint as it is, whose linears multiply with `product`."""

    def __init__(self, checkpoint: Checkpoint, product: Product) -> None:
        self.spec, self.dtype, self.product = checkpoint.spec, checkpoint.dtype, product
        self.layer, self.embedding = checkpoint.layer, checkpoint.embedding
        self.final_norm, self.head = checkpoint.final_norm, checkpoint.head


Streams = list[torch.Tensor]
"""The residual streams of all texts, float32 [rows, T, d_model] each; rows of one entry are equally long."""


def batches(sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Token ids int64 [rows, T], neighbours of equal length together, in their order."""
    found: list[list[Sequence[int]]] = []
    for ids in sequences:
        last = found[-1] if found else []
        if last and len(last[0]) == len(ids) and (len(last) + 1) * len(ids) <= ROW_TOKENS:
            last.append(ids)
        else:
            found.append([ids])
    return [torch.tensor(rows, dtype=torch.int64) for rows in found]


class Walk:
    """The layers of one model over given texts. Nothing is differentiated."""

    def __init__(self, spec: ModelSpec, longest: int, device: torch.device = CPU) -> None:
        """longest: tokens of the longest text. device: where layers run. Raises UnsupportedModel beyond the model's context."""
        if longest > spec.max_len:
            raise UnsupportedModel(
                f"Texts of {longest} tokens exceed the context of the model ({spec.max_len} tokens): lower --length."
            )
        self.spec, self.device = spec, device
        ropes = {layer.rope for layer in spec.layers}
        self._turns = {rope: rope_table(rope, longest, device) for rope in ropes}

    def embed(self, ids: Sequence[torch.Tensor], embedding: torch.Tensor, dtype: torch.dtype) -> Streams:
        """Streams before the first layer. dtype: of the checkpoint, to which Gemma rounds its scale."""
        scale = torch.tensor(self.spec.embed_scale, dtype=dtype).item()
        return [F.embedding(one, embedding).to(self.device) * scale for one in ids]

    def module(self, index: int, weights: Tensors, product: Product = plain) -> Layer:
        """A layer with these weights, float32, its linears multiplying with `product`."""
        with torch.device("meta"):
            layer = Layer(self.spec, self.spec.layers[index])
        placed = {name: tensor.to(self.device) for name, tensor in weights.items()}
        found = layer.load_state_dict(placed, strict=False, assign=True)
        if found.missing_keys or found.unexpected_keys:
            odd = ", ".join(sorted((*found.missing_keys, *found.unexpected_keys))[:6])
            raise UnsupportedModel(f"Layer {index} of the checkpoint has missing or unknown tensors: {odd}.")
        for name in LINEAR_NAMES:
            linear = layer.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            linear.forward = _multiply(linear, product)  # type: ignore[method-assign, assignment]
        return layer

    @torch.inference_mode()
    def run(self, index: int, layer: Layer, streams: Streams) -> Streams:
        """The streams behind a layer."""
        turn = self._turns[self.spec.layers[index].rope]
        return [layer(one, turn[: one.shape[1]], None) for one in streams]

    def final(self, weight: torch.Tensor) -> Norm:
        """The norm before the head."""
        norm = Norm(self.spec.d_model, self.spec)
        norm.weight = nn.Parameter(weight.to(self.device), requires_grad=False)
        return norm

    def states(self, model: Model, ids: Sequence[torch.Tensor], progress: Callable[[int], None]) -> Streams:
        """What the head reads, of all texts. progress: told how many layers are done."""
        streams = self.embed(ids, model.embedding(), model.dtype)
        for index in range(len(self.spec.layers)):
            streams = self.run(index, self.module(index, model.layer(index), model.product), streams)
            progress(index + 1)
        norm = self.final(model.final_norm())
        return [norm(one) for one in streams]


def _multiply(linear: nn.Linear, product: Product) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: product(x, linear.weight, linear.bias)


@contextmanager
def watched(layer: Layer) -> Iterator[dict[str, Statistics]]:
    """Statistics of the inputs of every linear while texts run through a layer, by the linear's name; linears that read one
    input have one object."""
    found: dict[str, Statistics] = {}
    hooks = []
    for name in LINEAR_NAMES:
        block, _, own = name.rpartition(".")
        if own in SHARED_INPUT:
            found[name] = found[f"{block}.{SHARED_INPUT[own]}"]
            continue
        linear = layer.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        found[name] = Statistics(linear.in_features, linear.weight.device)
        hooks.append(linear.register_forward_pre_hook(_seeing(found[name])))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _seeing(statistics: Statistics) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
    return lambda _, given: statistics.see(given[0].flatten(0, -2))
