"""Apply a recipe to one layer: pure functions of its weights and of the calibration statistics of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ridgeline.compress import awq, smooth
from ridgeline.compress.checkpoint import LINEAR_NAMES
from ridgeline.compress.gptq import gptq
from ridgeline.compress.grid import check_matrix, round_to_nearest
from ridgeline.compress.prune import by_magnitude, sparsegpt, wanda
from ridgeline.compress.recipes import Recipe
from ridgeline.compress.statistics import Statistics
from ridgeline.compress.storage import CompressedWeight, Tensors
from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import LayerSpec, ModelSpec
from ridgeline.models.build import DTYPES

InputStatistics = Mapping[str, Statistics]


@dataclass(frozen=True, slots=True)
class LinearInput:
    """An input that one or more linears share."""

    consumers: tuple[str, ...]
    """Linears that read the input."""
    producer: str
    """Norm or linear whose outputs can be divided to divide the input."""
    heads: bool = False
    """Whether the input is the attention output. Its query heads share the outputs of `producer`."""


def linear_inputs(spec: ModelSpec) -> tuple[LinearInput, ...]:
    """List the inputs of a layer's linears.

    The outputs of the up projection are multiplied by those of the gate, so a factor of the up projection's outputs is a
    factor of the down projection's inputs.
    """
    norm = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
    return (
        LinearInput(LINEAR_NAMES[:3], "input_layernorm"),
        LinearInput(("self_attn.o_proj",), "self_attn.v_proj", heads=True),
        LinearInput(("mlp.gate_proj", "mlp.up_proj"), norm),
        LinearInput(("mlp.down_proj",), "mlp.up_proj"),
    )


@dataclass(frozen=True, slots=True)
class Folded:
    """A layer with scaling factors folded into its weights. It computes the same function."""

    weights: Tensors
    divided: Mapping[str, torch.Tensor]
    """The factor by which the inputs of each linear are divided."""


@dataclass(frozen=True, slots=True)
class CompressedLayer:
    """The result of a recipe for one layer."""

    others: Tensors
    """Norms and biases, float32."""
    linears: dict[str, CompressedWeight]
    unrounded: Tensors
    """The weights that rounding to nearest turned into codes, float32, with the factors of AWQ or SmoothQuant. Else empty.

    GPTQ's codes compensate one another, so its training starts from the rounded weights: from those before rounding, the first
    steps would change many codes without their compensation (docs/log/2026-11-26-training-on-gptq-grids.md)."""


def compress_layer(
    recipe: Recipe, spec: ModelSpec, index: int, weights: Tensors, statistics: InputStatistics
) -> CompressedLayer:
    """Compress layer `index`.

    Args:
        weights: from Checkpoint.layer.
        statistics: of each linear's inputs. Empty if the recipe needs none.
    Raises:
        UnsupportedModel: names the tensor.
    """
    for name in LINEAR_NAMES:
        check_matrix(f"layers.{index}.{name}.weight", weights[f"{name}.weight"])
        recipe.pattern.check(f"layers.{index}.{name}.weight", weights[f"{name}.weight"])
        if recipe.needs_texts:
            statistics[name].check(f"layers.{index}.{name}")
    folded = Folded(weights, {})
    if recipe.method in ("awq", "smoothquant"):
        folded = fold(recipe, spec, spec.layers[index], weights, statistics)
    compressed: dict[str, CompressedWeight] = {}
    for name in LINEAR_NAMES:
        try:
            compressed[name] = _compress_linear(
                recipe, folded.weights[f"{name}.weight"], statistics.get(name), folded.divided.get(name)
            )
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"The tensor layers.{index}.{name}.weight cannot be compressed: {error.message}"
            ) from None
    others = {
        name: tensor for name, tensor in folded.weights.items() if name.removesuffix(".weight") not in LINEAR_NAMES
    }
    unrounded: Tensors = {}
    if recipe.method in ("rtn", "awq", "smoothquant"):
        unrounded = {f"{name}.weight": folded.weights[f"{name}.weight"] for name in LINEAR_NAMES}
    return CompressedLayer(others, compressed, unrounded)


def _compress_linear(
    recipe: Recipe, weight: torch.Tensor, statistics: Statistics | None, divided: torch.Tensor | None
) -> CompressedWeight:
    """Compress one linear. divided: factor by which its inputs are divided after `statistics` were collected."""
    if recipe.method in ("rtn", "smoothquant"):
        return round_to_nearest(weight, recipe.grid)
    if recipe.method == "magnitude":
        return by_magnitude(weight, recipe.pattern)
    assert statistics is not None
    if recipe.method == "awq":
        moment = statistics.moment if divided is None else statistics.moment / torch.outer(divided, divided)
        return awq.cut_to_error(weight, moment, recipe.grid)
    if recipe.method == "gptq":
        return gptq(weight, statistics.moment, recipe.grid, recipe.order)
    if recipe.method == "wanda":
        return wanda(weight, statistics.norm, recipe.pattern)
    return sparsegpt(weight, statistics.moment, recipe.pattern)


# --- factors moved from activations into weights ----------------------------------------------------------------------


def fold(recipe: Recipe, spec: ModelSpec, layer: LayerSpec, weights: Tensors, statistics: InputStatistics) -> Folded:
    """Compute the factors of AWQ or SmoothQuant and fold them into the weights.

    SmoothQuant scales only the outputs of norms (section 4).
    """
    folded = dict(weights)
    divided: dict[str, torch.Tensor] = {}
    for linear_input in linear_inputs(spec):
        if recipe.method == "smoothquant" and linear_input.producer in LINEAR_NAMES:
            continue
        consumer_weights = [folded[f"{name}.weight"] for name in linear_input.consumers]
        tie = _shared_head_mean(layer) if linear_input.heads else _identity
        scale = _scale(recipe, consumer_weights, statistics[linear_input.consumers[0]], tie)
        # The stored norm is rounded, so the factor follows from the rounded norm.
        scale = _divide_producer(folded, linear_input, scale, spec, layer)
        for name, weight in zip(linear_input.consumers, consumer_weights, strict=True):
            folded[f"{name}.weight"] = weight * scale
            divided[name] = scale
    return Folded(folded, divided)


def _scale(
    recipe: Recipe, weights: list[torch.Tensor], statistics: Statistics, tie: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    if recipe.method == "smoothquant":
        return smooth.factors(weights, statistics.max_abs, recipe.alpha)
    return awq.scales_for(weights, statistics, recipe.grid, tie)


def _identity(values: torch.Tensor) -> torch.Tensor:
    return values


def _shared_head_mean(layer: LayerSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function that averages values [inputs of the output projection] over query heads that share a value head."""
    shape = (layer.n_kv_heads, layer.n_heads // layer.n_kv_heads, layer.head_dim)
    return lambda values: values.view(shape).mean(1, keepdim=True).expand(shape).reshape(-1)


def _divide_producer(
    weights: Tensors, linear_input: LinearInput, scale: torch.Tensor, spec: ModelSpec, layer: LayerSpec
) -> torch.Tensor:
    """Divide the producer of an input by scale float32 [in]. Returns the factor after rounding of a norm."""
    if linear_input.producer in LINEAR_NAMES:
        rows = scale
        if linear_input.heads:
            shape = (layer.n_kv_heads, layer.n_heads // layer.n_kv_heads, layer.head_dim)
            rows = scale.view(shape)[:, 0].flatten()
        weights[f"{linear_input.producer}.weight"] = weights[f"{linear_input.producer}.weight"] / rows.unsqueeze(1)
        if f"{linear_input.producer}.bias" in weights:
            weights[f"{linear_input.producer}.bias"] = weights[f"{linear_input.producer}.bias"] / rows
        return scale
    name = f"{linear_input.producer}.weight"
    offset = float(spec.norm_offset)
    before = weights[name] + offset
    after = (before / scale - offset).to(DTYPES[spec.dtype]).float()
    weights[name] = after
    is_zero = (after + offset) == 0
    return torch.where(
        is_zero, torch.ones_like(scale), before / torch.where(is_zero, torch.ones_like(after), after + offset)
    )
