"""The shipped model as it is trained: a Llama-layout decoder whose parameter names are those of Hugging Face's LlamaForCausalLM."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


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


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * (wide * scale)).type_as(x)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves convention. x [batch, heads, tokens, head_dim]; cos, sin [tokens, head_dim / 2] float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.shape.heads, -1).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.shape.kv_heads, -1).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.shape.kv_heads, -1).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.width, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Token ids [batch, tokens] to logits [batch, tokens, vocab]; the head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width, shape.norm_eps)
        frequencies = 1.0 / shape.rope_theta ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim)
        angles = torch.outer(torch.arange(shape.context).float(), frequencies)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.reset()

    def reset(self) -> None:
        """Small normal weights; what writes to the residual stream starts at zero, so that every layer starts as the identity."""
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        tokens = ids.shape[1]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:tokens], self.sin[:tokens])
        return F.linear(self.norm(x), self.embed_tokens.weight)


def next_token_loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Mean nats per token of rows [batch, tokens + 1] (int64), each token predicted from those before it. A token x that
    is read but not scored stands in the row as ~x."""
    logits = model(torch.where(rows < 0, ~rows, rows)[:, :-1])
    targets = rows[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.clamp(min=-1), ignore_index=-1)
