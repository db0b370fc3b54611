"""Shapes of the models that train.py trains, and their loss. What computes them is ridgeline.compress.decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ridgeline.core.spec import LayerSpec, ModelSpec, Rope


@dataclass(frozen=True, slots=True)
class Shape:
    vocab: int = 8192
    width: int = 384
    layers: int = 7
    heads: int = 12
    kv_heads: int = 4
    head_dim: int = 32
    hidden: int = 1024
    context: int = 4096
    rope_theta: float = 50_000.0
    norm_eps: float = 1e-5

    def spec(self) -> ModelSpec:
        rope = Rope(self.rope_theta, self.head_dim)
        layer = LayerSpec(self.heads, self.kv_heads, self.head_dim, self.hidden, rope)
        layers = (layer,) * self.layers
        return ModelSpec("LlamaForCausalLM", self.vocab, self.width, layers, self.context, self.norm_eps, tied=True)


SHAPES = {
    "14m": Shape(),
    "107m": Shape(width=768, layers=16, head_dim=64, hidden=2048, context=2048),
    "10m": Shape(width=512, layers=2, heads=8, head_dim=64, hidden=1408, context=2048),
    "tiny": Shape(width=128, layers=2, heads=4, kv_heads=2, hidden=256),
    "tiny-draft": Shape(width=64, layers=1, heads=4, kv_heads=2, hidden=128),
}
"""Shapes by the name of `train.py --shape`. 14m: the shipped model. 107m: target of the worked path (worked_path.py), 16 layers because
drafts pay where the target is much deeper than the draft. 10m: its draft model. tiny: dry runs."""


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean nats per token of rows [batch, tokens + 1] (int64), each token predicted from those before it. A token x that
    is read but not scored stands in the row as ~x."""
    logits = model(torch.where(rows < 0, ~rows, rows)[:, :-1])
    targets = rows[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.clamp(min=-1), ignore_index=-1)
