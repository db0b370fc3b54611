"""A differentiable decoder for distillation, fine-tuning and quantization-aware training.

It computes the same function as models.decoder in PyTorch, on rows of equal length. Parameters have the names of Hugging Face
checkpoints. With a `Cache` it also decodes token by token, so that it generates many texts without an engine
(compress.generate).
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
from ridgeline.models.tensor_names import require_llama
from ridgeline.models.weights import HEAD, UNUSED, checkpoint_files, opened, predicts, short_name

PREFIX = "model."
"""Prefix of every tensor but the head in the checkpoint of a causal model."""


@dataclass(slots=True)
class Cache:
    """Keys and values of one layer for rows of equal length."""

    k: Tensor
    """[rows, kv_heads, capacity, head_dim]."""
    v: Tensor
    """[rows, kv_heads, capacity, head_dim]."""
    length: int = 0
    """Positions written so far."""

    def add(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append [rows, kv_heads, tokens, head_dim] and return all keys and values so far."""
        end = self.length + k.shape[2]
        self.k[:, :, self.length : end], self.v[:, :, self.length : end] = k, v
        self.length = end
        return self.k[:, :, :end], self.v[:, :, :end]


KeysValues = tuple[Tensor, Tensor]
"""Keys and values of one layer, [rows, kv_heads, tokens, head_dim] each."""


class Norm(nn.Module):
    """RMSNorm over the last dimension with float32 statistics. Gemma's norm scales by (1 + weight)."""

    def __init__(self, width: int, spec: ModelSpec) -> None:
        super().__init__()
        self.offset, self.eps = float(spec.norm_offset), spec.norm_eps
        self.weight = nn.Parameter(torch.full((width,), 1.0 - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        x_float = x.float()
        scale = torch.rsqrt(x_float.square().mean(-1, keepdim=True) + self.eps)
        return (x_float * scale * (self.weight.float() + self.offset)).type_as(x)


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Apply rotary position embedding (half-split pairs).

    Args:
        x: [rows, heads, tokens, head_dim].
        rotary: cos and sin, float32 [tokens, 2, dim / 2] with dim <= head_dim.
    """
    half = rotary.shape[2]
    cos, sin = rotary[:, 0], rotary[:, 1]
    x_float = x.float()
    first, second, unrotated = x_float[..., :half], x_float[..., half : 2 * half], x_float[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, unrotated), dim=-1).type_as(x)


def attention_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return the causal mask of the last `queries` of `keys` positions, bool [queries, keys]. True: the query attends."""
    query = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    return (key <= query) if window is None else (key <= query) & (key > query - window)


BAND = 128
"""Fewest queries that `banded_attention` takes together."""


def banded_attention(q: Tensor, k: Tensor, v: Tensor, window: int, scale: float) -> Tensor:
    """Attention of rows to the last `window` tokens: each block of queries reads the keys of its own block and of the one before.
    Memory grows with the tokens and not with their square. Shapes as in `Attention.mix`."""
    rows, heads, tokens, dim = q.shape
    size = max(window, BAND)
    blocks = -(-tokens // size)
    q, k, v = (
        F.pad(x, (0, 0, 0, blocks * size - tokens)).unflatten(2, (blocks, size)).transpose(1, 2) for x in (q, k, v)
    )
    k, v = (torch.cat((F.pad(x[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), x), 3).flatten(0, 1) for x in (k, v))
    mask = attention_mask(size, 2 * size, window, q.device).repeat(blocks, 1, 1)
    mask[0, :, :size] = False  # nothing is before the first block
    mask = mask.repeat(rows, 1, 1).unsqueeze(1)
    out = F.scaled_dot_product_attention(q.flatten(0, 1), k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return out.unflatten(0, (rows, blocks)).transpose(1, 2).reshape(rows, heads, -1, dim)[:, :, :tokens]


class Attention(nn.Module):
    """Attention with its projections. A layer that shares another layer's keys and values projects queries only."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().__init__()
        self.layer, self.scale = layer, spec.scale_of(layer)
        q_width, kv_width = layer.n_heads * layer.head_dim, layer.n_kv_heads * layer.head_dim
        self.q_proj = nn.Linear(spec.d_model, q_width, bias=spec.qkv_bias)
        if layer.written_heads:
            self.k_proj = nn.Linear(spec.d_model, kv_width, bias=spec.qkv_bias)
            self.v_proj = nn.Linear(spec.d_model, kv_width, bias=spec.qkv_bias)
            self.k_norm = Norm(layer.head_dim, spec) if spec.qk_norm else nn.Identity()
        self.o_proj = nn.Linear(q_width, spec.d_model, bias=spec.out_bias)
        self.q_norm = Norm(layer.head_dim, spec) if spec.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, rotary: Tensor, cache: Cache | None, shared: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        """shared: keys and values of the layer that this one shares. Returns the output, and the keys and values attended to."""
        q = rotate(self.q_norm(self._heads(self.q_proj, x)), rotary)
        if shared is None:
            k, v = rotate(self.k_norm(self._heads(self.k_proj, x)), rotary), self._heads(self.v_proj, x)
            shared = (k, v) if cache is None else cache.add(k, v)
        return self.o_proj(self.mix(q, *shared).transpose(1, 2).flatten(2)), shared

    def _heads(self, linear: nn.Linear, x: Tensor) -> Tensor:
        """The heads of a projection, [rows, heads, tokens, head_dim]."""
        return linear(x).view(*x.shape[:2], -1, self.layer.head_dim).transpose(1, 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute softmax(q k^T) v with causal mask, window and logit softcap."""
        layer, queries, keys = self.layer, q.shape[2], k.shape[2]
        windowed = layer.window is not None and layer.window < keys
        if layer.softcap is None and not windowed and queries == 1:
            # The query heads of a KV head are adjacent, so one pass over its keys serves all of them.
            grouped = q.reshape(len(q), layer.n_kv_heads, -1, layer.head_dim)
            return F.scaled_dot_product_attention(grouped, k, v, scale=self.scale).view_as(q)
        if layer.softcap is None and not windowed and queries == keys:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
        if layer.softcap is None and layer.window is not None and queries == keys > 2 * max(layer.window, BAND):
            return banded_attention(q, k, v, layer.window, self.scale)
        mask = attention_mask(queries, keys, layer.window, q.device)
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
    """Attention and feed-forward with pre-norms and residual connections. Gemma's layers have post-norms too."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec) -> None:
        super().__init__()
        self.post_norms = spec.post_norms
        self.input_layernorm = Norm(spec.d_model, spec)
        self.self_attn = Attention(spec, layer)
        self.post_attention_layernorm = Norm(spec.d_model, spec)
        self.mlp = FeedForward(spec, layer)
        if self.post_norms:
            self.pre_feedforward_layernorm = Norm(spec.d_model, spec)
            self.post_feedforward_layernorm = Norm(spec.d_model, spec)

    def forward(
        self, x: Tensor, rotary: Tensor, cache: Cache | None = None, shared: KeysValues | None = None
    ) -> tuple[Tensor, KeysValues]:
        """Return the stream after the layer, and the keys and values attended to; see Attention."""
        attended, keys_values = self.self_attn(self.input_layernorm(x), rotary, cache, shared)
        if self.post_norms:
            x = x + self.post_attention_layernorm(attended)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), keys_values
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), keys_values


class TrainableDecoder(nn.Module):
    """Map token ids int64 [rows, tokens] to logits [rows, tokens, vocab]. Positions start at 0 in every row.

    context: tokens of the longest row, at most spec.max_len. Initial weights are small and random. The projections that write
    to the residual stream are zero, so every layer starts as the identity.
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
            self.register_buffer(
                f"rotary_{index}", rope_table(rope, self.context, torch.device("cpu")), persistent=False
            )
        self.reset()

    def reset(self) -> None:
        """Initialize the parameters."""
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", ".bias")):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                is_vocabulary = "embed" in name or "lm_head" in name
                nn.init.normal_(parameter, std=0.02 if is_vocabulary else parameter.shape[1] ** -0.5)

    def cast_parameters(self, dtype: torch.dtype) -> TrainableDecoder:
        """Convert the parameters to `dtype` in place and return the decoder. Rotary tables stay in float32."""
        for parameter in self.parameters():
            parameter.data = parameter.data.to(dtype)
        return self

    @property
    def unembedding(self) -> Tensor:
        """The output projection [vocab, d_model]."""
        return self.embed_tokens.weight if self.spec.tied else self.lm_head.weight

    def cache(self, rows: int, capacity: int) -> list[Cache]:
        """Allocate caches of all layers for `rows` rows of at most `capacity` tokens, in the embedding's type. The cache of a layer
        that shares keys and values is empty."""
        weight = self.embed_tokens.weight

        def empty(layer: LayerSpec) -> Tensor:
            return weight.new_empty(rows, layer.written_heads, capacity, layer.head_dim)

        return [Cache(empty(layer), empty(layer)) for layer in self.spec.layers]

    def streams(self, ids: Tensor, cache: Sequence[Cache] | None = None) -> list[Tensor]:
        """Return the residual stream [rows, tokens, d_model] before the first layer and after every layer."""
        start = cache[0].length if cache else 0
        end = start + ids.shape[1]
        if end > self.context:
            raise ValueError(f"Rows of {end} tokens exceed the context of {self.context} tokens: shorten them.")
        streams = [self.embed_tokens(ids)]
        if self.spec.embed_scale != 1.0:  # Gemma rounds it to the type of the weights
            streams[0] = streams[0] * torch.tensor(self.spec.embed_scale, dtype=self.embed_tokens.weight.dtype)
        keys_values: list[KeysValues] = []
        for index, layer in enumerate(self.layers):
            rotary = getattr(self, f"rotary_{self.rope_of[index]}")[start:end]
            source = self.spec.layers[index].share_from
            shared = None if source is None else keys_values[source]
            stream, attended = layer(streams[-1], rotary, cache[index] if cache else None, shared)
            streams.append(stream)
            keys_values.append(attended)
        return streams

    def hidden(self, ids: Tensor, cache: Sequence[Cache] | None = None) -> Tensor:
        """Return the final hidden states after the last norm, [rows, tokens, d_model]."""
        return self.norm(self.streams(ids, cache)[-1])

    def logits(self, hidden: Tensor) -> Tensor:
        """Project final hidden states [..., d_model] to logits [..., vocab]."""
        out = F.linear(hidden, self.unembedding)
        cap = self.spec.final_softcap
        return out if cap is None else torch.tanh(out.float() / cap) * cap

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids))


def load_decoder(folder: Path, context: int = 4096) -> TrainableDecoder:
    """Load the model of a Hugging Face folder in float32 on the CPU.

    Raises UnsupportedModel for a quantized checkpoint, and for missing or unknown tensors or wrong shapes.
    """
    spec, _ = read_model(folder)
    if spec.quantization:
        raise UnsupportedModel(
            f"The checkpoint {folder} is quantized ({spec.quantization}) and cannot be trained: give the unquantized checkpoint."
        )
    require_llama(spec)
    decoder = TrainableDecoder(spec, context)
    missing, unknown = dict(decoder.state_dict()), []
    for path in checkpoint_files(folder):
        with opened(path) as shard:
            for name in shard.keys():  # noqa: SIM118 - not a mapping
                key = short_name(name)
                if key in missing:
                    tensor, parameter = shard.get_tensor(name), missing.pop(key)
                    if tensor.shape != parameter.shape:
                        raise UnsupportedModel(
                            f"tensor {name} has shape {list(tensor.shape)}; config.json asks for {list(parameter.shape)}."
                        )
                    parameter.copy_(tensor)
                elif not UNUSED.search(name) and not (key == HEAD and spec.tied) and not predicts(key, spec):
                    unknown.append(name)
    if missing or unknown:
        raise UnsupportedModel(
            f"The checkpoint {folder} does not match its config.json. Missing tensors: {sorted(missing)}. Unknown tensors: "
            f"{sorted(unknown)}."
        )
    return decoder


def save_decoder(decoder: TrainableDecoder, folder: Path, config: Mapping[str, Any]) -> None:
    """Write the weights in bfloat16 and `config` as config.json. The folder is created."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name if name == HEAD else PREFIX + name: value.detach().to("cpu", torch.bfloat16).contiguous()
        for name, value in decoder.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
