"""Training in compressed form: what was pruned stays zero, what will be rounded is rounded in the forward pass already.

Fine-tuning after pruning keeps the mask (Han et al. 2015); quantization-aware training lets gradients pass the rounding as if
it were not there (the straight-through estimator: Bengio et al. 2013; Jacob et al. 2018). Afterwards the weights lie in a
folder in floats, which `compress` packs without changing them: magnitude pruning finds the zeros, rounding the same grid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn.utils import parametrize

from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.grid import Grid, round_to_nearest
from ridgeline.core.errors import ConfigError
from ridgeline.models.weights import EMBEDDING, FINAL_NORM, HEAD

Masks = Mapping[str, torch.Tensor]
"""Name of a linear of the layers ("layers.0.mlp.up_proj") -> which of its weights stay, bool [out, in]."""


class Masked(nn.Module):
    """Weights of which those outside of `kept`, bool like the weights, are zero and get no gradient."""

    kept: torch.Tensor

    def __init__(self, kept: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept, persistent=False)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.kept


class Snapped(nn.Module):
    """Weights on the grid that round_to_nearest gives them; gradients are those of the weights behind."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            change = round_to_nearest(weight.float(), self.grid).dequantize().to(weight.dtype) - weight
        return weight + change


def trainable(checkpoint: Checkpoint, context: int = 4096) -> TrainableDecoder:
    """A checkpoint, however it is stored, as a module in float32 on the CPU."""
    decoder = TrainableDecoder(checkpoint.spec, context)
    found = {EMBEDDING: checkpoint.embedding(), FINAL_NORM: checkpoint.final_norm()}
    if not checkpoint.spec.tied:
        found[HEAD] = checkpoint.head()
    for index in range(len(checkpoint.spec.layers)):
        found.update({f"layers.{index}.{name}": tensor for name, tensor in checkpoint.layer(index).items()})
    decoder.load_state_dict(found)
    return decoder


def keep_zeros(decoder: TrainableDecoder) -> None:
    """From here on weights of the layers that are zero stay zero. Raises ConfigError if none is."""
    masks = {name: linear.weight.detach() != 0 for name, linear in linears(decoder).items()}
    if all(bool(kept.all()) for kept in masks.values()):
        raise ConfigError("The model has no zero weights: prune it first.")
    keep_masks(decoder, masks)


def keep_masks(decoder: TrainableDecoder, masks: Masks) -> None:
    """From here on every linear of the layers has the weights of its mask alone."""
    _constrain(decoder, lambda name: Masked(masks[name]))


def keep_on_grid(decoder: TrainableDecoder, grid: Grid) -> None:
    """From here on the layers multiply with weights on `grid`."""
    _constrain(decoder, lambda _: Snapped(grid))


def release(decoder: TrainableDecoder) -> None:
    """Constrained weights become plain ones, as they were multiplied with."""
    for linear in linears(decoder).values():
        if parametrize.is_parametrized(linear, "weight"):
            parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)


def linears(decoder: TrainableDecoder) -> dict[str, nn.Linear]:
    """The linears of the layers: what is compressed."""
    names = [f"layers.{index}.{name}" for index in range(len(decoder.layers)) for name in LINEAR_NAMES]
    found = {name: decoder.get_submodule(name) for name in names}
    return {name: one for name, one in found.items() if isinstance(one, nn.Linear)}


def _constrain(decoder: TrainableDecoder, constraint: Callable[[str], nn.Module]) -> None:
    for name, linear in linears(decoder).items():
        parametrize.register_parametrization(linear, "weight", constraint(name))
