"""Constraints for training compressed models: fixed zeros and quantization-aware training.

Fine-tuning after pruning keeps the mask. Quantization-aware training rounds weights in the forward pass, and gradients pass the
rounding unchanged (straight-through estimator). The trained weights are stored in floats and then packed by `compress` without a
change: magnitude pruning selects the same zeros, and rounding gives the same grid.
Sources: Han et al. 2015; Bengio et al. 2013; Jacob et al. 2018.
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
"""Name of a linear ("layers.0.mlp.up_proj") -> the weights that are kept, bool [out, in]."""


class Masked(nn.Module):
    """Parametrization with a mask. Weights outside of `kept` (bool, shape of the weights) are zero and get no gradient."""

    kept: torch.Tensor

    def __init__(self, kept: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", kept, persistent=False)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.kept


class FakeQuantized(nn.Module):
    """Parametrization that rounds weights to the nearest grid points. Gradients pass to the unrounded weights."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.grid = grid

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            change = round_to_nearest(weight.float(), self.grid).dequantize().to(weight.dtype) - weight
        return weight + change


def trainable_decoder(checkpoint: Checkpoint, context: int = 4096) -> TrainableDecoder:
    """Load a checkpoint of any storage as a trainable decoder in float32 on the CPU."""
    decoder = TrainableDecoder(checkpoint.spec, context)
    state = {EMBEDDING: checkpoint.embedding(), FINAL_NORM: checkpoint.final_norm()}
    if not checkpoint.spec.tied:
        state[HEAD] = checkpoint.head()
    for index in range(len(checkpoint.spec.layers)):
        state.update({f"layers.{index}.{name}": tensor for name, tensor in checkpoint.layer(index).items()})
    decoder.load_state_dict(state)
    return decoder


def keep_zeros(decoder: TrainableDecoder) -> None:
    """Keep the zero weights of the layers at zero in training. Raises ConfigError if there are none."""
    masks = {name: linear.weight.detach() != 0 for name, linear in linears(decoder).items()}
    if all(bool(kept.all()) for kept in masks.values()):
        raise ConfigError("The model has no zero weights: prune it first.")
    keep_masks(decoder, masks)


def keep_masks(decoder: TrainableDecoder, masks: Masks) -> None:
    """Keep the weights outside of the masks at zero in training."""
    _constrain(decoder, lambda name: Masked(masks[name]))


def keep_on_grid(decoder: TrainableDecoder, grid: Grid) -> None:
    """Round the weights of the layers to `grid` in every forward pass."""
    _constrain(decoder, lambda _: FakeQuantized(grid))


def release(decoder: TrainableDecoder) -> None:
    """Remove the constraints. The weights keep their masked or rounded values."""
    for linear in linears(decoder).values():
        if parametrize.is_parametrized(linear, "weight"):
            parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)


def linears(decoder: TrainableDecoder) -> dict[str, nn.Linear]:
    """Return the linears of the layers, which are the compressed modules, by name."""
    names = [f"layers.{index}.{name}" for index in range(len(decoder.layers)) for name in LINEAR_NAMES]
    modules = {name: decoder.get_submodule(name) for name in names}
    return {name: module for name, module in modules.items() if isinstance(module, nn.Linear)}


def _constrain(decoder: TrainableDecoder, constraint: Callable[[str], nn.Module]) -> None:
    for name, linear in linears(decoder).items():
        parametrize.register_parametrization(linear, "weight", constraint(name))
