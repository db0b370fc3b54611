"""Constraints for training compressed models: fixed zeros and quantization-aware training.

Fine-tuning after pruning keeps the mask. Quantization-aware training starts from the codes and scales that a method has chosen
(rounding to nearest, GPTQ, AWQ, SmoothQuant). It rounds weights in the forward pass, and gradients pass the rounding unchanged
(straight-through estimator). Scales are trained too; zero points and the group of each input stay. `save_trained` writes the
student in the layout of the checkpoint that its training started from.
Sources: Han et al. 2015; Bengio et al. 2013; Jacob et al. 2018; Esser et al. 2020 (LSQ, the gradient of a scale).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ridgeline.compress.checkpoint import LINEAR_NAMES, Checkpoint
from ridgeline.compress.decoder import TrainableDecoder
from ridgeline.compress.grid import Codes, group_index
from ridgeline.compress.inputs import int8_inputs
from ridgeline.compress.job import NOT_COPIED, copy_other_files, unrounded_file
from ridgeline.compress.storage import CompressedWeight, Tensors
from ridgeline.core.errors import ConfigError
from ridgeline.models.weights import EMBEDDING, FINAL_NORM, HEAD, opened, short_name
from ridgeline.ops.reference import in_8_bits

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


class OnGrid(nn.Module):
    """Parametrization that rounds weights to the grid of `start`, with trained scales.

    A scale is its first value times exp(stretch), rounded to the type in which it is stored. Weights beyond the ends of the grid
    get no gradient. The gradient of a scale is that of LSQ.
    """

    scales: Tensor
    zeros: Tensor
    group: Tensor

    def __init__(self, start: Codes) -> None:
        super().__init__()
        self.grid, self.has_zeros, self.has_order = start.grid, start.zeros is not None, start.g_idx is not None
        middle = torch.full_like(start.scales, float(start.grid.middle_code))
        group = group_index(start.grid, start.codes.shape[1]) if start.g_idx is None else start.g_idx.long()
        self.register_buffer("scales", start.scales, persistent=False)
        self.register_buffer("zeros", middle if start.zeros is None else start.zeros.float(), persistent=False)
        self.register_buffer("group", group.to(start.scales.device), persistent=False)
        self.stretch = nn.Parameter(torch.zeros(start.scales.numel(), device=start.scales.device))
        """Logarithm of each scale's change. A vector, so that AdamW trains it."""

    def forward(self, weight: Tensor) -> Tensor:
        scales, zeros = self.spread(self._scales()), self.spread(self.zeros)
        codes = _straight_through(self._positions(weight, scales, zeros), torch.round)
        return (codes - zeros) * scales

    @torch.no_grad()
    def codes(self, weight: Tensor) -> Codes:
        """Return the codes of the rounded weights, given the unrounded ones. They dequantize to the result of `forward`."""
        scales = self._scales()
        positions = self._positions(weight, self.spread(scales), self.spread(self.zeros))
        zeros = self.zeros.to(torch.uint8) if self.has_zeros else None
        g_idx = self.group.to(torch.int32) if self.has_order else None
        return Codes(self.grid, positions.round().to(torch.uint8), scales, zeros, g_idx)

    def spread(self, values: Tensor) -> Tensor:
        """Repeat values [out, groups] of groups for their inputs, [out, in]."""
        inputs = len(self.group)
        if self.has_order:
            return values.index_select(1, self.group)
        # A gather has a slow gradient.
        return values.unsqueeze(2).expand(-1, -1, self.grid.width(inputs)).flatten(1)[:, :inputs]

    def _scales(self) -> Tensor:
        stretched = self.scales * self.stretch.exp().view_as(self.scales)
        return _straight_through(stretched, lambda values: values.to(self.grid.scale_dtype).float())

    def _positions(self, weight: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """Return the places of weights on the grid, in codes."""
        return (weight / scales + zeros).clamp(0, self.grid.max_code)


def _straight_through(values: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Round in the forward pass, with the gradient of the identity."""
    return values + (rounded(values) - values).detach()


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
    for name, linear in linears(decoder).items():
        parametrize.register_parametrization(linear, "weight", Masked(masks[name]))


def keep_on_grid(decoder: TrainableDecoder, checkpoint: Checkpoint, unrounded: Path) -> None:
    """Round the weights of the layers to the grids of a checkpoint in every forward pass, and inputs to 8 bits if it does so.

    The first forward pass computes the checkpoint's function. The trained weights start at those that Job wrote into the folder
    `unrounded`, which round to the checkpoint's codes. Without them they start at the rounded weights.
    """
    for index in range(len(checkpoint.spec.layers)):
        floats = load_file(unrounded_file(unrounded, index))
        for name, codes in checkpoint.codes(index).items():
            linear = decoder.get_submodule(f"layers.{index}.{name}")
            assert isinstance(linear, nn.Linear)
            if f"{name}.weight" in floats:
                with torch.no_grad():
                    linear.weight.copy_(floats[f"{name}.weight"])
            parametrize.register_parametrization(linear, "weight", OnGrid(codes.to(linear.weight.device)))
            if checkpoint.product is int8_inputs:
                linear.register_forward_pre_hook(_round_inputs)


def _round_inputs(_: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    return _straight_through(inputs[0], in_8_bits)


def release(decoder: TrainableDecoder) -> None:
    """Remove the constraints of the weights. They keep their masked or rounded values."""
    for linear in linears(decoder).values():
        if parametrize.is_parametrized(linear, "weight"):
            parametrize.remove_parametrizations(linear, "weight", leave_parametrized=True)


def linears(decoder: TrainableDecoder) -> dict[str, nn.Linear]:
    """Return the linears of the layers, which are the compressed modules, by name."""
    names = [f"layers.{index}.{name}" for index in range(len(decoder.layers)) for name in LINEAR_NAMES]
    modules = dict(decoder.named_modules())
    return {name: module for name in names if isinstance(module := modules.get(name), nn.Linear)}


def save_trained(student: TrainableDecoder, start: Checkpoint, folder: Path) -> None:
    """Write a trained student as a model folder like `start`, from which its training started. The folder is created.

    Tensors have the layout and the types of `start`. Integers are stored with the codes and scales of the last forward pass.
    """
    trained = _stored_tensors(student, start)
    folder.mkdir(parents=True)
    copy_other_files(start.folder, folder)
    for name in NOT_COPIED:
        if (start.folder / name).is_file():
            shutil.copyfile(start.folder / name, folder / name)
    for path in start.files:
        with opened(path) as shard:
            names = [name for name in shard.offset_keys() if short_name(name) in trained]
        tensors = {name: trained[short_name(name)].cpu().contiguous() for name in names}
        save_file(tensors, folder / path.name, metadata={"format": "pt"})
        (folder / path.name).chmod(0o644)  # safetensors creates files that only their owner can read


def _stored_tensors(student: TrainableDecoder, start: Checkpoint) -> Tensors:
    """Return the tensors of a student as `start` stores them, by short name."""
    tensors: Tensors = {
        EMBEDDING: student.embed_tokens.weight,
        FINAL_NORM: student.norm.weight,
        HEAD: student.unembedding,
    }
    modules = linears(student)
    tensors |= {
        name: parameter
        for name, parameter in student.named_parameters()
        if name.startswith("layers.") and not any(name.startswith(linear + ".") for linear in modules)
    }
    stored = {name: tensor.detach().to(start.dtype) for name, tensor in tensors.items()}
    for name, linear in modules.items():
        packed = start.storage.pack(_compressed(linear), start.dtype)
        stored.update({f"{name}.{key}": tensor for key, tensor in packed.items()})
        if linear.bias is not None:
            stored[f"{name}.bias"] = linear.bias.detach().to(start.dtype)
    return stored


def _compressed(linear: nn.Linear) -> CompressedWeight:
    """Return the weight of a linear under its constraint, on the CPU."""
    if parametrize.is_parametrized(linear, "weight"):
        constraint = linear.get_submodule("parametrizations.weight.0")
        if isinstance(constraint, OnGrid):
            unrounded = linear.get_parameter("parametrizations.weight.original")
            return constraint.codes(unrounded).to(torch.device("cpu"))
    return linear.weight.detach().cpu()
