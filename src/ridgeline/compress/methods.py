"""A recipe applied to one layer: pure functions of its weights and of what calibration says of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ridgeline.compress import awq, smooth
from ridgeline.compress.checkpoint import LINEAR_NAMES
from ridgeline.compress.gptq import gptq
from ridgeline.compress.grid import refuse_odd, round_to_nearest
from ridgeline.compress.prune import by_magnitude, sparsegpt, wanda
from ridgeline.compress.recipes import Recipe
from ridgeline.compress.statistics import Statistics
from ridgeline.compress.storage import Settled, Tensors
from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import LayerSpec, ModelSpec
from ridgeline.models.build import DTYPES

Seen = Mapping[str, Statistics]


@dataclass(frozen=True, slots=True)
class Source:
    """Linears that read one input, and what makes it: the norm or the linear whose outputs can be divided instead.

    heads: the input is the attention's output, whose query heads share the outputs of `maker`.
    """

    readers: tuple[str, ...]
    maker: str
    heads: bool = False


def sources(spec: ModelSpec) -> tuple[Source, ...]:
    """Every input of a layer's linears. The feed-forward's up projection is multiplied by what gate makes, so a factor of
    its outputs is a factor of down's inputs."""
    norm = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
    return (
        Source(LINEAR_NAMES[:3], "input_layernorm"),
        Source(("self_attn.o_proj",), "self_attn.v_proj", heads=True),
        Source(("mlp.gate_proj", "mlp.up_proj"), norm),
        Source(("mlp.down_proj",), "mlp.up_proj"),
    )


@dataclass(frozen=True, slots=True)
class Folded:
    """A layer rewritten with the same function: weights, and by which factor each linear's inputs were divided."""

    weights: Tensors
    divided: Mapping[str, torch.Tensor]


def compress_layer(
    recipe: Recipe, spec: ModelSpec, index: int, weights: Tensors, seen: Seen
) -> tuple[Tensors, dict[str, Settled]]:
    """(norms and biases, linears) of layer `index`, float32, compressed. weights: as Checkpoint.layer gives them.

    seen: statistics of each linear's inputs; empty for a recipe that needs none. Raises UnsupportedModel naming the tensor.
    """
    for name in LINEAR_NAMES:
        refuse_odd(f"layers.{index}.{name}.weight", weights[f"{name}.weight"])
        recipe.pattern.check(f"layers.{index}.{name}.weight", weights[f"{name}.weight"])
        if recipe.needs_texts:
            seen[name].check(f"layers.{index}.{name}")
    folded = Folded(weights, {})
    if recipe.method in ("awq", "smoothquant"):
        folded = fold(recipe, spec, spec.layers[index], weights, seen)
    settled: dict[str, Settled] = {}
    for name in LINEAR_NAMES:
        try:
            settled[name] = _settle(recipe, folded.weights[f"{name}.weight"], seen.get(name), folded.divided.get(name))
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"The tensor layers.{index}.{name}.weight cannot be compressed: {error.message}"
            ) from None
    rest = {name: tensor for name, tensor in folded.weights.items() if name.removesuffix(".weight") not in LINEAR_NAMES}
    return rest, settled


def _settle(recipe: Recipe, weight: torch.Tensor, seen: Statistics | None, divided: torch.Tensor | None) -> Settled:
    """One linear. divided: by what its inputs are divided now, which `seen` does not know."""
    if recipe.method in ("rtn", "smoothquant"):
        return round_to_nearest(weight, recipe.grid)
    if recipe.method == "magnitude":
        return by_magnitude(weight, recipe.pattern)
    assert seen is not None
    if recipe.method == "awq":
        moment = seen.moment if divided is None else seen.moment / torch.outer(divided, divided)
        return awq.cut_to_error(weight, moment, recipe.grid)
    if recipe.method == "gptq":
        return gptq(weight, seen.moment, recipe.grid, recipe.order)
    if recipe.method == "wanda":
        return wanda(weight, seen.norm, recipe.pattern)
    return sparsegpt(weight, seen.moment, recipe.pattern)


# --- factors moved from activations into weights ----------------------------------------------------------------------


def fold(recipe: Recipe, spec: ModelSpec, layer: LayerSpec, weights: Tensors, seen: Seen) -> Folded:
    """AWQ's or SmoothQuant's factors, found and folded in. SmoothQuant moves only what a norm makes (section 4)."""
    done = dict(weights)
    divided: dict[str, torch.Tensor] = {}
    for source in sources(spec):
        if recipe.method == "smoothquant" and source.maker in LINEAR_NAMES:
            continue
        readers = [done[f"{name}.weight"] for name in source.readers]
        spread = _spread(layer) if source.heads else _own
        scale = _scale(recipe, readers, seen[source.readers[0]], spread)
        # The stored norm is rounded, so the factor is what that norm says it is.
        scale = _divide(done, source, scale, spec, layer)
        for name, reader in zip(source.readers, readers, strict=True):
            done[f"{name}.weight"] = reader * scale
            divided[name] = scale
    return Folded(done, divided)


def _scale(
    recipe: Recipe, readers: list[torch.Tensor], seen: Statistics, spread: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    if recipe.method == "smoothquant":
        return smooth.factors(readers, seen.largest, recipe.alpha)
    return awq.scales_for(readers, seen, recipe.grid, spread)


def _own(values: torch.Tensor) -> torch.Tensor:
    return values


def _spread(layer: LayerSpec) -> Callable[[torch.Tensor], torch.Tensor]:
    """Values per input of the output projection, made equal among the query heads that share a value head: their mean."""
    shape = (layer.n_kv_heads, layer.n_heads // layer.n_kv_heads, layer.head_dim)
    return lambda values: values.view(shape).mean(1, keepdim=True).expand(shape).reshape(-1)


def _divide(weights: Tensors, source: Source, scale: torch.Tensor, spec: ModelSpec, layer: LayerSpec) -> torch.Tensor:
    """Divide what makes the input by scale float32 [in]; the factor by which it was really divided."""
    if source.maker in LINEAR_NAMES:
        rows = scale
        if source.heads:
            shape = (layer.n_kv_heads, layer.n_heads // layer.n_kv_heads, layer.head_dim)
            rows = scale.view(shape)[:, 0].flatten()
        weights[f"{source.maker}.weight"] = weights[f"{source.maker}.weight"] / rows.unsqueeze(1)
        if f"{source.maker}.bias" in weights:
            weights[f"{source.maker}.bias"] = weights[f"{source.maker}.bias"] / rows
        return scale
    name = f"{source.maker}.weight"
    offset = float(spec.norm_offset)
    before = weights[name] + offset
    after = (before / scale - offset).to(DTYPES[spec.dtype]).float()
    weights[name] = after
    gone = (after + offset) == 0
    return torch.where(gone, torch.ones_like(scale), before / torch.where(gone, torch.ones_like(after), after + offset))
