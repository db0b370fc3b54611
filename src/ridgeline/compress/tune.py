"""Training in compressed form: what was pruned stays zero, what will be rounded is rounded in the forward pass already.

Fine-tuning after pruning keeps the mask (Han et al. 2015); quantization-aware training lets gradients pass the rounding as if
it were not there (the straight-through estimator: Bengio et al. 2013; Jacob et al. 2018). Afterwards the weights lie in a
folder in floats, which `compress` packs without changing them: magnitude pruning finds the zeros, rounding the same grid.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrize

from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.grid import Grid, round_to_nearest
from ridgeline.core.errors import ConfigError
from ridgeline.models.weights import EMBEDDING, FINAL_NORM, HEAD


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
    if all(bool(linear.weight.all()) for linear in _linears(decoder)):
        raise ConfigError("the model has no zero weights: prune it first.")
    _constrain(decoder, lambda weight: Masked(weight != 0))


def keep_on_grid(decoder: TrainableDecoder, grid: Grid) -> None:
    """From here on the layers multiply with weights on `grid`."""
    _constrain(decoder, lambda weight: Snapped(grid))


def release(decoder: TrainableDecoder) -> None:
    """Constrained weights become plain ones, as they were multiplied with."""
    for linear in _linears(decoder):
        if parametrize.is_parametrized(linear, "weight"):
            parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)


def _constrain(decoder: TrainableDecoder, constraint: Callable[[torch.Tensor], nn.Module]) -> None:
    for linear in _linears(decoder):
        parametrize.register_parametrization(linear, "weight", constraint(linear.weight.detach()))


def _linears(decoder: TrainableDecoder) -> list[nn.Linear]:
    found = [layer.get_submodule(name) for layer in decoder.layers for name in LINEAR_NAMES]
    return [one for one in found if isinstance(one, nn.Linear)]
