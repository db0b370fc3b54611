"""Structured pruning: fewer heads, fewer feed-forward neurons or fewer layers, which leaves a smaller dense model.

What goes is what costs least when the others make up for it (the optimal brain surgeon's cost for whole columns: Hassibi and
Stork 1993; Kurtic et al. 2023, ZipLM); what stays is refitted to the calibration texts by least squares. Layers go by how
little they turn the stream (Men et al. 2024, ShortGPT).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ridgeline.compress.gptq import DAMPENING
from ridgeline.compress.recipes import Recipe
from ridgeline.compress.statistics import Statistics
from ridgeline.compress.storage import Tensors
from ridgeline.core.errors import ConfigError
from ridgeline.core.spec import LayerSpec, ModelSpec

UNIT = 32
"""Feed-forward widths stay multiples of this, which every kernel likes, where the model's own is one."""


def costs(weight: torch.Tensor, moment: torch.Tensor, size: int) -> torch.Tensor:
    """What it costs to take away each block of `size` neighbouring inputs of weight float32 [out, in], float64 [in / size],
    in squared output error on the calibration tokens after the others made up for it as well as they can."""
    inverse = torch.linalg.inv(_damped(moment))
    blocks = inverse.unflatten(0, (-1, size)).unflatten(2, (-1, size)).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    columns = weight.double().unflatten(1, (-1, size)).permute(1, 0, 2)
    found: torch.Tensor = ((columns @ torch.linalg.inv(blocks)) * columns).sum((1, 2))
    return found


def refit(weight: torch.Tensor, moment: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """weight float32 [out, in] with the inputs `kept` alone, [out, kept], nearest to the old outputs in least squares."""
    wide = _damped(moment)
    # The best W' of min |W X - W' X_kept|^2 solves W' H_kk = W H_:k.
    right = weight.double() @ wide[:, kept]
    return torch.linalg.solve(wide[kept][:, kept], right, left=False).float()


def _damped(moment: torch.Tensor) -> torch.Tensor:
    wide = moment.double().clone()
    wide.diagonal().add_(DAMPENING * wide.diagonal().mean().clamp(min=1e-12))
    return wide


def narrower(recipe: Recipe, spec: ModelSpec) -> LayerSpec:
    """What a layer of the pruned model looks like; all layers are alike. Raises ConfigError where nothing would go."""
    layer = spec.layers[0]
    if any(
        (one.d_ff, one.n_heads, one.n_kv_heads) != (layer.d_ff, layer.n_heads, layer.n_kv_heads) for one in spec.layers
    ):
        raise ConfigError(f"The recipe {recipe.name} is not possible: the layers of the model differ in width.")
    if recipe.method == "neurons":
        unit = UNIT if layer.d_ff % UNIT == 0 else 1
        width = max(unit, round(layer.d_ff * (1 - recipe.amount) / unit) * unit)
        found = replace(layer, d_ff=width)
    else:
        kept = max(1, round(layer.n_kv_heads * (1 - recipe.amount)))
        found = replace(layer, n_kv_heads=kept, n_heads=kept * (layer.n_heads // layer.n_kv_heads))
    if found == layer:
        raise ConfigError(
            f"The recipe {recipe.name} removes nothing, because its share is less than one unit of this model: raise the share."
        )
    return found


def narrow(
    recipe: Recipe, layer: LayerSpec, target: LayerSpec, weights: Tensors, seen: Mapping[str, Statistics]
) -> Tensors:
    """The weights of one layer cut to `target`. Query heads go with the key-value head that they share."""
    if recipe.method == "neurons":
        reader, makers, size = "mlp.down_proj", {"mlp.gate_proj": 1, "mlp.up_proj": 1}, 1
        count = target.d_ff
    else:
        shared = layer.n_heads // layer.n_kv_heads
        reader, size = "self_attn.o_proj", shared * layer.head_dim
        makers = {"self_attn.q_proj": size, "self_attn.k_proj": layer.head_dim, "self_attn.v_proj": layer.head_dim}
        count = target.n_kv_heads
    weight, moment = weights[f"{reader}.weight"], seen[reader].moment
    kept = costs(weight, moment, size).argsort(descending=True, stable=True)[:count].sort().values
    done = dict(weights)
    done[f"{reader}.weight"] = refit(weight, moment, _members(kept, size))
    for maker, rows in makers.items():
        for name in (f"{maker}.weight", f"{maker}.bias"):
            if name in weights:
                done[name] = weights[name][_members(kept, rows)]
    return done


def _members(blocks: torch.Tensor, size: int) -> torch.Tensor:
    """Indices of the members of blocks of `size`."""
    return (blocks.unsqueeze(1) * size + torch.arange(size, device=blocks.device)).flatten()


def influence(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> float:
    """How far a layer turns the stream: 1 less the mean cosine between its input and its output, tokens alike."""
    turned = torch.cat([F.cosine_similarity(a, b, dim=-1).flatten() for a, b in zip(before, after, strict=True)])
    return 1 - float(turned.mean())


def check_layers(count: int, of: int) -> None:
    """Raise ConfigError unless `count` of so many layers can go."""
    if not 0 < count < of:
        raise ConfigError(
            f"{count} of {of} layers cannot be removed: give layers-1 to layers-{of - 1}.", param="recipe"
        )


def kept_layers(influences: Sequence[float], count: int) -> list[int]:
    """Indices of the layers that stay when the `count` of least influence go."""
    check_layers(count, len(influences))
    gone = set(sorted(range(len(influences)), key=lambda index: influences[index])[:count])
    return [index for index in range(len(influences)) if index not in gone]


def new_config(config: Mapping[str, Any], spec: ModelSpec, layers: Sequence[LayerSpec]) -> dict[str, Any]:
    """config.json of the pruned model with these layers."""
    first = layers[0]
    changed: dict[str, Any] = {
        "num_hidden_layers": len(layers),
        "num_attention_heads": first.n_heads,
        "num_key_value_heads": first.n_kv_heads,
        "head_dim": first.head_dim,
        "intermediate_size": first.d_ff,
    }
    if len({one.window for one in spec.layers}) > 1:
        changed["layer_types"] = ["full_attention" if one.window is None else "sliding_attention" for one in layers]
    if "text_config" in config:
        return {**config, "text_config": {**config["text_config"], **changed}}
    return {**config, **changed}
