"""Conversion of multi-head attention to grouped-query attention: neighbouring key/value heads become one.

The query heads of pooled heads are neighbours too, so they read the group's head without a change of order. Two ways:

- the mean of the heads' weights, as published. It needs training afterwards.
- principal components on calibration texts. The outputs of a group's value heads are approximated by the components of largest
  variance after the output projection, which absorbs how each head uses them. The rotary embedding limits how keys are combined:
  each rotated pair of dimensions is a complex number, and each head uses the component times its own complex factor, which its
  query heads absorb.

Source: Ainslie et al. 2023 (GQA), section 2.1; Jin et al. 2024 (arXiv:2412.20677) align heads before they take the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ridgeline.compress.recipes import Recipe
from ridgeline.compress.storage import Tensors
from ridgeline.core.errors import ConfigError
from ridgeline.core.plural import counted
from ridgeline.core.spec import LayerSpec, ModelSpec

Q, K, V, O = (f"self_attn.{name}_proj.weight" for name in "qkvo")  # noqa: E741
SMALLEST = 1e-9
"""Lower bound of a scale, relative to the mean of all. Unused dimensions have a scale of 0."""


def pooled_heads(recipe: Recipe, spec: ModelSpec) -> int:
    """Return the number of key/value heads after the recipe. Raises ConfigError that lists the possible recipes."""
    heads, wanted = spec.layers[0].n_kv_heads, int(recipe.amount)
    if recipe.method == "gqa-pca" and (spec.qkv_bias or spec.qk_norm or _has_unrotated(spec)):
        raise ConfigError(
            f"The recipe {recipe.name} is not possible: it needs keys that are rotated in all dimensions, without norms and "
            f"biases. Give gqa-{wanted}, and train the result (--tune FILE).",
            param="recipe",
        )
    if 0 < wanted < heads and heads % wanted == 0:
        return wanted
    suffix = "-pca" if recipe.method == "gqa-pca" else ""
    possible = [f"gqa-{count}{suffix}" for count in range(1, heads) if heads % count == 0]
    reason = "already has" if wanted == heads else "has"
    remedy = f"give {' or '.join(possible)}" if possible else "it cannot have fewer"
    raise ConfigError(
        f"The recipe {recipe.name} is not possible: the model {reason} {counted(heads, 'key/value head')}, which are pooled in "
        f"groups of equal size: {remedy}.",
        param="recipe",
    )


def _has_unrotated(spec: ModelSpec) -> bool:
    return any(layer.rope.dim != layer.head_dim for layer in spec.layers)


def pool_by_mean(layer: LayerSpec, heads: int, weights: Tensors) -> Tensors:
    """Replace each group of key/value heads by the mean of its weights and biases, so that `heads` remain."""
    pooled = dict(weights)
    for name in (K, V, K.replace("weight", "bias"), V.replace("weight", "bias")):
        if name in weights:
            groups = weights[name].unflatten(0, (heads, -1, layer.head_dim))
            pooled[name] = groups.mean(1).flatten(0, 1)
    return pooled


def pool_by_components(layer: LayerSpec, heads: int, weights: Tensors, moment: Tensor) -> Tensors:
    """Replace each group of key/value heads by principal components, so that `heads` remain.

    moment: second moment of the layer's attention inputs [d_model, d_model].
    """
    moment = moment.double()
    shape = (heads, layer.n_kv_heads // heads, layer.n_heads // layer.n_kv_heads, layer.head_dim)
    q = weights[Q].double().unflatten(0, shape)
    k, v = (weights[name].double().unflatten(0, (shape[0], shape[1], shape[3])) for name in (K, V))
    out = weights[O].double().unflatten(1, shape)
    q, k = _pool_keys(q, k, moment)
    v, out = _pool_values(v, out, moment)
    changed = {Q: q.flatten(0, 3), K: k.flatten(0, 1), V: v.flatten(0, 1), O: out.flatten(1, 4)}
    return weights | {name: tensor.float() for name, tensor in changed.items()}


def _pool_keys(q: Tensor, k: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return new query weights like q [heads, group, queries, dim, in] and key weights [heads, dim, in].

    k: [heads, group, dim, in]. Errors of a key count by the size of the queries that multiply it.
    """
    q, k, moment = _as_complex(q), _as_complex(k), moment.to(torch.complex128)
    size = (q.conj() * (q @ moment)).sum(-1).real.sum(2).sqrt()
    size = size.clamp(min=SMALLEST * float(size.mean()) or SMALLEST).unsqueeze(-1)
    scaled = (k * size).transpose(1, 2)  # [heads, pairs, group, in]
    component = torch.linalg.eigh(scaled @ moment @ scaled.mH).eigenvectors[..., -1:]  # [heads, pairs, group, 1]
    shared = (component.mH @ scaled).squeeze(2)
    factors = component.transpose(1, 2) / size  # key = factor * shared, [heads, group, pairs, 1]
    scale = factors.abs().square().mean(1, keepdim=True).sqrt()
    shared, factors = shared * scale.squeeze(1), factors / scale
    return _as_real(q * factors.conj().unsqueeze(2)), _as_real(shared)


def _pool_values(v: Tensor, out: Tensor, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return new value weights [heads, dim, in] and output weights like out [d_model, heads, group, queries, dim].

    v: [heads, group, dim, in]. Errors of a value count by their size after the output projection.
    """
    _, heads, group, _, dim = out.shape
    values, uses = [], torch.empty_like(out)
    for head in range(heads):
        grams = [torch.einsum("mqd,mqe->de", out[:, head, index], out[:, head, index]) for index in range(group)]
        gram = torch.block_diag(*grams)
        gram.diagonal().add_(SMALLEST * float(gram.diagonal().mean()) or SMALLEST)
        root = torch.linalg.cholesky(gram)  # an error e of the values is root^T e after the projection
        stacked = v[head].flatten(0, 1)
        scaled = root.mT @ stacked
        components = torch.linalg.eigh(scaled @ moment @ scaled.mT).eigenvectors[:, -dim:]
        mixing = torch.linalg.solve_triangular(root.mT, components, upper=True)  # stacked values = mixing * shared
        scale = (mixing.square().sum() / len(mixing)).sqrt()
        values.append(components.mT @ scaled * scale)
        uses[:, head] = torch.einsum("mgqd,gde->mgqe", out[:, head], (mixing / scale).unflatten(0, (group, dim)))
    return torch.stack(values), uses


def _as_complex(weight: Tensor) -> Tensor:
    """Return the rotated pairs of dimensions, the second to last ones, as complex numbers."""
    real, imaginary = weight.chunk(2, -2)
    return torch.complex(real, imaginary)


def _as_real(weight: Tensor) -> Tensor:
    return torch.cat((weight.real, weight.imag), -2)
