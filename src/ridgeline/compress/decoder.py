"""The decoder of models.decoder once more, as a module that can be differentiated: for distillation, fine-tuning and
quantization-aware training. Parameters carry the names that Hugging Face's checkpoints give them.

Plain PyTorch on rows of equal length. With a `Cache` it also goes on token by token, to let a model write many texts at
once without an engine (compress.write).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from ridgeline.core.errors import UnsupportedModel
from ridgeline.core.spec import LayerSpec, ModelSpec
from ridgeline.models.config import read_model
from ridgeline.models.rope import rope_table
from ridgeline.models.weights import HEAD, UNUSED, checkpoint_files, opened, short_name

PREFIX = "model."
"""Before every name but the head's in the checkpoint of a causal model."""


@dataclass(slots=True)
class Cache:
    """Keys and values of one layer for rows that grow together, [rows, kv_heads, room, head_dim] each. filled: positions
    written so far."""

    k: Tensor
    v: Tensor
    filled: int = 0

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [rows, kv_heads, tokens, head_dim]; everything up to there."""
        end = self.filled + k.shape[2]
        self.k[:, :, self.filled : end], self.v[:, :, self.filled : end] = k, v
        self.filled = end
        return self.k[:, :, :end], self.v[:, :, :end]


class Norm(nn.Module):
    """RMSNorm of the last dimension, statistics in float32; Gemma's kind scales by (1 + weight)."""

    def __init__(self, width: int, spec: ModelSpec) -> None:
        super().__init__()
        self.offset, self.eps = float(spec.norm_offset), spec.norm_eps
        self.weight = nn.Parameter(torch.full((width,), 1.0 - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (self.weight.float() + self.offset)).type_as(x)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotary positions, halves paired. x [rows, heads, tokens, head_dim]; turn float32 [tokens, 2, dim / 2], dim <= head_dim."""
    half = turn.shape[2]
    cos, sin = turn[:, 0], turn[:, 1]
    wide = x.float()
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).type_as(x)


def seen(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """bool [queries, keys]: what each of the last `queries` positions of `keys` sees."""
    at = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    return (key <= at) if window is None else (key <= at) & (key > at - window)


class Attention(nn.Module):
    def __init__(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().__init__()
        if layer.share_from is not None:
            raise UnsupportedModel(f"{spec.architecture} cannot be trained: its layers share keys and values.")
        self.layer, self.scale = layer, spec.scale_of(layer)
        queries, kept = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
        self.q_proj = nn.Linear(spec.d_model, queries, bias=spec.qkv_bias)
        self.k_proj = nn.Linear(spec.d_model, kept, bias=spec.qkv_bias)
        self.v_proj = nn.Linear(spec.d_model, kept, bias=spec.qkv_bias)
        self.o_proj = nn.Linear(queries, spec.d_model, bias=spec.out_bias)
        self.q_norm = Norm(layer.head_dim, spec) if spec.qk_norm else nn.Identity()
        self.k_norm = Norm(layer.head_dim, spec) if spec.qk_norm else nn.Identity()

    def forward(self, x: Tensor, turn: Tensor, cache: Cache | None) -> Tensor:
        rows, tokens, _ = x.shape
        q, k, v = (
            linear(x).view(rows, tokens, -1, self.layer.head_dim).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(self.q_norm(q), turn), rotate(self.k_norm(k), turn)
        if cache is not None:
            k, v = cache.add(k, v)
        return self.o_proj(self.mix(q, k, v).transpose(1, 2).reshape(rows, tokens, -1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """softmax(q k^T) v with causal masks, windows and soft caps."""
        layer, queries, keys = self.layer, q.shape[2], k.shape[2]
        hides = layer.window is not None and layer.window < keys
        if layer.softcap is None and not hides and queries == 1:
            # The queries that share a key head stand beside each other and read it once.
            grouped = q.reshape(len(q), layer.n_kv_heads, -1, layer.head_dim)
            return F.scaled_dot_product_attention(grouped, k, v, scale=self.scale).view_as(q)
        if layer.softcap is None and not hides and queries == keys:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        mask = seen(queries, keys, layer.window, q.device)
        if layer.softcap is None:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
        groups = layer.n_heads // layer.n_kv_heads
        scores = (q.float() @ k.float().repeat_interleave(groups, 1).mT) * self.scale
        scores = torch.tanh(scores / layer.softcap) * layer.softcap
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return (weights @ v.float().repeat_interleave(groups, 1)).type_as(v)


class FeedForward(nn.Module):
    def __init__(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().__init__()
        self.kind = spec.activation
        self.gate_proj = nn.Linear(spec.d_model, layer.d_ff, bias=spec.mlp_bias)
        self.up_proj = nn.Linear(spec.d_model, layer.d_ff, bias=spec.mlp_bias)
        self.down_proj = nn.Linear(layer.d_ff, spec.d_model, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        act = F.silu(gate) if self.kind == "silu" else F.gelu(gate, approximate="tanh")
        return self.down_proj(act * self.up_proj(x))


class Layer(nn.Module):
    """Attention and feed-forward, each normed before and added to the stream; Gemma's layers norm the results too."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().__init__()
        self.post = spec.post_norms
        self.input_layernorm = Norm(spec.d_model, spec)
        self.self_attn = Attention(spec, layer)
        self.post_attention_layernorm = Norm(spec.d_model, spec)
        self.mlp = FeedForward(spec, layer)
        if self.post:
            self.pre_feedforward_layernorm = Norm(spec.d_model, spec)
            self.post_feedforward_layernorm = Norm(spec.d_model, spec)

    def forward(self, x: Tensor, turn: Tensor, cache: Cache | None) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(x), turn, cache)
        if self.post:
            x = x + self.post_attention_layernorm(mixed)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x))


class TrainableDecoder(nn.Module):
    """Token ids int64 [rows, tokens] to logits [rows, tokens, vocab], positions counted from the start of the row.

    context: the longest row; at most spec.max_len. Weights begin small and random, what writes to the stream at zero, so that
    every layer begins as the identity.
    """

    def __init__(self, spec: ModelSpec, context: int = 4096) -> None:
        super().__init__()
        self.spec, self.context = spec, min(context, spec.max_len)
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.d_model)
        self.layers = nn.ModuleList(Layer(spec, layer) for layer in spec.layers)
        self.norm = Norm(spec.d_model, spec)
        if not spec.tied:
            self.lm_head = nn.Linear(spec.d_model, spec.vocab_size, bias=False)
        ropes = list(dict.fromkeys(layer.rope for layer in spec.layers))
        self.rope_of = [ropes.index(layer.rope) for layer in spec.layers]
        for index, rope in enumerate(ropes):
            self.register_buffer(f"turn_{index}", rope_table(rope, self.context, torch.device("cpu")), persistent=False)
        self.reset()

    def reset(self) -> None:
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", ".bias")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                small = "embed" in name or "lm_head" in name
                nn.init.normal_(parameter, std=0.02 if small else parameter.shape[1] ** -0.5)

    def rounded(self, dtype: torch.dtype) -> TrainableDecoder:
        """Itself with its weights in `dtype`; rotary tables stay in float32."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    @property
    def unembedding(self) -> Tensor:
        """What logits are products with, [vocab, d_model]."""
        return self.embed_tokens.weight if self.spec.tied else self.lm_head.weight

    def cache(self, rows: int, room: int) -> list[Cache]:
        """Empty caches for `rows` rows of at most `room` tokens, in the embedding's type."""
        like = self.embed_tokens.weight

        def room_for(layer: LayerSpec) -> Tensor:
            return like.new_empty(rows, layer.n_kv_heads, room, layer.head_dim)

        return [Cache(room_for(layer), room_for(layer)) for layer in self.spec.layers]

    def streams(self, ids: Tensor, cache: Sequence[Cache] | None = None) -> list[Tensor]:
        """The residual stream [rows, tokens, d_model] before the first layer and after every layer."""
        start = cache[0].filled if cache else 0
        end = start + ids.shape[1]
        if end > self.context:
            raise ValueError(f"Rows of {end} tokens exceed the context of {self.context} tokens: shorten them.")
        found = [self.embed_tokens(ids)]
        if self.spec.embed_scale != 1.0:  # Gemma's, rounded to the type of the weights
            found[0] = found[0] * torch.tensor(self.spec.embed_scale, dtype=self.embed_tokens.weight.dtype)
        for index, layer in enumerate(self.layers):
            turn = getattr(self, f"turn_{self.rope_of[index]}")[start:end]
            found.append(layer(found[-1], turn, cache[index] if cache else None))
        return found

    def hidden(self, ids: Tensor, cache: Sequence[Cache] | None = None) -> Tensor:
        """Final hidden states [rows, tokens, d_model], normed: what the head reads."""
        return self.norm(self.streams(ids, cache)[-1])

    def logits(self, hidden: Tensor) -> Tensor:
        out = F.linear(hidden, self.unembedding)
        cap = self.spec.final_softcap
        return out if cap is None else torch.tanh(out.float() / cap) * cap

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids))


def load_decoder(folder: Path, context: int = 4096) -> TrainableDecoder:
    """The model in a Hugging Face folder, in float32 on the CPU.

    Raises UnsupportedModel for a quantized checkpoint and where tensors are missing, unknown or of another shape.
    """
    spec, _ = read_model(folder)
    if spec.quantization:
        raise UnsupportedModel(
            f"The checkpoint {folder} is quantized ({spec.quantization}) and cannot be trained: give the unquantized checkpoint."
        )
    decoder = TrainableDecoder(spec, context)
    wanted, unknown = dict(decoder.state_dict()), []
    for path in checkpoint_files(folder):
        with opened(path) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                key = short_name(name)
                if key in wanted:
                    tensor, place = shard.get_tensor(name), wanted.pop(key)
                    if tensor.shape != place.shape:
                        raise UnsupportedModel(
                            f"tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(place.shape)}."
                        )
                    place.copy_(tensor)
                elif not UNUSED.search(name) and not (key == HEAD and spec.tied):
                    unknown.append(name)
    if wanted or unknown:
        raise UnsupportedModel(
            f"The checkpoint {folder} does not match its config.json. Missing tensors: {sorted(wanted)}. Unknown tensors: "
            f"{sorted(unknown)}."
        )
    return decoder


def save_decoder(decoder: TrainableDecoder, folder: Path, config: Mapping[str, Any]) -> None:
    """Write the weights in bfloat16 and `config` as config.json; the caller says what the config says. The folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name if name == HEAD else PREFIX + name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in decoder.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
