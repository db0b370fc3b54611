"""Structured pruning: remove heads, feed-forward neurons or layers, or pool key/value heads. The result is a smaller dense model.

Heads and neurons with the lowest cost are removed, where the cost assumes that the others compensate (the optimal brain
surgeon for column blocks). The others are refitted to the calibration texts by least squares. Layers are removed by the
smallest change of the direction of the residual stream. Key/value heads are pooled as compress.pooling says.
Sources: Hassibi and Stork 1993; Kurtic et al. 2023 (ZipLM); Men et al. 2024 (ShortGPT).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.compress.gptq import DAMPENING
from ridgeline.compress.pooling import pool_by_components, pool_by_mean, pooled_heads
from ridgeline.compress.recipes import Recipe
from ridgeline.compress.statistics import Statistics
from ridgeline.compress.storage import Tensors
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec, ModelSpec

WIDTH_MULTIPLE = 32
"""Pruned feed-forward widths are multiples of this if the model's width is one. Kernels are fast for such widths."""


def removal_costs(weight: torch.Tensor, moment: torch.Tensor, size: int) -> torch.Tensor:
    """Return the cost of removing each block of `size` neighbouring inputs, float64 [in / size].

    The cost is the squared output error on the calibration tokens after the other inputs compensate as well as possible.
    weight: float32 [out, in].
    """
    inverse = torch.linalg.inv(_damped(moment))
    blocks = inverse.unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    columns = weight.double().unflatten(1, (-1, size)).permute(1, 0, 2)
    result: torch.Tensor = ((columns @ torch.linalg.inv(blocks)) * columns).sum((1, 2))
    return result


def refit(weight: torch.Tensor, moment: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the weight [out, kept] on the inputs `kept` that reproduces the outputs best in least squares.

    weight: float32 [out, in].
    """
    damped = _damped(moment)
    # The minimum of |W X - W' X_kept|^2 over W' solves W' H_kk = W H_:k.
    target = weight.double() @ damped[:, kept]
    return torch.linalg.solve(damped[kept][:, kept], target, left=False).float()


def _damped(moment: torch.Tensor) -> torch.Tensor:
    damped = moment.double().clone()
    damped.diagonal().add_(DAMPENING * damped.diagonal().mean().clamp(min=1e-12))
    return damped


def pruned_layer_spec(recipe: Recipe, spec: ModelSpec) -> LayerSpec:
    """Return the shape of a layer of the pruned model.

    Raises ConfigError if nothing is removed, if layers differ, or if key/value heads cannot be pooled to the wanted number.
    """
    layer = spec.layers[0]
    if any(
        (other.d_ff, other.n_heads, other.n_kv_heads) != (layer.d_ff, layer.n_heads, layer.n_kv_heads)
        for other in spec.layers
    ):
        raise ConfigError(f"The recipe {recipe.name} is not possible: the layers of the model differ in width.")
    if recipe.pools_heads:
        return replace(layer, n_kv_heads=pooled_heads(recipe, spec))
    if recipe.method == "neurons":
        unit = WIDTH_MULTIPLE if layer.d_ff % WIDTH_MULTIPLE == 0 else 1
        width = max(unit, round(layer.d_ff * (1 - recipe.amount) / unit) * unit)
        pruned = replace(layer, d_ff=width)
    else:
        kept = max(1, round(layer.n_kv_heads * (1 - recipe.amount)))
        pruned = replace(layer, n_kv_heads=kept, n_heads=kept * (layer.n_heads // layer.n_kv_heads))
    if pruned == layer:
        raise ConfigError(
            f"The recipe {recipe.name} removes nothing, because its share is less than one unit of this model: raise the share."
        )
    return pruned


def prune_layer(
    recipe: Recipe, layer: LayerSpec, target: LayerSpec, weights: Tensors, statistics: Mapping[str, Statistics]
) -> Tensors:
    """Prune the weights of one layer to the shape `target`. A KV head is removed together with its query heads."""
    if recipe.method == "gqa":
        return pool_by_mean(layer, target.n_kv_heads, weights)
    if recipe.method == "gqa-pca":
        return pool_by_components(layer, target.n_kv_heads, weights, statistics["self_attn.k_proj"].moment)
    if recipe.method == "neurons":
        consumer, producers, size = "mlp.down_proj", {"mlp.gate_proj": 1, "mlp.up_proj": 1}, 1
        count = target.d_ff
    else:
        queries_per_kv = layer.n_heads // layer.n_kv_heads
        consumer, size = "self_attn.o_proj", queries_per_kv * layer.head_dim
        producers = {"self_attn.q_proj": size, "self_attn.k_proj": layer.head_dim, "self_attn.v_proj": layer.head_dim}
        count = target.n_kv_heads
    weight, moment = weights[f"{consumer}.weight"], statistics[consumer].moment
    kept = removal_costs(weight, moment, size).argsort(descending=True, stable=True)[:count].sort().values
    pruned = dict(weights)
    pruned[f"{consumer}.weight"] = refit(weight, moment, _members(kept, size))
    for producer, rows in producers.items():
        for name in (f"{producer}.weight", f"{producer}.bias"):
            if name in weights:
                pruned[name] = weights[name][_members(kept, rows)]
    return pruned


def _members(blocks: torch.Tensor, size: int) -> torch.Tensor:
    """Return the indices of the members of blocks of `size` elements."""
    return (blocks.unsqueeze(1) * size + torch.arange(size, device=blocks.device)).flatten()


def influence(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """Return the influence of a layer: 1 minus the mean cosine similarity of its input and output over all tokens."""
    turned = torch.cat([F.cosine_similarity(a, b, dim=-1).flatten() for a, b in zip(before, after, strict=True)])
    return 1 - float(turned.mean())


def check_layers(count: int, total: int) -> None:
    """Raise ConfigError unless `count` of `total` layers can be removed."""
    if not 0 < count < total:
        raise ConfigError(
            f"{count} of {total} layers cannot be removed: give layers-1 to layers-{total - 1}.", param="recipe"
        )


def kept_layers(influences: Sequence[float], count: int) -> list[int]:
    """Return the indices of the layers that remain after removing the `count` layers of least influence."""
    check_layers(count, len(influences))
    removed = set(sorted(range(len(influences)), key=lambda index: influences[index])[:count])
    return [index for index in range(len(influences)) if index not in removed]


def new_config(config: Mapping[str, Any], spec: ModelSpec, layers: Sequence[LayerSpec]) -> dict[str, Any]:
    """Return the config.json of the pruned model with these layers."""
    first = layers[0]
    changed: dict[str, Any] = {
        "num_hidden_layers": len(layers),
        "num_attention_heads": first.n_heads,
        "num_key_value_heads": first.n_kv_heads,
        "head_dim": first.head_dim,
        "intermediate_size": first.d_ff,
    }
    if len({layer.window for layer in spec.layers}) > 1:
        changed["layer_types"] = ["full_attention" if layer.window is None else "sliding_attention" for layer in layers]
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **changed}}
    return {**config, **changed}
